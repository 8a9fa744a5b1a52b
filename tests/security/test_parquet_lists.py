"""Parquet files of a few hundred bytes whose lists repeat one long word: a file holds it once, its rows thousands of times."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rekindle.data.ingest import ingest
from rekindle.errors import DataError
from rekindle.spec.model import DataSpec
from tests.data.corpora import all_examples

COLUMNS = {"columns": {"words": "words", "label": "tags", "key": "id"}}


def bomb(path, *, words, letters, rows, as_dictionary=False):
    """A file with `rows` lists of `words` words of so many letters."""
    offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * words)

    def lists(value):
        indices = pa.array(np.zeros(words * rows, np.int32))
        return pa.ListArray.from_arrays(
            offsets, pa.DictionaryArray.from_arrays(indices, pa.array([value]))
        )

    table = pa.table(
        {"id": [str(i) for i in range(rows)], "words": lists("w" * letters), "tags": lists("O")}
    )
    pq.write_table(table, path, store_schema=as_dictionary, compression="zstd")
    return path


@pytest.mark.parametrize("as_dictionary", [False, True])
def test_a_row_that_would_fill_memory_is_refused_with_its_number(as_dictionary, tmp_path):
    path = bomb(
        tmp_path / "x.parquet", words=4_000, letters=65_536, rows=3, as_dictionary=as_dictionary
    )
    assert path.stat().st_size < 4_000
    data = DataSpec.model_validate({"source": str(path), **COLUMNS})
    with pytest.raises(DataError, match=r"x\.parquet:1 \(a row of over 64 MiB\)"):
        ingest(data, "words", "", tmp_path / "out")


CHILD = """
import resource, sys
from pathlib import Path
from rekindle.data.normalise import Normaliser
from rekindle.data.source import open_source
from rekindle.data.roles import wanted_columns
from rekindle.rows.findings import Findings
from rekindle.spec.model import DataSpec
data = DataSpec.model_validate({"source": sys.argv[1], "columns": {"words": "words", "label": "tags", "key": "id"}})
before, rows = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
for raw in open_source(data, "words").read(wanted_columns(data, "words"), Findings()):
    rows += len(Normaliser(data, "words", Findings())(raw)[0])
print(rows, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.mark.slow
@pytest.mark.parametrize("as_dictionary", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_rows_that_are_large_together_are_read_a_few_at_a_time(as_dictionary, tmp_path):
    """60 rows of 16 MB each: a gigabyte of letters."""
    path = bomb(
        tmp_path / "x.parquet", words=250, letters=65_536, rows=60, as_dictionary=as_dictionary
    )
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path)], capture_output=True, text=True, check=True
    )
    rows, peak = map(int, done.stdout.split())
    assert rows == 60
    assert peak < 700, f"{peak} MiB"


@pytest.mark.parametrize("as_dictionary", [False, True])
def test_lists_come_out_as_they_went_in(as_dictionary, tmp_path):
    random = np.random.default_rng(0)
    rows = [
        {
            "id": f"r{i}",
            "words": [f"w{n}" for n in random.integers(0, 50, random.integers(1, 9))] + [f"n{i}"],
        }
        for i in range(9_000)
    ]
    for row in rows:
        row["tags"] = ["O" if len(word) % 2 else "B-X" for word in row["words"]]
    kind = pa.list_(pa.dictionary(pa.int32(), pa.string()) if as_dictionary else pa.string())
    table = pa.table(
        {
            "id": [row["id"] for row in rows],
            "words": pa.array([row["words"] for row in rows], kind),
            "tags": pa.array([row["tags"] for row in rows], kind),
        }
    )
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=2_500)
    data = DataSpec.model_validate({"source": str(tmp_path / "x.parquet"), **COLUMNS})
    ingest(data, "words", "", tmp_path / "out")
    found = {row["id"]: row for row in all_examples(tmp_path / "out").to_pylist()}
    assert len(found) == len(rows)
    for row in rows:
        assert json.loads(found[row["id"]]["words"]) == row["words"]
        assert found[row["id"]]["label"] == row["tags"]


def test_nulls_and_empty_lists_stay_what_they_are(tmp_path):
    table = pa.table(
        {
            "id": ["a", "b", "c"],
            "words": pa.array([["x"], None, []], pa.list_(pa.string())),
            "tags": pa.array([["O"], None, []], pa.list_(pa.string())),
        }
    )
    pq.write_table(table, tmp_path / "x.parquet")
    data = DataSpec.model_validate({"source": str(tmp_path / "x.parquet"), **COLUMNS})
    with pytest.raises(
        DataError, match=r"2 rows without a list of words[\s\S]*x\.parquet:2, x\.parquet:3 \(\[\]\)"
    ):
        ingest(data, "words", "", tmp_path / "out")
