"""What a card says of the plan: what was planned, what happened, and whether it lies inside."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from rekindle import formats
from rekindle.catalog.machines import recognised
from rekindle.report.card import render_card
from rekindle.report.collect import collect
from rekindle.report.plan_vs_actual import ComparedPlan, compared, measured, otherwise_trained
from tests.report.homes import Home
from tests.report.plans import planned, rows, seven
from tests.report.runs import promoted_digits

GIB = 2**30


def said(root: Path, **over: Any) -> ComparedPlan:
    run = planned(Home(root), **over)
    found = compared(run, collect(run))
    assert found
    return found


def row(found: ComparedPlan, name: str) -> tuple[str, ...]:
    (one,) = [row[1:] for row in found.rows if row[0] == name]
    return one


def test_a_run_without_a_plan_says_nothing_of_one(tmp_path):
    run = promoted_digits(Home(tmp_path))
    assert compared(run, collect(run)) is None
    assert 'id="plan"' not in render_card(tmp_path, run).read_text()


def test_a_training_that_went_as_planned(tmp_path):
    found = said(tmp_path)
    assert found == ComparedPlan(
        rows=(
            ("Time of a step", "31.5 s", "23.3 s to 42.5 s", "30.3 s", "inside"),
            ("Tensors on the fullest GPU", "61.2 GiB", "", "60.0 GiB", ""),
            ("Training time", "43 h 42 min", "32 h 22 min to 2 d 11 h", "42 h 12 min", "inside"),
            ("Dollars, estimated", "$1,200", "$889 to $1,619", "$1,158", "inside"),
        ),
        remarks=(
            "Planned for p4de.24xlarge with the layout shard 8.",
            "Dollars are hours at the price that the plan had: estimated, not billed.",
        ),
        command="",
    )


@pytest.mark.parametrize(("factor", "took"), [(2.9, "91.4 s"), (0.3, "9.46 s")])
def test_what_lies_outside_comes_with_the_command_by_which_plans_learn(tmp_path, factor, took):
    found = said(tmp_path, factor=factor)
    assert row(found, "Time of a step") == ("31.5 s", "23.3 s to 42.5 s", took, "outside")
    assert row(found, "Training time")[-1] == "outside"
    assert found.command == (
        "rekindle plan configs/plan/7b-spot.yaml --calibrate 20261123-080000-seven-7b7b"
    )
    page = render_card(tmp_path, planned(Home(tmp_path), factor=factor)).read_text()
    assert f"{found.command}</code>" in page
    assert f">{took}</td>" in page


def test_a_few_steps_are_not_enough_to_learn_from(tmp_path):
    found = said(tmp_path, factor=2.9, count=4)
    assert row(found, "Time of a step")[-1] == "outside"
    assert found.command == ""


def test_on_spot_machines_hours_and_dollars_are_those_of_spot(tmp_path):
    found = said(tmp_path, spot=True)
    assert row(found, "Training time")[0] == "44 h 22 min"
    assert row(found, "Dollars, estimated") == ("$505", "", "$484", "")
    rough = seven("resources.nodes=8", "resources.hazard=rough")
    both = said(tmp_path / "8", spot=True, plan=rough, world_size=64, layout=rough.chosen.layout)
    assert rough.spot
    mean = formats.usd(statistics.mean(rough.spot.usd))
    assert row(both, "Dollars, estimated")[:2] == (mean, ""), "nobody is sure of the ends"


@pytest.mark.parametrize(
    ("over", "why"),
    [
        ({"device": "cpu"}, "planned A100-80GB, trained cpu"),
        ({"device": "NVIDIA H200"}, "planned A100-80GB, trained NVIDIA H200"),
        ({"layout": "dp 8"}, "planned shard 8, trained dp 8"),
        (
            {"world_size": 4, "layout": "shard 4"},
            "planned 8 ranks, trained 4; planned shard 8, trained shard 4",
        ),
    ],
)
def test_what_was_trained_otherwise_is_shown_and_not_judged(tmp_path, over, why):
    found = said(tmp_path, factor=3, **over)
    assert found.remarks[1] == f"The figures are of different trainings: {why}."
    assert {one[-1] for one in found.rows} == {""}
    assert found.command == ""
    run = planned(Home(tmp_path), **over)
    assert otherwise_trained(seven(), collect(run).training) == why


def test_memory_is_compared_on_gpus_alone(tmp_path):
    name = "Tensors on the fullest GPU"
    on_cpu, older = said(tmp_path / "1", device="cpu"), said(tmp_path / "2", device="", layout="")
    for found in (on_cpu, older):
        assert row(found, name)[-2:] == ("–", "")
        assert "Memory is not compared" in " ".join(found.remarks)
    assert row(older, "Time of a step")[-1] == "inside", "what is not on record is as planned"
    plan = seven()
    chosen = plan.chosen.model_copy(update={"gpu": "CPU"})
    on_cpu = said(tmp_path / "3", plan=plan.model_copy(update={"chosen": chosen}), device="cpu")
    assert [one[0] for one in on_cpu.rows] == [
        "Time of a step",
        "Training time",
        "Dollars, estimated",
    ]


def test_a_model_from_the_cache_has_no_hours_of_its_own(tmp_path):
    found = said(tmp_path, step={"cached": True, "seconds": 0.1})
    assert row(found, "Training time")[2:] == row(found, "Dollars, estimated")[2:] == ("–", "")
    assert "from the cache" in " ".join(found.remarks)
    assert row(found, "Time of a step")[-1] == "inside"


def test_a_run_under_way_shows_its_plan(tmp_path):
    found = said(tmp_path, run={"steps": (), "status": "running"})
    assert row(found, "Time of a step") == ("31.5 s", "23.3 s to 42.5 s", "–", "")
    assert len(found.remarks) == 2
    assert found.command == ""


def test_another_number_of_steps_is_said(tmp_path):
    found = said(tmp_path, steps=4000)
    assert "4,000 steps were trained, not the 5,000 that were planned." in found.remarks


def test_short_steps_are_in_milliseconds(tmp_path):
    plan = seven()
    chosen = plan.chosen.model_copy(update={"step_seconds": (0.0645, 0.0967, 0.145)})
    found = said(tmp_path, plan=plan.model_copy(update={"chosen": chosen}), factor=0.7)
    assert row(found, "Time of a step")[:2] == ("96.7 ms", "64.5 ms to 145 ms")


def test_without_a_price_or_a_number_of_steps_there_are_neither_dollars_nor_hours(tmp_path):
    open_ended = seven().model_copy(update={"steps": None, "hours": None, "on_demand_usd": None})
    found = said(tmp_path, plan=open_ended)
    assert [one[0] for one in found.rows] == ["Time of a step", "Tensors on the fullest GPU"]
    assert len(found.remarks) == 1


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


def test_numbers_are_written_as_people_do():
    assert [formats.binary(size) for size in (3 * GIB, 2**29)] == ["3.0 GiB", "512.0 MiB"]
    assert [formats.usd(each) for each in (1234.5, 27.447)] == ["$1,234", "$27.45"]
    assert [formats.share(each) for each in (1.4, 0.125)] == ["140%", "12.5%"]


def test_gpus_are_recognised_by_what_torch_calls_them():
    names = ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA L4", "cpu", "")
    found = [recognised(name) for name in names]
    assert [one and one.name for one in found] == ["A100-80GB", "H100", "L4", None, None]
