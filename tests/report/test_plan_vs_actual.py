"""What a card says of the plan: what was planned, what happened, and how far apart they are."""

from __future__ import annotations

import dataclasses
import math
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle import formats
from rekindle.catalog.machines import recognised
from rekindle.records import RunRecord
from rekindle.report import plots
from rekindle.report.card import render_card
from rekindle.report.collect import collect
from rekindle.report.drawing import ratio_axis
from rekindle.report.plan_vs_actual import Compared, compared, measured
from tests.report.homes import Home
from tests.report.plans import planned, rows, seven
from tests.report.runs import promoted_digits

GIB = 2**30


def said(root: Path, **over: Any) -> Compared:
    run = planned(Home(root), **over)
    found = compared(run, collect(run))
    assert found
    return found


def row(found: Compared, name: str) -> tuple[str, str, str, str, str, str]:
    """All of it in words."""
    (one,) = [row for row in found.rows if row.name == name]
    planned, interval = one.say(one.planned[1]), one.interval or one.more
    return planned, interval, one.outcome, one.detail, one.difference, one.tone


def test_a_run_without_a_plan_says_nothing_of_one(tmp_path):
    run = promoted_digits(Home(tmp_path))
    assert compared(run, collect(run)) is None
    assert 'id="plan"' not in render_card(tmp_path, run).read_text()


def test_a_training_that_went_as_planned(tmp_path):
    found = said(tmp_path)
    assert found.verdict == (
        "As planned: a step took 30.3 s, inside the interval of 23.3 s to 42.5 s."
    )
    assert (found.tone, found.command) == ("good", "")
    assert dict(found.facts) == {
        "Planned for": "8 x A100-80GB, p4de.24xlarge",
        "Trained on": "8 x NVIDIA A100-SXM4-80GB",
        "Planned layout": "shard 8",
        "Trained layout": "shard 8",
    }
    assert {one.name: row(found, one.name) for one in found.rows} == {
        "Time of a step": ("31.5 s", "23.3 s to 42.5 s", "30.3 s", "", "-3.8%, inside", "quiet"),
        "Tokens a second": ("33,323", "24,684 to 44,986", "34,656", "", "+4.0%, inside", "quiet"),
        "Model FLOPs utilisation": (
            "55.1%", "40.8% to 74.4%", "57.3%", "", "+4.0%, inside", "quiet",
        ),
        "Tensors on the fullest GPU": (
            "61.2 GiB", "74.5 GiB with the reserve", "60.0 GiB", "", "-2.0%", "quiet",
        ),
        "Training time": (
            "43 h 42 min", "32 h 22 min to 2 d 11 h", "42 h 12 min", "", "-3.4%, inside", "quiet",
        ),
        "Dollars, estimated": ("$1,200", "$889 to $1,619", "$1,158", "", "-3.4%, inside", "quiet"),
    }  # fmt: skip
    remarks = " ".join(found.remarks)
    assert "medians of 55 steps, without the first 5, which warm up" in remarks
    assert "$27.45 an hour on demand in us-east-1: estimated, not billed" in remarks


def test_one_that_was_slower_says_how_the_next_plan_learns_from_it(tmp_path):
    found = said(tmp_path, factor=2.9, step={"attempts": 3})
    assert found.verdict == (
        "Slower than planned: a step took 91.4 s, 2.9 times the expected 31.5 s,"
        " above the interval of 23.3 s to 42.5 s."
    )
    assert found.tone == "bad"
    assert found.command == (
        "rekindle plan configs/plan/7b-spot.yaml --calibrate 20261123-080000-seven-7b7b"
    )
    assert row(found, "Time of a step")[-2:] == ("+190%, outside", "bad")
    assert row(found, "Tokens a second")[-2:] == ("-65.6%, outside", "bad")
    assert row(found, "Training time")[2:4] == ("5 d 7 h", "3 attempts")


def test_one_that_was_faster_is_no_failure(tmp_path):
    found = said(tmp_path, factor=0.3)
    assert found.verdict.startswith("Faster than planned: a step took 9.46 s, 3.33 times as fast")
    assert found.tone == "quiet"
    assert found.command
    assert row(found, "Time of a step")[-1] == row(found, "Tokens a second")[-1] == "good"


def test_a_few_steps_are_not_enough_to_learn_from(tmp_path):
    found = said(tmp_path, factor=2.9, count=4)
    assert found.verdict.startswith("Slower than planned")
    assert found.command == ""


