"""The section `monitor`: how what serves is watched."""

from typing import Literal

from pydantic import Field

from rekindle.spec.platforms import Section
from rekindle.spec.schedule import Duration


class MonitorSpec(Section):
    """What servers log of their predictions, and how `rekindle monitor` judges it."""

    log: str = ""
    """Folder or URI of the log of predictions; default: `predictions` under the home folder, or
    under a platform's `artifact_root`."""
    text: Literal["hash", "store"] = "hash"
    """Whether the log holds texts, or only their hashes."""
    window: Duration = "1 month"
    """How far back a check looks."""
    min_rows: int = Field(100, ge=10, le=1_000_000)
    """Rows, and for live accuracy labels, that a check needs to say anything."""
    false_alarms: float = Field(0.05, gt=0, lt=0.5)
    """Probability that a check raises an alarm, by any of its signals, although nothing changed."""
    labels: str = ""
    """Where the true labels arrive, as in `data.source`: rows with `data.columns.key` and
    `data.columns.label`. Needs the key in what is sent to the server."""
    label_delay: Duration | None = None
    """How long labels take: live accuracy leaves out younger rows, whose early labels mislead."""
