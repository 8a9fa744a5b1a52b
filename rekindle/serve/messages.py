"""What processes that serve read and answer: which files are the model and what columns
its inputs have, the file that `rekindle deploy` writes and the router follows, and what
servers and the router say of each version. Imports no torch: the command line writes some
of it."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Optional

from pydantic import TypeAdapter

from rekindle.spec.model import ColumnsSpec


@dataclasses.dataclass(frozen=True)
class LogTo:
    """Where a server logs its predictions, which column of an instance is its id, "" for
    none, and whether texts are kept."""

    root: str
    key: str = ""
    text: bool = False


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """A version in the folder `path`, whose files have the hash `digest`. `evidence` is
    the file that is kept beside it, "" for none; `code` as for `open_model`; the rest as
    in the config."""

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
    """One that gets what this one answered, too, and whose answers are only counted."""

    @property
    def identity(self) -> str:
        """What a version that is deployed keeps."""
        return f"{self.digest}-{self.precision}".rstrip("-")

    @property
    def deployed_name(self) -> str:
        """What a platform calls the version, behind the name of its model: its number and
        the begin of its digest, such as `v7-0123abcd`."""
        return f"v{self.version}-{self.digest[:8]}"

    def with_shadow(self, shadow: "ServedModel") -> "ServedModel":
        """This version with another one in its shadow, as a version of its own: digits
        alone name it, which all platforms take."""
        # a platform counts it as another version, with a share of its own
        return dataclasses.replace(self, version=f"{SHADOWED}{shadow.version}", shadow=shadow)


SHADOWED = "0"
"""What the name of a version begins with that has another one in its shadow."""


@dataclasses.dataclass(frozen=True)
class ServeJob:
    """Where the server listens, which routes Vertex AI asks,
    whether it proves the model."""

    model: ServedModel
    host: str
    port: int
    smoke: bool
    health_route: str = "/health/ready"
    predict_route: str = "/predict"


WANTED = "wanted.json"
STATUS = "/-/status"
VERSION = "x-rekindle-version"
"""Header of a request that this version, with or without a share, has to answer."""
ABOUT_ROUTES = (
    "/openapi.json",
    "/v1/models",
    "/v1/models/{name}",
    "/v2",
    "/v2/models/{name}",
    "/v2/models/{name}/versions/{version}",
)
"""Routes of the server that describe its model. All others that it counts answer with what the
model predicts."""
STREAM_FAILED = re.compile(rb'^(data: )?\{"error"', re.MULTILINE)
"""The line in which a streamed answer says that it failed: JSON alone, or as the data of an event.
Its status was sent before."""
BOUNDS_MS = tuple(round(2 ** (step / 4), 3) for step in range(-8, 68))
"""Upper bounds of the counts of latencies, from 0.25 ms to 2 minutes."""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The versions that run, in the order in which they were created: of two with a share
    of requests, the first is the version before, and the other one is on trial. Shares
    are in percent. Requests are counted from the last change of `number` on."""

    number: int
    host: str
    port: int
    models: tuple[ServedModel, ...]
    shares: Mapping[str, int]

    @staticmethod
    def read(folder: Path) -> "Wanted":
        """What the file in a folder says. Raises OSError, ValueError for another file."""
        return WANTED_JSON.validate_json((folder / WANTED).read_bytes())


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Requests that a version was given since the shares last changed, those that it
    failed (5xx, or no answer), those that it refused (see `is_refusal`), and the others
    by latency: how many up to each of `BOUNDS_MS`, not cumulated, and above the last.
    `ends` is how often its process ended by itself meanwhile."""

    requests: int
    errors: int
    latencies: tuple[int, ...]
    ends: int = 0
    refused: int = 0


# client errors that say nothing of what a model reads: see `is_refusal`
_NO_REFUSALS = frozenset({404, 408, 413, 429, 499})


def is_refusal(status: int) -> bool:
    """Whether a version says by this status that it does not read the request. Not so
    where nothing is there (404), a body came too slowly (408) or is too large (413), the
    queue is full (429), or the client went away (499): these say nothing of what a model
    reads."""
    return 400 <= status < 500 and status not in _NO_REFUSALS


@dataclasses.dataclass(frozen=True)
class VersionStatus:
    """`state`: starting, ready, stopping or failed
    (then `reason` is the end of its log)."""

    state: str
    reason: str
    traffic: Traffic


@dataclasses.dataclass(frozen=True)
class Status:
    """What `GET /-/status` of the router answers; `answered` counts predictions (POST)
    since it started, but for those that ask for a version, as roll-outs do to prove
    one."""

    folder: str
    pid: int
    number: int
    answered: int
    versions: Mapping[str, VersionStatus]


@dataclasses.dataclass(frozen=True)
class Shadowed:
    """What the server process `replica` counted of the version in its shadow: answers,
    those among them that failed, those that are another label, tags or text, and requests
    that it was spared because it had not kept up. `refused` counts those among the
    answers that say that it does not read the request, which the version before has
    answered. `took_ms` and `before_ms` are how long 50 and 99 of 100 of its latest
    answers took, and those of the version that answers, where there were any."""

    replica: str
    answered: int
    failed: int
    differed: int
    spared: int
    took_ms: tuple[float, ...] = ()
    before_ms: tuple[float, ...] = ()
    refused: int = 0


ASK_SHADOW = {"rekindle/shadow": True}
"""The instance, alone in a body of `/predict`,
to which a server answers its `Shadowed`."""

SHADOWED_JSON = TypeAdapter(Shadowed)
WANTED_JSON = TypeAdapter(Wanted)
STATUS_JSON = TypeAdapter(Status)
