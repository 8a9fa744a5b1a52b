"""Examples become shards, which the ranks read: files, and a manifest of every byte.

The task learns what it must from the training split (`fit`), or from every n-th batch of
one that is large, then workers (executor.py) encode runs of at most `data.shard_rows`
examples, each into an Arrow file, which is not compressed, because it is memory-mapped.
No shard has rows of two pieces of the source, so that a window that moves on finds its
shards again. The bytes depend on examples, task and settings only. `manifest.json` is
written last and is the commit."""

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
from rekindle.data.examples import SPLITS, ExamplesFile, ExamplesSummary, open_examples
from rekindle.data.executor import Order, code, executor_of
from rekindle.data.fingerprint import own_files
from rekindle.data.manifest import ASSETS, MANIFEST, SHARD, folder_fingerprint, row_tokens
from rekindle.data.order import best_fit
from rekindle.data.quarantine import QUARANTINE, leave_out
from rekindle.data.split import stored_hashes
from rekindle.data.store import Entry, PieceStore, made_once
from rekindle.errors import DataError
from rekindle.launch.events import emit
from rekindle.launch.rendezvous import Rendezvous
from rekindle.modalities import MODALITIES
from rekindle.objectives.numbers import SCALE
from rekindle.records import MixedRows, ShardFile, ShardManifest
from rekindle.rows.findings import MOST, Findings
from rekindle.spec.identity import digest
from rekindle.spec.model import DataSpec, ModelSpec
from rekindle.tasks import TASKS, Task, load_task
from rekindle.tasks.base import REFUSED, Settings

log = logging.getLogger(__name__)

_FIT_BATCHES = 512  # at most a million rows and 2 GB
_FEW = 0.01  # of the texts, of whose being cut nothing is said
_BATCHES_A_WORKER = 8  # a process takes a second to begin


def shard(
    examples: Path, data: DataSpec, model: ModelSpec, task_name: str, out: Path, store: str = ""
) -> ShardManifest | None:
    """Write the shards of a folder of examples into `out`; returns, and writes, their
    manifest. `store`: a path or URI that keeps shards for the next time, and which all
    workers reach. On several nodes all but the first return None. Raises DataError for
    incomplete examples, StepError if a worker fails."""
    summary = written.read_summary(examples)
    task = load_task(task_name)
    if task.modality != summary.modality:
        raise DataError(
            f"{task_name} reads {task.modality}, the examples hold {summary.modality}",
            where=str(examples),
            fix="run the step `ingest` again for this task",
        )
    assets = _clear(out)
    settings = _fit(task, examples, data, model, assets, summary)
    tokenizer = folder_fingerprint(assets)
    made_of = [code(), _code_of_task(task_name), _shaping(settings), summary.labels, tokenizer]
    items = _items(summary, data.shard_rows, digest(made_of))
    stay_in_store = bool(store and data.disk_gb)
    with tempfile.TemporaryDirectory(prefix=".shards-", dir=out) as scratch:
        shard_store = PieceStore(store or scratch)
        entries = _encode_all(
            items, examples, assets, shard_store, data, task_name, summary, settings
        )
        if Rendezvous.current().node_rank:
            return None
        rows = _counts(items, entries, "rows")
        bad_rows = _leave_out_refused(items, entries, data, summary, rows, out)
        shards = []
        for item, entry in zip(items, entries, strict=True):
            if entry["rows"]:
                shards.append(_file(item, entry))
        if not stay_in_store:
            for file in shards:
                shard_store.take(file.key, SHARD, file.sha256, out / file.path)
    encoded = _counts(items, entries, "encoded")
    refused = _counts(items, entries, "refused")
    manifest = ShardManifest(
        task=task_name,
        source=summary.source,
        window=summary.window,
        tokenizer=tokenizer,
        examples=digest([file.examples for file in shards]),
        labels=summary.labels,
        slices=summary.slices,
        rows=rows,
        dropped=_dropped(summary, encoded, refused, rows, data),
        class_rows=summary.class_rows,
        bad_rows=bad_rows,
        left_out=summary.left_out,
        notices=tuple(task.notices(settings)),
        settings=settings,
        shards=tuple(shards),
        shuffle_bytes=round(data.shuffle_gb * 1e9),
        disk_bytes=round(data.disk_gb * 1e9) if data.disk_gb and stay_in_store else 0,
        sources=_mixed(data, shards),
        drawn=data.temperature is not None or any(part.weight for part in data.sources),
    )
    manifest.write(out / MANIFEST)
    _emit_notices(manifest, sum(entry.get("full", 0) for entry in entries), data)
    total_bytes = sum(file.bytes for file in shards)
    new = sum(entry["new"] for entry in entries)
    log.info("%d shards, %s bytes, %d of them new", len(shards), f"{total_bytes:,}", new)
    return manifest


