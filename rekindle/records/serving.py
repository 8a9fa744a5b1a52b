"""A model that serves: its roll-out, its traffic, and what a monitor sees of it."""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from rekindle.records.base import Record, VersionedRecord

RolloutState = Literal[
    "shadow",
    "create",
    "smoke",
    "canary",
    "live",
    "settled",
    "roll_back",
    "rolled_back",
    "delete",
    "deleted",
]


class RolloutEvent(Record):
    """What a roll-out does next, written before it does it."""

    number: int
    state: RolloutState
    """For the `version`."""
    version: str
    previous: str
    """The version that had the requests before; "": none."""
    at: str
    """UTC, ISO 8601."""
    shares: Mapping[str, int]
    """Of requests, in percent, by version."""
    reason: str
    """Of a roll back."""
    digest: str = ""
    """The model's, where it is created."""
    inputs: str = ""
    """How clients ask it, where it is created."""


class VersionTraffic(Record):
    """What a version was asked since the shares last changed."""

    state: str
    share: int
    """Of requests, in percent."""
    requests: int
    errors: int
    """Requests that it failed (5xx)."""
    p50_ms: float | None
    """An upper bound; None without an answer."""
    p99_ms: float | None
    """An upper bound; None without an answer."""
    refused: int = 0
    """Requests that it refused (4xx)."""


class Deployment(VersionedRecord):
    """What `rekindle deploy --json` ends with: where a model serves."""

    name: str
    platform: str
    address: str
    versions: Mapping[str, VersionTraffic]
    """Those that stand there; none if the endpoint gives no answer."""
    events: tuple[RolloutEvent, ...]
    """What happened, oldest first."""
    version_hours: float = 0.0
    """For which versions stood, each of two at once counted."""
    usd: float | None = None
    """For these at the prices of today; None where they are unknown."""


class Signal(Record):
    """What a monitor compared."""

    name: str
    before: float
    """The mean in the rows that judged the model; of `prediction` the share of the class
    that was the most frequent; of `latency` the median in seconds of the window
    before."""
    now: float
    """The same in `rows`."""
    effect: float
    """How far both are apart: in points of unknown words and accuracy, in seconds of
    `latency`, else the distance of distributions, 0 to 1."""
    rows: int
    """Of production; of `latency` requests."""
    p_value: float
    detectable: float | None = None
    """About the change of the mean that is found in 80 of 100 checks."""
    alarm: bool = False


class Monitored(VersionedRecord):
    """Kind `monitored`: a check of what a model answered from `start` to `end`."""

    name: str
    version: str
    at: str
    start: str
    end: str
    verdict: Literal["alarm", "quiet", "too_few"]
    """Whether there is an alarm, or too few rows to tell."""
    reason: str
    """The verdict in a sentence."""
    rows: int
    """How many of the `version` were logged."""
    different: int | None = None
    """How many contents these have; None where no row tells its content."""
    left_out: Mapping[str, int] = Field(default_factory=dict)
    """Other rows, by why they do not count."""
    signals: tuple[Signal, ...] = ()
    expected_accuracy: float | None = None
    """Estimated from confidence, without labels."""
    p99_seconds: float | None = None
    """How long 99 of 100 requests took at most."""
