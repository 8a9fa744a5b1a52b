"""What one training gang is asked to do, as a JSON file that every rank reads."""

from __future__ import annotations

import dataclasses
import json
import uuid
from pathlib import Path
from typing import Any, Self

from rekindle.errors import RequestError
from rekindle.records import write_atomically
from rekindle.spec.model import ModelSpec, TrainSpec


@dataclasses.dataclass(frozen=True)
class Job:
    """Folders are absolute paths. `init` is a model folder to start from ("" = `model.source`).

    `checkpoints` outlives attempts and belongs to one run key; `status` belongs to one attempt;
    `output` receives the model, `history` the loss curve."""

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

    @classmethod
    def of(cls, *, artifact_root: str, run_key: str, **fields: Any) -> Self:
        """A job whose state lives under `<artifact_root>/checkpoints/<run_key>`."""
        if "://" in artifact_root:
            raise RequestError(
                f"checkpoints cannot go to {artifact_root} yet",
                where="artifact_root",
                fix="name a folder that all attempts see, such as a shared volume",
            )
        checkpoints = Path(artifact_root).absolute() / "checkpoints" / run_key
        status = checkpoints / "attempts" / uuid.uuid4().hex[:8]
        return cls(run_key=run_key, checkpoints=str(checkpoints), status=str(status), **fields)

    def parameters(self) -> dict[str, Any]:
        """The settings that tracking shows beside the curves."""
        sections = {
            "train": self.train.model_dump(mode="json"),
            "model": self.model.model_dump(mode="json"),
        }
        flat = {
            f"{name}.{key}": value for name, part in sections.items() for key, value in part.items()
        }
        return {"task": self.task, "run_key": self.run_key, "init_from": self.init_from, **flat}

    def write(self, path: Path) -> None:
        """Store it for `read`."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields["model"] = self.model.model_dump(mode="json")
        fields["train"] = self.train.model_dump(mode="json")
        write_atomically(path, json.dumps(fields, indent=2))

    @classmethod
    def read(cls, path: Path) -> Self:
        """The job that `write` stored."""
        fields = json.loads(path.read_text())
        fields["model"] = ModelSpec.model_validate(fields["model"])
        fields["train"] = TrainSpec.model_validate(fields["train"])
        return cls(**fields)
