"""The plan of DeepSpeed's ZeRO: its memory against what ranks held here (zero.json, by `python -m tests.plan.zero_ranks`), what it
says, and what it says of the other engine.
"""

import dataclasses
import importlib.util
import json
import shlex
import statistics

import pytest

from rekindle.app.plan import settled
from rekindle.catalog.prices import shipped
from rekindle.errors import RequestError
from rekindle.plan.memory import ZeroPeak, memory, offloaded_bytes, snapshot_bytes
from rekindle.plan.plan import make, plan_record
from rekindle.plan.shape import shape_of
from rekindle.plan.work import Work, Zero
from rekindle.spec.layout import Layout
from rekindle.spec.load import load_target
from tests.plan.zero_ranks import CASES, KEPT, SHAPE, measured
from tests.support.plan import ROOT

STORED = json.loads(KEPT.read_text())["cases"]
GIB = 2**30
SEVEN = shape_of(
    {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    },
    None,
)


def work(name):
    one = CASES[name]
    zero = Zero.of(one.train.engine_config)
    return Work(
        shape_of(SHAPE, None),
        one.layout,
        one.accumulation,
        one.sequence,
        precision=one.train.precision,
        zero=zero,
    )


def off(name):
    return memory(work(name)).peak_bytes / STORED[name]["peak"] - 1


def test_every_case_has_been_measured():
    assert list(STORED) == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_the_closed_form_is_close_to_what_a_rank_held(name):
    assert -0.08 <= off(name) <= 0.08


def test_it_is_three_percent_off_on_average():
    assert statistics.mean(abs(off(name)) for name in CASES) <= 0.03


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="the extra `deepspeed` is not installed"
)
def test_ranks_still_hold_what_is_stored(tmp_path):
    names = [name for name in CASES if name.startswith(("1: bf16, 2", "3: bf16, 2", "2: fp32, 2"))]
    found = measured({name: CASES[name] for name in names}, tmp_path)
    for name in names:
        assert found[name]["peak"] == pytest.approx(STORED[name]["peak"], rel=0.02), name


def zero(stage, ranks=8, **more):
    return Work(
        SEVEN,
        Layout(dp=ranks),
        1,
        128,
        zero=Zero.of({"zero_optimization": {"stage": stage, **more}}),
    )


def states(one):
    """Of weights, optimizer and gradients that stay, in bytes a parameter."""
    terms = ZeroPeak(one).static()
    return (
        sum(terms[name] for name in ("parameters", "optimizer", "divided gradients"))
        / SEVEN.parameters
    )


def test_states_are_those_of_the_paper():
    """Table 1 of Rajbhandari et al.: 2 + 12/N, and with stage 3 all of 16 divided."""
    assert [round(states(zero(stage)), 2) for stage in (1, 2, 3)] == [3.5, 3.5, 2.0]


def test_what_is_offloaded_lies_in_the_memory_of_the_host():
    device = {"device": "cpu"}
    there = zero(3, offload_optimizer=device, offload_param=device)
    assert states(there) == 0
    assert offloaded_bytes(there) / SEVEN.parameters == pytest.approx((12 + 4 + 2) / 8, rel=0.01)
    assert offloaded_bytes(zero(3)) == 0
    assert snapshot_bytes(there) / SEVEN.parameters == pytest.approx(12 / 8, rel=0.01)


def test_every_rank_has_the_whole_network_once_before_it_is_divided():
    device = {"device": "cpu"}
    found = memory(zero(3, ranks=64, offload_optimizer=device, offload_param=device))
    assert (found.phase, found.peak_bytes) == (
        "start",
        pytest.approx(4 * SEVEN.parameters, rel=0.01),
    )


@pytest.mark.parametrize(
    ("section", "found"),
    [
        (None, Zero()),
        ({"stage": "auto", "overlap_comm": "auto"}, Zero()),
        ({"stage": 2, "overlap_comm": True}, Zero(stage=2, buckets=2, overlaps=True)),
        ({"stage": 3}, Zero(stage=3, overlaps=True)),
        ({"stage": 0}, Zero(stage=0, bucket=0)),
        ({"stage": 1, "contiguous_gradients": False}, Zero(stage=1, bucket=0)),
        ({"stage": 3, "offload_param": {"device": "none"}}, Zero(stage=3, overlaps=True)),
        ({"stage": 3, "stage3_max_live_parameters": 1e6}, Zero(stage=3, overlaps=True)),
    ],
)
def test_a_config_of_deepspeed_is_read_with_its_own_defaults(section, found):
    assert Zero.of({"zero_optimization": section}) == found


