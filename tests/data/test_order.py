"""Sample order is arithmetic: what any step trains on follows from seed, lengths and its number
alone."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.data.order import BUCKET_BATCHES, PADDING, WINDOW_ROWS, Lookup, SampleOrder, best_fit

SIZES = {
    "rows": st.integers(1, 700),
    "batch": st.integers(1, 64),
    "seed": st.integers(0, 2**31 - 1),
}
LONGEST = 100


def lengths_of(rows: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, LONGEST, rows)


def cut(rows: int, seed: int) -> list[int]:
    """The rows of some shards."""
    random = np.random.default_rng(seed)
    cuts = np.sort(random.integers(1, rows, random.integers(0, 12))) if rows > 1 else []
    return np.diff(np.unique([0, *cuts, rows])).tolist()


def looked_up(values: npt.ArrayLike, sizes: Sequence[int]) -> Lookup:
    parts = np.split(np.asarray(values), np.cumsum(sizes)[:-1])
    return lambda shards: np.concatenate([parts[shard] for shard in shards])


def order_of(
    kind: str,
    rows: int,
    batch: int,
    seed: int,
    windows: int = 1,
    lengths: npt.ArrayLike = (),
    pack_length: int = 128,
    **more: Any,
) -> SampleOrder:
    sizes = cut(rows, seed) if windows > 1 else [rows]
    if kind != "plain":
        lengths = np.asarray(lengths) if len(lengths) else lengths_of(rows, seed)
        more["lengths"] = looked_up(lengths, sizes)
    if kind == "packed":
        parts = np.split(lengths, np.cumsum(sizes)[:-1])
        more["sequences"] = [best_fit(part, pack_length)[1] for part in parts]
        more["pack_length"] = pack_length
    return SampleOrder(rows=sizes, global_batch_size=batch, seed=seed, windows=windows, **more)


KINDS = st.sampled_from(["plain", "bucketed", "packed"])
WINDOWS = st.sampled_from([1, 2, 5])


@settings(max_examples=100)
@given(**SIZES, epoch=st.integers(0, 20), kind=KINDS, windows=WINDOWS)
def test_an_epoch_holds_every_row_once_and_fills_every_slot_of_its_batches(
    rows, batch, seed, epoch, kind, windows
):
    order = order_of(kind, rows, batch, seed, windows)
    first = epoch * order.steps_in_epoch
    batches = [order.batch(first + i) for i in range(order.steps_in_epoch)]
    drawn = np.concatenate([b.rows for b in batches])
    assert sorted(drawn[drawn != PADDING].tolist()) == list(range(rows))
    assert (batches[-1].rows != PADDING).any()
    for b in batches:
        assert b.rows.dtype == b.slots.dtype == np.int64
        assert sorted(set(b.slots.tolist())) == b.slots[np.diff(b.slots, prepend=-1) > 0].tolist()
        assert set(b.slots.tolist()) == set(range(batch))
    assert all((b.rows != PADDING).all() for b in batches[:-1])
    if kind != "packed":
        assert all(b.slots.tolist() == list(range(batch)) for b in batches)


@settings(max_examples=60)
@given(**SIZES, epoch=st.integers(0, 5), windows=WINDOWS)
def test_no_pack_exceeds_its_length(rows, batch, seed, epoch, windows):
    order = order_of("packed", rows, batch, seed, windows)
    lengths = np.append(lengths_of(rows, seed), 0)
    for step in range(order.steps(epoch + 1)):
        b = order.batch(step)
        assert np.bincount(b.slots, weights=lengths[b.rows]).max() <= 128
        assert all(
            (b.slots == b.slots[i]).sum() == 1 for i in np.flatnonzero(b.rows == PADDING).tolist()
        )


@settings(max_examples=60)
@given(**SIZES, step=st.integers(0, 200), kind=KINDS, windows=WINDOWS)
def test_a_step_does_not_depend_on_what_ran_before(rows, batch, seed, step, kind, windows):
    order = order_of(kind, rows, batch, seed, windows)
    for earlier in (step + 17, 0, step // 2):
        order.batch(earlier)
    again, alone = order.batch(step), order_of(kind, rows, batch, seed, windows).batch(step)
    assert again.rows.tolist() == alone.rows.tolist()
    assert again.slots.tolist() == alone.slots.tolist()


@settings(max_examples=60)
@given(**SIZES, step=st.integers(0, 100), kind=KINDS, windows=WINDOWS)
def test_a_step_lies_in_the_epoch_that_the_steps_before_it_leave(
    rows, batch, seed, step, kind, windows
):
    order = order_of(kind, rows, batch, seed, windows)
    epoch, position = order.epoch_of(step)
    assert epoch * order.steps_in_epoch + position == step
    assert 0 <= position < order.steps_in_epoch
    assert order.steps(epoch) <= max(1, step) <= order.steps(epoch + 1)


@pytest.mark.parametrize(
    ("rows", "epochs", "steps"), [(50, 1.0, 5), (50, 1.5, 8), (99, 1.1, 11), (50, 0.01, 1)]
)
def test_a_part_of_an_epoch_is_rounded_up_to_whole_steps(rows, epochs, steps):
    assert SampleOrder(rows=[rows], global_batch_size=10, seed=0).steps(epochs) == steps


def test_epochs_and_seeds_differ():
    order = SampleOrder(rows=[64], global_batch_size=64, seed=0)
    other = SampleOrder(rows=[64], global_batch_size=64, seed=1).batch(0)
    first, second = order.batch(0), order.batch(1)
    assert (first.rows != second.rows).any()
    assert (first.rows != other.rows).any()


def test_buckets_waste_little_padding_and_come_in_no_order_of_length():
    lengths = lengths_of(10_000, 1)
    plain = order_of("plain", 10_000, 32, seed=0)
    bucketed = order_of("bucketed", 10_000, 32, seed=0, lengths=lengths)
    padded = {}
    for name, order in (("plain", plain), ("bucketed", bucketed)):
        batches = [order.batch(i).rows for i in range(order.steps_in_epoch)]
        padded[name] = sum(lengths[b[b >= 0]].max() * (b >= 0).sum() for b in batches)
    assert padded["bucketed"] < 1.1 * lengths.sum() < 0.7 * padded["plain"]
    longest = [lengths[bucketed.batch(i).rows].max() for i in range(BUCKET_BATCHES)]
    assert abs(np.corrcoef(longest, np.arange(BUCKET_BATCHES))[0, 1]) < 0.5


@pytest.mark.parametrize(("rows", "pack_length"), [(2_000, 512), (50_007, 2_048)])
def test_packs_of_realistic_texts_are_nearly_full_and_come_in_no_order(rows, pack_length):
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.0, 1.0, rows), 1, pack_length).astype(int)
    order = order_of("packed", rows, 8, 0, lengths=lengths, pack_length=pack_length)
    steps = order.steps_in_epoch
    assert lengths.sum() > 0.95 * steps * 8 * pack_length
    texts_in = [len(order.batch(i).rows) for i in range(steps - 1)]
    assert abs(np.corrcoef(texts_in, np.arange(steps - 1))[0, 1]) < 0.3


def test_a_pack_is_shared_with_other_texts_in_another_epoch():
    order = order_of("packed", 700, 8, 3)
    partners = []
    for first in (0, order.steps_in_epoch):
        steps = [order.batch(first + i) for i in range(order.steps_in_epoch)]
        b = next(b for b in steps if 5 in b.rows)
        slot = b.slots[b.rows == 5]
        partners.append(set(b.rows[b.slots == slot].tolist()))
    assert partners[0] != partners[1]


@settings(max_examples=100)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=60), capacity=st.integers(20, 50))
def test_grouping_equal_lengths_packs_as_one_by_one_does(lengths, capacity):
    """The textbook algorithm, one text after the other, needs as many sequences, as full."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting, key=rooms.__getitem__)] -= length
        else:
            rooms.append(capacity - length)
    sequence_of, count = best_fit(lengths, capacity)
    filled = np.bincount(sequence_of, weights=lengths, minlength=count)
    assert sorted(capacity - filled) == sorted(rooms)