def test_on_spot_machines_hours_and_dollars_are_those_of_spot(tmp_path):
    found = said(tmp_path, spot=True)
    assert row(found, "Training time")[0] == "44 h 22 min"
    assert row(found, "Dollars, estimated")[0::2] == ("$505", "$484", "-4.2%")
    assert "$11.46 an hour spot in us-east-1" in " ".join(found.remarks)
    rough = seven("resources.nodes=8", "resources.hazard=rough")
    between = said(tmp_path / "8", spot=True, plan=rough, world_size=64, layout=rough.chosen.layout)
    assert rough.spot
    low, high = sorted(rough.spot.usd)
    assert row(between, "Dollars, estimated")[1].split(" to ") == [
        formats.usd(each) for each in (low, high)
    ]
    assert "side" not in row(between, "Dollars, estimated")[4], "nobody is sure of the ends"


@pytest.mark.parametrize(
    ("over", "why"),
    [
        ({"device": "cpu"}, "planned A100-80GB, trained cpu"),
        ({"device": "NVIDIA H200"}, "planned A100-80GB, trained NVIDIA H200"),
        ({"layout": "dp 8"}, "planned shard 8, trained dp 8"),
        ({"world_size": 4, "layout": "shard 4"},
         "planned 8 ranks, trained 4; planned shard 8, trained shard 4"),
    ],
)  # fmt: skip
def test_what_was_trained_otherwise_is_shown_and_not_judged(tmp_path, over, why):
    found = said(tmp_path, factor=3, **over)
    assert found.verdict == f"The figures are of different trainings: {why}."
    assert (found.tone, found.command) == ("quiet", "")
    assert {one.tone for one in found.rows} == {"quiet"}
    assert not [one.difference for one in found.rows if "side" in one.difference]


def test_memory_is_compared_on_gpus_alone(tmp_path):
    name = "Tensors on the fullest GPU"
    on_cpu, older = said(tmp_path / "1", device="cpu"), said(tmp_path / "2", device="", layout="")
    assert row(on_cpu, name)[2] == row(older, name)[2] == "–"
    assert "Memory is not compared: training on a CPU" in " ".join(on_cpu.remarks)
    assert "a record that names no device" in " ".join(older.remarks)
    assert dict(older.facts)["Trained layout"] == "not on record"
    assert older.tone == "good", "without a layout on record, the planned one is taken"
    stages = seven("train.layout={pp: 2, shard: 4}")
    deep = said(tmp_path / "3", plan=stages, layout=stages.chosen.layout)
    assert "fullest stage of a pipeline may be another" in " ".join(deep.remarks)


def test_a_plan_for_a_cpu_has_neither_utilisation_nor_memory_of_tensors(tmp_path):
    plan = seven()
    chosen = plan.chosen.model_copy(update={"gpu": "CPU"})
    found = said(tmp_path, plan=plan.model_copy(update={"chosen": chosen}), device="cpu")
    names = [one.name for one in found.rows]
    assert names == ["Time of a step", "Tokens a second", "Training time", "Dollars, estimated"]
    assert found.tone == "good"


def test_a_model_from_the_cache_has_no_hours_of_its_own(tmp_path):
    found = said(tmp_path, step={"cached": True, "seconds": 0.1})
    assert row(found, "Training time")[2] == row(found, "Dollars, estimated")[2] == "–"
    assert "from the cache" in " ".join(found.remarks)
    assert found.tone == "good"


def test_a_run_under_way_shows_its_plan(tmp_path):
    found = said(tmp_path, run={"steps": (), "status": "running"})
    assert found.verdict.startswith("Nothing to compare yet")
    assert row(found, "Time of a step")[:3] == ("31.5 s", "23.3 s to 42.5 s", "–")
    assert [name for name, _ in found.facts] == ["Planned for", "Planned layout"]
    assert found.remarks == ()


def test_other_lengths_and_other_numbers_of_steps_are_said(tmp_path):
    run = planned(Home(tmp_path), count=20, steps=4000)
    history = [each.model_copy(update={"tokens": 2**18}) for each in rows(30.0, 20)]
    found = dataclasses.replace(collect(run), history=tuple(history))
    remarks = " ".join(compared(run, found).remarks)
    assert "A step had about 262,144 tokens, and was planned with 1,048,576" in remarks
    assert "Planned were 5,000 steps, trained 4,000" in remarks


