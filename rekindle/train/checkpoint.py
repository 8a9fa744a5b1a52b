"""Training state that survives being killed at any instant, and is never trusted when it did not.

A checkpoint is a folder `step-<step>.<attempt>` in the folder of its run key. Tensors (weights,
optimizer moments) are written by torch.distributed.checkpoint, in the background; everything else
is JSON in `state.json`. `manifest.json` with the size and SHA-256 of every file is written last: it
is the commit. The newest complete checkpoint wins; one whose files do not match its manifest is
skipped, loudly. DCP pickles its own `.metadata`, so that file is read with an allow-list, after its
hash was checked; tensors only, no pickled objects."""

from __future__ import annotations

import dataclasses
import json
import logging
import pickle
import re
import shutil
import uuid
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save

from rekindle.errors import CheckpointError
from rekindle.records import write_atomically
from rekindle.spec.identity import file_sha256

log = logging.getLogger(__name__)

_NAME = re.compile(r"^step-(\d{9})\.[0-9a-f]{8}$")
_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    (f"{_DCP}.metadata", "Metadata"),
    (f"{_DCP}.metadata", "MetadataIndex"),
    (f"{_DCP}.metadata", "TensorStorageMetadata"),
    (f"{_DCP}.metadata", "TensorProperties"),
    (f"{_DCP}.metadata", "ChunkStorageMetadata"),
    (f"{_DCP}.metadata", "StorageMeta"),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
}

State = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its folder, the optimizer step it was taken after, and its JSON
    state.
    """

    folder: Path
    step: int
    state: State


def newest(root: Path) -> Checkpoint | None:
    """The newest checkpoint under `root` whose files all match its manifest, or None. Broken ones
    are reported.
    """
    for folder in _folders(root):
        if not (folder / "manifest.json").exists():
            continue
        problem = broken(folder)
        if problem:
            log.warning(
                "checkpoint %s is broken (%s); falling back to the one before", folder.name, problem
            )
            continue
        return Checkpoint(folder, _step(folder), json.loads((folder / "state.json").read_text()))
    return None


def broken(folder: Path) -> str:
    """What is wrong with a committed checkpoint, or "" when every file has its size and hash."""
    try:
        files = json.loads((folder / "manifest.json").read_text())["files"]
    except (OSError, ValueError, KeyError) as error:
        return f"manifest.json cannot be read: {error}"
    for entry in files:
        path = folder / entry["path"]
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            return f"{entry['path']} is missing or has another size"
        if file_sha256(path) != entry["sha256"]:
            return f"{entry['path']} does not match its hash"
    return ""


class Checkpointer:
    """Saves in the background, commits, and keeps the newest `keep`. One an engine; all ranks call
    it alike.
    """

    def __init__(self, root: Path, keep: int) -> None:
        self.root, self.keep = root, keep
        # Two groups of their own: the save in the background runs collectives at any time, and
        # they must interleave neither with those of a step nor with the vote on whether it is done.
        self.group = dist.new_group(backend="gloo")
        self.vote = dist.new_group(backend="gloo")
        self.pending: tuple[Future[Any], Path, State] | None = None

    def save(self, step: int, tensors: Mapping[str, Any], state: State) -> None:
        """Start saving; waits for the save before, so that at most one is in flight."""
        self.wait()
        name = [f"step-{step:09d}.{uuid.uuid4().hex[:8]}"]
        dist.broadcast_object_list(name, src=0, group=self.vote)
        folder = self.root / name[0]
        writer = FileSystemWriter(folder, sync_files=True)
        future = async_save(dict(tensors), storage_writer=writer, process_group=self.group)
        assert isinstance(future, Future)
        self.pending = (future, folder, state)

    def wait(self) -> None:
        """Finish and commit the save in flight, if there is one; returns after the commit, on every
        rank.
        """
        if self.pending is None:
            return
        future, folder, state = self.pending
        self.pending = None
        future.result()
        if dist.get_rank() == 0:
            _commit(folder, state)
            _forget(self.root, self.keep)
        dist.barrier(group=self.vote)

    def committed(self) -> None:
        """Commit the save in flight if it has finished everywhere; never waits for one that has
        not.
        """
        if self.pending is None:
            return
        finished = torch.tensor(float(self.pending[0].done()))
        dist.all_reduce(finished, dist.ReduceOp.MIN, group=self.vote)
        if finished.item():
            self.wait()


def load(checkpoint: Checkpoint, tensors: dict[str, Any]) -> None:
    """Fill `tensors` in place from the checkpoint; raises CheckpointError when they do not fit."""
    try:
        dcp_load(tensors, storage_reader=_Reader(checkpoint.folder))
    except (CheckpointException, RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"the checkpoint {checkpoint.folder.name} does not fit this model: {error}",
            where=str(checkpoint.folder),
            fix="remove the folder to train from the start",
        ) from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise CheckpointError(
            f"the checkpoint's metadata names {module}.{name}, which is not allowed"
        )


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata: Metadata = _Unpickler(file).load()
        return metadata


def _folders(root: Path) -> list[Path]:
    """Checkpoint folders, newest step first."""
    if not root.is_dir():
        return []
    return sorted((p for p in root.iterdir() if _NAME.match(p.name)), key=_step, reverse=True)


def _step(folder: Path) -> int:
    match = _NAME.match(folder.name)
    assert match
    return int(match[1])


def _commit(folder: Path, state: State) -> None:
    write_atomically(folder / "state.json", json.dumps(state))
    files = [
        {
            "path": path.relative_to(folder).as_posix(),
            "bytes": path.stat().st_size,
            "sha256": file_sha256(path),
        }
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    ]
    write_atomically(
        folder / "manifest.json", json.dumps({"schema_version": 1, "files": files}, indent=2)
    )


def _forget(root: Path, keep: int) -> None:
    """Remove all but the newest `keep` complete checkpoints, and what attempts before this one left
    half-written.
    """
    complete = [folder for folder in _folders(root) if (folder / "manifest.json").exists()]
    kept = set(complete[:keep])
    for folder in _folders(root):
        if folder not in kept:
            shutil.rmtree(folder, ignore_errors=True)
