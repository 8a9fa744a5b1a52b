"""The closed form of memory against traces of the engine, and what must hold of it everywhere.

Traces are stored, of cases that we chose (traces.json, by `python -m tests.plan.retrace`: a few are made again here; the slow test makes
the shallower of each two, and both by `make layouts`) and of cases that a seed drew (fresh.json, by `python -m tests.plan.fresh SEED NUMBER --keep`).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import statistics

import pytest

from rekindle.plan.inflight import moments, most_held
from rekindle.plan.memory import memory, needed
from rekindle.plan.shape import shape_of
from rekindle.plan.work import Work, lora_targets
from rekindle.spec.layout import Layout
from tests.plan import fresh
from tests.plan.retrace import BERT, CASES, FILE, SEVEN, finalist
from tests.plan.traced.finalist import asked, depths, extrapolated, job, trace

STORED = json.loads(FILE.read_text())
FAST = ("distilbert ddp", "gpt2 no dropout", "1b one bf16 weights")
GIB = 2**30


def of_trace(name):
    return extrapolated(STORED[name]["pair"], finalist(name).work, STORED[name]["pp_rank"])


def error(name):
    return (
        memory(finalist(name).work, STORED[name]["pp_rank"]).peak_bytes / of_trace(name).peak_bytes
        - 1
    )


def test_every_case_has_a_stored_trace():
    assert list(STORED) == list(CASES)
    assert len(CASES) >= 24


@pytest.mark.parametrize("name", CASES)
def test_the_closed_form_is_at_most_three_percent_below_each_trace_and_five_above(name):
    assert -0.03 <= error(name) <= 0.05


def test_the_closed_form_is_half_a_percent_off_the_traces_on_average():
    assert statistics.mean(abs(error(name)) for name in CASES) <= 0.005


def test_so_it_is_of_traces_that_a_seed_drew():
    kept = json.loads(fresh.FILE.read_text())
    drawn = [one["case"] for one in kept["cases"]]
    assert len(drawn) >= 24
    assert drawn == fresh.cases(kept["seed"], len(drawn)), "none was left out"
    off = [fresh.off(one) for one in kept["cases"]]
    assert min(off) >= -0.03
    assert max(off) <= 0.05


@pytest.mark.parametrize("name", CASES)
def test_the_terms_of_a_trace_add_up_to_its_peak(name):
    for one in STORED[name]["pair"]:
        assert sum(one["terms"].values()) == one["peak"] == max(one["phases"].values())
    found = of_trace(name)
    assert found.peak_bytes == sum(found.terms.values())


@pytest.mark.parametrize("name", CASES)
def test_what_lies_between_two_steps_is_known_to_the_percent(name):
    deep, one = STORED[name]["pair"][1], finalist(name)
    shape = dataclasses.replace(one.work.shape, layers=depths(one.work)[1] * one.work.layout.stages)
    found = memory(dataclasses.replace(one.work, shape=shape), STORED[name]["pp_rank"]).terms
    kept = found["parameters"] + found["optimizer"] + found.get("teacher", 0)
    kept += found.get("pipeline buffers", 0)
    work = one.work
    if work.layout.only_replicates and work.layout.world > 1:  # buckets
        kept += found["optimizer"] // 2
    if work.layout.schedule == "zero_bubble" and STORED[name]["pp_rank"] == 0:
        # keeps gradients of what the last stage received, until the next step begins
        kept += found["pipeline buffers"] // 2
    assert kept == pytest.approx(deep["static"], rel=0.01)


@pytest.mark.slow
def test_three_finalists_are_traced_again_and_hold_what_is_stored():
    for name in FAST:
        found = trace(finalist(name))
        assert found.peak_bytes == pytest.approx(of_trace(name).peak_bytes, rel=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_all_traces_are_what_is_stored():
    same(CASES)


def same(names):
    # a stage of three blocks has all that there is: a deeper one repeats the second
    count = 2 if os.environ.get("LAYOUTS") == "all" else 1
    jobs = [
        job(finalist(n), STORED[n]["pp_rank"], depth)
        for n in names
        for depth in depths(finalist(n).work)[:count]
    ]
    said = asked(jobs, 900)
    for number, name in enumerate(names):
        again, stored = said[count * number :][:count], STORED[name]["pair"][:count]
        for one, other in zip(again, stored, strict=True):
            assert one["phases"] == pytest.approx(other["phases"], rel=1e-3), name


# The second needs most at the end of its backward pass, where its embedding is gathered, until it has many blocks.
THIRD = {"gpt2 no dropout": 9, "70b fsdp full": 12}


@pytest.mark.slow
@pytest.mark.parametrize("name", THIRD)
def test_straight_lines_through_two_depths_meet_a_third(name):
    one, third = finalist(name), THIRD[name]
    shape = dataclasses.replace(one.work.shape, layers=third)
    jobs = [job(one, 0, depth) for depth in (*depths(one.work), third)]
    low, high, deep = asked(jobs, 300)
    found = extrapolated([low, high], dataclasses.replace(one.work, shape=shape), 0)
    assert found.peak_bytes == pytest.approx(deep["peak"], rel=1e-3)


# One rank, fp32: weights [8, 8] of a table and a head, one block of 4 + 3 matrices and 3 norms.
TINY = {
    "config": {
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "vocab_size": 8,
    },
    "task": "causal_lm",
    "layout": {},
    "train": {},
    "sequence": 8,
    "accumulation": 1,
}


@pytest.mark.slow
def test_a_model_whose_bytes_are_known_is_traced_to_the_byte():
    (found,) = asked([TINY], 250)
    weights, counts = 4 * (9 * 8 * 8 + 3 * 8), 4 * 12
    assert found["static"] - (3 * weights + counts) in range(512), "what a loop keeps"


def test_ten_gib_of_tensors_need_thirteen():
    assert needed(10 * GIB) == 13 * GIB


def test_the_first_of_four_pipeline_ranks_holds_four_micro_batches():
    assert [sum(most_held(Layout(pp=4), rank, 8)) for rank in range(4)] == [4, 3, 2, 1]
    assert most_held(Layout(pp=4), 0, 2) == (2,)
    looped = Layout(pp=2, schedule="interleaved")
    assert [sum(most_held(looped, rank, 4)) for rank in range(2)] == [5, 3]
    zero_bubble = Layout(pp=4, schedule="zero_bubble")
    assert [sum(most_held(zero_bubble, rank, 8)) for rank in range(4)] == [8] * 4


def test_gradients_of_weights_wait_where_zero_bubble_puts_them_off():
    last = moments(Layout(pp=4, schedule="zero_bubble"), 3, 8)
    assert max(sum(moment.halved) for moment in last) == 7
    assert max(sum(moment.halved) for moment in moments(Layout(pp=4), 3, 8)) == 0


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
def test_a_rank_holds_and_puts_off_as_much_as_in_torchs_schedule(schedule, pp):
    from torch.distributed.pipelining import schedules

    kind = (
        schedules.ScheduleInterleaved1F1B
        if schedule == "interleaved"
        else schedules.ScheduleZBVZeroBubble
    )
    layout = Layout(pp=pp, schedule=schedule)
    for micro, rank in itertools.product((pp, 2 * pp, 3 * pp), range(pp)):
        made = object.__new__(kind)
        made.pp_group_size, made.n_local_stages, made._n_microbatches = pp, 2, micro
        made.num_stages = made._num_stages = 2 * pp
        made.number_of_rounds = micro // pp
        made.microbatches_per_round = pp
        held, halved = passes(made._calculate_single_rank_operations(rank), rank, micro)
        most = max(map(sum, held))
        assert most_held(layout, rank, micro) in [one for one in held if sum(one) == most]
        found = max(sum(moment.halved) for moment in moments(layout, rank, micro))
        assert found == max(map(sum, halved))


def passes(actions, rank, micro):
    """Micro-batches of both stages that are held, and those that are halved, at each action."""
    held, halved, at = [0, 0], [0, 0], ([], [])
    for action in actions:
        if action is None or action.microbatch_index >= micro:
            continue
        name, number = action.computation_type.name, int(action.stage_index != rank)
        half = action.stage_index > 0  # the first stage's input has no gradient
        held[number] += name == "FORWARD"
        halved[number] += half and name == "BACKWARD_INPUT"
        at[0].append(tuple(held))
        at[1].append(tuple(halved))
        held[number] -= name in ("FULL_BACKWARD", "BACKWARD_WEIGHT")
        halved[number] -= half and name == "BACKWARD_WEIGHT"
    return at


def test_adapters_are_on_the_matrices_that_are_named():
    assert lora_targets(shape_of(SEVEN), ["q_proj", "up_proj"]) == ("q", "up")
    assert lora_targets(shape_of(BERT, 2), ["output.dense"]) == ("o", "down")
    work = Work(shape_of(SEVEN), Layout(), 1, 1024, lora_rank=8, lora_targets=("q", "down"))
    assert work.adapters_share() == 8 * (4096 + 4096 + 11008 + 4096)


def test_a_7b_model_on_eight_gpus_keeps_two_bytes_a_weight_of_each_state():
    found = memory(finalist("7b fsdp").work).terms
    parameters = shape_of(SEVEN).parameters
    assert found["parameters"] == pytest.approx(4 * parameters / 8, rel=1e-6)
    assert found["optimizer"] == 2 * found["parameters"]
