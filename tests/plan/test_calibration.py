"""Plans that were corrected by trainings that were measured."""

from __future__ import annotations

import pytest

from rekindle.catalog.prices import shipped
from rekindle.outputs import Calibration
from rekindle.plan.calibration import Known, Speeds, job_of
from rekindle.plan.constants import spread_of, stamp
from rekindle.plan.plan import make
from rekindle.spec.load import load_target
from tests.support.plan import ROOT

BASE = Calibration(
    run_id="r",
    gpu="A100-80GB",
    compiled=False,
    layout="shard 8",
    measured=2.0,
    predicted=1.0,
    ratio=2.0,
    steps=9,
    left_out=5,
    job="another",
    constants=stamp(),
)


def plan(*measured, **changes):
    spec = load_target(ROOT / "configs" / "plan" / "7b-spot.yaml")
    return make(spec.model_copy(update=changes), shipped(), known=Known(Speeds(measured)))


def of(**changes):
    return BASE.model_copy(update=changes)


PLAIN = plan()


def test_another_training_on_that_gpu_corrects_all_times_and_narrows_the_interval():
    found = plan(of(ratio=1.5), of(ratio=1.5, run_id="s"))
    assert found.hours[1] == pytest.approx(1.5 * PLAIN.hours[1])
    assert found.hours[2] / found.hours[1] - 1 == pytest.approx(spread_of("calibrated"))
    assert PLAIN.hours[2] / PLAIN.hours[1] - 1 == pytest.approx(0.35)
    assert found.usd == pytest.approx(1.5 * PLAIN.usd)
    layouts = [str(one.option.work.layout) for one in (PLAIN.chosen, *PLAIN.others)]
    assert [str(one.option.work.layout) for one in (found.chosen, *found.others)] == layouts
    assert found.if_else == PLAIN.if_else, "shares of the time stay"
    assert any("measured on A100-80GB in r, s: 1.50 times" in note for note in found.notes)


def test_measurements_that_contradict_meet_in_their_geometric_mean():
    found = plan(of(ratio=0.5), of(ratio=2.0))
    assert found.hours[1] == pytest.approx(PLAIN.hours[1])
    assert found.hours[2] < PLAIN.hours[2], "and the interval is that of what was measured"


def test_the_same_work_takes_as_long_as_it_took():
    option = PLAIN.chosen.option
    job = job_of(option.work, option.cluster)
    same = of(job=job, measured=3 * option.step.seconds, ratio=9.0, constants="older")
    whole = plan(of(ratio=0.5), same)
    assert any("the same work on such machines; within 10%, a guess" in n for n in whole.notes)
    found = whole.chosen.option
    for one, before in zip(whole.others, PLAIN.others, strict=True):
        assert one.option.step.seconds == pytest.approx(3 * before.option.step.seconds)
        assert one.option.profile.spread == spread_of("calibrated")
    assert found.step.seconds == pytest.approx(3 * option.step.seconds)
    _, high = found.seconds_between
    assert high / found.step.seconds - 1 == pytest.approx(spread_of("same_job"))
    assert "the same work" in found.profile.basis


@pytest.mark.parametrize("changes", [{"gpu": "H100"}, {"compiled": True}, {"constants": "older"}])
def test_what_was_measured_elsewhere_or_against_older_numbers_does_not_count(changes):
    found = plan(of(**changes))
    assert found.hours == PLAIN.hours
    told = [note for note in found.notes if "rekindle plan --calibrate r" in note]
    assert len(told) == (1 if "constants" in changes else 0)
