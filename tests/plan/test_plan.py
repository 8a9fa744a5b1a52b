"""Whole plans: what is chosen, what is refused, and that the engine takes what is offered."""

from __future__ import annotations

import dataclasses
import datetime
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.catalog.machines import gpu
from rekindle.catalog.prices import Price, PriceBook, shipped
from rekindle.catalog.tables import known_configs
from rekindle.errors import RequestError
from rekindle.plan.cluster import Cluster
from rekindle.plan.memory import needed, snapshot_bytes
from rekindle.plan.plan import make, plan_record, refusals
from rekindle.plan.request import Asked, asked_of
from rekindle.plan.search import search
from rekindle.plan.shape import shape_of
from rekindle.spec.load import load_target
from rekindle.spec.model import Spec, TrainSpec
from tests.quick import first
from tests.support.plan import LAMBDA_BOOK, ROOT, planned, takes

SCENARIOS = sorted((ROOT / "configs" / "plan").glob("*.yaml"))


@pytest.mark.parametrize("path", first(1, SCENARIOS), ids=lambda path: path.stem)
def test_a_scenario_is_planned_with_what_the_engine_takes_and_the_gpus_hold(path):
    plan = planned(path.stem)
    for choice in (plan.chosen, *plan.others):
        takes(plan.asked, choice.option)
        held = needed(choice.option.memory.peak_bytes)
        assert held <= choice.option.cluster.gpu.memory_bytes
    assert all(rejected.reason for rejected in plan.rejected)
    assert {str(other.option.work.layout) for other in plan.others} <= {
        rejected.layout for rejected in plan.rejected
    }
    assert plan.hours[0] < plan.hours[1] < plan.hours[2]
    said = plan_record(plan)
    assert sum(term.amount for term in said.memory) == said.chosen.memory_bytes
    assert sum(t.amount for t in said.time) == pytest.approx(said.chosen.step_seconds[1])


def test_a_teacher_takes_memory_and_time_and_is_never_divided_by_the_axes_of_a_student():
    alone = planned("gpt2-1.3b")
    plan = planned("gpt2-1.3b", "model.teacher.source=gpt2-medium")
    taught = plan.chosen.option
    assert plan.asked.teacher == shape_of(known_configs()["gpt2-medium"])
    assert taught.memory.terms["teacher"] == 2 * plan.asked.teacher.parameters
    assert taught.step.terms["teacher"] > 0.05 * taught.step.terms["matrix products"]
    assert "teacher" not in alone.chosen.option.memory.terms
    assert "teacher" not in alone.chosen.option.step.terms

    def divided(plan):
        found = [one.option.work.layout for one in (plan.chosen, *plan.others)]
        return {layout.tp * layout.pp * layout.cp > 1 for layout in found}

    assert (divided(alone), divided(plan)) == ({False, True}, {False})
    with pytest.raises(RequestError) as refused:
        planned("gpt2-1.3b", "model.teacher.source=./none")
    assert refused.value.problems[0].where == "model.teacher.source"


@pytest.mark.slow
def test_what_six_scenarios_are_known_to_want():
    layouts = {path.stem: planned(path.stem).chosen.option.work.layout for path in SCENARIOS}
    assert layouts["distilbert"].only_replicates, "66 million parameters need nothing else"
    assert layouts["gpt2-1.3b"].only_replicates
    assert layouts["7b-spot"].shard == layouts["7b-spot"].world == 8
    slow = layouts["10b-slow-network"]
    inside = slow.tp * slow.cp * slow.shard * slow.dp
    assert (slow.pp > 1, inside <= 8) == (True, True), "only stages talk over the slow network"
    large = layouts["130b"]
    assert min(large.tp, large.pp, large.data) > 1
    assert large.tp <= 8


