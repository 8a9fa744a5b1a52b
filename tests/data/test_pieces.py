"""Pieces: the same examples and shards however a source is cut and by whichever executor, and nothing is
read again that a store holds."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kfp import dsl
from PIL import Image

from components.ingest import ingest as component
from rekindle.data import duplicates, files, pieces
from rekindle.data.executor import Local, executor_of
from rekindle.data.files import _LineRange
from rekindle.data.fingerprint import fingerprint
from rekindle.data.ingest import ingest
from rekindle.data.manifest import open_shards
from rekindle.data.store import PieceStore
from rekindle.errors import DataError, RequestError, StepError
from rekindle.launch.rendezvous import VARIABLE, Rendezvous
from rekindle.spec.model import DataSpec, ModelSpec, TrainSpec
from tests.data.corpora import TASKS, all_examples, content, rows, sharded, text_spec, write_jsonl

SMALL = 4_096


PLAIN = {"columns": {"key": "id", "time": "month"}, "slices": ["category"]}


def lines(path):
    return write_jsonl(path / "x.jsonl", rows()), {}


def compressed(path):
    raw = write_jsonl(path / "x.jsonl", rows()).read_bytes()
    (path / "y.jsonl.gz").write_bytes(gzip.compress(raw))
    return path / "y.jsonl.gz", {}


def rows_over_lines(path):
    pyarrow.csv.write_csv(pa.Table.from_pylist(rows()), path / "x.csv")
    return path / "x.csv", PLAIN


def quoted(path, end="\n", mark=b""):
    """CSV with quotes, each row of one line."""
    flat = [{**row, "text": row["text"].replace("\n", ' "and" ')} for row in rows()]
    quotes = (",".join('"' + str(v).replace('"', '""') + '"' for v in row.values()) for row in flat)
    text = end.join([",".join(flat[0]), *quotes]) + end
    (path / "x.csv").write_bytes(mark + text.encode())
    return path / "x.csv", {}


def parquet(path):
    pq.write_table(pa.Table.from_pylist(rows()), path / "x.parquet", row_group_size=40)
    return path / "x.parquet", PLAIN


def by_time(path):
    return write_jsonl(path / "x.jsonl", rows()), {**PLAIN, "split": {"by": "time"}}


def messy(path):
    records = [*rows(), *rows()[100:140]]
    for i in (7, 150, 151, 290):
        records[i] = {**records[i], "text": " "}
    fields = {"on_bad_rows": "drop", "max_bad_rows": 0.1, "duplicates": "folded"}
    source = write_jsonl(path / "x.jsonl", records)
    return source, {**PLAIN, **fields, "split": {"by": "time", "gap": "1 day"}}


def by_source(path):
    for split in ("train", "validation", "test"):
        own = [{**row, "text": row["text"] + split} for row in rows()]
        write_jsonl(path / "source" / f"{split}.jsonl", own)
    return path / "source", {"split": {"by": "source"}}


def partitions(path):
    for month in range(1, 7):
        own = [row for row in rows(1_500) if row["month"][5:] == f"0{month}"]
        write_jsonl(path / f"2026-0{month}.jsonl", own)
    return f"{path}/{{window:%Y-%m}}.jsonl", {"window": {"size": "4 months"}}


def images(path):
    for i in range(120):
        held, place = io.BytesIO(), path / "images" / "ab"[i % 2] / f"{i:03}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L" if i % 3 else "RGB", (6, 6), i % 250).save(held, "png")
        place.write_bytes(held.getvalue())
    return path / "images", {}


def window_by_column(path):
    return write_jsonl(path / "x.jsonl", rows()), {
        **PLAIN,
        "window": {"size": "4 months", "end": "2026-09"},
    }


def images_in_rows(path):
    """Encoded; before the window some have another size."""
    images(path)
    found = sorted((path / "images").rglob("*.png"), key=lambda file: file.name)
    records = [
        {"image": file.read_bytes(), "label": file.parent.name, "month": f"2026-{i // 10 + 1:02}"}
        for i, file in enumerate(found)
    ]
    for record in records[1:40:2]:
        held = io.BytesIO()
        Image.new("L", (9, 9)).save(held, "png")
        record["image"] = held.getvalue()
    pq.write_table(pa.Table.from_pylist(records), path / "x.parquet", row_group_size=10)
    columns = {"columns": {"time": "month"}}
    return path / "x.parquet", {**columns, "window": {"size": "7 months", "end": "2027-01"}}


def images_by_name(path):
    images(path)
    names = sorted((path / "images").rglob("*.png"), key=lambda file: file.name)
    records = ({"image": str(name.relative_to(path)), "label": name.parent.name} for name in names)
    return write_jsonl(path / "x.jsonl", records), {}


KINDS = {
    "window by column": window_by_column,
    "images in rows": images_in_rows,
    "images by name": images_by_name,
    "jsonl": lines,
    "jsonl.gz": compressed,
    "csv": quoted,
    "crlf csv": lambda path: quoted(path, "\r\n", b"\xef\xbb\xbf"),
    "rows over lines": rows_over_lines,
    "parquet": parquet,
    "by time": by_time,
    "by source": by_source,
    "partitions": partitions,
    "images": images,
    "messy": messy,
}


def written(path, kind):
    """Records in files of some kind, and the config that reads them."""
    return KINDS[kind](path)


def test_rows_outside_of_a_window_by_column_leave_its_hash_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PIECE_BYTES", SMALL)
    source, fields = written(tmp_path, "window by column")
    first, _ = read(text_spec(source, **fields), "text", tmp_path / "first")
    with source.open("a") as file:
        file.writelines(json.dumps({**row, "month": "2025-01"}) + "\n" for row in rows(60))
    assert read(text_spec(source, **fields), "text", tmp_path / "more")[0].data == first.data
    with source.open("a") as file:
        file.write(json.dumps({**rows()[0], "month": "2026-08"}) + "\n")
    assert (
        fingerprint(
            "text_classification",
            text_spec(source, **fields),
            ModelSpec(),
            TrainSpec(),
            champion=None,
        ).data
        != first.data
    )


def test_faults_of_times_are_named_in_all_pieces_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PIECE_BYTES", SMALL)
    for name, when in (("a", "soon"), ("b", "later")):
        write_jsonl(tmp_path / "x" / f"{name}.jsonl", rows(60, month=when))
    data = text_spec(tmp_path / "x", columns={"time": "month"}, window={"size": "1 month"})
    with pytest.raises(DataError) as caught:
        fingerprint("text_classification", data, ModelSpec(), TrainSpec(), champion=None)
    assert str(caught.value).startswith("120 rows with no ISO 8601 time")


@pytest.mark.parametrize("kind", ["images by name", "images in rows"])
def test_an_image_that_changed_is_read_again(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(files, "PIECE_BYTES", 1_000)
    source, fields = written(tmp_path, kind)
    data, kept = text_spec(source, **fields), {"store": str(tmp_path / "store")}
    first, _ = read(data, "image", tmp_path / "first", **kept)
    assert read(data, "image", tmp_path / "again", **kept)[0].data == first.data
    assert all_examples(tmp_path / "first").equals(all_examples(tmp_path / "again"))
    changed = tmp_path / "images" / "b" / "119.png"
    Image.new("L", (6, 6), 250).save(changed)
    if kind == "images in rows":
        records = pq.read_table(source).to_pylist()
        records[119]["image"] = changed.read_bytes()
        pq.write_table(pa.Table.from_pylist(records), source, row_group_size=10)
    second, _ = read(data, "image", tmp_path / "second", **kept)
    assert second.data != first.data
    assert not all_examples(tmp_path / "first").equals(all_examples(tmp_path / "second"))


def read(data, modality, out, **how):
    """The keys of the source, and its examples."""
    task = f"{modality}_classification"
    seen = fingerprint(task, data, ModelSpec(), TrainSpec(), champion=None)
    summary = ingest(data, modality, seen.window, out, source=seen.data, **how)
    return seen, summary


@pytest.mark.parametrize("kind", KINDS)
def test_examples_do_not_depend_on_how_a_source_is_cut(tmp_path, monkeypatch, kind):
    source, fields = written(tmp_path, kind)
    data, modality = text_spec(source, **fields), "image" if "images" in kind else "text"
    _, whole = read(data, modality, tmp_path / "whole")
    monkeypatch.setattr(files, "PIECE_BYTES", SMALL if "images" not in kind else 1_000)
    seen, cut = read(data, modality, tmp_path / "cut", store=str(tmp_path / "store"))
    names = {file.path for file in cut.files if file.split == "train"}
    assert (len(names) > 2) == (kind not in ("jsonl.gz", "rows over lines"))
    assert all_examples(tmp_path / "cut").equals(all_examples(tmp_path / "whole"))
    assert cut.source == seen.data
    assert (cut.left_out, bool(cut.bad_rows)) == (
        {"duplicate": 40} if kind == "messy" else {},
        kind == "messy",
    )
    same = {"source", "files"}
    assert cut.model_dump(exclude=same) == whole.model_dump(exclude=same)


@given(
    st.lists(st.sampled_from([b"a", b"\n", b'"', b"\r\n", b"bc"]), max_size=40).map(b"".join),
    st.integers(1, 9),
    st.integers(1, 5),
)
def test_each_line_lies_in_the_range_in_which_it_begins(text, width, most):
    """Lines of ranges of every width, read in pieces of every size."""
    found, line = [], 1
    for start in range(0, max(len(text), 1), width):
        end, raw = min(start + width, len(text)), io.BytesIO(text)
        part, lines = _LineRange(raw, start, end, b""), b""
        while piece := part.read(most):
            lines += piece
        found.append(lines)
        begins = [i for i in range(start, end) if i == 0 or text[i - 1 : i] == b"\n"]
        assert lines.count(b"\n") + (lines != b"" and not lines.endswith(b"\n")) == len(begins)
        line += len(begins)
    assert b"".join(found) == text


@given(
    st.lists(st.sampled_from(["a", "\n", '"', "\r\n", "\r", 'b""c']), max_size=30).map("".join),
    st.integers(1, 7),
)
def test_a_csv_file_is_cut_only_where_each_row_is_one_line(text, width):
    """Measured block by block as by a parser of states over the whole."""
    raw = text.encode()
    blocks = []
    for start in range(0, len(raw), width):
        quotes = pieces._Quotes()
        quotes.update(raw[start : start + width])
        blocks.append(pieces.Block("", raw[start : start + width].count(b"\n"), quotes.evenness()))
    inside, one_a_row = False, "\r" not in text.replace("\r\n", "")
    for letter in text:
        inside ^= letter == '"'
        one_a_row &= not (inside and letter == "\n")
    if pieces._one_line_a_row(blocks):
        assert one_a_row
        assert not inside
    elif one_a_row and not inside:
        assert any(raw[end - 1 : end] == b"\r" for end in range(width, len(raw) + 1, width))


def with_copies(folder):
    """Records over ten months, 30 of them again in capitals in a later one, and what leaves those out."""
    source, fields = written(folder, "by time")
    again = [json.loads(line) for line in source.read_text().splitlines()[:30]]
    with source.open("a") as file:
        for record in again:
            later = {
                "id": f"{record['id']} again",
                "text": record["text"].upper(),
                "month": "2026-10",
            }
            file.write(json.dumps({**record, **later}) + "\n")
    return source, {**fields, "duplicates": "folded"}


@pytest.mark.slow
def test_bytes_do_not_depend_on_who_works(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PIECE_BYTES", SMALL)
    monkeypatch.setattr(duplicates, "GROUP_ROWS", 40)
    source, fields = with_copies(tmp_path)
    found = []
    for workers in (1, 2, 4):
        data = text_spec(source, **fields, shard_rows=20, workers=workers)
        sharded(data, tmp_path / str(workers), store=str(tmp_path / f"store-{workers}"))
        open_shards(tmp_path / str(workers) / "shards")
        found.append(content(tmp_path / str(workers)))
    assert found[0] == found[1] == found[2]
    assert len(found[0]) > 20


NODE = """
import sys
import time
from rekindle.data import duplicates, files
files.PIECE_BYTES, duplicates.GROUP_ROWS = 4_096, 40
from pathlib import Path
from rekindle.data.ingest import ingest
from rekindle.data.shard import shard
from rekindle.spec.model import DataSpec, ModelSpec

