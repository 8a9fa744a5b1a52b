"""Small sources that the tests of data/ share, and short ways to run its steps on them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

from rekindle.data.examples import SPLITS, ExamplesSummary, open_examples
from rekindle.data.ingest import ingest
from rekindle.data.shard import shard
from rekindle.records import ShardManifest
from rekindle.spec.model import DataSpec, ModelSpec

TASKS = "tests/data/own_task.py"
LABELS = ("bad", "fair", "good")


def rows(count: int = 300, **extra: Any) -> list[dict[str, Any]]:
    """Records of three classes over ten months of 2026, with key, time and slice."""
    return [
        {
            "id": f"r{i:04}",
            "text": f"review {i} says: «{LABELS[i % 3]}», word{i % 37} and\nword{i * 7 % 91}",
            "label": LABELS[i % 3],
            "category": f"c{i % 4}",
            "month": f"2026-{i * 10 // count + 1:02}",
            **extra,
        }
        for i in range(count)
    ]


def write_jsonl(path: Path, records: Iterable[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    return path


def text_spec(source: object, **fields: Any) -> DataSpec:
    return DataSpec.model_validate({"source": str(source), **fields})


def ingested(
    data: DataSpec, out: Path, window: str = "", modality: str = "text"
) -> ExamplesSummary:
    found = ingest(data, modality, window, out)
    assert found is not None
    return found


def sharded(
    data: DataSpec,
    out: Path,
    task: str = "Words",
    workers: int | None = None,
    store: str = "",
    window: str = "",
) -> ShardManifest:
    """Examples in `out/examples`, shards in `out/shards`, by so many workers."""
    data, modality = data.model_copy(update={"workers": workers or data.workers}), "text"
    if task == "Pixels":
        modality = "image"
    ingest(data, modality, window, out / "examples", store=store)
    made = shard(
        out / "examples", data, ModelSpec(), f"{TASKS}:{task}", out / "shards", store=store
    )
    assert made is not None
    return made


def all_examples(folder: Path) -> pa.Table:
    return pa.Table.from_batches(
        [batch for split in SPLITS for batch in open_examples(folder, split)]
    )


def content(folder: Path) -> dict[str, str]:
    """Hash of every file below a folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
