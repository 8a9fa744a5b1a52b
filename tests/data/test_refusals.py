"""A table of sources that are not fit to train on: each is refused with the rows at fault and a
fix."""

from __future__ import annotations

import gzip
import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from rekindle.data.examples import SUMMARY
from rekindle.data.split import content_hashes, hash_splits
from rekindle.errors import DataError, RekindleError, RequestError
from rekindle.spec.model import SplitSpec
from tests.data.corpora import ingested, rows, text_spec, write_jsonl

GOOD = [json.dumps(row) for row in rows()]


def lines(changed: dict[int, str]):
    """The good file with some lines (from 1) put in the place of others."""
    return "\n".join(changed.get(i, line) for i, line in enumerate(GOOD, 1)).encode() + b"\n"


def row(number: int, **fields: object) -> str:
    record = {**json.loads(GOOD[number - 1]), **fields}
    return json.dumps({key: value for key, value in record.items() if value is not ...})


def parquet(names: list[str]) -> bytes:
    sink = io.BytesIO()
    table = pa.Table.from_arrays([pa.array(["a", "b"])] * len(names), names=names)
    pa.parquet.write_table(table, sink)
    return sink.getvalue()


# name: (file, content, fields of the spec, what the message must hold)
REFUSED = {
    "a missing column, with the nearest": (
        "x.jsonl",
        lines({}),
        {"columns": {"label": "lable"}},
        ["no column `lable`", "did you mean `label`?", "x.jsonl"],
    ),
    "a missing column of a CSV": (
        "x.csv",
        b"text,y\na,b\n",
        {},
        ["no column `label`", "it has `text`, `y`"],
    ),
    "a missing slice": (
        "x.jsonl",
        lines({}),
        {"slices": ["catgory"]},
        ["no column `catgory`", "`category`", "data.slices"],
    ),
    "a column that stands twice": (
        "x.csv",
        b"text,text,label\na,b,c\n",
        {},
        ["duplicate column `text`"],
    ),
    "a column that stands twice in Parquet": (
        "x.parquet",
        parquet(["text", "label", "text"]),
        {},
        ["duplicate column `text`", "x.parquet"],
    ),
    "a key that stands twice": (
        "x.jsonl",
        lines({5: '{"text": "a", "text": "b", "label": "bad"}'}),
        {},
        ["x.jsonl:5", "duplicate key `text`"],
    ),
    "a million columns": (
        "x.csv",
        b"text,label," + b",".join(b"column%d" % i for i in range(1_000_000)) + b"\n",
        {},
        ["over 1 MiB long", "x.csv"],
    ),
    "UTF-16 with its mark": (
        "x.csv",
        "text,label\na,b\n".encode("utf-16"),
        {},
        ["UTF-16", "x.csv"],
    ),
    "a header of another code page": (
        "x.csv",
        "text,label,größe\na,b,c\n".encode("cp1252"),
        {},
        ["columns are not UTF-8", "iconv -f CP1252"],
    ),
    "UTF-16 without": ("x.csv", "text,label\na,b\n".encode("utf-16-be"), {}, ["UTF-16", "x.csv"]),
    "UTF-32 in JSON lines": (
        "x.jsonl",
        lines({}).decode().encode("utf-32"),
        {},
        ["UTF-16 or UTF-32", "x.jsonl"],
    ),
    "an empty text": (
        "x.jsonl",
        lines({7: row(7, text="")}),
        {},
        ["1 row with an empty text", "x.jsonl:7"],
    ),
    "a text of white space": (
        "x.jsonl",
        lines({7: row(7, text=" \n\t ")}),
        {},
        ["empty text", "x.jsonl:7"],
    ),
    "a null text": ("x.jsonl", lines({9: row(9, text=None)}), {}, ["empty text", "x.jsonl:9"]),
    "an absent text": ("x.jsonl", lines({9: row(9, text=...)}), {}, ["empty text", "x.jsonl:9"]),
    "a number for a text": (
        "x.jsonl",
        lines({3: row(3, text=5)}),
        {},
        ["wrong type", "x.jsonl:3", "text: 5"],
    ),
    "a list for a label": (
        "x.jsonl",
        lines({4: row(4, label=["a"])}),
        {},
        ["wrong type", "x.jsonl:4", "label: ['a']"],
    ),
    "half a label": ("x.jsonl", lines({4: row(4, label=0.5)}), {}, ["wrong type", "label: 0.5"]),
    "no label": (
        "x.jsonl",
        lines({2: row(2, label=None)}),
        {},
        ["1 row without a label", "x.jsonl:2"],
    ),
    "an empty label of a CSV": (
        "x.csv",
        b"text,label\na,b\nc,\n",
        {},
        ["without a label", "x.csv:3"],
    ),
    "an unknown label": (
        "x.jsonl",
        lines({2: row(2, label="goood")}),
        {"labels": ["bad", "fair", "good"]},
        ["data.labels", "x.jsonl:2 (goood)"],
    ),
    "no key": (
        "x.jsonl",
        lines({5: row(5, id=None)}),
        {"columns": {"key": "id"}},
        ["without a key", "x.jsonl:5"],
    ),
    "a malformed line": (
        "x.jsonl",
        lines({6: '{"text": "a", '}),
        {},
        ["1 row that cannot be parsed", "x.jsonl:6"],
    ),
    "a line that is no object": (
        "x.jsonl",
        lines({6: "[1, 2]"}),
        {},
        ["cannot be parsed", "x.jsonl:6", "no object"],
    ),
    "nesting beyond all depth": (
        "x.jsonl",
        lines({6: "[" * 100_000}),
        {},
        ["cannot be parsed", "x.jsonl:6"],
    ),
    "a row with too many values": (
        "x.csv",
        b"text,label\na,b\nc,d,e\n",
        {},
        ["x.csv:3", "3 values for 2 columns"],
    ),
    "a fault after a skipped row": (
        "x.csv",
        b"text,label\nc,d,e\na,b\n ,b\n",
        {},
        ["empty text", "x.csv:4"],
    ),
    "a fault after a text of two lines and a blank line": (
        "x.csv",
        b'text,label\n"a\nb",x\n\n ,y\n',
        {},
        ["empty text", "x.csv:5"],
    ),
    "a value too many after a text of two lines": (
        "x.csv",
        b'text,label\r\n"a\r\nb",x\r\nc,d,e\r\n',
        {},
        ["x.csv:4", "3 values"],
    ),
    "a quote that takes the rest of the file": (
        "x.csv",
        b'text,label\na,b\nc,"d\ne,f\n',
        {},
        ["cannot be parsed", "x.csv:3", "never closed"],
    ),
    "a quote that is never closed": (
        "x.csv",
        b'text,label\n"' + b"a" * 10_000_000,
        {},
        ["cannot be parsed", "x.csv:2", "never closed"],
    ),
    "a row that is too long": (
        "x.csv",
        b'text,label\n"a\nb",x\n' + b"a" * 10_000_000 + b",x\n" + b"a,b\n" * 2_000_000,
        {},
        ["x.csv:4", "a row of over"],
    ),
    "bytes that are not UTF-8 in JSON": (
        "x.jsonl",
        lines({}) + b'{"text": "\xff", "label": "a"}\n',
        {},
        ["not UTF-8", "x.jsonl:301"],
    ),
    "bytes that are not UTF-8 in a CSV": (
        "x.csv",
        b"text,label\na,b\n\xe9t\xe9,b\n",
        {},
        ["not UTF-8", "x.csv:3"],
    ),
    "half a surrogate pair": (
        "x.jsonl",
        lines({8: row(8, text="\ud800")}),
        {},
        ["not UTF-8", "x.jsonl:8"],
    ),
    "a file that is cut short": (
        "x.jsonl.gz",
        gzip.compress(lines({}))[:-20],
        {},
        ["cannot be read", "cut short"],
    ),
    "a file that is no gzip": ("x.csv.gz", b"text,label\n", {}, ["cannot be read", "x.csv.gz"]),
    "a file that is no Parquet": (
        "x.parquet",
        b"text,label\n",
        {},
        ["no Parquet file", "x.parquet"],
    ),
    "an empty CSV": ("x.csv", b"", {}, ["the file is empty"]),
    "an empty file": ("x.jsonl", b"", {}, ["holds no records"]),
    "a header alone": ("x.csv", b"text,label\n", {}, ["holds no records"]),
    "one class": (
        "x.jsonl",
        lines({i: row(i, label="a") for i in range(1, 301)}),
        {},
        ["every row has the label `a`"],
    ),
    "a class that a split lacks": (
        "x.jsonl",
        lines({2: row(2, label="rare")}),
        {},
        ["no row of class `rare`", "split validation"],
    ),
    "an empty split": (
        "x.jsonl",
        lines({i: row(i, id="k") for i in range(1, 301)}),
        {"columns": {"key": "id"}},
        ["is empty", "train "],
    ),
    "a time that is none": (
        "x.jsonl",
        lines({3: row(3, month="March")}),
        {"columns": {"time": "month"}, "split": {"by": "time"}},
        ["ISO 8601", "x.jsonl:3", "'March'"],
    ),
    "no time": (
        "x.jsonl",
        lines({3: row(3, month=None)}),
        {"columns": {"time": "month"}, "split": {"by": "time"}},
        ["ISO 8601", "x.jsonl:3"],
    ),
    "copies across splits by key": (
        "x.jsonl",
        lines({i: row(i, text="same words") for i in range(1, 60)}),
        {"columns": {"key": "id"}},
        ["59 rows whose content stands in more than one split", "in train", "same words"],
    ),
    "copies across time": (
        "x.jsonl",
        lines({1: row(1, text="same"), 300: row(300, text="same")}),
        {"columns": {"time": "month"}, "split": {"by": "time"}},
        ["more than one split", "x.jsonl:1 in train = x.jsonl:300 in test"],
    ),
    "files that tell no split": (
        "x.jsonl",
        lines({}),
        {"split": {"by": "source"}},
        ["cannot derive a split from the file name", "x.jsonl"],
    ),
    "a train file alone": (
        "train.jsonl",
        lines({}),
        {"split": {"by": "source"}},
        ["the split test is empty"],
    ),
    "a suffix that nobody knows": ("x.docx", b"abc", {}, ["of no known format", "data.format"]),
}


