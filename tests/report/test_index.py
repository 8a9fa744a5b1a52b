"""The life of each model on the index: which candidates, intervals, live accuracy and alarms are drawn, and in which words."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from rekindle.report.index import render_index
from tests.report.homes import Home
from tests.report.lives import candidate, check, lived
from tests.report.mishaps import build


def lives(home: Path) -> list[ET.Element]:
    text = render_index(home).read_text()
    found = re.findall(r'<svg class="plot life".*?</svg>(?=\n<p class="legend">)', text, re.DOTALL)
    return [ET.fromstring(one) for one in found]


def at(element: ET.Element, *names: str) -> tuple[float, ...]:
    return tuple(float(element.attrib[name].rstrip("%")) for name in names)


def of(root: ET.Element, tag: str, css: str) -> list[ET.Element]:
    return [one for one in root.iter(tag) if one.get("class") == css]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_a_life_has_all_candidates_live_accuracy_and_months_of_alarms(home: Home) -> None:
    lived(home)
    (life,) = lives(home.root)
    promoted, refused = of(life, "circle", "promoted"), of(life, "circle", "refused")
    assert (len(promoted), len(refused)) == (5, 4)
    places = [at(one, "cx", "cy") for one in promoted]
    assert places == sorted(places)
    assert places[0][0] == 0
    assert at(refused[-1], "cx") == (100,)
    assert len(of(life, "line", "whisker")) == 8  # the first had no champion to gain on
    top = {tick.text: at(tick, "y")[0] for tick in life.iter("text") if tick.get("y") != "100%"}
    assert top["0.8"] == 0  # the axis goes up
    assert top["0.6"] == 100
    assert len(of(life, "circle", "b")) == 9
    (line,) = of(life, "path", "b")
    assert line.attrib["d"].count("L") == 8
    bars = of(life, "rect", "alarm")
    spans = [at(bar, "x", "width") for bar in bars if bar.attrib["width"] != "4"]
    days = 273  # from 28 January on
    assert spans[0] == pytest.approx((100 * 153.75 / days, 100 * 31 / days), abs=0.1)  # July
    assert sum(spans[0]) == pytest.approx(spans[1][0], abs=0.02)
    assert life.attrib["role"] == "img"
    assert life.attrib["aria-label"] == (
        "accuracy of candidates; 28 Feb 2026 0.7310 promoted; 28 Mar 2026 0.7280 refused; "
        "28 Apr 2026 0.7520 promoted; 28 May 2026 0.7410 refused; 28 Jun 2026 0.7600 promoted; "
        "28 Jul 2026 0.6990 refused; 28 Sep 2026 0.7440 promoted; "
        "28 Oct 2026 0.7510 approval needed; live 0.7380 on 20 Oct 2026; "
        "alarm in Jul 2026; alarm in Aug 2026"
    )
    title = bars[0].findtext("title")
    assert title == "alarm in Jul 2026: unknown words went from 10.0% to <13.0%>"
    dates = [text.text for text in life.iter("text") if text.get("y") == "100%"]
    assert dates == ["28 Jan 2026", "28 Oct 2026"]


def test_the_spread_of_trainings_holds_no_trend(home: Home) -> None:
    """Ten months that climb by a point each, and a wobble of 0.3 points up and down."""
    for month in range(1, 11):
        value = 0.7 + 0.01 * month + 0.003 * (-1) ** month
        candidate(home, "wobbly", month, value, None, "promoted", "accuracy")
        candidate(home, "short", month, value, None, "promoted", "accuracy") if month < 5 else None
    text = render_index(home.root).read_text()
    (found,) = re.findall(r"differs from the next by ([0-9.]+) ", text)
    assert float(found) == pytest.approx(4 * 0.003 / 6**0.5, abs=1e-4)


def test_the_interval_is_that_of_the_gain_on_the_champion_whichever_way_is_better(
    home: Home,
) -> None:
    """A loss of 0.5 where the champion has 0.6: 0.48 to 0.52; of accuracies 0.7 and 0.75 alike."""
    for name, metric, values in (
        ("loss", "log_loss", (0.6, 0.5)),
        ("right", "accuracy", (0.7, 0.75)),
    ):
        candidate(home, name, 1, values[0], None, "promoted", metric)
        candidate(home, name, 2, values[1], values[0], "refused", metric)
    for life in lives(home.root):
        (whisker,), (dot,) = of(life, "line", "whisker"), of(life, "circle", "refused")
        low, high, middle = (*at(whisker, "y1", "y2"), *at(dot, "cy"))
        assert low - middle == pytest.approx(middle - high, abs=0.02)
        assert low > middle > high


def test_without_labels_or_with_another_metric_there_is_no_live_accuracy(home: Home) -> None:
    lived(home, labels=False)
    for month in (1, 2):
        candidate(home, "loss", month, 0.5, None, "promoted", "log_loss")
    file = home.root / "monitored" / "loss.jsonl"
    lines = (check("loss", month, 0.7, alarm=False).to_json() for month in (3, 4))
    file.write_text("cut short {\n" + "\n".join(lines))
    by_label, page = lives(home.root), (home.root / "index.html").read_text()
    assert [len(of(life, "circle", "b")) for life in by_label] == [0, 0]
    assert "live accuracy" not in page
    assert page.count("month with an alarm") == 1
    (loss,) = (one for one in by_label if one.attrib["aria-label"].startswith("log loss"))
    dates = [text.text for text in loss.iter("text") if text.get("y") == "100%"]
    assert dates == ["28 Jan 2026", "20 Apr 2026"]  # as far as the monitor looked
    assert of(loss, "rect", "alarm") == []


def test_checks_of_before_the_first_candidate_and_of_other_names_are_left_out(home: Home) -> None:
    candidate(home, "one", 5, 0.7, None, "promoted")
    (home.root / "monitored").mkdir()
    for name, month in (("one", 4), ("other", 6)):
        text = check(name, month, 0.1, alarm=True).to_json()
        (home.root / "monitored" / f"{name}.jsonl").write_text(text)
    (life,) = lives(home.root)
    assert of(life, "rect", "alarm") == of(life, "circle", "b") == []
    dates = [text.text for text in life.iter("text") if text.get("y") == "100%"]
    assert dates == ["28 May 2026"]
    (dot,) = of(life, "circle", "promoted")
    assert at(dot, "cx") == (50,)


def test_what_is_not_a_number_is_not_drawn(home: Home) -> None:
    for month, value, champion in ((1, 0.7, None), (2, float("nan"), 0.7), (3, 0.71, float("nan"))):
        candidate(home, "odd", month, value, champion, "refused")
    (life,) = lives(home.root)
    assert len(of(life, "circle", "refused")) == 2
    assert "nan" not in ET.tostring(life, "unicode").replace(life.attrib["aria-label"], "")


def test_jobs_whose_models_were_never_judged_or_at_no_time_have_no_life(tmp_path: Path) -> None:
    build(tmp_path)
    assert len(lives(tmp_path)) == 2  # the start of the hostile run is markup


def test_the_number_beside_the_champion_is_the_champions(home: Home) -> None:
    """The newest candidate was refused: its number stands small beside it."""
    candidate(home, "shapes", 1, 0.6071, None, "promoted")
    candidate(home, "shapes", 2, 0.7879, 0.6071, "refused")
    text = render_index(home.root).read_text()
    course = text[text.index('<div class="course">') :]
    assert course.startswith(
        '<div class="course"><p><b>0.6071</b> <small>accuracy of the champion; newest candidate 0.7879, refused</small>'
    )


def test_without_a_champion_the_number_is_said_to_be_a_candidates(home: Home) -> None:
    candidate(home, "shapes", 2, 0.7879, 0.6071, "refused")
    text = render_index(home.root).read_text()
    assert "<b>0.7879</b> <small>accuracy of the newest candidate, refused</small>" in text