def test_short_steps_are_in_milliseconds(tmp_path):
    plan = seven()
    chosen = plan.chosen.model_copy(update={"step_seconds": (0.0645, 0.0967, 0.145)})
    found = said(tmp_path, plan=plan.model_copy(update={"chosen": chosen}), factor=0.7)
    assert row(found, "Time of a step")[:2] == ("96.7 ms", "64.5 ms to 145 ms")


def test_without_a_price_or_a_number_of_steps_there_are_neither_dollars_nor_hours(tmp_path):
    open_ended = seven().model_copy(update={"steps": None, "hours": None, "on_demand_usd": None})
    found = said(tmp_path, plan=open_ended)
    assert [one.name for one in found.rows][-1] == "Tensors on the fullest GPU"
    assert not [remark for remark in found.remarks if "Dollars" in remark or "starts" in remark]


def test_first_steps_are_left_out_as_long_as_some_remain():
    for count, kept in ((60, list(range(6, 61))), (7, [3, 4, 5, 6, 7]), (3, [1, 2, 3])):
        found, left_out = measured(rows(1.0, count))
        assert ([each.step for each in found], left_out) == (kept, count - len(kept))
    unmeasured = [each.model_copy(update={"step_seconds": None}) for each in rows(1.0, 9)]
    assert measured(unmeasured) == ((), 0)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda plan: plan.pop("chosen"), "Field required at `chosen`"),
        (lambda plan: plan.update(horoscope=1), "Extra inputs are not permitted at `horoscope`"),
        (lambda plan: plan.update(hours="soon"), "Input should be a valid tuple at `hours`"),
    ],
)
def test_a_plan_of_another_version_becomes_a_note(tmp_path, change, what):
    plan = seven().model_dump(mode="json")
    change(plan)
    run = planned(Home(tmp_path), run={"plan": plan})
    found = collect(run)
    assert found.plan is None
    assert found.notes == (f"The plan cannot be shown: {what} in run.json.",)
    page = render_card(tmp_path, run).read_text()
    assert "The plan cannot be shown" in page
    assert 'id="plan"' not in page


def test_the_card_says_every_figure_to_those_who_hear_it(tmp_path):
    run: RunRecord = planned(Home(tmp_path), factor=2.9)
    page = render_card(tmp_path, run).read_text()
    for label in (
        "Time of a step: planned 31.5 s, 23.3 s to 42.5 s; happened 91.4 s, +190%, outside.",
        "Tensors on the fullest GPU: planned 61.2 GiB; happened 60.0 GiB, -2.0%.",
    ):
        assert f'aria-label="{label}"' in page
    assert "--calibrate 20261123-080000-seven-7b7b</code>" in page


positive = st.floats(min_value=1e-300, max_value=1e300)


@given(st.lists(positive, min_size=1, max_size=8), positive)
def test_any_ratios_lie_on_an_axis_with_few_ticks(ratios, happened):
    scale = ratio_axis([*ratios, happened])
    assert scale.low <= -1
    assert scale.high >= 1
    assert 1 <= len(scale.ticks) <= 7
    assert all(0 < scale.at(math.log2(ratio)) < 100 for ratio in ratios)
    drawn = plots.planned(min(ratios), max(ratios), happened, scale, label="<&", css="in")
    for one in (drawn, plots.ratio_ruler(scale)):
        assert "nan" not in str(one)
        assert ET.fromstring(one).get("role") == "img"


def test_ticks_of_ratios_are_those_that_a_person_would_choose():
    def told(*ratios: float) -> list[str]:
        return [formats.share(2**tick) for tick in ratio_axis(ratios).ticks]

    assert told(0.8, 1.3) == ["50%", "70%", "100%", "140%", "200%"]
    assert told(3.9) == ["50%", "100%", "200%"]
    assert told(0.25) == ["25%", "50%", "100%", "200%"]
    assert told(40, 0.1) == ["10%", "100%", "1,000%"]


def test_numbers_are_written_as_people_do():
    assert [formats.binary(size) for size in (3 * GIB, 2**29)] == ["3.0 GiB", "512.0 MiB"]
    assert [formats.usd(each) for each in (1234.5, 27.447)] == ["$1,234", "$27.45"]
    assert [formats.change(each) for each in (-0.0432, 1.4)] == ["-4.3%", "+140%"]
    assert [formats.times(each) for each in (1.913, 1234.5)] == ["1.91 times", "1,234 times"]


def test_gpus_are_recognised_by_what_torch_calls_them():
    names = ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA L4", "cpu", "")
    found = [recognised(name) for name in names]
    assert [one and one.name for one in found] == ["A100-80GB", "H100", "L4", None, None]