def test_the_order_is_the_same_on_every_machine_and_numpy():
    lengths = [5, 1, 4, 2, 3, 9, 8, 7, 6, 10]
    sizes = {"rows": 10, "batch": 4, "seed": 7, "lengths": lengths}
    assert order_of("plain", **sizes).batch(3).rows.tolist() == [3, 9, 1, 6]
    assert order_of("bucketed", **sizes).batch(1).rows.tolist() == [1, 3, 4, 2]
    packed = order_of("packed", **sizes, pack_length=10).batch(1)
    assert packed.rows.tolist() == [8, 2, 1, 5, PADDING, PADDING]
    assert packed.slots.tolist() == [0, 0, 1, 1, 2, 3]


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": []},
        {"rows": [3, 0]},
        {"global_batch_size": 0},
        {"pack_length": 4},
        {"pack_length": 4, "lengths": lambda shards: [1, 2, 5], "sequences": [1]},
        {"pack_length": 4, "lengths": lambda shards: [1, 2, 0], "sequences": [1]},
        {"pack_length": 4, "lengths": lambda shards: [1, 2, 3], "sequences": [3]},
    ],
)
def test_nonsense_is_refused(wrong):
    with pytest.raises(ValueError, match=r"."):
        SampleOrder(**{"rows": [3], "global_batch_size": 2, "seed": 0, **wrong}).batch(0)


@pytest.mark.slow
@settings(max_examples=100)
@given(**SIZES, epoch=st.integers(0, 20), classes=st.integers(1, 5))
def test_balanced_epochs_draw_every_class_equally_often_and_its_rows_in_turns(
    rows, batch, seed, epoch, classes
):
    of_row = np.random.default_rng(seed).integers(0, classes, rows) ** 2
    order = order_of("plain", rows, batch, seed, classes=lambda shards: of_row)
    steps = order.steps_in_epoch
    drawn = np.concatenate([order.batch(step).rows for step in range((epoch + 1) * steps)])
    drawn = drawn[drawn != PADDING]
    assert len(drawn) == (epoch + 1) * rows
    times = np.bincount(drawn, minlength=rows)
    for one in set(of_row.tolist()):
        share = (epoch + 1) * rows / len(set(of_row.tolist()))
        assert abs(times[of_row == one].sum() - share) <= epoch + 1
        assert np.ptp(times[of_row == one]) <= 1


