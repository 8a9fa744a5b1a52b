"""Examples become shards: what the ranks read, with a manifest that vouches for every byte.

The task learns what it must from the training split (`fit`), or from every n-th batch of one that
is large, then workers (executor.py) encode runs of at most `data.shard_rows` examples, each into an
Arrow file, which is not compressed, because it is memory-mapped. No shard has rows of two pieces of
the source, so that a window that moves on finds its shards again. The bytes depend on examples,
task and settings only. `manifest.json` is written last and is the commit."""

import contextlib
import hashlib
import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rekindle.data import examples as written
from rekindle.data.examples import CONTENT, SPLITS, ExamplesFile, ExamplesSummary, open_examples
from rekindle.data.executor import Order, code, executor_of
from rekindle.data.fingerprint import own_files
from rekindle.data.manifest import ASSETS, MANIFEST, SHARD, folder_fingerprint, row_tokens
from rekindle.data.order import best_fit
from rekindle.data.quarantine import QUARANTINE, leave_out
from rekindle.data.split import stored_hashes
from rekindle.data.store import Entry, Store, kept
from rekindle.data.validate import MOST, Findings
from rekindle.errors import DataError
from rekindle.launch.events import emit
from rekindle.launch.rendezvous import Rendezvous
from rekindle.records import MixedRows, ShardFile, ShardManifest
from rekindle.spec.identity import digest
from rekindle.spec.model import DataSpec, ModelSpec
from rekindle.tasks import TASKS, Task, load_task
from rekindle.tasks.base import REFUSED, SCALE, Settings

log = logging.getLogger(__name__)

_FACTS = ("rows", "bytes", "tokens", "longest", "sequences", "examples")
_FIT_BATCHES = 512  # at most a million rows and 2 GB
_FEW = 0.01  # of the texts, of whose being cut nothing is said
_BATCHES_A_WORKER = 8  # a process takes a second to begin