data, folder, store = DataSpec.model_validate_json(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
examples = Path(sys.argv[4])
ingest(data, "text", "", folder / "examples", store=store)
give_up = time.monotonic() + 120  # a node whose test failed goes, too
while not (examples / "summary.json").exists():  # as a platform hands on what node 0 wrote
    assert time.monotonic() < give_up
    time.sleep(0.01)
shard(examples, data, ModelSpec(), sys.argv[5], folder / "shards", store=store)
"""


def started(data, out, store, task, node, nodes):
    place = Rendezvous(nodes=nodes, node_rank=node, patience_seconds=60, port=1)
    command = [
        sys.executable,
        "-c",
        NODE,
        data.model_dump_json(),
        str(out / str(node)),
        str(store),
        str(out / "0" / "examples"),
        f"{TASKS}:{task}",
    ]
    environment = {**os.environ, VARIABLE: json.dumps(dataclasses.asdict(place))}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_three_nodes_write_the_bytes_of_one(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PIECE_BYTES", SMALL)
    source, fields = with_copies(tmp_path)
    data = text_spec(source, **fields, shard_rows=20, workers=1)
    assert sharded(data, tmp_path / "one").left_out == {"duplicate": 30}
    nodes = [started(data, tmp_path / "n", tmp_path / "store", "Words", i, 3) for i in range(3)]
    for node in nodes:
        _, errors = node.communicate(timeout=120)
        assert node.returncode == 0, errors
    assert content(tmp_path / "n" / "0") == content(tmp_path / "one")
    assert not list((tmp_path / "n" / "1").rglob("*.arrow"))


def keys_of(store):
    return {path.parent.name for path in Path(store).glob("*/entry.json")}


def test_a_window_that_moves_on_reads_only_the_new_month(tmp_path, caplog):
    caplog.set_level("INFO")
    source, _ = written(tmp_path, "partitions")
    told = []
    for month in range(4, 7):
        window = {"size": "3 months", "end": f"2026-0{month}"}
        data = text_spec(source, window=window, columns={"key": "id"})
        read(data, "text", tmp_path / f"out-{month}", store=str(tmp_path / "store"))
        told += [r.message for r in caplog.records if "pieces of the source" in r.message]
        caplog.clear()
    assert told == ["3 pieces of the source, 3 of them new"] + 2 * [
        "3 pieces of the source, 1 of them new"
    ]
    store = tmp_path / "store"
    assert sum((store / key / "train.arrow").exists() for key in keys_of(store)) == 5
    hashed = [key for key in keys_of(store) if (store / key / "dealt").exists()]
    assert len(hashed) <= 3 * 5 + 3  # each split of each month once, and a comparison a window


def test_the_step_says_how_many_pieces_were_new(tmp_path):
    source, _ = written(tmp_path, "partitions")
    told = []
    for month in (4, 5):
        window = {"size": "3 months", "end": f"2026-0{month}"}
        data = text_spec(source, window=window, columns={"key": "id"})
        seen = fingerprint("text_classification", data, ModelSpec(), TrainSpec(), champion=None)
        examples = dsl.Dataset(uri=str(tmp_path / str(month)))
        component.python_func(
            task="text_classification",
            data=data.model_dump_json(),
            window=seen.window,
            data_key=seen.data,
            artifact_root=str(tmp_path / "root"),
            examples=examples,
        )
        told.append(examples.metadata["pieces"])
        assert "pieces" not in (tmp_path / str(month) / "summary.json").read_text()
    assert told == ["3 of 3 new", "1 of 3 new"]


def test_lines_behind_a_large_file_leave_its_other_pieces(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(files, "PIECE_BYTES", SMALL)
    source, fields = written(tmp_path, "jsonl")
    data = text_spec(source, **fields)
    read(data, "text", tmp_path / "first", store=str(tmp_path / "store"))
    with source.open("a") as file:
        file.writelines(
            json.dumps({"text": f"more {i}", "label": "good"}) + "\n" for i in range(20)
        )
    read(data, "text", tmp_path / "second", store=str(tmp_path / "store"))
    count, new = (
        [int(w) for w in m.split() if w.isdecimal()] for m in caplog.messages if "new" in m
    )
    assert count == [count[0], count[0]]
    assert new[1] <= 2 < new[0]
    assert len(all_examples(tmp_path / "second")) == 320


def damaged(path):
    """The file with one other bit; what links to it stays as it is."""
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.unlink()
    path.write_bytes(body)


def other_json(path):
    """An entry that counts one row more, or that is JSON of something else."""
    text = path.read_text()
    path.write_text(re.sub(r'("bad": )(\d+)', lambda m: f"{m[1]}{int(m[2]) + 1}", text, count=1))
    if path.read_text() == text:
        path.write_text("null")


@pytest.mark.parametrize(
    "what", ["train.arrow", "all.arrow", "times.npy", "entry.json", "gone", "other"]
)
def test_what_is_damaged_in_a_store_is_made_again(tmp_path, monkeypatch, caplog, what):
    monkeypatch.setattr(files, "PIECE_BYTES", SMALL)
    source, fields = by_time(tmp_path)
    data, store = text_spec(source, **fields), tmp_path / "store"
    read(data, "text", tmp_path / "first", store=str(store))
    names = {"gone": "*.arrow", "other": "entry.json"}
    victims = sorted(store.glob("*/" + names.get(what, what)))
    for victim in victims if what == "other" else victims[:2]:
        how = {"entry.json": lambda path: path.write_bytes(b""), "other": other_json}.get(
            what, damaged
        )
        how(victim)
        if what == "gone":
            victim.unlink()
    read(data, "text", tmp_path / "second", store=str(store))
    assert content(tmp_path / "second") == content(tmp_path / "first")
    assert ("is damaged, and is made again" in caplog.text) == bool(
        victims and what not in ("entry.json", "other")
    )
    caplog.clear()
    read(data, "text", tmp_path / "third", store=str(store))
    assert "damaged" not in caplog.text


@pytest.mark.parametrize("what", ["train.arrow", "all.arrow", "times.npy", "dealt"])
def test_what_an_object_store_removed_by_a_rule_is_made_again(tmp_path, what):
    """Its rules remove one file after the other, and `entry.json` last, as the youngest one."""
    source, fields = with_copies(tmp_path)
    data, store = text_spec(source, **fields), fsspec.filesystem("memory")
    root = f"memory://{tmp_path.name}"
    read(data, "text", tmp_path / "first", store=root)
    victims = store.glob(f"{root}/*/{what}")
    assert victims
    for victim in victims:
        store.rm(victim)
    read(data, "text", tmp_path / "second", store=root)
    assert content(tmp_path / "second") == content(tmp_path / "first")
    assert all(map(store.exists, victims))


@pytest.mark.parametrize("change", ["longer", "shorter"])
def test_a_file_that_changes_between_listing_and_measuring_is_refused(
    tmp_path, monkeypatch, change
):
    monkeypatch.setattr(files, "PIECE_BYTES", SMALL)
    source, fields = written(tmp_path, "jsonl")
    data, whole = text_spec(source, **fields), source.read_bytes()
    found = pieces.FileSource(data, "text")
    source.write_bytes(whole + whole[:100] if change == "longer" else whole[:9_000])
    with pytest.raises(DataError, match="written to while it was read"):
        pieces.measure_files(found, data.source, Local(1))


def test_a_part_of_a_file_that_became_shorter_ends():
    part = _LineRange(io.BytesIO(b"a\n" * 10), 100, 200, b"")
    assert part.read() == b""


def test_the_first_readable_image_decides_wherever_it_lies(tmp_path, monkeypatch):
    source, _ = images(tmp_path)
    for i in range(0, 40, 2):
        (source / "a" / f"{i:03}.png").write_bytes(b"no image")
    Image.new("L", (9, 9)).save(source / "b" / "119.png")
    data = text_spec(source, on_bad_rows="drop", max_bad_rows=0.9)
    _, whole = read(data, "image", tmp_path / "whole")
    monkeypatch.setattr(files, "PIECE_BYTES", 100)
    _, cut = read(data, "image", tmp_path / "cut")
    assert (cut.image_shape, cut.bad_rows) == (whole.image_shape, whole.bad_rows)
    assert whole.bad_rows["image size"] == 1


def test_a_row_without_a_time_may_name_an_image_and_be_left_out(tmp_path):
    source, _ = images_by_name(tmp_path)
    records = [json.loads(line) for line in source.read_text().splitlines()]
    for i, record in enumerate(records):
        record["month"] = "soon" if i == 7 else f"2026-{i // 10 + 1:02}"
    fields = {"columns": {"time": "month"}, "split": {"by": "time"}, "on_bad_rows": "drop"}
    data = text_spec(write_jsonl(source, records), **fields, max_bad_rows=1)
    _, summary = read(data, "image", tmp_path / "out")
    assert summary.bad_rows == {"time": 1}
    (tmp_path / records[7]["image"]).unlink()  # no row that stays names it
    assert read(data, "image", tmp_path / "again")[1].files == summary.files


def test_what_a_whole_file_lacks_is_said_once(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PIECE_BYTES", SMALL)
    for name in ("train", "other", "rest"):
        write_jsonl(tmp_path / "d" / f"{name}.jsonl", rows())
    with pytest.raises(DataError, match="cannot derive a split") as caught:
        ingest(text_spec(tmp_path / "d", split={"by": "source"}), "text", "", tmp_path / "out")
    assert [problem.where for problem in caught.value.problems] == ["other.jsonl, rest.jsonl"]


def test_a_fault_whose_value_has_no_utf8_form_is_refused(tmp_path):
    turns = [{"role": "\ud800", "content": "Is it?"}, {"role": "assistant", "content": "Yes"}]
    source = tmp_path / "x.jsonl"
    source.write_text(json.dumps({"messages": turns}) + "\n")
    data = text_spec(source, columns={"messages": "messages"})
    with pytest.raises(DataError, match="1 row with a role that is unknown"):
        ingest(data, "document", "", tmp_path / "out", store=str(tmp_path / "store"))


def test_a_piece_at_fault_is_named_and_the_others_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PIECE_BYTES", SMALL)
    records = [{**row, "text": row["text"].replace("\n", " ")} for row in rows()]
    good = [*records]
    records[200] = {**records[200], "text": " " * len(records[200]["text"].encode())}
    source = write_jsonl(tmp_path / "x.jsonl", records)
    with pytest.raises(DataError, match=r"1 row with an empty text or none\n  where: x.jsonl:201"):
        read(text_spec(source), "text", tmp_path / "out", store=str(tmp_path / "store"))
    kept = keys_of(tmp_path / "store")
    write_jsonl(source, good)
    read(text_spec(source), "text", tmp_path / "out", store=str(tmp_path / "store"))
    assert len(keys_of(tmp_path / "store") - kept) <= 2 < len(kept)


def test_a_file_that_changes_between_measuring_and_reading_is_refused(tmp_path):
    source, _ = written(tmp_path, "jsonl")
    data = text_spec(source)
    found = pieces.FileSource(data, "text")
    (piece,) = pieces.pieces(found, pieces.measure_files(found, data.source, Local(1)))
    order = {"root": str(tmp_path), "format": "jsonl"}
    part = pieces.source_of(order, piece.item("k"), data, "text")
    pieces.check_versions(part)
    os.utime(source, (1, 1))
    with pytest.raises(DataError, match="written to while it was read"):
        pieces.check_versions(part)


def test_a_missing_node_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PIECE_BYTES", SMALL)
    place = Rendezvous(nodes=2, node_rank=0, patience_seconds=0.5, port=1)
    monkeypatch.setenv(VARIABLE, json.dumps(dataclasses.asdict(place)))
    source, _ = written(tmp_path, "jsonl")
    data = text_spec(source, workers=1)
    with pytest.raises(StepError, match="items have no result, such as 1") as caught:
        ingest(data, "text", "", tmp_path / "out", store=str(tmp_path / "store"))
    assert caught.value.problems[0].where == "node 1"


@pytest.mark.slow
def test_a_node_waits_for_what_another_has_to_make_again(tmp_path, monkeypatch):
    """The results of an earlier run are there, and its entries are not."""
    source, fields = with_copies(tmp_path)
    data = text_spec(source, **fields, shard_rows=20, workers=1)
    nodes = [started(data, tmp_path / "n", tmp_path / "store", "Words", i, 2) for i in range(2)]
    assert [node.wait(120) for node in nodes] == [0, 0]
    monkeypatch.setattr(files, "PIECE_BYTES", SMALL)
    monkeypatch.setattr(duplicates, "GROUP_ROWS", 40)
    place = Rendezvous(nodes=2, node_rank=0, patience_seconds=0.5, port=1)
    monkeypatch.setenv(VARIABLE, json.dumps(dataclasses.asdict(place)))
    store = str(tmp_path / "store")
    ingest(data, "text", "", tmp_path / "again", store=store)
    for key in keys_of(store):
        shutil.rmtree(Path(store, key))
    with pytest.raises(StepError, match="items have no result, such as 1") as caught:
        ingest(data, "text", "", tmp_path / "out", store=store)
    assert caught.value.problems[0].where == "node 1"


@pytest.mark.parametrize(("executor", "package"), [("ray", "ray"), ("spark", "pyspark")])
def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch, executor, package):
    monkeypatch.setitem(sys.modules, package, None)
    source, _ = written(tmp_path, "jsonl")
    data = text_spec(source, executor=executor)
    with pytest.raises(RequestError, match="is not installed") as caught:
        ingest(data, "text", "", tmp_path / "out", store=str(tmp_path / "store"))
    assert caught.value.problems[0].fix == f"pip install 'rekindle[{executor}]'"


@pytest.mark.slow
def test_thirty_kills_leave_the_same_bytes_and_repeat_only_what_was_in_hand(tmp_path, monkeypatch):
    """Three nodes, any of which is killed at any time; the step then runs again, as a platform does."""
    monkeypatch.setattr(files, "PIECE_BYTES", SMALL)
    source, fields = with_copies(tmp_path)
    data = text_spec(source, **fields, shard_rows=10, workers=1)
    sharded(data, tmp_path / "one")
    kills, round_, pause = 0, 0, 1.0
    while True:
        out = tmp_path / f"round-{round_}"
        nodes = [started(data, out, tmp_path / "store", "Words", i, 3) for i in range(3)]
        if kills < 30:
            time.sleep(pause)  # nothing to wait for: any instant will do
            pause = pause + 0.13 if pause < 5 else 1.0
            nodes[kills % 3].send_signal(signal.SIGKILL)
            kills, round_ = kills + 1, round_ + 1
            for node in nodes:
                with contextlib.suppress(ProcessLookupError):
                    node.kill()
                node.communicate()
            continue
        for node in nodes:
            _, errors = node.communicate(timeout=120)
            assert node.returncode == 0, errors
        break
    assert content(tmp_path / f"round-{round_}" / "0") == content(tmp_path / "one")
    assert not [path for path in (tmp_path / "store").glob("answers/*/.*") if path.stat().st_size]


@pytest.mark.parametrize("executor", ["ray", "spark"])
def test_a_cluster_that_does_not_listen_is_refused_at_once(tmp_path, monkeypatch, executor):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        scheme = "ray" if executor == "ray" else "spark"
        monkeypatch.setenv("CLUSTER", f"{scheme}://127.0.0.1:{free.getsockname()[1]}")
        data = DataSpec(source="x", executor=executor, executor_address="CLUSTER")
        with pytest.raises(RequestError, match=r"nothing answers at \w+://127.0.0.1:\d+"):
            executor_of(data, PieceStore(str(tmp_path)), 1)
