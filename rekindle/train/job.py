"""What the ranks of one training are asked to do, as a JSON file that every rank reads."""

import contextlib
import dataclasses
import json
import os
import stat
import tempfile
import uuid
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter

from rekindle.data.manifest import Shards
from rekindle.data.reading import shared_shards
from rekindle.errors import RequestError
from rekindle.records import TrainingSummary, write_atomically
from rekindle.spec.model import ModelSpec, TrainSpec
from rekindle.train.modelfolder import weights_sha256


class StoredAsJson:
    """Base of dataclasses that lie on disk as JSON, for each rank to read."""

    def write(self, path: Path) -> None:
        fields = TypeAdapter(type(self)).dump_python(self, mode="json")
        write_atomically(path, json.dumps(fields, indent=2))

    @classmethod
    def read(cls, path: Path) -> Self:
        return TypeAdapter(cls).validate_python(json.loads(path.read_text()))


@dataclasses.dataclass(frozen=True)
class Job(StoredAsJson):
    """What is to be trained, as the step writes it for its ranks."""

    task: str
    run_key: str
    shards: str
    """What `shard` wrote."""
    output: str
    """Folder that receives the model."""
    history: str
    """Folder that receives the loss curve and the summary."""
    checkpoints: str
    """A folder or URI that belongs to the run key."""
    status: str
    """A folder that belongs to one attempt."""
    init: str
    """A model folder to start from; "": `model.source`."""
    init_from: str
    """How the spec names it, for the record."""
    model: ModelSpec
    train: TrainSpec
    code: str = ""
    """What code the folder of `init` may bring, as for `modelfolder.open_model`."""

    @classmethod
    def of(cls, *, artifact_root: str, run_key: str, **fields: Any) -> Self:
        """A job whose state lives under `<artifact_root>/checkpoints/<run_key>`."""
        checkpoints = folder_of(artifact_root, "checkpoints", run_key)
        job = cls(run_key=run_key, checkpoints=checkpoints, status="", **fields)
        return dataclasses.replace(job, status=str(attempt_in(job.working)))

    @property
    def working(self) -> Path:
        """The run key's folder on this machine: the checkpoints' own, or a temporary one."""
        return working_of(self.checkpoints)

    @property
    def cache(self) -> Path:
        """Where shards that are fetched lie on this node, for all attempts."""
        return _private() / f"{self.run_key}-shards"

    def reading(self) -> Shards:
        """The shards, as the ranks of a node read them together."""
        store = folder_of(root_of(self.checkpoints), "pieces", "").rstrip("/")
        return shared_shards(Path(self.shards), Path(self.status) / "checked", self.cache, store)

    @property
    def curve(self) -> Path:
        """The growing loss curve of the run key."""
        return self.working / "history.jsonl"

    def summarise(self, **fields: Any) -> None:
        """Leave the loss curve, damaged lines included, and the summary with these fields."""
        target = Path(self.history)
        target.mkdir(parents=True, exist_ok=True)
        if self.curve.exists():
            write_atomically(target / "history.jsonl", self.curve.read_text(errors="replace"))
        TrainingSummary(
            run_key=self.run_key,
            task=self.task,
            seed=self.train.seed,
            init_from=self.init_from,
            global_batch_size=self.train.global_batch_size,
            weights_sha256=weights_sha256(Path(self.output)),
            **fields,
        ).write(target / "training.json")

    def parameters(self) -> dict[str, Any]:
        """The settings that tracking shows beside the curves."""
        settings = {"task": self.task, "run_key": self.run_key, "init_from": self.init_from}
        for field, value in self.train.model_dump(mode="json").items():
            settings[f"train.{field}"] = value
        for field, value in self.model.model_dump(mode="json").items():
            settings[f"model.{field}"] = value
        return settings


def folder_of(artifact_root: str, kind: str, key: str) -> str:
    """`<artifact_root>/<kind>/<key>`: an absolute path or a URI."""
    root = artifact_root.removeprefix("file://").rstrip("/") or "/"
    if "://" not in root:
        root = str(Path(root).absolute())
    return f"{root}/{kind}/{key}"


def working_of(folder: str) -> Path:
    """A folder on this machine that belongs to `folder`: itself, or a temporary one."""
    return Path(folder) if "://" not in folder else _private() / folder.rpartition("/")[2]


def _private() -> Path:
    """This user's folder among temporary files, which ranks trust: ours alone, or RequestError."""
    folder = Path(tempfile.gettempdir()) / f"rekindle-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    others_can_write = status.st_mode & 0o022
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or others_can_write:
        message = "other users can write to this folder, or own it"
        fix = "have its owner delete it, or set TMPDIR to a folder of your own"
        raise RequestError(message, where=str(folder), fix=fix)
    if status.st_mode & 0o077:  # an earlier version's, which others can read
        folder.chmod(0o700)
    return folder


def attempt_in(working: Path) -> Path:
    """A folder for a new attempt."""
    return working / "attempts" / uuid.uuid4().hex[:8]


def root_of(folder: str) -> str:
    """The artifact root of a folder that `folder_of` names."""
    return folder.rsplit("/", 2)[0]
