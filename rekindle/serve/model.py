"""What a server, or a batch inference, is asked to do: which files are the model, and what columns
its inputs have. Imports no torch: the command line writes it."""

import dataclasses
from typing import Optional

from rekindle.spec.model import ColumnsSpec


@dataclasses.dataclass(frozen=True)
class LogTo:
    """Where a server logs its predictions, which column of an instance is its id, "" for none, and
    whether texts are kept."""

    root: str
    key: str = ""
    text: bool = False


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """A version in the folder `path`, whose files have the hash `digest`. `evidence` is the file
    that is kept beside it, "" for none; `code` as for `open_model`; the rest as in the config."""

    name: str
    version: str
    digest: str
    path: str
    evidence: str
    code: str
    columns: ColumnsSpec
    image_size: tuple[int, int] | None
    precision: str = ""
    """bf16 or int8; "": as trained."""
    log: LogTo | None = None
    shadow: Optional["ServedModel"] = None
    """Another one that is given what this one answered, and whose answers are only counted."""

    @property
    def identity(self) -> str:
        """What a version that is deployed keeps."""
        return f"{self.digest}-{self.precision}".rstrip("-")

    def with_shadow(self, shadow: "ServedModel") -> "ServedModel":
        """This version with another one in its shadow, as a version of its own: digits alone name
        it, which all platforms take."""
        return dataclasses.replace(self, version=f"{SHADOWED}{shadow.version}", shadow=shadow)


SHADOWED = "0"
"""What the name of a version begins with that has another one in its shadow."""


@dataclasses.dataclass(frozen=True)
class ServeJob:
    """Where the server listens, on which routes Vertex AI asks, and whether it proves the model."""

    model: ServedModel
    host: str
    port: int
    health_route: str
    predict_route: str
    smoke: bool
