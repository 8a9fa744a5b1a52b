"""`rekindle.planned`: the value, and what a notebook shows of it."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pandas as pd
import pytest
from playwright.sync_api import sync_playwright

import rekindle
from rekindle.app.forecast import COLOURS, Forecast
from rekindle.app.plan_text import lines
from rekindle.formats import binary
from tests.contrast import contrast

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs" / "plan").glob("*.yaml"))
SEVEN = ROOT / "configs" / "plan" / "7b-spot.yaml"
CHROMIUM = Path("/usr/bin/chromium")
# what JupyterLab and VS Code say of tables, and the colours of their themes
JUPYTER = """.jp-RenderedHTMLCommon table { table-layout: fixed; margin-left: auto; margin-right: auto; font-size: 13px; }
.jp-RenderedHTMLCommon td, .jp-RenderedHTMLCommon th, .jp-RenderedHTMLCommon tr { vertical-align: middle; padding: 0.5em; max-width: none; border: none; }
:not(.jp-RenderedMarkdown).jp-RenderedHTMLCommon td, :not(.jp-RenderedMarkdown).jp-RenderedHTMLCommon th { text-align: right; }
.jp-RenderedHTMLCommon tbody tr:nth-child(odd) { background: #888; }"""
VSCODE = """table, thead, tr, th, td, tbody { border: none; border-color: transparent; border-spacing: 0; border-collapse: collapse; }
table, th, tr { vertical-align: middle; text-align: right; }
th, td { padding: 4px 8px; }
tr:nth-child(even) { background-color: rgba(130, 130, 130, 0.08); }
tbody th { font-weight: normal; }"""
PAGE = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 8px; font: 14px/1.5 sans-serif; background: {ground}; color: {ink}; }}
{rules}</style><div class="jp-RenderedHTMLCommon">{page}</div>"""
TOO_WIDE = """() => [...document.querySelectorAll("th, td, div, span")]
  .filter(e => e.getBoundingClientRect().right > innerWidth + 0.5).length"""


@pytest.fixture(scope="module")
def seven() -> Forecast:
    return rekindle.planned(SEVEN)


@pytest.fixture(scope="module")
def plans() -> list[Forecast]:
    return [rekindle.planned(config) for config in CONFIGS]


def shown(plan: Forecast) -> ET.Element:
    return ET.fromstring(plan._repr_html_())


def memory(plan: Forecast) -> dict[str, float]:
    return {term.name: term.amount for term in plan.record.memory}


def words(element: ET.Element) -> str:
    return " ".join(element.itertext())


def bar(page: ET.Element, name: str) -> ET.Element:
    (found,) = [
        e for e in page.iter("div") if (e.get("aria-label") or "").startswith(f"{name} of ")
    ]
    return found


def shares(element: ET.Element) -> list[float]:
    styles = [segment.get("style") or "" for segment in element]
    return [float(style.partition("flex:")[2].split()[0]) for style in styles]


def test_the_name_stays_a_function_whatever_was_imported_or_run_before(tmp_path):
    """`rekindle.plan` could not: it is the package from its first import on."""
    (tmp_path / "one.py").write_text(
        "from kfp import dsl\n\n\n@dsl.component(install_kfp_package=False)\ndef hello() -> int:\n"
        "    return 1\n\n\n@dsl.pipeline\ndef one():\n    hello()\n"
    )
    (tmp_path / "one.yaml").write_text("name: one\npipeline: one.py:one\n")
    code = (
        "import rekindle\n"
        "assert rekindle.run('one.yaml', quiet=True).status == 'succeeded'\n"
        f"first, second = (rekindle.planned({str(SEVEN)!r}) for _ in range(2))\n"
        "import rekindle.plan.plan\n"
        f"assert rekindle.planned({str(SEVEN)!r}) == first == second\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_a_plan_is_a_value_with_figures_and_rows(seven):
    spec = rekindle.load(SEVEN)
    assert rekindle.planned(spec) == seven
    assert (seven.layout, seven.machines) == ("shard 8", "1 x p4de.24xlarge")
    least, expected, most = seven.hours
    assert least < expected < most
    assert seven.on_demand_usd[1] == pytest.approx(expected * 27.44705)
    assert seven.record.spot.usd[0] < seven.on_demand_usd[0]
    record = seven.record
    assert sum(memory(seven).values()) == record.chosen.memory_bytes
    assert sum(term.amount for term in record.time) == pytest.approx(record.chosen.step_seconds[1])
    assert seven.refused == []
    table = pd.DataFrame(seven.rows)
    assert list(table["chosen"]) == [True] + [False] * 5
    assert table["needed_gib"].lt(table["device_gib"]).all()
    assert "as fast within the error" in pd.DataFrame(seven.rejected)["reason"][0]
    assert str(seven) == "\n".join(lines(seven.record))
    assert repr(seven) == "Forecast('plan-7b-spot', shard 8 on 1 x p4de.24xlarge)"


def test_platform_region_prices_and_examples_are_those_of_the_command_line(tmp_path):
    own = tmp_path / "own.yaml"
    row = "{machine: p4de.24xlarge, region: eu-west-1, on_demand: 90, source: a contract, as_of: 2026-11-23}"
    own.write_text(f"prices:\n  - {row}\n")
    there = rekindle.planned(SEVEN, region="eu-west-1", prices=[own], home=tmp_path)
    assert there.record.chosen.on_demand_usd_per_hour == 90
    small = ROOT / "configs" / "plan" / "distilbert.yaml"
    assert rekindle.planned(small).hours is None
    assert rekindle.planned(small, examples=1_000_000).hours is not None
    with pytest.raises(rekindle.RekindleError, match="there is no platform `vertx`"):
        rekindle.planned(SEVEN, platform="vertx")
    assert list(tmp_path.iterdir()) == [own], "a plan writes nothing"


@pytest.mark.slow
def test_a_notebook_shows_what_the_command_line_says(plans):
    for plan in plans:
        said = words(shown(plan))
        for line in lines(plan.record):
            if not line.startswith("  ") or line.startswith(" " * 11):
                text = line.partition(": ")[2] if line.startswith("plan-") else line[11:]
                assert text in said, line


def test_what_speaks_against_a_plan_comes_first():
    tight = ["resources.deadline_hours=10", "resources.budget_usd=100"]
    plan = rekindle.planned(SEVEN, tight)
    first = next(shown(plan).iter("tr"))
    assert first[0].text == "refused"
    assert "resources.deadline_hours is 10" in words(first[1])
    assert "resources.budget_usd is $100" in words(first[1])
    assert len(plan.refused) == 2


@pytest.mark.slow
def test_the_bars_show_each_term_at_its_size_and_the_reserve_beyond(plans):
    for plan in plans:
        page, chosen = shown(plan), plan.record.chosen
        drawn = bar(page, "Memory")
        reserve = chosen.needed_bytes - chosen.memory_bytes
        free = chosen.device_bytes - chosen.needed_bytes
        amounts = [*memory(plan).values(), reserve, free]
        assert shares(drawn) == pytest.approx([a / chosen.device_bytes for a in amounts], abs=1e-5)
        label = drawn.get("aria-label")
        assert all(f"{name} {binary(size)}" in label for name, size in memory(plan).items())
        assert f"reserve (allocator, CUDA, NCCL) {binary(reserve)}" in label
        assert sum(shares(bar(page, "Time"))) == pytest.approx(1, abs=1e-4)


def test_every_term_has_a_colour_of_its_own_that_is_seen_in_light_and_in_dark(plans):
    for plan in plans:
        for terms in (plan.record.memory, plan.record.time):
            assert len({COLOURS[term.name] for term in terms}) == len(terms)
    for name, colour in COLOURS.items():
        for ground in ("#ffffff", "#111111", "#1e1e1e"):
            assert contrast(colour, ground) >= 3, (name, ground)


def test_the_output_needs_and_touches_nothing_else(seven):
    """Notebooks that are not trusted lose svg and style; two outputs share no names."""
    record = seven.record.model_copy(update={"name": "<script>x</script>", "notes": ("<b>&",)})
    page = shown(Forecast(record))
    assert {e.tag for e in page.iter()} <= {
        "div", "b", "table", "tbody", "tr", "th", "td", "span", "details", "summary",
    }  # fmt: skip
    used = {name for e in page.iter() for name in e.attrib}
    assert used <= {"style", "title", "role", "scope", "aria-label", "aria-hidden"}
    assert "url(" not in seven._repr_html_()


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM.exists(), reason="no chromium on this machine")
def test_it_fits_a_phone_and_is_left_aligned_whatever_the_notebook_says_of_tables(plans):
    page = "".join(plan._repr_html_() for plan in plans)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        for width, rules, ground, ink in (
            (360, JUPYTER, "#ffffff", "#000000"),
            (1200, JUPYTER, "#111111", "#ffffff"),
            (700, VSCODE, "#1e1e1e", "#cccccc"),
        ):
            tab = browser.new_page(viewport={"width": width, "height": 900})
            tab.set_content(PAGE.format(page=page, rules=rules, ground=ground, ink=ink))
            tab.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
            assert tab.evaluate(TOO_WIDE) == 0
            for kind, weight in (("td", "400"), ("th", "600")):
                styles = tab.evaluate(
                    f"[...document.querySelectorAll('{kind}')].map(e => getComputedStyle(e))"
                    ".map(s => [s.textAlign, s.backgroundColor, s.fontWeight, s.borderTopStyle])"
                )
                assert {tuple(style) for style in styles} == {
                    ("left", "rgba(0, 0, 0, 0)", weight, "solid")
                }
            sizes = [box.bounding_box() for box in tab.locator("[role=img]").all()]
            assert len(sizes) == 2 * len(plans)
            assert all(size and size["width"] > width / 3 and size["height"] > 10 for size in sizes)
        browser.close()