@pytest.mark.parametrize(
    ("name", "content", "fields", "expected"), REFUSED.values(), ids=list(REFUSED)
)
def test_it_is_refused(tmp_path, name, content, fields, expected):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        ingested(text_spec(tmp_path / name, **fields), tmp_path / "out")
    for part in expected:
        assert part in str(caught.value)
    assert all(problem.fix for problem in caught.value.problems)
    assert not (tmp_path / "out" / SUMMARY).exists()


def test_all_kinds_are_told_at_once_and_five_rows_of_each_are_shown(tmp_path):
    bad = {i: row(i, text="") for i in range(1, 21)} | {
        30: "{",
        40: row(40, label=None),
        50: row(50, text=1),
    }
    (tmp_path / "x.jsonl").write_bytes(lines(bad))
    with pytest.raises(DataError) as caught:
        ingested(text_spec(tmp_path / "x.jsonl", labels=["bad", "fair"]), tmp_path / "out")
    told = [problem.what for problem in caught.value.problems]
    assert [text.split(" ", 1)[0] for text in told] == ["1", "1", "20", "1", "99"]
    empty = caught.value.problems[2]
    assert empty.where == "x.jsonl:1, x.jsonl:2, x.jsonl:3, x.jsonl:4, x.jsonl:5 and 15 more"


