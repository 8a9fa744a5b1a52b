"""What `ingest` reads is what `fingerprint` saw, or it is refused: exports land while runs go on."""

import gzip
import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from rekindle.data.fingerprint import fingerprint
from rekindle.data.ingest import ingest
from rekindle.errors import DataError
from rekindle.spec.model import DataSpec, ModelSpec, TrainSpec

ROWS = [
    {"text": f"text {i}", "label": "ab"[i % 2], "at": f"2026-01-{i % 28 + 1:02d}T00:00:00"}
    for i in range(240)
]


def csv(rows):
    return "text,label,at\n" + "".join(f"{r['text']},{r['label']},{r['at']}\n" for r in rows)


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def png(shade):
    held = io.BytesIO()
    Image.fromarray(np.full((4, 4), shade, np.uint8)).save(held, "png")
    return held.getvalue()


def texts(name, content):
    """One file; the second version has other texts."""

    def make(folder, version):
        rows = [{**row, "text": f"{row['text']} {version}"} for row in ROWS]
        (folder / name).write_bytes(content(rows))
        return {"source": str(folder / name)}

    return make


def parquet(rows):
    held = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), held)
    return held.getvalue()


def irregular(rows):
    return jsonl([{**row, "label": i % 2 if i % 2 else "0"} for i, row in enumerate(rows)]).encode()


def windowed(folder, version):
    given = texts("x.jsonl", lambda rows: jsonl(rows).encode())(folder, version)
    return {**given, "columns": {"time": "at"}, "window": {"size": "20 days"}}


def partitioned(folder, version):
    for day in range(1, 6):
        rows = [{**row, "text": f"{row['text']} {day} {version}"} for row in ROWS]
        (folder / f"2026-01-0{day}.csv").write_text(csv(rows))
    return {"source": f"{folder}/{{window:%Y-%m-%d}}.csv", "window": {"size": "3 days"}}


def images(folder, version):
    for i in range(120):
        path = folder / "images" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(i + 120 * (version - 1)))
    return {"source": str(folder / "images")}


def named_images(folder, version):
    """The rows stay as they are; the files that they name do not."""
    images(folder, version)
    rows = [
        f"images/{'ab'[i % 2]}/{i}.png,{'ab'[i % 2]},2026-01-{i % 28 + 1:02d}" for i in range(120)
    ]
    (folder / "x.csv").write_text("image,label,at\n" + "\n".join(rows) + "\n")
    return {"source": str(folder / "x.csv")}


def named_images_in_a_window(folder, version):
    return {
        **named_images(folder, version),
        "columns": {"time": "at"},
        "window": {"size": "20 days"},
    }


KINDS = {
    "csv": texts("x.csv", lambda rows: csv(rows).encode()),
    "csv.gz": texts("x.csv.gz", lambda rows: gzip.compress(csv(rows).encode())),
    "members.csv.gz": texts(
        "x.csv.gz",
        lambda rows: (
            gzip.compress(csv(rows[:99]).encode())
            + gzip.compress(csv(rows).encode().split(b"\n", 100)[100])
        ),
    ),
    "jsonl": texts("x.jsonl", lambda rows: jsonl(rows).encode()),
    "jsonl.bz2": texts(
        "x.jsonl.bz2", lambda rows: __import__("bz2").compress(jsonl(rows).encode())
    ),
    "irregular": texts("x.jsonl", irregular),
    "parquet": texts("x.parquet", parquet),
    "by time": lambda folder, version: {
        **KINDS["csv"](folder, version),
        "columns": {"time": "at"},
        "split": {"by": "time"},
    },
    "window": windowed,
    "partitions": partitioned,
    "images": images,
    "named": named_images,
    "named, window": named_images_in_a_window,
}


def read(data, folder):
    """What `fingerprint` says, and the examples of `ingest`, told that."""
    task = "image_classification" if "image" in folder.name else "text_classification"
    seen = fingerprint(task, data, ModelSpec(), TrainSpec(), champion=None)
    return seen, lambda: ingest(
        data,
        "image" if "image" in folder.name else "text",
        seen.window,
        folder / "out",
        source=seen.data,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_is_what_was_asked_for_or_refused(tmp_path, kind):
    folder = tmp_path / ("images" if kind.startswith(("images", "named")) else "texts")
    folder.mkdir()
    data = DataSpec.model_validate(KINDS[kind](folder, 1))
    first, ingested = read(data, folder)
    assert ingested().source == first.data

    KINDS[kind](folder, 2)
    with pytest.raises(DataError, match="the data changed between `fingerprint` and `ingest`"):
        ingested()
    assert not (folder / "out" / "summary.json").exists()

    second, again = read(data, folder)
    assert second.run_key != first.run_key
    assert again().source == second.data


@pytest.mark.timeout(120)
def test_a_line_without_an_end_is_refused_and_does_not_fill_the_memory(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b'{"text": "')
        for _ in range(300):
            file.write(b"a" * (1 << 20))
    data = DataSpec(source=str(path))
    with pytest.raises(DataError, match="a line of over 64 MiB"):
        ingest(data, "text", "", tmp_path / "out")