def _shaping(settings: Settings) -> dict[str, Any]:
    """The settings of a task that shape its shards."""
    shaping = dict(settings)
    for name in SCALE:
        shaping.pop(name, None)  # shards hold numbers as they are, without their scale
    return shaping


def _encode_all(
    items: Sequence[Entry],
    examples: Path,
    assets: Path,
    store: PieceStore,
    data: DataSpec,
    task_name: str,
    summary: ExamplesSummary,
    settings: Settings,
) -> list[Entry]:
    """Have workers encode all items into entries of the store; returns an entry an item."""
    order = {
        "task": task_name,
        "labels": list(summary.labels),
        "settings": settings,
        "examples": str(examples),
        "assets": str(assets),
        "store": store.root,
        "shared": False,
        "most": data.max_length,
    }
    batches = sum(len(file.batches) for file in summary.files)
    executor = executor_of(data, store, batches // _BATCHES_A_WORKER)
    if executor.apart:
        order |= {"assets": store.share(assets), "shared": True}
        keys = {file.path: store.share(examples / file.path) for file in summary.files}
        items = [{**item, "shared": keys[item["path"]]} for item in items]
    return executor.map(f"{__name__}:encode", order, items, digest(["shard", items]))


def _clear(out: Path) -> Path:
    """A new folder for assets. An earlier attempt is removed, its manifest first."""
    assets = out / ASSETS
    # first: without it the shards of before are not there
    (out / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(assets, ignore_errors=True)
    for file in out.glob("*.arrow"):
        file.unlink()
    assets.mkdir(parents=True)
    return assets


def _fit(
    task: Task,
    examples: Path,
    data: DataSpec,
    model: ModelSpec,
    assets: Path,
    summary: ExamplesSummary,
) -> dict[str, Any]:
    """The settings that the task learns from the training split,
    or every n-th batch of it."""
    train = open_examples(examples, "train")
    # evenly over the split, whose rows may lie in the order of their classes
    every = len(train) // _FIT_BATCHES + 1

    def batches() -> Iterator[pa.RecordBatch]:
        return (train[number] for number in range(0, len(train), every))

    fitted = task.fit(batches, data, model, assets)
    if not summary.image_shape:
        return {**fitted}
    return {"image_shape": list(summary.image_shape), **fitted}


def _code_of_task(task_name: str) -> object:
    """What identifies a task's code:
    the name of one of rekindle's, the files of a user's."""
    if task_name in TASKS:
        return task_name
    return own_files(Path(task_name.rpartition(":")[0]))


def _emit_notices(manifest: ShardManifest, full: int, data: DataSpec) -> None:
    """Say what the task noticed, and that texts are cut: one that is cut is as long as
    one may be, as few others are by chance."""
    for text in manifest.notices:
        emit("notice", text=text)
    rows = sum(manifest.rows.values())
    if full > _FEW * rows:
        text = f"{full:,} of {rows:,} texts are cut at data.max_length"
        emit("notice", text=f"{text} ({data.max_length:,} tokens), or fill it")


def _items(summary: ExamplesSummary, shard_rows: int, made_of: str) -> list[dict[str, Any]]:
    """What each shard is made of: `rows` examples of a file, from row `skip` of batch
    `batch` on, cut for itself in each file; splits come one after the other."""
    items: list[dict[str, Any]] = []
    for file in summary.files:
        batch = 0
        skip = 0
        remaining_rows = sum(file.batches)
        while remaining_rows:
            rows = min(shard_rows, remaining_rows)
            item = {
                "key": digest([made_of, file.sha256, batch, skip, rows]),
                "name": f"{file.split}-{len(items):05}.arrow",
                "split": file.split,
                "path": file.path,
                "batch": batch,
                "skip": skip,
                "rows": rows,
                "source": file.source,
            }
            items.append(item)
            remaining_rows -= rows
            skip += rows
            while batch < len(file.batches) and skip >= file.batches[batch]:
                skip -= file.batches[batch]
                batch += 1
    return items


def _file(item: Entry, entry: Entry) -> ShardFile:
    """What the manifest says of a shard."""
    return ShardFile(
        path=item["name"],
        split=item["split"],
        key=item["key"],
        source=item["source"],
        sha256=entry["files"][SHARD],
        rows=entry["rows"],
        bytes=entry["bytes"],
        tokens=entry["tokens"],
        longest=entry["longest"],
        sequences=entry["sequences"],
        examples=entry["examples"],
    )


def _mixed(data: DataSpec, shards: Sequence[ShardFile]) -> tuple[MixedRows, ...]:
    """What training draws from each source of a mixture. DataError for an empty one."""
    rows_S = np.zeros(len(data.sources), np.int64)
    sequences_S = np.zeros(len(data.sources), np.int64)
    for file in shards:
        if data.sources and file.split == "train":
            rows_S[file.source] += file.rows
            sequences_S[file.source] += file.sequences or file.rows
    for part, rows in zip(data.sources, rows_S, strict=True):
        if not rows:
            raise DataError(
                f"the source {part.source} has no example in the split train",
                where="data.sources",
                fix="remove it, or give it more rows",
            )
    weights = [part.weight for part in data.sources if part.weight]
    # a temperature of 1 draws by size, a higher one more evenly
    parts_S = np.array(weights or sequences_S ** (1 / (data.temperature or 1)), float)
    shares_S = parts_S / parts_S.sum() if len(parts_S) else parts_S
    mixed = []
    for number, part in enumerate(data.sources):
        share = shares_S[number]
        epochs = share * sequences_S.sum() / sequences_S[number]
        mixed.append(MixedRows(source=part.source, rows=rows_S[number], share=share, epochs=epochs))
    return tuple(mixed)


def _counts(items: Sequence[Entry], entries: Sequence[Entry], name: str) -> dict[str, int]:
    """Rows of each split, as each entry counts them under this name."""
    counts = dict.fromkeys(SPLITS, 0)
    for item, entry in zip(items, entries, strict=True):
        counts[item["split"]] += entry[name]
    return counts


def _leave_out_refused(
    items: Sequence[Entry],
    entries: Sequence[Entry],
    data: DataSpec,
    summary: ExamplesSummary,
    rows: Mapping[str, int],
    out: Path,
) -> dict[str, int]:
    """The rows that were left out, by kind of fault, those among them that the task
    cannot encode. DataError where these may not be left out, or are too many with those
    of before."""
    findings = Findings()
    for item, entry in zip(items, entries, strict=True):
        has_key = data.parts[item["source"]].columns.key is not None
        for place, why in entry["refusals"]:
            findings.add("template", f"key {place}" if has_key else place, why)
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
    """Examples without a target by split.
    DataError if others are lost, or none is left."""
    if encoded != dict(summary.rows):
        raise DataError(
            f"the examples promised {dict(summary.rows)} rows and hold {encoded}",
            fix="run `ingest` again",
        )
    dropped = {split: encoded[split] - refused[split] - rows[split] for split in SPLITS}
    if not any(dropped.values()):
        return {}
    counts = ", ".join(f"{split} {count:,}" for split, count in dropped.items() if count)
    target = f"token to predict within data.max_length ({data.max_length} tokens)"
    if not rows["train"]:
        raise DataError(
            f"no text of the split train has a {target}",
            where=counts,
            fix="raise data.max_length: the prompts alone are longer",
        )
    log.warning("texts with no %s were left out: %s", target, counts)
    return dropped


def encode_batch(
    task: Task, batch: pa.RecordBatch, labels: dict[str, int], settings: Settings, assets: Path
) -> pa.RecordBatch:
    """Id, hash, label (a number, class index or indices), slices,
    and the encoded columns."""
    names = [name for name in batch.schema.names if name not in ("split", *MODALITIES)]
    columns: dict[str, pa.Array] = {name: batch.column(name) for name in names}
    if "label" in columns:
        columns["label"] = _indices(columns["label"], labels)
    encoded = task.encode(batch, settings, assets)
    duplicates = sorted(set(encoded) & set(columns))
    if duplicates:
        raise ValueError(f"encode returned a column `{duplicates[0]}`, which the shard already has")
    return pa.record_batch({**columns, **encoded})


def _indices(column: pa.Array, labels: dict[str, int]) -> pa.Array:
    """Labels, or lists of them, as class indices; numbers as they are."""
    if pa.types.is_floating(column.type):
        return column
    rows = column.to_pylist()
    if pa.types.is_list(column.type):
        indices = [[labels[label] for label in row] for row in rows]
        return pa.array(indices, pa.list_(pa.int32()))
    return pa.array([labels[label] for label in rows], pa.int32())


@made_once
def encode(order: Order, item: Entry, store: PieceStore, folder: Path) -> dict[str, Any]:
    """Of a shard: `encoded` examples, `rows` of them that hold something to learn from,
    their `tokens`; `refused` that the task cannot encode, and `refusals`: ids of the
    first with why."""
    task = load_task(order["task"])
    labels = {name: number for number, name in enumerate(order["labels"])}
    if order["shared"]:
        assets = store.shared(order["assets"])
        path = store.shared(item["shared"]) / item["path"]
    else:
        assets = Path(order["assets"])
        path = Path(order["examples"], item["path"])
    rows = 0
    encoded = 0
    refused = 0
    refusals: list[tuple[str, str]] = []
    with contextlib.ExitStack() as opened:
        writer = None
        for examples in _read(ExamplesFile(path), item["batch"], item["skip"], item["rows"]):
            batch = encode_batch(task, examples, labels, order["settings"], assets)
            encoded += len(batch)
            if REFUSED in batch.schema.names:
                why = batch.column(REFUSED)
                refused_rows = batch.filter(why.is_valid())
                refused += len(refused_rows)
                ids = refused_rows.column("id").to_pylist()
                refusals += zip(ids, refused_rows.column(REFUSED).to_pylist(), strict=True)
                batch = batch.filter(why.is_null()).drop_columns(REFUSED)
            # null where a text holds no token to predict
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
    return {
        "encoded": encoded,
        "rows": rows,
        "refused": refused,
        "refusals": refusals[:MOST],
        **facts,
    }


def _facts(path: Path, settings: Mapping[str, Any], most: int) -> dict[str, Any]:
    """What the manifest says of a shard beside its rows
    and hash, and how many rows have `most` tokens."""
    with pa.memory_map(str(path)) as mapped:
        table = pa.ipc.open_file(mapped).read_all()
        lengths = row_tokens(table)
        tokens = 0
        full = 0
        if "input_ids" in table.schema.names:
            tokens = int(lengths.sum())
            full = int((lengths == most).sum())
        sequences = 0
        if settings.get("packing"):
            _, sequences = best_fit(lengths, settings["max_length"])
        hashes = b"".join(map(stored_hashes, table.column("hash").chunks))
        return {
            "bytes": path.stat().st_size,
            "longest": int(lengths.max()),
            "full": full,
            "tokens": tokens,
            "sequences": sequences,
            "examples": hashlib.sha256(hashes).hexdigest()[:32],
        }


def _read(examples: ExamplesFile, batch: int, skip: int, rows: int) -> Iterator[pa.RecordBatch]:
    """So many rows, from row `skip` of batch number `batch` on."""
    while rows and batch < len(examples):
        part = examples[batch].slice(skip, rows)
        yield part
        batch += 1
        skip = 0
        rows -= len(part)