def test_columns_of_a_wrong_type_are_told_once(tmp_path):
    table = pa.table({"text": [1, 2, 3], "label": [["a"], ["b"], None]})
    pa.parquet.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(DataError) as caught:
        ingested(text_spec(tmp_path / "x.parquet"), tmp_path / "out")
    assert "x.parquet:1 (text: int64)" in str(caught.value)
    assert "label: list<" in str(caught.value)


def test_a_window_that_selects_nothing_says_what_there_is(tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl", rows())
    data = text_spec(path, columns={"time": "month"}, window={"size": "1 month"})
    with pytest.raises(
        DataError, match=r"selects none of 300 records\n.*2026-01-01T00:00:00 to 2026-10-01"
    ):
        ingested(data, tmp_path / "out", "2030-01-01T00:00:00/2030-02-01T00:00:00")


REQUESTS = {
    "no such file": ({"source": "/nowhere/*.csv"}, "names no file"),
    "no such protocol": ({"source": "gopher://x/y.csv"}, "cannot open"),
    "no such bundled set": ({"source": "sklearn:diabetes"}, "bundles no images called `diabetes`"),
    "images for a text task": (
        {"source": "sklearn:digits"},
        "holds images, and the task reads texts",
    ),
    "an option that the hub has not": ({"source": "hub:a/b?cofig=c"}, "unknown option `cofig`"),
    "a slice with a name of ours": ({"source": "x.csv", "slices": ["label"]}, "cannot be a slice"),
}


@pytest.mark.parametrize(("fields", "message"), REQUESTS.values(), ids=list(REQUESTS))
def test_a_request_that_cannot_be_met_is_refused(tmp_path, fields, message):
    with pytest.raises(RekindleError, match=message) as caught:
        ingested(text_spec(**fields), tmp_path / "out")
    assert isinstance(caught.value, DataError | RequestError)


def test_a_failed_attempt_does_not_leave_the_summary_of_an_earlier_one(tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl", rows())
    ingested(text_spec(path), tmp_path / "out")
    path.write_bytes(lines({1: "{"}))
    with pytest.raises(DataError):
        ingested(text_spec(path), tmp_path / "out")
    assert not (tmp_path / "out" / SUMMARY).exists()


@pytest.mark.parametrize("buckets", [1, 7])
def test_leaks_are_found_whether_or_not_they_fit_into_memory(tmp_path, monkeypatch, buckets):
    copies = np.random.default_rng(0).choice(300, 40, replace=False).tolist()
    changed = {i + 1: row(i + 1, text=f"copy {copies.index(i) % 20}") for i in copies}
    (tmp_path / "x.jsonl").write_bytes(lines(changed))
    monkeypatch.setattr(
        "rekindle.data.duplicates.GROUP_ROWS", 1_000 if buckets == 1 else 300 // buckets
    )
    with pytest.raises(DataError, match="whose content stands in more than one split") as caught:
        ingested(text_spec(tmp_path / "x.jsonl", columns={"key": "id"}), tmp_path / "out")
    keys = content_hashes(pa.array([f"r{i:04}" for i in range(300)]))
    split_of = hash_splits(keys, SplitSpec())
    groups = [[i for i in copies if copies.index(i) % 20 == n] for n in range(20)]
    leaking = sum(len(group) for group in groups if len({split_of[i] for i in group}) > 1)
    assert str(caught.value).startswith(f"{leaking} rows")
