"""The cards and the index as a reader sees them: from disk, in headless Chromium, offline."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from rekindle.records import RunRecord
from rekindle.report import card
from rekindle.report.card import render_card
from rekindle.report.index import render_index
from tests.contrast import contrast, luminance
from tests.quick import first
from tests.report.homes import Home
from tests.report.lives import lived
from tests.report.mishaps import build
from tests.report.plans import planned

CHROMIUM = Path("/usr/bin/chromium")
pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason="no chromium on this machine")

# Text that is read, with what lies behind it.
CONTRAST = """() => {
  const shown = e => e.getClientRects().length && getComputedStyle(e).visibility === "visible";
  const behind = e => {
    for (; e; e = e.parentElement) {
      const c = getComputedStyle(e).backgroundColor;
      if (!/, 0\\)$/.test(c)) return c;
    }
    return "rgb(255, 255, 255)";
  };
  const out = [];
  for (const e of document.body.querySelectorAll("*")) {
    if (e.closest(".said, script")) continue;
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    if (!own || !shown(e) || e.tagName === "title") continue;
    const style = getComputedStyle(e);
    const svg = e.namespaceURI.endsWith("svg");
    const ground = behind(svg ? e.closest("div, li, td") : e);
    out.push([svg ? style.fill : style.color, ground, e.textContent.trim().slice(0, 40)]);
  }
  return out;
}"""
# What the policy stops even if markup got in.
FORBIDDEN = """async () => {
  const stopped = [];
  addEventListener("securitypolicyviolation", event => stopped.push(event.effectiveDirective));
  const add = (name, fields) => {
    document.body.append(Object.assign(document.createElement(name), fields));
    return new Promise(done => setTimeout(done, 50));
  };
  await add("script", {textContent: "window.pwned = 1"});
  await add("img", {src: "https://evil.example/x.png"});
  return stopped;
}"""
CELLS = """() => {
  const probe = getComputedStyle(document.documentElement);
  const paint = name => probe.getPropertyValue(name).trim();
  const ink = getComputedStyle(document.querySelector(".heat g text")).fill;
  return [ink, paint("--heat-hit"), paint("--heat-miss")];
}"""

# The colours of a model's life: a dot, the line of live accuracy, an alarm, and what is behind.
MARKS = """() => {
  const paint = (one, what) => getComputedStyle(document.querySelector(one))[what];
  return [paint(".life .promoted", "fill"), paint(".life path", "stroke"),
          paint(".life .alarm", "fill"), paint(".job", "backgroundColor")];
}"""


@dataclasses.dataclass(frozen=True)
class Shown:
    """A page that has been opened, and what it said and asked for meanwhile; `stopped` is what its
    policy did not let out, which Chromium reports now and then."""

    page: Page
    console: list[str]
    requests: list[str]
    stopped: list[str] = dataclasses.field(default_factory=list)


class Reader:
    """One Chromium for all tests; `open` gives a fresh tab."""

    def __init__(self, browser: Browser, home: Path) -> None:
        self.browser, self.home = browser, home

    def open(
        self, name: str, *, width: int = 1200, scheme: str = "light", script: bool = True
    ) -> Shown:
        context = self.browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=scheme,  # type: ignore[arg-type]
            offline=True,
            java_script_enabled=script,
        )
        page = context.new_page()
        shown = Shown(page, [], [])
        page.on("console", lambda message: shown.console.append(message.text))
        page.on("pageerror", lambda error: shown.console.append(str(error)))
        page.on("request", lambda request: shown.requests.append(request.url))
        page.on("requestfailed", lambda r: r.failure == "csp" and shown.stopped.append(r.url))
        page.goto((self.home / name).as_uri())
        return shown


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("home")
    for run in build(root).values():
        render_card(root, run)
    render_index(root)
    for run_id, factor in ((INSIDE, 0.96), (SLOWER, 2.9)):
        render_card(root, planned(Home(root), run_id, factor=factor))
    return root


@pytest.fixture(scope="module")
def reader(home: Path) -> Iterator[Reader]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield Reader(browser, home)
        browser.close()


INSIDE, SLOWER = "20261123-080000-seven-7b7b", "20261123-090000-seven-7b7b"
PLANNED, MISPLANNED = f"runs/{INSIDE}/card.html", f"runs/{SLOWER}/card.html"
DIGITS = "runs/20261121-090800-digits-a1b2/card.html"
REVIEWS = "runs/20261121-101500-reviews-c3d4/card.html"
FAILED = "runs/20261121-111500-digits-e5f6/card.html"
KILLED = "runs/20261121-121500-digits-9a9a/card.html"
HOSTILE = "runs/20261121-131500-hostile-0666/card.html"
OWN = "runs/20261121-141500-hello-1111/card.html"
SHOWS = "runs/20261121-143000-shows-1212/card.html"
EMPTY = "runs/20261121-150000-nothing-2222/card.html"
PAGES = (DIGITS, HOSTILE, PLANNED, "index.html", REVIEWS, FAILED, KILLED, OWN, EMPTY, MISPLANNED)


@pytest.mark.parametrize("name", first(2, PAGES))
def test_a_page_is_quiet_self_contained_and_fits_a_phone(reader: Reader, name: str) -> None:
    shown = reader.open(name, width=360)
    page = shown.page
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("document.body.innerText.length") > 100
    assert shown.console == []
    assert [url for url in shown.requests if not url.startswith(("file:", "data:"))] == []
    assert len(shown.requests) <= 2  # the page, and the icon that it carries
    assert page.evaluate("window.pwned === undefined")
    page.context.close()


def plots(page: Page) -> dict[str, int]:
    """How many plots of each kind are visible, each with a size."""
    kinds = ("line:not(.square)", "square", "heat", "interval", "bar", "track", "ruler", "life")
    found = {}
    for kind in kinds:
        boxes = [plot.bounding_box() for plot in page.locator(f"svg.plot.{kind}:visible").all()]
        assert all(box and box["width"] > 20 and box["height"] > 5 for box in boxes), kind
        found[kind.split(":")[0]] = len(boxes)
    return found


def test_the_promoted_run_shows_all_its_plots(reader: Reader) -> None:
    page = reader.open(DIGITS).page
    assert plots(page) == {
        "line": 5,
        "square": 1,
        "heat": 1,
        "interval": 0,
        "bar": 33,
        "track": 7,
        "ruler": 1,
        "life": 0,
    }
    assert page.locator("h1").inner_text() == "digits"
    assert page.locator(".verdict").inner_text() == (
        "Promoted: version 1 of digits is now the champion."
    )
    labels = [plot.get_attribute("aria-label") for plot in page.locator("svg[role=img]").all()]
    assert all(labels)
    assert page.locator("#steps li").count() == 8
    assert "cached: the same inputs and code" in page.locator("#steps").inner_text()
    assert page.locator(".heat g > g").count() == 100
    assert page.locator(".line .band title").first.inner_html().startswith("step ")
    assert "rekindle run configs/digits.yaml" in page.locator("#again").inner_text()
    page.context.close()


def test_the_refused_run_shows_its_interval_slices_and_champion(reader: Reader) -> None:
    page = reader.open(REVIEWS).page
    found = plots(page)
    assert (found["interval"], found["heat"], found["square"]) == (1, 1, 1)
    interval = page.locator("svg.interval")
    assert interval.locator(".goal, .zero, .needed, .span.bad").count() == 6
    left, right = (interval.locator(f"line.{css}").bounding_box() for css in ("zero", "needed"))
    assert left
    assert right
    assert left["x"] < right["x"]
    rows = page.locator("#slices tbody tr").all()
    assert len(rows) == 18
    assert rows[0].locator(".delta").inner_text().startswith("-")
    assert rows[0].locator(".bar line.mark").count() == 1
    text = page.locator("main").inner_text()
    assert "Nothing was trained in this run" in text
    assert "2 of 40 rows that must pass do not: row 3 expected `good`" in text
    said = page.locator(".reason").inner_text()
    assert said.endswith("; accuracy of product=c falls too far; and 2 more, below")
    boxes = page.locator("#quality .scroll:has(table), #gate .scroll:has(table)").all()
    fits = [box.evaluate("e => e.scrollWidth <= e.clientWidth") for box in boxes]
    assert len(fits) > 1
    assert all(fits), "no bar to scroll under a table that fits"
    said = "12.0% of 450 answers differ from the champion's: 29 are right that were wrong, 24 wrong"
    assert said in text
    assert "Refused: version 4 of reviews is kept" in page.locator(".verdict").inner_text()
    page.context.close()


def test_a_failed_run_opens_with_the_step_its_log_and_the_way_on(reader: Reader) -> None:
    page = reader.open(FAILED).page
    failure = page.locator("#failure").inner_text()
    assert "Step finetune" in failure
    assert "lower train.lr" in failure
    assert "RuntimeError: <b>loss</b> is not a number at step 30" in failure
    assert "rekindle run configs/digits.yaml --set train.lr=3" in failure
    assert "hunter2secret" not in page.content()
    assert "hf_aB3" not in page.content()
    assert "\x1b" not in page.content()
    assert "The loss is not a number from step 30." in page.locator("#training").inner_text()
    log = page.locator(".log")
    last = log.evaluate("e => e.scrollTop + e.clientHeight >= 0 && Math.abs(e.scrollTop) < 1")
    assert last, "the log opens at its end"
    assert page.locator("#gate, #quality, #slices").count() == 0
    page.context.close()


@pytest.mark.slow
@pytest.mark.parametrize("width", first(1, [360, 1200]))
def test_the_plan_lies_beside_what_came_of_it(reader: Reader, width: int) -> None:
    for name, inside in ((PLANNED, True), (MISPLANNED, False)):
        page = reader.open(name, width=width).page
        rows = page.locator("#plan tbody tr").all()
        assert [row.locator("th").inner_text() for row in rows] == [
            "Time of a step",
            "Tensors on the fullest GPU",
            "Training time",
            "Dollars, estimated",
        ]
        judged = [row.locator("td").nth(3).inner_text() for row in rows]
        assert judged == [*(("inside", "–") if inside else ("outside", "–")), *judged[:1] * 2]
        if width < 600:  # each figure is a block, and nothing is cut off
            for cell in page.locator("#plan tbody td").all():
                assert cell.evaluate("e => e.scrollWidth <= e.clientWidth")
                assert cell.evaluate("e => getComputedStyle(e, '::before').content") != "none"
        assert page.locator("#plan .command code").count() == (0 if inside else 1)
        page.context.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sections", "verdict"),
    [
        (KILLED, ["failure", "steps", "lineage", "again"], "Still running, or killed"),
        (OWN, ["steps", "shown", "lineage", "again"], "Finished: 2 steps done, and no gate"),
        (EMPTY, ["failure", "lineage"], "Cancelled. No model was promoted."),
    ],
)
def test_sections_without_a_record_are_left_out(
    reader: Reader, name: str, sections: list[str], verdict: str
) -> None:
    page = reader.open(name).page
    assert page.evaluate("[...document.querySelectorAll('section[id]')].map(s => s.id)") == sections
    assert page.locator(".verdict").inner_text().startswith(verdict)
    page.context.close()


def test_what_a_user_writes_stays_text(reader: Reader) -> None:
    page = reader.open(HOSTILE).page
    assert page.locator("h1").inner_text().startswith('"><script>window.pwned = 1</script><img')
    assert page.locator("script").count() == 1
    assert page.locator("img").count() == 0
    assert page.evaluate("window.pwned") is None
    assert "hunter2secret" not in page.content()
    policy = page.locator("meta[http-equiv]").get_attribute("content")
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert page.evaluate(FORBIDDEN) == ["script-src-elem", "img-src"]
    assert page.evaluate("window.pwned") is None
    page.context.close()


@pytest.mark.slow
def test_what_steps_show_is_drawn_and_neither_runs_nor_loads_anything(reader: Reader) -> None:
    shown = reader.open(SHOWS)
    page = shown.page
    section = page.locator("#shown")
    section.locator("iframe").scroll_into_view_if_needed()
    frame = page.frame_locator("#shown iframe")
    assert frame.locator("h1").inner_text() == "Errors"
    assert frame.locator("h1").evaluate("e => getComputedStyle(e).color") == "rgb(0, 128, 128)"
    assert frame.locator("body").inner_text() != "pwned"
    page.wait_for_load_state("networkidle")
    assert [u for u in shown.requests if "evil" in u and u not in shown.stopped] == []
    assert section.locator(".prose td").all_inner_texts() == ["1", "2"]
    assert section.locator(".prose b, .prose img, .prose a[href^=javascript]").count() == 0
    said = section.inner_text()
    assert "<b onclick=pwned()>raw</b>" in said
    assert "auc\t0.9000" in said
    assert "<i>best</i>" in said
    assert "ROC curve, area 0.8000" in said
    assert said.count("cannot be shown") == 3, "too long, gone, of another form"
    assert section.locator("svg.heat, svg.line").count() == 2
    assert page.evaluate("document.documentElement.scrollWidth") <= 1200
    page.set_viewport_size({"width": 375, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    page.context.close()


def test_a_file_of_this_machine_that_a_platform_names_is_not_shown(home: Path) -> None:
    run = RunRecord.read(home / Path(SHOWS).parent / "run.json")
    there = card.shown_by_steps(run.model_copy(update={"platform": "vertex"}))
    assert {one.html for one in there} == {""}
    assert {one.markdown for one in there} == {None}
    assert sum("not on this machine" in one.note for one in there) == 4


@pytest.mark.slow
def test_light_and_dark_differ_and_both_reach_wcag_aa(reader: Reader) -> None:
    assert round(contrast("#000000", "rgb(255, 255, 255)"), 2) == 21
    backgrounds = {}
    for scheme in ("light", "dark"):
        for name in (REVIEWS, FAILED, KILLED, MISPLANNED, "index.html"):
            page = reader.open(name, scheme=scheme).page
            read = page.evaluate(CONTRAST)
            poor = {(f, b, t) for f, b, t in read if contrast(f, b) < 4.5}
            assert len(read) > 20
            assert poor == set(), f"{scheme} {name}"
            backgrounds[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
            if name == REVIEWS:
                ink, *cells = page.evaluate(CELLS)
                assert min(contrast(ink, cell) for cell in cells) >= 4.5
            page.context.close()
    assert luminance(backgrounds["light"]) > 0.8
    assert luminance(backgrounds["dark"]) < 0.05


@pytest.mark.slow
def test_paper_shows_everything_in_light_colours(reader: Reader) -> None:
    page = reader.open(REVIEWS, scheme="dark", script=False).page
    folded = page.locator("#again .yaml, #steps .outputs, #slices details table").all()
    assert len(folded) == 7
    assert not any(part.evaluate("e => e.checkVisibility()") for part in folded)
    page.emulate_media(media="print", color_scheme="dark")
    assert all(part.evaluate("e => e.checkVisibility() && e.clientHeight > 15") for part in folded)
    assert luminance(page.evaluate("getComputedStyle(document.body).backgroundColor")) == 1
    assert page.locator(".copy").count() == 0
    pdf = page.pdf(format="A4", print_background=True)
    assert pdf.startswith(b"%PDF")
    page.context.close()


@pytest.mark.slow
def test_copying_gives_exactly_the_value(reader: Reader) -> None:
    page = reader.open(DIGITS).page
    page.evaluate("navigator.clipboard.writeText = async text => { window.copied = text }")
    row = page.locator(".hashes div", has_text="Run key").first
    row.locator("button").click()
    assert page.evaluate("window.copied") == row.locator("code").inner_text()
    assert row.locator("button").inner_text() == "copied"
    page.context.close()


@pytest.mark.slow
def test_the_index_lists_runs_newest_first_and_links_to_their_cards(reader: Reader) -> None:
    page = reader.open("index.html").page
    ids = [
        text.split("\n")[-1] for text in page.locator(".runs li:not(.head) .name").all_inner_texts()
    ]
    assert len(ids) == 11
    dated = [run_id for run_id in ids if "hostile" not in run_id and "nothing" not in run_id]
    assert dated == sorted(dated, reverse=True)
    assert page.locator(".jobs .life").count() == 2
    assert page.locator(".job", has_text="digits").locator(".life circle.promoted").count() == 4
    assert "champion is version 4" in page.locator(".job", has_text="digits").inner_text()
    assert "broken: run.json cannot be read" in page.locator(".notes").inner_text()
    page.locator(".runs a", has_text="reviews").click()
    assert page.locator("h1").inner_text() == "reviews"
    page.locator(".brand a").click()
    assert page.locator("h1").inner_text() == "Runs"
    page.context.close()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_life_of_a_model_fits_a_phone_and_is_read_in_both_schemes(
    reader: Reader, tmp_path_factory: pytest.TempPathFactory, scheme: str
) -> None:
    home = tmp_path_factory.mktemp("lived")
    lived(Home(home))
    render_index(home)
    shown = reader.open(str(home / "index.html"), width=375, scheme=scheme)
    page = shown.page
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    assert shown.console == []
    box, card = (page.locator(name).bounding_box() for name in (".life", ".job"))
    assert box
    assert card
    assert card["x"] < box["x"]
    assert box["x"] + box["width"] < card["x"] + card["width"]
    texts = page.locator(".life text").all()
    assert len(texts) >= 4
    for text in texts:
        place = text.bounding_box()
        assert place
        assert card["x"] < place["x"]
        assert place["x"] + place["width"] < card["x"] + card["width"]
    colours = page.evaluate(MARKS)
    assert all(contrast(colour, colours[-1]) >= 3 for colour in colours[:-1]), colours
    read = page.evaluate(CONTRAST)
    assert {(f, b, t) for f, b, t in read if contrast(f, b) < 4.5} == set()
    page.context.close()


@pytest.mark.slow
def test_the_index_filters_and_sorts_without_a_server(reader: Reader) -> None:
    page = reader.open("index.html").page
    names = page.locator(".runs li:not(.head):visible .name a, .runs li:not(.head):visible .name")
    shown = page.locator(".runs li:not(.head):visible")
    everything = shown.all_inner_texts()
    page.locator(".filter input").fill("Digits failed")
    assert shown.count() == sum("digits" in t and "ailed" in t for t in everything) > 0
    assert page.locator(".filter small").inner_text() == f"{shown.count()} of 11 runs"
    page.locator(".filter input").fill("no such run")
    assert shown.count() == 0
    page.locator(".filter input").fill("")
    assert shown.all_inner_texts() == everything
    for column, name in enumerate(("Run", "Outcome", "Metric", "Model", "Took", "Started")):
        button = page.locator(".runs .head button", has_text=name)
        cell = f":scope > span:nth-child({column + 1})"
        orders = []
        for mark in ("up", "down"):
            button.click()
            assert button.get_attribute("data-order") == mark
            orders.append(
                [
                    row.locator(cell).evaluate("e => e.dataset.sort ?? e.innerText")
                    for row in shown.all()
                ]
            )
        first, last = ([v for v in order if v not in ("–", "")] for order in orders)
        assert len(first) > 1
        if name in ("Metric", "Took"):
            assert [*map(float, first)] == sorted(map(float, first))
        elif name == "Started":
            assert first == sorted(first)
        assert [
            v for v in orders[0][len(first) :] if v not in ("–", "")
        ] == []  # the empty ones last
        assert sorted(first) == sorted(last)
        assert name == "Model" or first != last
    assert names.count() >= 10
    page.context.close()
