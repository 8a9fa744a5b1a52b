"""Sample order is arithmetic: what any step trains on follows from seed, lengths and its number
alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.data.order import BUCKET_BATCHES, PACK_WINDOW, PADDING, SampleOrder, best_fit

SIZES = {
    "rows": st.integers(1, 700),
    "batch": st.integers(1, 64),
    "seed": st.integers(0, 2**31 - 1),
}
LONGEST = 100


def lengths_of(rows: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, LONGEST, rows)


def order_of(kind: str, rows: int, batch: int, seed: int) -> SampleOrder:
    lengths = None if kind == "plain" else lengths_of(rows, seed)
    pack = 128 if kind == "packed" else None
    return SampleOrder(
        rows=rows, global_batch_size=batch, seed=seed, lengths=lengths, pack_length=pack
    )


KINDS = st.sampled_from(["plain", "bucketed", "packed"])


@settings(max_examples=100)
@given(**SIZES, epoch=st.integers(0, 20), kind=KINDS)
def test_an_epoch_holds_every_row_once_and_fills_every_slot_of_its_batches(
    rows, batch, seed, epoch, kind
):
    order = order_of(kind, rows, batch, seed)
    first = sum(order.steps_in_epoch(e) for e in range(epoch))
    batches = [order.batch(first + i) for i in range(order.steps_in_epoch(epoch))]
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
@given(**SIZES, epoch=st.integers(0, 5))
def test_no_pack_exceeds_its_length(rows, batch, seed, epoch):
    order = order_of("packed", rows, batch, seed)
    lengths = np.append(lengths_of(rows, seed), 0)
    for step in range(order.steps(epoch + 1)):
        b = order.batch(step)
        assert np.bincount(b.slots, weights=lengths[b.rows]).max() <= 128
        assert all(
            (b.slots == b.slots[i]).sum() == 1 for i in np.flatnonzero(b.rows == PADDING).tolist()
        )


@settings(max_examples=60)
@given(**SIZES, step=st.integers(0, 200), kind=KINDS)
def test_a_step_does_not_depend_on_what_ran_before(rows, batch, seed, step, kind):
    order = order_of(kind, rows, batch, seed)
    for earlier in (step + 17, 0, step // 2):
        order.batch(earlier)
    again, alone = order.batch(step), order_of(kind, rows, batch, seed).batch(step)
    assert again.rows.tolist() == alone.rows.tolist()
    assert again.slots.tolist() == alone.slots.tolist()


@settings(max_examples=60)
@given(**SIZES, step=st.integers(0, 100), kind=KINDS)
def test_a_step_lies_in_the_epoch_that_the_steps_before_it_leave(rows, batch, seed, step, kind):
    order = order_of(kind, rows, batch, seed)
    epoch, position = order.epoch_of(step)
    assert sum(order.steps_in_epoch(e) for e in range(epoch)) + position == step
    assert 0 <= position < order.steps_in_epoch(epoch)
    assert order.steps(epoch) <= max(1, step) <= order.steps(epoch + 1)


@pytest.mark.parametrize(
    ("rows", "epochs", "steps"), [(50, 1.0, 5), (50, 1.5, 8), (99, 1.1, 11), (50, 0.01, 1)]
)
def test_a_part_of_an_epoch_is_rounded_up_to_whole_steps(rows, epochs, steps):
    assert SampleOrder(rows=rows, global_batch_size=10, seed=0).steps(epochs) == steps


def test_epochs_and_seeds_differ():
    order = SampleOrder(rows=64, global_batch_size=64, seed=0)
    other = SampleOrder(rows=64, global_batch_size=64, seed=1).batch(0)
    first, second = order.batch(0), order.batch(1)
    assert (first.rows != second.rows).any()
    assert (first.rows != other.rows).any()


def test_buckets_waste_little_padding_and_come_in_no_order_of_length():
    lengths = lengths_of(10_000, 1)
    plain = SampleOrder(rows=10_000, global_batch_size=32, seed=0)
    bucketed = SampleOrder(rows=10_000, global_batch_size=32, seed=0, lengths=lengths)
    padded = {}
    for name, order in (("plain", plain), ("bucketed", bucketed)):
        batches = [order.batch(i).rows for i in range(order.steps_in_epoch(0))]
        padded[name] = sum(lengths[b[b >= 0]].max() * (b >= 0).sum() for b in batches)
    assert padded["bucketed"] < 1.1 * lengths.sum() < 0.7 * padded["plain"]
    longest = [lengths[bucketed.batch(i).rows].max() for i in range(BUCKET_BATCHES)]
    assert abs(np.corrcoef(longest, np.arange(BUCKET_BATCHES))[0, 1]) < 0.5


@pytest.mark.parametrize(("rows", "pack_length"), [(2_000, 512), (3 * PACK_WINDOW + 7, 2_048)])
def test_packs_of_realistic_texts_are_nearly_full_and_come_in_no_order(rows, pack_length):
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.0, 1.0, rows), 1, pack_length).astype(int)
    order = SampleOrder(
        rows=rows, global_batch_size=8, seed=0, lengths=lengths, pack_length=pack_length
    )
    steps = order.steps_in_epoch(0)
    assert lengths.sum() > 0.95 * steps * 8 * pack_length
    texts_in = [len(order.batch(i).rows) for i in range(steps - 1)]
    assert abs(np.corrcoef(texts_in, np.arange(steps - 1))[0, 1]) < 0.3


def test_a_pack_is_shared_with_other_texts_in_another_epoch():
    order = order_of("packed", 700, 8, 3)
    partners = []
    for first in (0, order.steps_in_epoch(0)):
        steps = [order.batch(first + i) for i in range(order.steps_in_epoch(0))]
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
    sizes = {"rows": 10, "global_batch_size": 4, "seed": 7}
    assert SampleOrder(**sizes).batch(3).rows.tolist() == [3, 9, 1, 6]
    assert SampleOrder(**sizes, lengths=lengths).batch(1).rows.tolist() == [1, 3, 4, 2]
    packed = SampleOrder(**sizes, lengths=lengths, pack_length=10).batch(1)
    assert packed.rows.tolist() == [8, 2, 1, 5, PADDING, PADDING]
    assert packed.slots.tolist() == [0, 0, 1, 1, 2, 3]


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": 0},
        {"global_batch_size": 0},
        {"lengths": [1, 2]},
        {"pack_length": 4},
        {"pack_length": 4, "lengths": [1, 2, 5]},
        {"pack_length": 4, "lengths": [1, 2, 0]},
    ],
)
def test_nonsense_is_refused(wrong):
    with pytest.raises(ValueError, match=r"."):
        SampleOrder(**{"rows": 3, "global_batch_size": 2, "seed": 0, **wrong})


@settings(max_examples=100)
@given(**SIZES, epoch=st.integers(0, 20), classes=st.integers(1, 5))
def test_balanced_epochs_draw_every_class_equally_often_and_its_rows_in_turns(
    rows, batch, seed, epoch, classes
):
    of_row = np.random.default_rng(seed).integers(0, classes, rows) ** 2
    order = SampleOrder(rows=rows, global_batch_size=batch, seed=seed, classes=of_row)
    steps = order.steps_in_epoch(0)
    drawn = np.concatenate([order.batch(step).rows for step in range((epoch + 1) * steps)])
    drawn = drawn[drawn != PADDING]
    assert len(drawn) == (epoch + 1) * rows
    times = np.bincount(drawn, minlength=rows)
    for one in set(of_row.tolist()):
        share = (epoch + 1) * rows / len(set(of_row.tolist()))
        assert abs(times[of_row == one].sum() - share) <= epoch + 1
        assert np.ptp(times[of_row == one]) <= 1


def test_balanced_rows_that_share_sequences_all_fit():
    lengths, of_row = lengths_of(300, 1), np.arange(300) % 7 == 0
    order = SampleOrder(
        rows=300, global_batch_size=8, seed=1, lengths=lengths, pack_length=128, classes=of_row
    )
    drawn = np.concatenate([order.batch(step).rows for step in range(order.steps_in_epoch(0))])
    assert np.bincount(of_row[drawn[drawn != PADDING]].astype(int)).tolist() == [150, 150]