def test_offload_is_said_in_words():
    moved = dataclasses.replace(Zero(stage=3), optimizer_offloaded=True, parameters_offloaded=True)
    assert str(moved) == "ZeRO 3, optimizer and weights in the host's memory"


def planned(path, *overrides):
    return make(load_target(ROOT / "configs" / path, overrides), shipped())


OFFLOADED = "engines/gpt2-1.3b-zero3.yaml"
OURS = ("train.engine=rekindle", "train.engine_config=null")


def test_what_does_not_fit_is_answered_with_the_stage_that_does_and_the_command():
    with pytest.raises(RequestError) as refused:
        planned(OFFLOADED, *OURS)
    (problem,) = refused.value.problems
    assert "no layout fits on g5.8xlarge" in problem.what
    _, said, command = problem.fix.split("; ", 2)
    assert said.startswith("or DeepSpeed's ZeRO 3, optimizer and weights in the host's memory: ")
    words = shlex.split(command)
    assert words[::2] == ["--set", "--set"]
    plan = planned(OFFLOADED, *OURS, *words[1::2])
    assert plan.asked.zero == Zero(3, True, True, overlaps=True)
    record = plan_record(plan)
    assert (record.chosen.layout, record.chosen.zero) == ("one rank", str(plan.asked.zero))
    assert record.advice == (
        "DeepSpeed: one GPU does everything; optimizer and weights in the host's memory",
        "rekindle's engine does not fit there",
    )
    assert "to and from the host" in plan.chosen.option.step.terms
    assert any(
        note.startswith("host memory: a save copies and what is offloaded") for note in plan.notes
    )


def test_advice_says_what_is_done_why_and_what_the_other_engine_would_do():
    first, why, change, other = plan_record(planned("plan/7b-spot.yaml")).advice
    assert (
        first
        == "rekindle's engine: 8 GPUs divide weights, gradients and optimizer among them (FSDP)"
    )
    assert why.startswith("not replicas alone: needs ")
    assert change.endswith(" GiB would change that")
    assert other.startswith("or DeepSpeed's ZeRO ")
    words = shlex.split(other.split("; ", 1)[1])
    plan = planned("plan/7b-spot.yaml", *words[1::2])
    assert plan.chosen.option.work.engine == "deepspeed"
    back = plan_record(plan).advice[-1]
    assert back.startswith("or rekindle's engine, shard 8: ")
    again = planned("plan/7b-spot.yaml", *words[1::2], *shlex.split(back.split("; ", 1)[1])[1::2])
    assert again.chosen.option.work.engine == "rekindle"


def test_the_command_gives_up_a_layout_that_deepspeed_does_not_have():
    fixed = ("train.layout={shard: 8}",)
    other = plan_record(planned("plan/7b-spot.yaml", *fixed)).advice[-1]
    words = shlex.split(other.split("; ", 1)[1])
    assert words[-1] == "train.layout=auto"
    assert (
        planned("plan/7b-spot.yaml", *fixed, *words[1::2]).chosen.option.work.engine == "deepspeed"
    )


def test_no_advice_names_deepspeed_where_it_refuses_the_config():
    assert not any(
        "DeepSpeed" in line
        for line in plan_record(planned("plan/7b-spot.yaml", "train.compile=true")).advice
    )


def test_a_run_has_the_micro_batch_of_the_plan_and_deepspeeds_own_layout():
    spec = load_target(ROOT / "configs" / OFFLOADED)
    train = settled(spec, "sagemaker").train
    assert (train.layout, train.micro_batch_size, train.activation_checkpointing) == (
        "auto",
        16,
        "full",
    )


def test_the_speed_of_another_engine_is_said_to_be_a_guess():
    profile = planned(OFFLOADED).chosen.option.profile
    assert "not measured with deepspeed; half to twice as long, a guess" in str(profile)


def test_a_stage_that_shares_more_exchanges_more():
    seconds = [
        planned(
            "plan/7b-spot.yaml",
            "train.engine=deepspeed",
            f"train.engine_config={{zero_optimization: {{stage: {stage}}}}}",
            "train.micro_batch_size=1",
            "train.activation_checkpointing=full",
        ).chosen.option.step.seconds
        for stage in (2, 3)
    ]
    assert seconds[0] < seconds[1]
