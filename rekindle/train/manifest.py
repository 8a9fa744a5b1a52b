"""What a committed checkpoint says of itself, whether it is true, and which are kept.

`manifest.json` holds the schema, run key, step and state as JSON, the size and SHA-256 of
every file, and a hash of itself."""

import concurrent.futures
import dataclasses
import gzip
import hashlib
import io
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rekindle.errors import CheckpointError
from rekindle.spec.heartbeat import beat
from rekindle.spec.model import CheckpointSpec
from rekindle.storage import Storage
from rekindle.train.checkpoint_storage import checkpoint_storage
from rekindle.train.dcp import METADATA, THREADS, File

SCHEMA_VERSION = 2
MANIFEST = "manifest.json"
_MOST_HISTORY_BYTES = 2 << 30
HISTORY = "history.jsonl.gz"
_PIECE_BYTES = 1 << 20
_NAME = re.compile(r"^step-(\d{9,})\.([0-9a-f]{8})$")

State = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: where it is, after which step it was taken, its JSON state."""

    root: str
    name: str
    step: int
    state: State
    files: tuple[File, ...]

    @property
    def folder(self) -> Path:
        return Path(self.root) / self.name

    def history(self) -> str | None:
        """The loss curve up to this step as JSON lines, where the checkpoint carries it."""
        if not any(file.path == HISTORY for file in self.files):
            return None
        content = checkpoint_storage(self.root).read(f"{self.name}/{HISTORY}")
        if content is None:
            return None
        where = f"{self.root}/{self.name}/{HISTORY}"
        try:
            # a curve of ten million steps; what is more is damaged, or a bomb
            text = gzip.GzipFile(fileobj=io.BytesIO(content)).read(_MOST_HISTORY_BYTES + 1)
            if len(text) <= _MOST_HISTORY_BYTES:
                return text.decode()
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
            raise CheckpointError(f"the loss curve cannot be read: {error}", where=where) from error
        message = f"the loss curve is larger than {_MOST_HISTORY_BYTES:,} bytes"
        fix = f"remove {self.root}/{self.name} to start from the checkpoint before"
        raise CheckpointError(message, where=where, fix=fix)


def signed(body: Mapping[str, Any]) -> bytes:
    """A manifest as it is written, with a hash of itself."""
    return json.dumps({**body, "sha256": _digest(body)}, indent=2).encode()


def offers(storage: Storage, run_key: str) -> Iterator[tuple[Checkpoint, str]]:
    """Committed checkpoints, newest first, and what is wrong with the manifest, or ""."""
    for name in reversed(names_in(storage)):
        content = storage.read(f"{name}/{MANIFEST}")
        if content is None:
            continue
        where = f"{storage.root}/{name}"
        try:
            manifest = json.loads(content)
            schema = manifest["schema_version"]
            if schema != SCHEMA_VERSION:
                message = f"checkpoint {name} has schema {schema}, this rekindle reads "
                fix = "resume with the rekindle that wrote it, or train with --fresh elsewhere"
                raise CheckpointError(f"{message}{SCHEMA_VERSION}", where=where, fix=fix)
            body = {key: value for key, value in manifest.items() if key != "sha256"}
            files = tuple(File(**entry) for entry in body["files"])
            problem = "" if _digest(body) == manifest["sha256"] else f"{MANIFEST} was altered"
            key_of_checkpoint = str(body["run_key"])
            step = int(body["step"])
            state = dict(body["state"])
        except (ValueError, KeyError, TypeError) as error:
            unread = Checkpoint(storage.root, name, step_of(name), {}, ())
            yield unread, f"{MANIFEST} cannot be read: {error!r}"
            continue
        if not problem and key_of_checkpoint != run_key:
            message = f"checkpoint {name} is of the run key {key_of_checkpoint}, not of {run_key}"
            fix = "data, settings or code differ: train into another folder, or remove this one"
            raise CheckpointError(message, where=where, fix=fix)
        yield Checkpoint(storage.root, name, step, state, files), problem


def broken(checkpoint: Checkpoint, files: Sequence[File] | None = None) -> str:
    """What is wrong with these files of a checkpoint (by default all), or ""."""
    if files is None:
        files = checkpoint.files
    storage = checkpoint_storage(checkpoint.root)

    def check(file: File) -> str:
        path = f"{checkpoint.name}/{file.path}"
        if storage.size(path) != file.bytes:
            return f"{file.path} is missing or has another size"
        running = hashlib.sha256()
        try:
            with storage.reader(path) as stream:
                while content := stream.read(_PIECE_BYTES):
                    running.update(content)
                    beat()
        except OSError as error:
            return f"{file.path} cannot be read: {error}"
        return "" if running.hexdigest() == file.sha256 else f"{file.path} does not match its hash"

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        for problem in pool.map(check, files):
            if problem:
                return problem
    return ""


def metadata_of(storage: Storage, checkpoint: Checkpoint) -> bytes:
    """DCP's metadata; its hash is checked again, because the bytes are about to be unpickled."""
    expected = {file.sha256 for file in checkpoint.files if file.path == METADATA}
    content = storage.read(f"{checkpoint.name}/{METADATA}") or b""
    if {hashlib.sha256(content).hexdigest()} != expected:
        raise CheckpointError(f"{METADATA} does not match its hash")
    return content


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def names_in(storage: Storage) -> list[str]:
    """Names of checkpoints, complete or not, by step."""
    names = [name for name in storage.folders() if _NAME.match(name)]
    return sorted(names, key=lambda name: (step_of(name), name))


def step_of(name: str) -> int:
    """The step in the name of a checkpoint."""
    match = _NAME.match(name)
    assert match
    return int(match[1])


def state_of(storage: Storage, name: str) -> State | None:
    """The state of a complete checkpoint, {} where it is damaged; None if nothing was committed."""
    content = storage.read(f"{name}/{MANIFEST}")
    if content is None:
        return None
    try:
        return dict(json.loads(content)["state"])
    except (ValueError, KeyError, TypeError):
        return {}


def retained(complete: Mapping[str, State], spec: CheckpointSpec) -> set[str]:
    """The newest `keep`, the best, and the last of each span of training time, by name."""
    ordered = sorted(complete, key=lambda name: (step_of(name), name))
    names = set(ordered[-spec.keep :])
    if spec.keep_best:
        losses = {}
        for name in ordered:
            loss = complete[name].get("validation_loss")
            if loss is not None and math.isfinite(loss):
                losses[name] = loss
        if losses:
            names.add(min(losses, key=lambda name: losses[name]))
    if spec.keep_every_hours:
        span_seconds = spec.keep_every_hours * 3600
        last_of_spans = {}
        for name in ordered:
            seconds = complete[name].get("train_seconds")
            if seconds is not None:
                last_of_spans[int(seconds // span_seconds)] = name
        names.update(last_of_spans.values())
    return names
