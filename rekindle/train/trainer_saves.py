"""Checkpoints of a training by transformers' Trainer, which writes them itself.

It writes into a folder of this machine. A checkpoint counts once rank 0 has written
`complete.json` into it, after all ranks. Where checkpoints belong into an object store,
each machine puts there what its ranks wrote, and fetches all of it before it resumes: the
Trainer reads and writes files, so they cannot stream as those of checkpoint.py do."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from rekindle.errors import CheckpointError
from rekindle.train.checkpoint_storage import checkpoint_storage
from rekindle.train.job import Job
from rekindle.train.mesh import of_all, of_first

COMPLETE = "complete.json"
CURVE = "history.jsonl"
_FOREIGN = "rekindle did not write it: find out who did, and remove it"


class TrainerSaves:
    """The checkpoints of one job. All ranks have to call `newest` and `complete`."""

    def __init__(self, job: Job) -> None:
        self.folder = job.working / "trainer"
        self.curve = job.curve
        self.keep = job.train.checkpoint.keep
        self.store = checkpoint_storage(f"{job.checkpoints}/trainer")
        self.is_away = "://" in job.checkpoints
        # one rank of each machine moves its files
        self.is_first_here = os.environ.get("LOCAL_RANK", "0") == "0"

    def newest(self) -> Path | None:
        """The newest complete checkpoint, on this machine; incomplete ones are removed."""
        if self.is_away and self.is_first_here:
            shutil.rmtree(self.folder, ignore_errors=True)
        newest: str | None = None
        if dist.get_rank() == 0:
            newest = max(self._complete_ones(), key=step_of, default=None)
        name = of_first(newest)
        if name and self.is_away and self.is_first_here:
            self._fetch(name)
        dist.barrier()
        return self.folder / name if name else None

    def _complete_ones(self) -> list[str]:
        names = []
        for name in self._names():
            if self.store.size(f"{name}/{COMPLETE}"):
                names.append(name)
            elif not self.is_away:  # a store may have one that another attempt is writing
                self.store.remove(name, first=COMPLETE)
        return names

    def _fetch(self, name: str) -> None:
        """Bring all files of a checkpoint to this machine, `complete.json` last."""
        complete = self.store.read(f"{name}/{COMPLETE}")
        assert complete is not None, "rank 0 has seen it"
        local_folder = self.folder / name
        local_folder.mkdir(parents=True, exist_ok=True)
        for file in json.loads(complete)["files"]:
            if Path(file).name != file:
                message = f"the checkpoint {name} names a file outside of it: {file}"
                raise CheckpointError(message, where=f"{self.store.root}/{name}", fix=_FOREIGN)
            if not self.store.download(f"{name}/{file}", local_folder / file):
                where = f"{self.store.root}/{name}"
                fix = "delete it: the same command goes on from the checkpoint before"
                raise CheckpointError(
                    f"{file} of the checkpoint {name} is gone", where=where, fix=fix
                )
        (local_folder / COMPLETE).write_bytes(complete)

    def curve_of(self, checkpoint: Path) -> str:
        """The loss curve up to a checkpoint, as JSON lines."""
        return (checkpoint / CURVE).read_text(errors="replace")

    def facts_of(self, checkpoint: Path) -> dict[str, str]:
        """What was in effect when a checkpoint was written."""
        facts: dict[str, str] = json.loads((checkpoint / COMPLETE).read_text())["facts"]
        return facts

    def complete(self, step: int, facts: Mapping[str, str]) -> None:
        """Have the checkpoint of a step count from now on; older ones than are kept go."""
        name = f"checkpoint-{step}"
        local_folder = self.folder / name
        if dist.get_rank() == 0:
            shutil.copyfile(self.curve, local_folder / CURVE)
        dist.barrier()
        files_here: list[str] = []
        if self.is_away and self.is_first_here:
            files_here = sorted(path.name for path in local_folder.iterdir() if path.is_file())
            for file in files_here:
                self.store.upload(local_folder / file, f"{name}/{file}")
        files = [file for files_of_rank in of_all(files_here) for file in files_of_rank]
        if dist.get_rank() > 0:
            return
        body = {"step": step, "world": dist.get_world_size(), "files": files, "facts": dict(facts)}
        self.store.put_new(f"{name}/{COMPLETE}", json.dumps(body).encode())
        for old in sorted(self._names(), key=step_of)[: -self.keep]:
            shutil.rmtree(self.folder / old, ignore_errors=True)
            self.store.remove(old, first=COMPLETE)

    def _names(self) -> list[str]:
        return [name for name in self.store.folders() if name.startswith("checkpoint-")]


def step_of(name: str) -> int:
    """The step of `checkpoint-<step>`."""
    return int(name.rpartition("-")[2])
