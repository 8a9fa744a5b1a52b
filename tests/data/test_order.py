"""Sample order is arithmetic: what any step trains on follows from seed, lengths and its number
alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.data.order import BUCKET_BATCHES, PADDING, SampleOrder, batch_indices, steps_per_epoch

SIZES = {
    "rows": st.integers(1, 700),
    "batch": st.integers(1, 64),
    "seed": st.integers(0, 2**31 - 1),
}


def lengths_of(rows: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 100, rows)


@settings(max_examples=60, deadline=None)
@given(**SIZES, epoch=st.integers(0, 50), bucketed=st.booleans())
def test_an_epoch_holds_every_row_once_and_pads_its_last_batch(rows, batch, seed, epoch, bucketed):
    lengths = lengths_of(rows, seed) if bucketed else None
    order = SampleOrder(rows=rows, global_batch_size=batch, seed=seed, lengths=lengths)
    steps = steps_per_epoch(rows, batch)
    drawn = np.concatenate([order.batch(epoch * steps + i) for i in range(steps)])
    assert len(drawn) == steps * batch
    assert sorted(drawn[:rows].tolist()) == list(range(rows))
    assert (drawn[rows:] == PADDING).all()


@settings(max_examples=40, deadline=None)
@given(**SIZES, step=st.integers(0, 500))
def test_a_step_does_not_depend_on_what_ran_before(rows, batch, seed, step):
    order = SampleOrder(rows=rows, global_batch_size=batch, seed=seed)
    for earlier in (step + 17, 0, step // 2):
        order.batch(earlier)
    alone = batch_indices(step, rows=rows, global_batch_size=batch, seed=seed)
    assert (order.batch(step) == alone).all()


def test_epochs_and_seeds_differ():
    first, second = (batch_indices(i, rows=64, global_batch_size=64, seed=0) for i in (0, 1))
    other = batch_indices(0, rows=64, global_batch_size=64, seed=1)
    assert (first != second).any()
    assert (first != other).any()


def test_buckets_waste_little_padding_and_come_in_no_order_of_length():
    lengths = lengths_of(10_000, 1)
    plain = SampleOrder(rows=10_000, global_batch_size=32, seed=0)
    bucketed = SampleOrder(rows=10_000, global_batch_size=32, seed=0, lengths=lengths)
    padded = {}
    for name, order in (("plain", plain), ("bucketed", bucketed)):
        batches = [order.batch(i) for i in range(order.steps_per_epoch)]
        padded[name] = sum(lengths[b[b >= 0]].max() * (b >= 0).sum() for b in batches)
    assert padded["bucketed"] < 1.1 * lengths.sum() < 0.7 * padded["plain"]
    longest = [lengths[bucketed.batch(i)].max() for i in range(BUCKET_BATCHES)]
    assert abs(np.corrcoef(longest, np.arange(BUCKET_BATCHES))[0, 1]) < 0.5


def test_the_order_is_the_same_on_every_machine_and_numpy():
    assert batch_indices(3, rows=10, global_batch_size=4, seed=7).tolist() == [3, 9, 1, 6]
    lengths = [5, 1, 4, 2, 3, 9, 8, 7, 6, 0]
    assert batch_indices(1, rows=10, global_batch_size=4, seed=7, lengths=lengths).tolist() == [
        9,
        1,
        3,
        4,
    ]


@pytest.mark.parametrize("wrong", [{"rows": 0}, {"global_batch_size": 0}, {"lengths": [1, 2]}])
def test_nonsense_is_refused(wrong):
    with pytest.raises(ValueError, match=r"."):
        SampleOrder(**{"rows": 3, "global_batch_size": 2, "seed": 0, **wrong})
