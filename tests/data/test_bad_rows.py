"""`data.on_bad_rows: drop` leaves rows with faults out, up to a limit, counts and lists them."""

from __future__ import annotations

import json

import pytest

from rekindle.data import quarantine
from rekindle.data.examples import SUMMARY
from rekindle.data.files import MOST_ROW_BYTES
from rekindle.data.quarantine import QUARANTINE
from rekindle.errors import DataError, SpecError
from rekindle.launch.events import parse
from rekindle.spec.load import load_target
from rekindle.spec.model import DataSpec
from tests.data.corpora import (
    all_examples,
    content,
    ingested,
    rows,
    sharded,
    text_spec,
    write_jsonl,
)


def damaged(folder, count=1_000):
    """JSON lines with three kinds of faults, one row with two of them."""
    lines = [json.dumps(row) for row in rows(count)]
    lines[9] = "{broken"
    lines[19] = json.dumps({**rows(count)[19], "text": ""})
    lines[29] = json.dumps({**rows(count)[29], "text": " ", "label": None})
    lines[39] = json.dumps({**rows(count)[39], "label": None})
    path = folder / "x.jsonl"
    path.write_text("\n".join(lines))
    return path


def dropping(path, **fields):
    return text_spec(path, on_bad_rows="drop", **fields)


def test_rows_with_faults_are_left_out_counted_and_listed(tmp_path):
    data = dropping(damaged(tmp_path))
    summary = ingested(data, tmp_path / "a")
    counts = {"malformed": 1, "empty text": 2, "empty label": 2}
    assert summary.bad_rows == counts
    assert sum(summary.rows.values()) == 996 == sum(map(len, [all_examples(tmp_path / "a")]))
    listed = (tmp_path / "a" / QUARANTINE).read_text().splitlines()
    malformed, *others = map(json.loads, listed)
    assert malformed["value"].startswith("Expecting property name")
    assert malformed | {"value": ""} == {
        "kind": "malformed",
        "place": "x.jsonl:10",
        "value": "",
        "rows": 1,
    }
    assert [(each["kind"], each["place"]) for each in others] == [
        ("empty text", "x.jsonl:20"),
        ("empty text", "x.jsonl:30"),
        ("empty label", "x.jsonl:30"),
        ("empty label", "x.jsonl:40"),
    ]
    assert sharded(data, tmp_path / "b").bad_rows == counts
    assert content(tmp_path / "a") == content(tmp_path / "b" / "examples"), "the same bytes"


@pytest.mark.parametrize(
    ("limit", "passes"), [(3, False), (4, True), (0.0039, False), (0.004, True), (0.5, True)]
)
def test_more_than_the_limit_are_refused_as_without_it(tmp_path, limit, passes):
    data = dropping(damaged(tmp_path), max_bad_rows=limit)
    if passes:
        assert ingested(data, tmp_path / "out").bad_rows
        return
    with pytest.raises(DataError) as caught:
        ingested(data, tmp_path / "out")
    with pytest.raises(DataError) as refused:
        ingested(data.model_copy(update={"on_bad_rows": "refuse"}), tmp_path / "out")
    what = f"4 of 1,000 rows have faults, more than data.max_bad_rows ({limit})"
    assert caught.value.problems[0].what == what
    assert list(caught.value.problems[1:]) == list(refused.value.problems)
    assert not (tmp_path / "out" / SUMMARY).exists()
    assert not (tmp_path / "out" / QUARANTINE).exists()


