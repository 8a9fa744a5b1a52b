"""The sections `deploy` and `monitor`: how a new champion takes over where it serves, and
how what serves is watched."""

from typing import Literal, Self

from pydantic import Field, model_validator

from rekindle.spec.schedule import Duration
from rekindle.spec.section import Section


class DeploySpec(Section):
    """How `rekindle deploy` rolls a version out, and when it rolls it back."""

    machine: str = ""
    """Machine of a version, as its platform calls it, such as `ml.m5.large`; default: the
    platform's."""
    replicas: int = Field(1, ge=1, le=1_000)
    """Machines of each version; on this machine always one process."""
    precision: Literal["", "bf16", "int8"] = ""
    """Precision that a model is served in, on CPUs with int8; default: that of its
    training. It is measured on the test split first, on this machine."""
    max_precision_loss: float = Field(0.005, ge=0, lt=1)
    """Share of the test split's labels that it may answer wrongly because of `precision`,
    or, of a language model, by which its mean loss on a token of the test split may
    grow."""
    budget_usd_per_day: float | None = Field(None, gt=0)
    """What a deployment may cost a day while one version answers; a dearer one, or one
    whose price is unknown, is refused."""
    after_promotion: bool = False
    """Whether the shipped pipeline, or `rekindle run`, ends with a deployment of what the
    gate let pass, there where it runs; else `rekindle deploy` deploys the champion."""
    shadow: int = Field(0, ge=0, lt=100)
    """Percent of requests that the new version also answers, unseen, before its canary:
    for as long as a step, the version before answers them on machines that hold both, and
    both are compared."""
    max_disagreement: float | None = Field(None, gt=0, lt=1)
    """Share of requests that it may answer in the shadow with another label, other tags
    or another text than the version before; default: they are only counted."""
    canary: tuple[int, ...] = (10, 50)
    """Percent of requests that the new version gets, one step after another, before it
    gets all; `[]`: it gets all at once."""
    step_minutes: float = Field(5.0, ge=0)
    """How long a step lasts at least."""
    min_requests: int = Field(200, ge=1)
    """Requests that the new version answers in a step at least: with fewer, the step goes on."""
    max_error_rate: float = Field(0.01, ge=0, lt=1)
    """Share of requests that it may fail (status 5xx, or no answer)."""
    allow_other_inputs: bool = False
    """Whether a version may take over that is asked otherwise than the one that answers:
    by another column, or as another form (a chat, a prompt, words, images of another
    size). Without it such a version is refused before it gets a request, and a canary is
    rolled back that refuses (status 4xx) clearly more requests than the version before.
    Set it once all clients can send what the new version reads."""
    max_p99_ms: float | None = Field(None, gt=0, le=60_000)
    """Milliseconds within which it has to answer 99 of 100 requests; default: no such
    limit. In any case it is rolled back if clearly more than a tenth of its answers take
    1.4 times as long as all but the slowest twentieth of the version before."""
    alpha: float = Field(0.05, gt=0, lt=0.5)
    """Probability of rolling back a version that is as good as the one before, over all
    looks of a step."""

    @model_validator(mode="after")
    def _shares(self) -> Self:
        if list(self.canary) != sorted({*self.canary}) or not all(0 < s < 100 for s in self.canary):
            what = "percentages from 1 to 99 are needed, each above the one before"
            raise ValueError(f"canary: {what}")
        return self


class MonitorSpec(Section):
    """What servers log of their predictions, and how `rekindle monitor` judges it."""

    log: str = ""
    """Folder or URI of the log of predictions; default: `predictions` under the home
    folder, or under a platform's `artifact_root`."""
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
    `data.columns.label` (or `target`), and with those of `data.slices` to compare the
    accuracy of each slice. Needs the key in what is sent to the server."""
    label_delay: Duration | None = None
    """How long labels take: live accuracy leaves out younger rows, whose early labels mislead."""
