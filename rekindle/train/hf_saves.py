"""Which checkpoints of the Trainer of transformers count, and where they are.

The Trainer writes into a folder of this machine. A checkpoint counts once `complete.json` lies in
it, which rank 0 writes when all ranks have written theirs. Where checkpoints belong into an object
store, each machine puts what its ranks wrote there first, and fetches all of it before it resumes.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import torch.distributed as dist

from rekindle.records import write_atomically
from rekindle.train.job import Job
from rekindle.train.mesh import of_all, of_first
from rekindle.train.storage import Storage, storage_of

COMPLETE, CURVE = "complete.json", "history.jsonl"


class Saves:
    """Those of a job. All ranks call each method."""

    def __init__(self, job: Job) -> None:
        self.folder, self.curve = job.working / "trainer", job.curve
        self.keep = job.train.checkpoint.keep
        self.store: Storage | None = None
        if "://" in job.checkpoints:
            self.store = storage_of(f"{job.checkpoints}/trainer")
        self.first_here = os.environ.get("LOCAL_RANK", "0") == "0"

    def newest(self) -> Path | None:
        """The newest complete checkpoint, on this machine, the same on all ranks. What attempts
        before left incomplete is removed here."""
        if self.store is not None and self.first_here:
            shutil.rmtree(self.folder, ignore_errors=True)
        name = of_first(self._newest() if dist.get_rank() == 0 else None)
        if name and self.store is not None and self.first_here:
            self._fetch(name, self.store)
        dist.barrier()
        return self.folder / name if name else None

    def _newest(self) -> str | None:
        if self.store is not None:
            found = [n for n in self.store.folders() if self.store.size(f"{n}/{COMPLETE}")]
        else:
            found = [path.name for path in self.folder.glob("checkpoint-*")]
            for name in found:
                if not (self.folder / name / COMPLETE).exists():
                    shutil.rmtree(self.folder / name)
            found = [name for name in found if (self.folder / name).exists()]
        return max(found, key=step_of, default=None)

    def _fetch(self, name: str, store: Storage) -> None:
        complete = store.read(f"{name}/{COMPLETE}")
        assert complete is not None, "rank 0 has seen it"
        (self.folder / name).mkdir(parents=True, exist_ok=True)
        for file in json.loads(complete)["files"]:
            with (
                store.reader(f"{name}/{file}") as source,
                (self.folder / name / file).open("wb") as target,
            ):
                shutil.copyfileobj(source, target)
        (self.folder / name / COMPLETE).write_bytes(complete)

    def completed(self, step: int, facts: Mapping[str, str]) -> None:
        """All ranks have written the checkpoint of a step: it counts from now on, and older ones
        than are kept go."""
        name = f"checkpoint-{step}"
        here = self.folder / name
        if dist.get_rank() == 0:
            shutil.copyfile(self.curve, here / CURVE)
        dist.barrier()
        mine: list[str] = []
        if self.store is not None and self.first_here:
            mine = sorted(path.name for path in here.iterdir() if path.is_file())
            for file in mine:
                self.store.write(f"{name}/{file}", functools.partial(_copied, here / file))
        files = [file for each in of_all(mine) for file in each]
        if dist.get_rank() > 0:
            return
        body = {"step": step, "world": dist.get_world_size(), "files": files, "facts": dict(facts)}
        write_atomically(here / COMPLETE, json.dumps(body))
        names = [path.name for path in self.folder.glob("checkpoint-*")]
        if self.store is not None:
            self.store.put_new(f"{name}/{COMPLETE}", json.dumps(body).encode())
            names = self.store.folders()
        for old in sorted(names, key=step_of)[: -self.keep]:
            shutil.rmtree(self.folder / old, ignore_errors=True)
            if self.store is not None:
                self.store.remove(old, COMPLETE)


def facts_of(checkpoint: Path) -> dict[str, str]:
    """What was in effect when it was written."""
    facts: dict[str, str] = json.loads((checkpoint / COMPLETE).read_text())["facts"]
    return facts


def curve_of(checkpoint: Path) -> str:
    """The loss curve up to there, which counts whatever is left on this machine."""
    return (checkpoint / CURVE).read_text(errors="replace")


def step_of(name: str) -> int:
    """Of `checkpoint-12`: 12."""
    return int(name.rpartition("-")[2])


def _copied(path: Path, target: BinaryIO) -> None:
    with path.open("rb") as source:
        shutil.copyfileobj(source, target)
