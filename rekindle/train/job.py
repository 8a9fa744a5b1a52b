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


class Stored:
    """Base of dataclasses that lie on disk as JSON, for each rank to read."""

    def write(self, path: Path) -> None:
        fields = TypeAdapter(type(self)).dump_python(self, mode="json")
        write_atomically(path, json.dumps(fields, indent=2))

    @classmethod
    def read(cls, path: Path) -> Self:
        return TypeAdapter(cls).validate_python(json.loads(path.read_text()))


@dataclasses.dataclass(frozen=True)
class Job(Stored):
    """`checkpoints`, a folder or URI, belongs to one run key, `status` to one attempt; `output`
    receives the model, `history` the loss curve. `init` is a model folder to start from ("" =
    `model.source`), `code` what it may bring."""

    task: str
    run_key: str
    shards: str
    output: str
    history: str
    checkpoints: str
    status: str
    init: str
    init_from: str
    model: ModelSpec
    train: TrainSpec
    code: str = ""

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
        return self.working / "history.jsonl"

    def summarise(self, **found: Any) -> None:
        """Leave the loss curve, damaged lines included, and the summary with what was `found`."""
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
            **found,
        ).write(target / "training.json")

    def parameters(self) -> dict[str, Any]:
        """The settings that tracking shows beside the curves."""
        found = {"task": self.task, "run_key": self.run_key, "init_from": self.init_from}
        for name, section in (("train", self.train), ("model", self.model)):
            found |= {f"{name}.{k}": value for k, value in section.model_dump(mode="json").items()}
        return found


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
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        what = "other users can write to this folder, or own it"
        fix = "have its owner delete it, or set TMPDIR to a folder of your own"
        raise RequestError(what, where=str(folder), fix=fix)
    if found.st_mode & 0o077:  # an earlier version's, which others can read
        folder.chmod(0o700)
    return folder


def attempt_in(working: Path) -> Path:
    return working / "attempts" / uuid.uuid4().hex[:8]


def root_of(folder: str) -> str:
    """The artifact root of a folder that `folder_of` names."""
    return folder.rsplit("/", 2)[0]
