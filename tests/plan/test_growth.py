"""What a plan may need more or less of: for trainings of all kinds, drawn as in fresh.py."""

from __future__ import annotations

import dataclasses
import itertools

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rekindle.catalog.machines import gpu
from rekindle.plan import risk
from rekindle.plan.cluster import Cluster
from rekindle.plan.constants import profile_of
from rekindle.plan.memory import memory
from rekindle.plan.spot import Offer, SpotNeeds, weigh
from rekindle.plan.steptime import step_time
from rekindle.plan.tensors import Rank
from tests.plan.fresh import case, finalist_of, shape_of

FINALISTS = st.randoms(use_true_random=False).map(case).filter(bool).map(finalist_of)
WORKS = FINALISTS.map(lambda one: one.work)
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "n_embd",
    "n_head",
    "dim",
    "hidden_dim",
    "n_heads",
)
drawn = settings(max_examples=200, derandomize=True)
few = settings(drawn, max_examples=40)


def peak(work):
    return memory(work).peak_bytes


def changed(work, **layout):
    return dataclasses.replace(work, layout=dataclasses.replace(work.layout, **layout))


def deeper(work, by):
    shape = dataclasses.replace(work.shape, layers=work.shape.layers + by)
    return dataclasses.replace(work, shape=shape)


def larger(one):
    """By what there is more of: the same training, with more work."""
    work, shape = one.work, one.work.shape
    wide = {name: 2 * size if name in SIZES else size for name, size in one.config.items()}
    wider = shape_of(wide, None if shape.causal else 2)
    return {
        "micro-batch": changed(work, micro_batch_size=2 * work.layout.micro_batch_size),
        "sequence": dataclasses.replace(work, sequence=2 * work.sequence),
        "a layer": deeper(work, 1),
        "layers": deeper(work, work.layout.stages),
        "width": dataclasses.replace(work, shape=wider),
        "micro-batches": dataclasses.replace(work, accumulation=2 * work.accumulation),
    }


def rule(work):
    """What decides how states are held; another axis of more than one may change it."""
    rank, layout = Rank(work, 0), work.layout
    replicas = layout.only_replicates and layout.world > 1
    return rank.sharded, rank.shard_ranks > 1, replicas, layout.pp > 1, layout.cp > 1


def divides(work):
    """Stages are equally deep, heads go round, and a pipeline is fed in whole rounds."""
    layout, shape = work.layout, work.shape
    heads = shape.kv_heads % layout.tp or shape.heads % layout.tp
    return not (heads or shape.layers % layout.stages or work.accumulation % layout.pp)


@drawn
@given(WORKS)
def test_terms_are_positive_and_add_up_and_the_largest_dominates(work):
    found = memory(work)
    assert all(size > 0 for size in found.terms.values())
    assert found.peak_bytes == sum(found.terms.values())
    assert found.terms[found.dominant] == max(found.terms.values())
    assert 0 <= found.pp_rank < work.layout.pp


@drawn
@given(WORKS, st.sampled_from(["dp", "shard", "tp", "pp", "cp"]))
def test_more_gpus_never_need_more_memory_a_rank_under_the_same_layout_rule(work, axis):
    more = changed(work, **{axis: 2 * getattr(work.layout, axis)})
    assume(rule(more) == rule(work) and divides(more) and (work.shape.causal or axis != "cp"))
    assume(more.attention == work.attention)  # dropout that tp ranks share is written out
    beside = 0
    if axis == "pp":
        # 1F1B's first rank holds as many blocks, of more micro-batches: there is what each has beside its blocks. Interleaved holds
        # (p - 1) / 2p more blocks, which grows (Korthikanti et al. 2022), and zero bubble puts off more, the more ranks there are
        assume(work.layout.schedule == "1f1b")
        rank = Rank(work, 0)
        each = rank.norm_bytes + rank.stream * rank.size
        beside = (more.layout.stages - work.layout.stages) * each
    assert peak(more) <= peak(work) + beside


@drawn
@given(FINALISTS)
def test_memory_grows_with_micro_batch_sequence_layers_and_width(one):
    base = peak(one.work)
    for name, more in larger(one).items():
        assert peak(more) >= base, name
        assert peak(more) > base or name not in ("layers", "width")


@drawn
@given(WORKS)
def test_recomputation_never_needs_more(work):
    """But for the entry of the block that is computed again; and for the products of adapters, which `selective` keeps and nothing
    else needs."""
    assume(work.layout.schedule != "zero_bubble")
    kinds = ("full", "none") if work.lora_rank else ("full", "selective", "none")
    peaks = [peak(dataclasses.replace(work, checkpointing=kind)) for kind in kinds]
    rank = Rank(work, 0)
    beside = rank.stream * rank.size
    for less, more in itertools.pairwise(peaks):
        assert less <= more + beside


def seconds(work, inside=450e9, between=400e9):
    cluster = Cluster(gpu("H100"), 8, 2, inside, between)
    return step_time(work, cluster, profile_of("H100").constants).seconds


@drawn
@given(FINALISTS, st.floats(1, 10))
def test_a_step_takes_longer_with_more_work_and_no_longer_with_faster_links(one, faster):
    work, slight = one.work, 1 + 1e-9  # sums of the same in another order
    base = seconds(work)
    assert 0 < base < float("inf")
    exact = dataclasses.replace(work, precision="fp32", weights_bytes=4)
    for name, more in {**larger(one), "precision": exact}.items():
        assert base <= seconds(more) * slight, name
    kinds = ("none", "selective", "full")
    again = [seconds(dataclasses.replace(work, checkpointing=kind)) for kind in kinds]
    for less, more in itertools.pairwise(again):
        assert less <= more * slight
    assert seconds(work, inside=faster * 450e9) <= base * slight
    assert seconds(work, between=faster * 400e9) <= base * slight


@few
@given(
    st.integers(1, 20_000),
    st.integers(1, 20_000),
    st.floats(0.1, 30),
    st.floats(0, 120),
    st.sampled_from(["calm", "moderate", "rough"]),
    st.integers(1, 16),
)
def test_a_longer_run_costs_more_on_either_kind_of_machine(steps, more, step, save, often, nodes):
    runs = [
        risk.InterruptibleWork(steps=n, step_seconds=step, save_seconds=save, restart_seconds=120)
        for n in (steps, steps + more)
    ]
    hazard = risk.hazard(often)
    short, long = (weigh(run, hazard, nodes, Offer(100.0, 250.0), SpotNeeds()) for run in runs)
    alone = [risk.uninterrupted_seconds(run, risk.interval(run, 0.0)) for run in runs]
    assert alone[0] < alone[1], "on demand"
    for end in ("independent", "together"):
        assert getattr(short, end).expected_usd < getattr(long, end).expected_usd