GOOD = "".join(json.dumps(row) + "\n" for row in rows())
TABLE = "text,label\n" + "".join(f"text {i},{'ab'[i % 2]}\n" for i in range(300))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    {
        "a quote that takes the rest": ("x.csv", TABLE + 'c,"d\ne,f\n', "never closed"),
        "a quote before all values": ("x.csv", TABLE + '"c,d\ne,f\n', "1 values for 2 columns"),
        "a row beyond bounds": ("x.csv", TABLE + '"' + "a" * 9_000_000, "never closed"),
        "a line beyond bounds": ("x.jsonl", GOOD + "a" * (MOST_ROW_BYTES + 1), "a line of over"),
        "a file that is no Parquet": ("x.parquet", TABLE, "no Parquet file"),
        "a missing column": ("x.csv", TABLE.replace("text,", "txt,"), "no column `text`"),
        "all rows": ("x.csv", "text,label\n,b\n,c\n", "2 of 2 rows have faults"),
    }.values(),
)
def test_what_is_no_fault_of_single_rows_is_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        ingested(dropping(tmp_path / name, max_bad_rows=1_000), tmp_path / "out")


def test_a_long_list_is_cut_and_the_count_is_not(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(quarantine, "MOST", 3)
    monkeypatch.setattr("rekindle.rows.findings.MOST", 3)
    lines = [
        json.dumps({**row, "text": ""} if i % 10 == 0 else row) for i, row in enumerate(rows())
    ]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    summary = ingested(dropping(tmp_path / "x.jsonl", max_bad_rows=0.2), tmp_path / "out")
    assert summary.bad_rows == {"empty text": 30}
    assert len((tmp_path / "out" / QUARANTINE).read_text().splitlines()) == 3
    assert "left out 30 of 300 rows (empty text 30)" in caplog.text
    assert "the first 3 of a kind" in caplog.text


def test_a_slice_that_cannot_be_read_drops_its_row(tmp_path):
    lines = [
        json.dumps({**row, "category": ["a"]} if row["id"] == "r0007" else row) for row in rows()
    ]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    summary = ingested(dropping(tmp_path / "x.jsonl", slices=["category"]), tmp_path / "out")
    assert (summary.bad_rows, sum(summary.rows.values())) == ({"type": 1}, 299)


def test_a_list_of_an_earlier_attempt_is_removed(tmp_path):
    ingested(dropping(damaged(tmp_path)), tmp_path / "out")
    assert (tmp_path / "out" / QUARANTINE).exists()
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows())))
    assert ingested(dropping(tmp_path / "x.jsonl"), tmp_path / "out").bad_rows == {}
    assert not (tmp_path / "out" / QUARANTINE).exists()


@pytest.mark.parametrize("limit", [0, -1, 1.5, -0.1, 2_000_000_000, "all"])
def test_a_limit_out_of_range_is_refused(limit):
    fields = {"source": "x", "on_bad_rows": "drop", "max_bad_rows": limit}
    with pytest.raises(ValueError, match="max_bad_rows"):
        DataSpec.model_validate(fields)


def test_a_limit_without_dropping_is_refused(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "name: x\ntask: text_classification\ndata: {source: x.csv, max_bad_rows: 0.1}\n"
        "model: {source: {model_type: distilbert}}\n"
    )
    with pytest.raises(SpecError, match=r"set data\.on_bad_rows: drop"):
        load_target(path)
    assert load_target(path, ["data.on_bad_rows=drop"]).data.max_bad_rows == 0.1


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (("0", "1", "0.0", "1.0"), "'0' and '0.0' may be one class"),
        (("spam", "ham", "spam ", "Ham"), "'Ham' and 'ham' may be one class"),
        (("a", "b", "A b", "b1"), ""),
    ],
)
def test_classes_that_may_be_one_are_told_of(tmp_path, capfd, labels, said):
    made = [{"text": f"row {i}", "label": labels[i % 4]} for i in range(200)]
    data = text_spec(write_jsonl(tmp_path / "r.jsonl", made))
    ingested(data, tmp_path / "out")
    told = [event["text"] for line in capfd.readouterr().out.splitlines() if (event := parse(line))]
    assert [said in one for one in told] == ([True] if said else [])
    named = data.model_copy(update={"labels": labels})
    ingested(named, tmp_path / "named")
    assert not capfd.readouterr().out