@settings(max_examples=25)
@given(
    st.sampled_from(["llama", "gpt2", "distilbert"]),
    st.integers(1, 12),
    st.sampled_from([2, 4, 6, 8]),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.sampled_from([4, 8, 48, 64]),
    st.sampled_from(["fp32", "bf16"]),
    st.booleans(),
)
def test_every_layout_offered_is_legal_for_the_engine(
    kind, layers, heads, world, batch, precision, free
):
    config = {
        "model_type": kind,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "hidden_size": 64 * heads,
        "n_layer": layers,
        "n_head": heads,
        "n_embd": 64 * heads,
        "n_layers": layers,
        "n_heads": heads,
        "dim": 64 * heads,
    }
    words = kind == "distilbert"
    asked = Asked(
        "text" if words else "tokens",
        shape_of(config, 2 if words else None),
        256,
        TrainSpec(global_batch_size=batch, precision=precision),
        frozenset({"activation_checkpointing"} if free else ()),
    )
    asked = Asked(asked.kind, asked.shape, 256, asked.train, asked.free | {"micro_batch_size"})
    cluster = Cluster(gpu("H100"), min(8, world), max(1, world // 8), 450e9, 400e9)
    found = search(asked, cluster)
    assert found.options or found.rejected
    for option in found.options:
        takes(asked, option)
    for one, other in itertools.pairwise(found.options[1:]):
        assert one.step.seconds <= other.step.seconds


def of(**changes):
    base = {
        "name": "job",
        "task": "causal_lm",
        "data": {"source": "s3://b/t.jsonl", "max_length": 2048},
        "model": {"source": "meta-llama/Llama-3.1-8B"},
        "train": {"steps": 2000, "global_batch_size": 256, "precision": "bf16"},
        "resources": {"machine": "auto"},
    }
    return Spec.model_validate({**base, **changes})


def auto(**limits):
    spec = of(resources={"machine": "auto", **limits})
    return make(spec, shipped(), "sagemaker", "us-east-1"), spec


@pytest.mark.slow
def test_machines_are_chosen_for_a_deadline_and_refused_where_none_keeps_it():
    slow, _ = auto()
    fast, spec = auto(deadline_hours=1.0)
    assert fast.hours[2] <= 1.0 < slow.hours[2]
    assert fast.chosen.fleet.usd_per_hour() > slow.chosen.fleet.usd_per_hour()
    assert list(refusals(fast, spec)) == []
    never, spec = auto(deadline_hours=0.001)
    (problem,) = refusals(never, spec)
    assert problem.where == "resources.deadline_hours"
    assert "resources.deadline_hours is 0.001" in problem.what


@pytest.mark.slow
def test_machines_are_chosen_for_a_budget():
    cheapest, _ = auto()
    rich, spec = auto(budget_usd=2 * cheapest.usd)
    assert list(refusals(rich, spec)) == []
    assert rich.hours[1] < cheapest.hours[1], "the fastest that the money buys"
    poor, spec = auto(budget_usd=1.0)
    (problem,) = refusals(poor, spec)
    assert "budget_usd is $1" in problem.what


def test_the_copies_of_a_checkpoint_are_planned_and_a_host_that_cannot_hold_them_is_refused():
    plan = planned("7b-spot")
    choice, spec = plan.chosen, load_target(ROOT / "configs" / "plan" / "7b-spot.yaml")
    work = choice.option.work
    one = snapshot_bytes(work)
    # eight shards hold weights and two moments once, in fp32 or bf16
    expected = 3 * work.weights_bytes * plan.asked.shape.parameters
    assert 8 * one == pytest.approx(expected, rel=0.02)
    (note,) = (note for note in plan.notes if note.startswith("host memory"))
    assert f"a save copies {8 * one / 2**30:,.1f} of " in note
    assert list(refusals(plan, spec)) == []
    small = dataclasses.replace(choice.fleet.machine, memory_bytes=8 * one - 1)
    cramped = dataclasses.replace(choice, fleet=dataclasses.replace(choice.fleet, machine=small))
    (problem,) = refusals(dataclasses.replace(plan, chosen=cramped), spec)
    assert problem.where == "train.checkpoint"
    assert "of host memory a machine for its copies" in problem.what


def test_nothing_fits_and_the_nearest_miss_is_told():
    with pytest.raises(RequestError) as caught:
        planned("100b", "resources.nodes=1")
    (problem,) = caught.value.problems
    assert "no layout fits on p5.48xlarge (8 x H100)" in problem.what
    assert "of 80 GiB, most of it" in problem.what
    assert "larger machines" in problem.fix


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": {"source": {"model_type": "mamba"}}}, "does not know the architecture `mamba`"),
        ({"task": "", "pipeline": "p.py:f"}, "does not know what a pipeline of your own computes"),
        (
            {"task": "image_classification"},
            "does not know what the task `image_classification` computes",
        ),
        ({"model": {"source": "nobody/knows-it"}}, "`nobody/knows-it`"),
        ({"resources": {}}, "the planner knows this CPU in fp32, not in bf16"),
        ({"resources": {"machine": "p5.48xlarge"}}, "the config asks for no GPUs"),
        ({"resources": {"machine": "p5.99xlarge", "gpus_per_node": 8}}, "no machine `p5.99xlarge`"),
        (
            {"resources": {"machine": "m5.xlarge", "gpus_per_node": 1}},
            "m5.xlarge has no GPUs, not 1",
        ),
        (
            {"resources": {"accelerator": "X1", "gpus_per_node": 1}},
            "no machine of the catalog has these GPUs",
        ),
        (
            {"resources": {"machine": "g4dn.xlarge", "gpus_per_node": 1}},
            "knows no bf16 peak of T4, but fp32, fp16",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_planned_is_refused_by_name(changes, says, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RequestError, match=says.replace("(", r"\(")):
        make(of(**changes), shipped())


def test_an_unknown_price_is_told_and_ones_own_counts():
    nothing = PriceBook(())
    plan = planned("7b-spot", book=nothing)
    assert (plan.usd, plan.spot) == (None, None)
    assert any(note.startswith("the price of p4de.24xlarge") for note in plan.notes)
    today = datetime.date(2026, 11, 23)
    own = PriceBook([Price("p4de.24xlarge", "us-east-1", 10.0, 10.0, "a contract", today)])
    plan = planned("7b-spot", book=own)
    assert plan.usd == pytest.approx(10 * plan.hours[1])
    assert plan.spot is None, "spot as dear as on demand is none"
    assert any("no spot price" in note for note in plan.notes)


def test_old_prices_and_what_spot_assumes_are_told():
    spec = load_target(ROOT / "configs" / "plan" / "7b-spot.yaml")
    read = shipped().find("p4de.24xlarge", "us-east-1").as_of
    fresh = make(spec, shipped(), region="us-east-1", today=read)
    old = make(spec, shipped(), region="us-east-1", today=read + datetime.timedelta(days=400))
    marked = [note for note in old.notes if "the price is old" in note]
    assert len(marked) == 1
    assert "rekindle plan --prices FILE" in marked[0]
    assert any(note.startswith("spot: assumed are 300 s to start") for note in fresh.notes)


def test_what_a_plan_only_guesses_is_called_a_guess():
    spec = load_target(ROOT / "configs" / "chat.yaml", ["train.steps=20", "train.epochs=null"])
    notes = " | ".join(make(spec, LAMBDA_BOOK, "local").notes)
    assert "speed: not measured on this CPU; half to twice as long, a guess; after a run, " in notes
    assert "training is its steps alone" in notes
    assert "training is its steps alone" not in " | ".join(planned("7b-spot").notes)
    assert "within 35% in nine of ten" in " | ".join(planned("7b-spot").notes)


def test_steps_that_depend_on_data_are_not_guessed():
    plan = planned("distilbert", examples=None)
    assert (plan.steps, plan.hours, plan.usd) == (None, None, None)
    assert any("--examples" in note for note in plan.notes)
    assert planned("distilbert", examples=64_000).steps == 2_000


def test_what_the_config_fixes_stays_as_it_is():
    fixed = (
        "train.layout={tp: 2, shard: 4}",
        "train.micro_batch_size=2",
        "train.activation_checkpointing=full",
    )
    plan = planned("7b-spot", *fixed)
    work = plan.chosen.option.work
    assert (work.layout.tp, work.layout.shard, work.layout.dp) == (2, 4, 1)
    assert (work.layout.micro_batch_size, work.checkpointing) == (2, "full")
    assert plan.weighed == 1
    assert asked_of(load_target(SCENARIOS[0])).free