def shard(
    examples: Path, data: DataSpec, model: ModelSpec, task_name: str, out: Path, store: str = ""
) -> ShardManifest | None:
    """Write the shards of a folder of examples into `out`; returns, and writes, their manifest.
    `store`: a path or URI that keeps shards for the next time, and which all workers reach. On
    several nodes all but the first return None. Raises DataError for incomplete examples, StepError
    if a worker fails."""
    summary = written.read_summary(examples)
    task = load_task(task_name)
    if task.modality != summary.modality:
        what = f"{task_name} reads {task.modality}, the examples hold {summary.modality}"
        raise DataError(what, where=str(examples), fix="run the step `ingest` again for this task")
    assets = _cleared(out)
    train = open_examples(examples, "train")
    every = len(train) // _FIT_BATCHES + 1
    fitted = task.fit(lambda: (train[i] for i in range(0, len(train), every)), data, model, assets)
    shape = {"image_shape": list(summary.image_shape)} if summary.image_shape else {}
    settings: dict[str, Any] = {**shape, **fitted}
    with tempfile.TemporaryDirectory(prefix=".shards-", dir=out) as scratch:
        kept, away = Store(store or scratch), bool(store and data.disk_gb)
        own = task_name if task_name in TASKS else own_files(Path(task_name.rpartition(":")[0]))
        tokenizer = folder_fingerprint(assets)
        made_of = [
            code(),
            own,
            {name: value for name, value in settings.items() if name not in SCALE},
            summary.labels,
            tokenizer,
        ]
        items = [*_items(summary, data.shard_rows, digest(made_of))]
        order = {
            "task": task_name,
            "labels": list(summary.labels),
            "settings": settings,
            "examples": str(examples),
            "assets": str(assets),
            "store": kept.root,
            "shared": False,
            "most": data.max_length,
        }
        batches = sum(len(file.batches) for file in summary.files)
        executor = executor_of(data, kept, batches // _BATCHES_A_WORKER)
        if executor.apart:
            order |= {"assets": kept.share(assets), "shared": True}
            keys = {file.path: kept.share(examples / file.path) for file in summary.files}
            items = [{**item, "shared": keys[item["path"]]} for item in items]
        entries = executor.map(f"{__name__}:encode", order, items, digest(["shard", items]))
        if Rendezvous.current().node_rank:
            return None
        encoded, rows = (_counts(items, entries, name) for name in ("encoded", "rows"))
        bad_rows = _leave_out_refused(items, entries, data, summary, rows, out)
        shards = [_file(*one) for one in zip(items, entries, strict=True) if one[1]["rows"]]
        if not away:
            for one in shards:
                kept.take(one.key, SHARD, one.sha256, out / one.path)
    manifest = ShardManifest(
        task=task_name,
        source=summary.source,
        window=summary.window,
        tokenizer=tokenizer,
        examples=digest([file.examples for file in shards]),
        labels=summary.labels,
        slices=summary.slices,
        rows=rows,
        dropped=_dropped(summary, encoded, _counts(items, entries, "refused"), rows, data),
        class_rows=summary.class_rows,
        bad_rows=bad_rows,
        left_out=summary.left_out,
        notices=tuple(task.notices(settings)),
        settings=settings,
        shards=tuple(shards),
        shuffle_bytes=round(data.shuffle_gb * 1e9),
        disk_bytes=round(data.disk_gb * 1e9) if data.disk_gb and away else 0,
        sources=_mixed(data, shards),
        drawn=data.temperature is not None or any(part.weight for part in data.sources),
    )
    manifest.write(out / MANIFEST)
    _tell(manifest, sum(entry.get("full", 0) for entry in entries), data)
    total, new = sum(file.bytes for file in shards), sum(entry["new"] for entry in entries)
    log.info("%d shards, %s bytes, %d of them new", len(shards), f"{total:,}", new)
    return manifest


def _cleared(out: Path) -> Path:
    """A new folder for assets. Nothing is left of an earlier attempt; the manifest goes first."""
    assets = out / ASSETS
    (out / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(assets, ignore_errors=True)
    for file in out.glob("*.arrow"):
        file.unlink()
    assets.mkdir(parents=True)
    return assets


def _tell(manifest: ShardManifest, full: int, data: DataSpec) -> None:
    """Say what the task noticed, and that texts are cut: one that is cut is as long as one may be,
    as few others are by chance."""
    for text in manifest.notices:
        emit("notice", text=text)
    rows = sum(manifest.rows.values())
    if full > _FEW * rows:
        what = f"{full:,} of {rows:,} texts"
        text = f"{what} are cut at data.max_length ({data.max_length:,} tokens), or fill it"
        emit("notice", text=text)


def _items(summary: ExamplesSummary, shard_rows: int, made_of: str) -> Iterator[dict[str, Any]]:
    """What each shard is made of: `rows` examples of a file, from row `skip` of batch `batch` on,
    cut for itself in each file; splits come one after the other."""
    number = 0
    for file in summary.files:
        batch = skip = 0
        left = sum(file.batches)
        while left:
            rows = min(shard_rows, left)
            key = digest([made_of, file.sha256, batch, skip, rows])
            yield {
                "key": key,
                "name": f"{file.split}-{number:05}.arrow",
                "split": file.split,
                "path": file.path,
                "batch": batch,
                "skip": skip,
                "rows": rows,
                "source": file.source,
            }
            number, left, skip = number + 1, left - rows, skip + rows
            while batch < len(file.batches) and skip >= file.batches[batch]:
                batch, skip = batch + 1, skip - file.batches[batch]


def _file(item: Mapping[str, Any], entry: Mapping[str, Any]) -> ShardFile:
    facts = {name: entry[name] for name in _FACTS}
    where = {"path": item["name"], **{name: item[name] for name in ("split", "key", "source")}}
    return ShardFile(sha256=entry["files"][SHARD], **where, **facts)


def _mixed(data: DataSpec, shards: Sequence[ShardFile]) -> tuple[MixedRows, ...]:
    """What training draws from each source of a mixture; DataError for one without examples."""
    rows, filled = np.zeros((2, len(data.sources)), np.int64)
    for file in shards:
        if data.sources and file.split == "train":
            rows[file.source] += file.rows
            filled[file.source] += file.sequences or file.rows
    for part, count in zip(data.sources, rows, strict=True):
        if not count:
            what = f"the source {part.source} has no example in the split train"
            raise DataError(what, where="data.sources", fix="remove it, or give it more rows")
    weights = [part.weight for part in data.sources if part.weight]
    parts = np.array(weights or filled ** (1 / (data.temperature or 1)), float)
    shares = parts / parts.sum() if len(parts) else parts
    return tuple(
        MixedRows(source=part.source, rows=n, share=share, epochs=share * filled.sum() / own)
        for part, n, own, share in zip(data.sources, rows, filled, shares, strict=True)
    )


def _counts(items: Sequence[Any], entries: Sequence[Any], name: str) -> dict[str, int]:
    """Rows of each split."""
    found = dict.fromkeys(SPLITS, 0)
    for item, entry in zip(items, entries, strict=True):
        found[item["split"]] += entry[name]
    return found


def _leave_out_refused(
    items: Sequence[Any],
    entries: Sequence[Any],
    data: DataSpec,
    summary: ExamplesSummary,
    rows: Mapping[str, int],
    out: Path,
) -> dict[str, int]:
    """The rows that were left out, by kind of fault, those among them that the task cannot encode.
    DataError where these may not be left out, or are too many with those of before."""
    findings = Findings()
    for item, entry in zip(items, entries, strict=True):
        keyed = data.parts[item["source"]].columns.key is not None
        for place, why in entry["refusals"]:
            findings.add("template", f"key {place}" if keyed else place, why)
        findings.count("template", entry["refused"] - len(entry["refusals"]))
    if not findings:
        (out / QUARANTINE).unlink(missing_ok=True)
        return dict(summary.bad_rows)
    problems = findings.problems()
    findings.rows += summary.faulty
    left_out = leave_out(data, findings, sum(rows.values()), out)
    findings.raise_if_any()
    if not rows["train"]:
        raise DataError(problems)
    return {**summary.bad_rows, **left_out}


def _dropped(
    summary: ExamplesSummary,
    encoded: Mapping[str, int],
    refused: Mapping[str, int],
    rows: Mapping[str, int],
    data: DataSpec,
) -> dict[str, int]:
    """Examples of each split without a target; DataError if others are lost, or none is left."""
    if encoded != dict(summary.rows):
        what = f"the examples promised {dict(summary.rows)} rows and hold {encoded}"
        raise DataError(what, fix="run `ingest` again")
    dropped = {split: encoded[split] - refused[split] - rows[split] for split in SPLITS}
    if not any(dropped.values()):
        return {}
    counts = ", ".join(f"{split} {count:,}" for split, count in dropped.items() if count)
    what = f"no token to predict within data.max_length ({data.max_length} tokens)"
    if not rows["train"]:
        fix = "raise data.max_length: the prompts alone are longer"
        raise DataError(f"no text of the split train has a {what[3:]}", where=counts, fix=fix)
    log.warning("texts with %s were left out: %s", what, counts)
    return dropped


def encode_batch(
    task: Task, batch: pa.RecordBatch, labels: dict[str, int], settings: Settings, assets: Path
) -> pa.RecordBatch:
    """Id, hash, label (a number, class index or indices) if any, slices, and what is encoded."""
    names = [name for name in batch.schema.names if name not in ("split", *CONTENT)]
    columns: dict[str, Any] = {name: batch.column(name) for name in names}
    if "label" in columns and not pa.types.is_floating(columns["label"].type):
        rows, kind = columns["label"].to_pylist(), pa.int32()
        if pa.types.is_list(columns["label"].type):
            indices = [[labels[label] for label in row] for row in rows]
            columns["label"] = pa.array(indices, pa.list_(kind))
        else:
            columns["label"] = pa.array([labels[label] for label in rows], kind)
    encoded = task.encode(batch, settings, assets)
    if clash := sorted(set(encoded) & set(columns)):
        raise ValueError(f"encode returned a column `{clash[0]}`, which the shard already has")
    return pa.record_batch({**columns, **encoded})


@kept
def encode(order: Order, item: Entry, store: Store, folder: Path) -> dict[str, Any]:
    """Of a shard: `encoded` examples, `rows` of them that hold something to learn from, their
    `tokens`; `refused` that the task cannot encode, and `refusals`: ids of the first with why."""
    task, labels = load_task(order["task"]), {name: i for i, name in enumerate(order["labels"])}
    if order["shared"]:
        assets = store.shared(order["assets"])
        path = store.shared(item["shared"]) / item["path"]
    else:
        assets, path = Path(order["assets"]), Path(order["examples"], item["path"])
    rows = encoded = refused = 0
    refusals: list[tuple[str, str]] = []
    with contextlib.ExitStack() as opened:
        writer = None
        for examples in _read(ExamplesFile(path), item["batch"], item["skip"], item["rows"]):
            batch = encode_batch(task, examples, labels, order["settings"], assets)
            encoded += len(batch)
            if REFUSED in batch.schema.names:
                why = batch.column(REFUSED)
                bad = batch.filter(why.is_valid())
                refused += len(bad)
                both = zip(bad.column("id"), bad.column(REFUSED), strict=True)
                refusals += [(id_.as_py(), text.as_py()) for id_, text in both]
                batch = batch.filter(why.is_null()).drop_columns(REFUSED)
            if "input_ids" in batch.schema.names and batch.column("input_ids").null_count:
                batch = batch.filter(batch.column("input_ids").is_valid())
            rows += len(batch)
            if not len(batch):
                continue
            if writer is None:
                file = opened.enter_context((folder / SHARD).open("wb"))
                sink = pa.PythonFile(file, mode="w")
                writer = opened.enter_context(pa.ipc.new_file(sink, batch.schema))
            writer.write_batch(batch)
    facts = _facts(folder / SHARD, order["settings"], order["most"]) if rows else {}
    about = {"encoded": encoded, "rows": rows, "refused": refused}
    return {**about, "refusals": refusals[:MOST], **facts}


def _facts(path: Path, settings: Mapping[str, Any], most: int) -> dict[str, Any]:
    """What the manifest says of a shard beside its rows and hash, and how many rows have `most`
    tokens."""
    with pa.memory_map(str(path)) as mapped:
        table = pa.ipc.open_file(mapped).read_all()
        lengths, packed = row_tokens(table), settings.get("packing")
        are_tokens = "input_ids" in table.schema.names
        hashes = b"".join(map(stored_hashes, table.column("hash").chunks))
        return {
            "bytes": path.stat().st_size,
            "longest": int(lengths.max()),
            "full": int((lengths == most).sum()) if are_tokens else 0,
            "tokens": int(lengths.sum()) if are_tokens else 0,
            "sequences": best_fit(lengths, settings["max_length"])[1] if packed else 0,
            "examples": hashlib.sha256(hashes).hexdigest()[:32],
        }


def _read(examples: ExamplesFile, batch: int, skip: int, rows: int) -> Iterator[pa.RecordBatch]:
    """So many rows, from row `skip` of batch number `batch` on."""
    while rows and batch < len(examples):
        part = examples[batch].slice(skip, rows)
        yield part
        batch, skip, rows = batch + 1, 0, rows - len(part)