@pytest.mark.parametrize("kind", ["plain", "bucketed", "packed"])
def test_a_window_reads_few_shards_and_says_which_are_next(kind):
    seen: list[tuple[set[int], set[int]]] = []

    def expect(now, soon):
        seen.append((set(now.tolist()), set(soon.tolist())))

    sizes = [100] * 40
    lengths = [lengths_of(100, shard) for shard in range(40)]
    more = (
        {}
        if kind == "plain"
        else {"lengths": lambda ids: np.concatenate([lengths[i] for i in ids])}
    )
    if kind == "packed":
        more |= {"pack_length": 128, "sequences": [best_fit(part, 128)[1] for part in lengths]}
    order = SampleOrder(rows=sizes, global_batch_size=3, seed=0, windows=8, expect=expect, **more)
    for step in range(2 * order.steps_in_epoch):
        rows = order.batch(step).rows
        assert set((rows[rows != PADDING] // 100).tolist()) <= seen[-1][0]
    assert len(seen) == 16
    assert max(len(now) for now, _ in seen) <= 12
    assert all(soon <= now for (_, soon), (now, _) in itertools.pairwise(seen))
    assert set().union(*(now for now, _ in seen[:8])) == set(range(40))


def test_neighbours_meet_rows_of_everywhere():
    order = SampleOrder(rows=[1_000] * 100, global_batch_size=50, seed=0, windows=10)
    assert len(set((order.batch(0).rows // 1_000).tolist())) > 5
    assert (order.batch(0).rows // 1_000).mean() != (
        order.batch(order.steps_in_epoch).rows // 1_000
    ).mean()


def test_the_order_of_many_rows_costs_what_a_window_costs():
    rows = [10_000] * 50_000
    tracemalloc.start()
    order = SampleOrder(rows=rows, global_batch_size=1_024, seed=0)
    assert order.steps(1) == -(-500_000_000 // 1_024)
    assert len(order.batch(123_456).rows) == 1_024
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 * 8 * WINDOW_ROWS


@pytest.mark.parametrize("seed", range(4))
def test_a_short_shard_is_drawn_no_more_often_than_others_of_its_source(seed):
    sizes, sources = [100, 100, 100, 3] + [100] * 32, [0] * 4 + [1] * 32
    order = SampleOrder(
        rows=sizes, global_batch_size=2, seed=seed, windows=3, sources=sources, shares=(0.1, 0.9)
    )
    times = np.zeros(sum(sizes))
    for step in range(3 * order.steps_in_epoch):
        rows = order.batch(step).rows
        np.add.at(times, rows[rows != PADDING], 1)
    assert times.sum() == 3 * sum(sizes)
    assert np.ptp(times[:303]) <= 3
    assert np.ptp(times[303:]) <= 3


@pytest.mark.parametrize("windows", [1, 5])
@pytest.mark.parametrize("packed", [False, True])
def test_sources_are_drawn_by_their_shares_and_each_row_in_its_turn(windows, packed):
    sizes, sources, shares = [100] * 10 + [50, 40], [0] * 10 + [1, 2], (0.5, 0.3, 0.2)
    lengths = [lengths_of(size, shard) for shard, size in enumerate(sizes)]
    more, sequences = {}, sizes
    if packed:
        sequences = [best_fit(part, 128)[1] for part in lengths]
        more = {"pack_length": 128, "sequences": sequences}
        more["lengths"] = lambda ids: np.concatenate([lengths[i] for i in ids])
    order = SampleOrder(
        rows=sizes,
        global_batch_size=2,
        seed=3,
        windows=windows,
        sources=sources,
        shares=shares,
        **more,
    )
    starts, epochs = np.cumsum([0, *sizes]), 4
    drawn, times = np.zeros(3), np.zeros(sum(sizes))
    for step in range(epochs * order.steps_in_epoch):
        batch = order.batch(step)
        rows, first = batch.rows, np.flatnonzero(np.diff(batch.slots, prepend=-1))
        firsts = rows[first][rows[first] != PADDING]
        source = np.asarray(sources)[np.searchsorted(starts, firsts, side="right") - 1]
        drawn += np.bincount(source, minlength=3)
        np.add.at(times, rows[rows != PADDING], 1)
    assert drawn.sum() == epochs * sum(sequences)
    assert abs(drawn / drawn.sum() - shares).max() < 0.002
    for source in (1, 2):  # all of their shards are in each window
        assert np.ptp(times[starts[9 + source] : starts[10 + source]]) <= 1
    assert np.ptp(times[:1000]) <= 2
