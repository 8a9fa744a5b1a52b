"""Degrees of parallelism: what they multiply to, what they have to divide, what is offered instead."""

import collections
import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.errors import RequestError, UnsupportedError
from rekindle.spec import layout_support
from rekindle.spec.layout import AXES, Layout, Shape, resolve, uneven
from rekindle.spec.layout_support import Cell, cell_of, impossible, require
from rekindle.spec.model import TrainSpec

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


def said(train, world, shape=None):
    with pytest.raises(RequestError) as error:
        resolve(TrainSpec(**train), world, shape)
    (problem,) = error.value.problems
    return problem.what, problem.where, problem.fix


def test_dp_takes_the_ranks_that_the_other_degrees_leave():
    assert resolve(TrainSpec(layout={"tp": 2}), 8).dp == 4
    assert resolve(TrainSpec(), 3) == Layout(dp=3, micro_batch_size=32)


@pytest.mark.parametrize(
    ("train", "world", "what", "where", "fix"),
    [
        (
            {"layout": {"tp": 3}},
            6,
            "tp 3 does not divide 8 heads and 2 key-value heads",
            "train.layout.tp",
            "on 6 ranks, use {dp: 3, tp: 2} or {dp: 6}",
        ),
        (
            {"layout": {"pp": 8}},
            8,
            "4 blocks cannot fill 8 stages (1f1b)",
            "train.layout.pp",
            "on 8 ranks, use {dp: 2, pp: 4} or {dp: 4, pp: 2} or {dp: 8}",
        ),
        (
            {"layout": {"tp": 2, "pp": 2}},
            6,
            "the layout tp 2 x pp 2, 1f1b needs 4 ranks and there are 6",
            "train.layout",
            "on 6 ranks, use {tp: 2, pp: 3} or {dp: 3, tp: 2} or {dp: 3, pp: 2}",
        ),
        (
            {"layout": {"pp": 4}, "global_batch_size": 2},
            4,
            "2 micro-batches of 1 a data rank cannot feed 4 stages (1f1b needs at least 4)",
            "train.micro_batch_size",
            "set train.global_batch_size to a multiple of 4, or a smaller micro_batch_size; "
            "on 4 ranks, use {dp: 4}",
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_the_nearest_that_do(
    train, world, what, where, fix
):
    assert said(train, world, Shape.of(LLAMA)) == (what, where, fix)


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_models_whose_blocks_are_not_known_are_not_divided(axis):
    shape = Shape.of({"model_type": "gpt_neox", "num_hidden_layers": 4, "num_attention_heads": 8})
    what, where, fix = said({"layout": {axis: 2}}, 2, shape)
    assert what.startswith("gpt_neox cannot be divided, as llama, mistral, qwen2, ")
    assert (where, fix) == ("train.layout", "on 2 ranks, use {dp: 2}")


@given(
    world=st.integers(1, 64),
    tp=st.integers(1, 4),
    pp=st.integers(1, 4),
    shard=st.integers(1, 4),
    batch=st.integers(1, 256),
)
def test_what_is_offered_is_legal(world, tp, pp, shard, batch):
    train = {"layout": {"tp": tp, "pp": pp, "shard": shard}, "global_batch_size": batch}
    try:
        layout = resolve(TrainSpec(**train), world, Shape.of(LLAMA))
    except RequestError as error:
        (problem,) = error.problems
        for offer in problem.fix.partition("ranks, use ")[2].split(" or "):
            degrees = (
                dict(part.split(": ") for part in offer.strip("{}").split(", "))
                if offer.startswith("{")
                else {}
            )
            degrees = {axis: int(degree) for axis, degree in degrees.items()}
            again = {**train, "layout": degrees or "auto"}
            assert resolve(TrainSpec(**again), world, Shape.of(LLAMA)).world == world
        return
    assert layout.world == world
    assert batch % layout.micro_batch_size == 0


def test_the_shape_comes_from_any_familys_config():
    assert Shape.of({"model_type": "gpt2", "n_layer": 4}) == Shape("gpt2", 4, 12, 12)
    assert Shape.of({"model_type": "distilbert"}) == Shape("distilbert", 6, 12, 12)
    assert Shape.of({"model_type": "mistral"}) == Shape("mistral", 32, 32, 8)


def test_a_combination_that_no_test_has_run_is_refused_with_neighbours():
    untested = Cell("tokens", ("dp", "tp"), precision="fp16", compile=True)
    with pytest.raises(UnsupportedError) as error:
        require(untested)
    (problem,) = error.value.problems
    assert problem.what == (
        "tokens: dp x tp, fp16, compiled is refused: no test has trained tp with fp16"
    )
    assert "dp, fp16" in problem.fix


PROVEN = Cell("tokens", ("shard",), checkpointing="full", precision="bf16", lora=True)
COMPOSED = Cell("text", ("dp", "shard", "tp"), checkpointing="selective", precision="bf16")
ALONE = Cell("image", (), compile=True)


@pytest.mark.parametrize(
    ("cell", "untested", "level"),
    [
        (PROVEN, "refuse", "proven"),
        (COMPOSED, "check", "composed"),
        (COMPOSED, "allow", "composed"),
    ],
)
def test_a_layout_whose_every_two_parts_are_proven_may_be_composed(cell, untested, level):
    assert require(cell, untested) == level


@pytest.mark.parametrize(
    ("cell", "untested", "why"),
    [
        (COMPOSED, "refuse", "train.untested is `refuse`"),
        (ALONE, "allow", "no test has trained compiled blocks here"),
        (Cell("text", ("cp",)), "allow", "divides sequences of tokens"),
    ],
)
def test_what_is_refused_says_why_whatever_is_allowed(cell, untested, why):
    with pytest.raises(UnsupportedError, match=why):
        require(cell, untested)


def test_no_pair_of_a_composed_layout_is_without_a_test():
    """Asked of every combination, by another way than support.py's: for each two features a proven cell that has both."""

    def features(cell):
        named = {("axis", axis) for axis in cell.axes if axis != "pp"} | {
            ("precision", cell.precision)
        }
        named |= {("pp", cell.schedule)} if cell.schedule else set()
        named |= {(n, getattr(cell, n)) for n in ("checkpointing", "compile", "lora")}
        return named - {("checkpointing", "none"), ("compile", False), ("lora", False)}

    proven = layout_support.tested()
    known = {
        kind: [features(cell) for cell in proven if cell.kind == kind]
        for kind in layout_support.KINDS
    }
    axes = [a for n in range(len(AXES) + 1) for a in itertools.combinations(AXES, n)]
    products = itertools.product(
        layout_support.KINDS,
        axes,
        layout_support.SCHEDULES,
        ("none", "full", "selective"),
        (False, True),
        ("fp32", "bf16", "fp16"),
        (False, True),
    )
    counts = collections.Counter()
    for values in products:
        cell = Cell(*values)
        if "pp" not in cell.axes:
            cell = dataclasses.replace(cell, schedule="")
        pairs = itertools.combinations_with_replacement(sorted(features(cell), key=str), 2)
        covered = all(any({*pair} <= one for one in known[cell.kind]) for pair in pairs)
        expected = (
            "proven"
            if cell in proven
            else "composed"
            if covered and not impossible(cell)
            else "refused"
        )
        assert layout_support.level(cell) == expected, cell
        counts[expected] += 1
    assert min(counts.values()) > 100


def test_every_listed_combination_is_possible_and_listed_once():
    cells = layout_support.tested()
    assert len(cells) == len(set(cells))
    assert not [cell for cell in cells if impossible(cell)]
    assert Cell("tokens", ("shard", "tp", "pp", "cp"), "1f1b") in cells


def test_fp64_is_the_cell_of_fp32():
    train = TrainSpec(precision="fp64", layout={"shard": 2})
    assert cell_of("text", resolve(train, 4), train, lora=False) == Cell("text", ("dp", "shard"))


@pytest.mark.parametrize(
    ("total", "degrees", "says"),
    [
        (
            61,
            {},
            "61 divides into micro-batches of at most 1, which is slow; 64 divides into micro-batches of 32",
        ),
        (64, {}, ""),
        (60, {}, ""),
        (7, {}, ""),
        (37, {"dp": 2}, "48 divides into micro-batches of 16"),
        (2, {"dp": 2}, ""),
        (122, {"dp": 4}, "at most 2, which is slow; 128"),
        (24, {"dp": 2, "pp": 2}, ""),
    ],
)
def test_a_batch_with_too_few_divisors_is_told(total, degrees, says):
    told = uneven(TrainSpec(global_batch_size=total), Layout(**degrees))
    assert says in told
    assert bool(says) == bool(told)
