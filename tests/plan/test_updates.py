"""What other optimizers than AdamW take, and which layouts a plan leaves them; their memory is held against traces in test_memory.py."""

import dataclasses

import pytest

from rekindle.errors import RequestError
from rekindle.plan import quantised, updates
from rekindle.plan.memory import memory, snapshot_bytes
from rekindle.plan.shape import shape_of
from rekindle.plan.steptime import step_time
from rekindle.plan.tensors import Rank
from rekindle.plan.work import Work
from rekindle.spec.layout import Layout
from tests.plan.retrace import EIGHT
from tests.support.plan import planned, takes

GB = 1e9


def eight(name, **layout):
    return Work(shape_of(EIGHT, None), Layout(**layout), 1, 2048, optimizer=name)


def test_llama_8b_has_64_36_and_22_gigabytes_of_moments():
    found = {n: Rank(eight(n), 0).static()["optimizer"] / GB for n in ("adamw", *updates.MOVED)}
    assert found == pytest.approx({"adamw": 64.2, "muon": 36.3, "adamw8bit": 22.6}, rel=0.01)
    shards = Rank(eight("adamw8bit", shard=8), 0).static()["optimizer"] / GB
    assert shards == pytest.approx(found["adamw8bit"] / 8, rel=1e-6)


@pytest.mark.parametrize("name", updates.MOVED)
def test_a_save_copies_what_the_optimizer_has_and_the_worst_moment_is_smaller(name):
    other, adamw = eight(name, pp=4), eight("adamw", pp=4)
    less = [
        snapshot_bytes(adamw) - snapshot_bytes(other),
        memory(adamw).peak_bytes - memory(other).peak_bytes,
    ]
    assert min(less) > 0.4 * 8e9
    assert memory(other).terms["optimizer"] + 4e9 < memory(adamw).terms["optimizer"], (
        "of a fourth of the blocks"
    )


@pytest.mark.parametrize(
    ("columns", "blocks"),
    [(1, (1, 1)), (16, (1, 16)), (256, (1, 256)), (257, (2, 129)), (1000, (4, 250))],
)
def test_blocks_of_a_row_are_of_equal_length(columns, blocks):
    assert updates.scale_blocks(columns) == blocks


def test_a_plan_leaves_muon_the_layouts_that_keep_matrices_whole_and_knows_its_products():
    plain, plan = planned("7b-spot"), planned("7b-spot", "train.optimizer=muon")
    for choice in (plan.chosen, *plan.others):
        takes(plan.asked, choice.option)
        layout = choice.option.work.layout
        assert (layout.shard, layout.tp, layout.cp) == (1, 1, 1)
    refused = [one.reason for one in plan.rejected if "needs whole matrices" in one.reason]
    assert len(refused) > 5
    assert updates.UNMEASURED in plan.notes
    assert updates.UNMEASURED not in plain.notes
    spent = plan.chosen.option.step.terms["optimizer"]
    stages = plan.chosen.option.work.layout.pp
    # 7e9 elements of matrices, five steps of about 6 x 4,096 operations an element, at 0.6 to 0.8 of an A100's 312 TFLOPS
    assert 0.5 * stages * spent < 5 * 6 * 4096 * 6.5e9 / (0.7 * 312e12) < 2 * stages * spent


def test_8_bits_may_be_sharded_and_not_divided_by_tp():
    plan = planned("7b-spot", "train.optimizer=adamw8bit")
    assert plan.chosen.option.work.layout.shard > 1
    assert {c.option.work.layout.tp for c in (plan.chosen, *plan.others)} == {1}
    assert any("needs whole rows of matrices" in one.reason for one in plan.rejected)


def test_a_model_that_fits_in_no_layout_that_muon_takes_is_refused_with_the_way_out():
    with pytest.raises(RequestError, match="no layout fits") as caught:
        planned("100b", "train.optimizer=muon")
    (problem,) = caught.value.problems
    assert problem.fix.endswith("or train.optimizer: adamw in any layout")


def test_time_of_adamw_is_the_time_of_its_bytes():
    work = eight("adamw", shard=2)
    assert updates.seconds(work, 8e9, 32, 1.0, 2e12, 28.0) == pytest.approx(28 * 8e9 / 2 / 2e12)
    other = dataclasses.replace(work, optimizer="adamw8bit")
    assert updates.seconds(other, 8e9, 32, 1.0, 2e12, 28.0) > 3 * 28 * 8e9 / 2 / 2e12


def test_a_base_in_4_bits_takes_less_memory_not_less_time_and_replicas_only():
    adapters = ("model.lora.rank=16", "train.layout=auto")
    full, four = (
        planned("7b-spot", *adapters),
        planned("7b-spot", *adapters, "model.lora.base=4bit"),
    )
    for choice in (four.chosen, *four.others):
        assert choice.option.work.layout.only_replicates
    assert any("a base in 4 bits is whole" in one.reason for one in four.rejected)
    assert quantised.UNMEASURED in four.notes
    assert quantised.UNMEASURED not in full.notes
    work = four.chosen.option.work
    plain = dataclasses.replace(work, quantised=False)
    assert memory(work).terms["parameters"] < 0.25 * memory(plain).terms["parameters"]
    cluster, constants = four.chosen.option.cluster, four.chosen.option.profile.constants
    assert (
        step_time(work, cluster, constants).seconds > step_time(plain, cluster, constants).seconds
    )


def test_a_billion_weights_in_4_bits_take_half_a_billion_bytes_and_their_scales():
    work = dataclasses.replace(eight("adamw"), lora_rank=8, quantised=True)
    count = sum(m.inputs * m.outputs for m in work.shape.matrices)
    assert quantised.block_bytes(work) == pytest.approx(count * 4.5 / 8)
