"""Splits: stable under changes elsewhere, true to their shares, exact in time."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.data.examples import SPLITS
from rekindle.data.split import (
    content_hashes,
    digit_counts,
    hash_splits,
    order_statistic,
    time_cuts,
    time_splits,
)
from rekindle.spec.model import SplitSpec
from tests.data.corpora import all_examples, ingested, rows, text_spec, write_jsonl

INT64 = st.integers(-(2**63), 2**63 - 1)


def counted(*pieces):
    """Counts over all pieces."""
    return lambda prefix, bits: sum(digit_counts(times, prefix, bits) for times in pieces)


@given(st.lists(st.lists(INT64, max_size=20), min_size=1, max_size=5), st.data())
def test_an_order_statistic_is_what_sorting_gives(blocks, data):
    everything = sorted(value for block in blocks for value in block)
    if everything:
        rank = data.draw(st.integers(0, len(everything) - 1))
        arrays = [np.array(block, np.int64) for block in blocks]
        assert order_statistic(counted(*arrays), rank) == everything[rank]


def test_ten_equal_months_are_cut_between_months():
    months = np.repeat(np.arange(10), 150)
    cuts = time_cuts(counted(months[:700], months[700:]), 1500, SplitSpec(by="time"))
    assert cuts == (8, 9)
    assert np.bincount(time_splits(months, cuts)).tolist() == [1200, 150, 150]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=200))
def test_records_of_one_time_stay_together_and_in_order(times):
    array = np.array(times, np.int64)
    splits = time_splits(array, time_cuts(counted(array), len(array), SplitSpec(by="time")))
    assert all(len(set(splits[array == time])) == 1 for time in set(times))
    assert (np.diff(splits[np.argsort(array, kind="stable")]) >= 0).all()


@given(st.lists(st.text(max_size=20), max_size=30), st.integers(0, 5))
def test_hashes_are_sha256_of_each_value(values, skipped):
    array = pa.array(["x"] * skipped + values, pa.string())[skipped:]
    expected = b"".join(hashlib.sha256(value.encode()).digest()[:16] for value in values)
    assert content_hashes(array) == expected


def test_the_hash_split_holds_its_shares():
    hashes = content_hashes(pa.array([str(i) for i in range(20_000)]))
    shares = (
        np.bincount(hash_splits(hashes, SplitSpec(train=0.7, validation=0.1, test=0.2))) / 20_000
    )
    assert shares == pytest.approx([0.7, 0.1, 0.2], abs=0.01)


def test_another_salt_draws_other_records_of_the_same_shares():
    hashes = content_hashes(pa.array([str(i) for i in range(20_000)]))
    tests = [hash_splits(hashes, SplitSpec(salt=salt)) == 2 for salt in ("", "spring", "summer")]
    assert [mine.mean() for mine in tests] == pytest.approx([0.1] * 3, abs=0.01)
    for mine, other in itertools.combinations(tests, 2):
        assert (mine & other).mean() == pytest.approx(0.01, abs=0.003)


@pytest.mark.parametrize("key", [None, "id"])
def test_a_record_keeps_its_split_when_others_come_and_go(tmp_path, key):
    def splits(name, records):
        path = write_jsonl(tmp_path / f"{name}.jsonl", records)
        ingested(text_spec(path, columns={"key": key}), tmp_path / name)
        table = all_examples(tmp_path / name)
        return dict(zip(table["text"].to_pylist(), table["split"].to_pylist(), strict=True))

    records = rows()
    whole, half = splits("whole", records), splits("half", reversed(records[::2]))
    assert half.items() <= whole.items()
    assert set(whole.values()) == set(SPLITS)
