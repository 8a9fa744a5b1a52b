"""The same records in every format and place give the same examples."""

from __future__ import annotations

import csv
import datetime as dt
import gzip
import io
import json

import fsspec
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.data import readers
from rekindle.data.files import SourceFile
from rekindle.rows.findings import Findings
from tests.data.corpora import all_examples, content, ingested, rows, text_spec, write_jsonl

FIELDS = {"columns": {"key": "id"}, "slices": ["category"]}


def as_csv(records, delimiter=","):
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, list(records[0]), delimiter=delimiter)
    table.writeheader()
    table.writerows(records)
    return text.getvalue().encode()


def as_jsonl(records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def as_parquet(records):
    sink = pa.BufferOutputStream()
    table = pa.Table.from_pylist(records)
    table = table.set_column(2, "label", table["label"].dictionary_encode())
    pa.parquet.write_table(table, sink, row_group_size=70)
    return sink.getvalue().to_pybytes()


def zstd(content):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


WRITERS = {
    "a.jsonl": as_jsonl,
    "a.csv": as_csv,
    "a.tsv": lambda records: as_csv(records, "\t"),
    "semicolons.csv": lambda records: b"\xef\xbb\xbf\r\n" + as_csv(records, ";"),
    "tabs.csv": lambda records: as_csv(records, "\t"),
    "a.parquet": as_parquet,
    "a.jsonl.gz": lambda records: gzip.compress(as_jsonl(records)),
    "a.jsonl.zst": lambda records: zstd(as_jsonl(records[:100])) + zstd(as_jsonl(records[100:])),
    "a.csv.zst": lambda records: zstd(as_csv(records)),
    "a.csv.gz": lambda records: gzip.compress(as_csv(records)),
    "blank.csv": lambda records: b"\n\n" + as_csv(records),
    "bom.csv": lambda records: b"\xef\xbb\xbf" + as_csv(records),
    "bom.jsonl": lambda records: b"\xef\xbb\xbf" + as_jsonl(records),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_examples(tmp_path, name):
    write_jsonl(tmp_path / "plain.jsonl", rows())
    (tmp_path / name).write_bytes(WRITERS[name](rows()))
    expected = ingested(text_spec(tmp_path / "plain.jsonl", **FIELDS), tmp_path / "expected")
    summary = ingested(text_spec(tmp_path / name, **FIELDS), tmp_path / "out")
    assert summary == expected
    assert content(tmp_path / "out") == content(tmp_path / "expected")


def test_many_files_behind_a_memory_uri_are_read_in_order_of_name(tmp_path):
    memory = fsspec.filesystem("memory")
    for i, name in enumerate(["b.jsonl", "a.jsonl", "sub/c.jsonl.gz", "_SUCCESS", ".hidden.jsonl"]):
        part = as_jsonl(rows()[i::5])
        memory.pipe(f"/many/{name}", gzip.compress(part) if name.endswith(".gz") else part)
    ingested(text_spec("memory://many"), tmp_path / "folder")
    ids = all_examples(tmp_path / "folder")["id"].to_pylist()
    assert {name.split(":")[0] for name in ids} == {"a.jsonl", "b.jsonl", "sub/c.jsonl.gz"}
    ingested(text_spec("memory://many/*.jsonl"), tmp_path / "glob")
    assert len(all_examples(tmp_path / "glob")) == 120
    assert "a.jsonl:1" in all_examples(tmp_path / "glob")["id"].to_pylist()


def test_blocks_of_any_size_give_the_same_bytes(tmp_path, monkeypatch):
    for name in ("a.jsonl", "a.csv"):
        (tmp_path / name).write_bytes(WRITERS[name](rows(2_500)))
        ingested(text_spec(tmp_path / name), tmp_path / "large" / name)
        monkeypatch.setattr(readers, "BLOCK_BYTES", 1_000)
        ingested(text_spec(tmp_path / name), tmp_path / "small" / name)
        monkeypatch.undo()
    assert content(tmp_path / "large") == content(tmp_path / "small")


VALUES = st.text('a",\n é', max_size=8).map(lambda text: text + "z")


@given(st.lists(st.tuples(VALUES, st.integers(0, 2)), max_size=30), st.sampled_from(["\n", "\r\n"]))
def test_a_row_of_a_csv_is_called_by_the_line_where_it_begins(values, end):
    text, expected = io.StringIO(newline=""), []
    table = csv.writer(text, lineterminator=end)
    table.writerow(["text", "label"])
    for value, blank_lines in values:
        text.write(end * blank_lines)
        expected.append((value, text.getvalue().count("\n") + 1))
        table.writerow([value, "a"])
    memory = fsspec.filesystem("memory")
    memory.pipe("/lines/x.csv", text.getvalue().encode())
    file = SourceFile(memory, "/lines", "/lines/x.csv", "x.csv", 0)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "BLOCK_BYTES", 120)
        for raw in readers.read_csv(file, {"text": "text", "label": "scalar"}, Findings()):
            texts = [value.as_py().decode() for value in raw.columns["text"]]
            found += zip(texts, raw.lines.tolist(), strict=True)
    assert found == expected


@pytest.mark.parametrize("size", range(100, 132))
def test_a_line_end_within_quotes_that_blocks_cut_keeps_both_its_characters(monkeypatch, size):
    """pyarrow drops a newline that begins a block behind a carriage return."""
    text = "text,label\r\n" + '"one\r\ntwo\r\n\r\nthree",a\r\n' * 40
    memory = fsspec.filesystem("memory")
    memory.pipe("/ends/x.csv", text.encode())
    monkeypatch.setattr(readers, "BLOCK_BYTES", size)
    file = SourceFile(memory, "/ends", "/ends/x.csv", "x.csv", 0)
    found = readers.read_csv(file, {"text": "text", "label": "scalar"}, Findings())
    texts = [value.as_py() for raw in found for value in raw.columns["text"]]
    assert texts == [b"one\r\ntwo\r\n\r\nthree"] * 40


ODD_LINES = [
    '{"text": "number", "label": 7}',
    '{"text": "whole float", "label": 7.0}',
    '{"text": "truth", "label": true}',
    '{"text": "more keys", "label": "a", "other": [1, {"b": null}]}',
    '  {"label": "a", "text": "spaces"}  ',
    '{"text": "\\u00e9\\ud83d\\ude00 \\u0000", "label": "a"}',
    '{"text": "huge", "label": 123456789012345678901234567890}',
]


def test_irregular_lines_mean_the_same_alone_and_among_regular_ones(tmp_path):
    """pyarrow parses regular blocks, Python the others; which it was must not show."""

    def read(text):
        path = tmp_path / "x.jsonl"
        path.write_text(text)
        file = SourceFile(fsspec.filesystem("file"), str(path.parent), str(path), "x.jsonl", 0)
        columns = {"text": "text", "label": "scalar"}
        found = []
        for raw in readers.read_jsonl(file, columns, Findings()):
            texts = [
                value if isinstance(value, str) else value.as_py() for value in raw.columns["text"]
            ]
            found += list(zip(texts, raw.lines.tolist(), strict=True))
        return found

    for line in ODD_LINES:
        regular = '{"text": "first", "label": "a"}\n'
        alone, among = read(line), read(regular + "\n" + line + "\n" + regular)
        assert [text for text, _ in among] == ["first", alone[0][0], "first"]
        assert [number for _, number in among] == [1, 3, 4]


def test_times_and_numbers_of_parquet_become_text(tmp_path):
    moments = [
        dt.datetime(2026, 1, 1, tzinfo=dt.UTC) + dt.timedelta(days=i, microseconds=5)
        for i in range(300)
    ]
    table = pa.table(
        {
            "text": [f"text {i}" for i in range(300)],
            "label": pa.array([i % 2 for i in range(300)], pa.float64()),
            "at": pa.array(moments, pa.timestamp("us", tz="Europe/Berlin")),
            "day": pa.array([moment.date() for moment in moments]),
            "flag": [i % 3 == 0 for i in range(300)],
        }
    )
    pa.parquet.write_table(table, tmp_path / "t.parquet")
    data = text_spec(
        tmp_path / "t.parquet", columns={"time": "at"}, slices=["day", "flag"], split={"by": "time"}
    )
    summary = ingested(data, tmp_path / "out")
    assert summary.labels == ("0", "1")
    assert summary.rows == {"train": 240, "validation": 30, "test": 30}
    last = all_examples(tmp_path / "out").slice(299).to_pylist()[0]
    assert (last["day"], last["flag"], last["label"]) == ("2026-10-27", "false", "1")
