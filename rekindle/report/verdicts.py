"""What came of a run, in one plain sentence, and the one number that stands for it.

The registry's record has the last word, then the gate's evidence, then the run's own
status. Nothing is claimed that no record says: a run that failed after its gate passed is
a failure."""

import dataclasses
import math
from typing import Literal, NamedTuple

from rekindle import formats
from rekindle.records import (
    Comparison,
    Evidence,
    Registration,
    RunRecord,
    Slice,
    StepRecord,
)
from rekindle.report import texts
from rekindle.report.collect import RunFindings

_CHANCE = 0.025  # one-sided, as of an interval of 95 %
Tone = Literal["good", "bad", "wait", "quiet"]


@dataclasses.dataclass(frozen=True)
class CardVerdict:
    """`word` for a badge, `sentence` for a person,
    `reason` as the gate or the error put it."""

    tone: Tone
    word: str
    sentence: str
    reason: str = ""


class Headline(NamedTuple):
    """The metric that the gate looks at."""

    name: str
    value: float
    champion: float | None = None


def verdict(run: RunRecord, findings: RunFindings) -> CardVerdict:
    """What the reader wants to know first."""
    if run.status != "succeeded":
        return _unfinished(run, findings)
    if findings.registration:
        return _registered(findings.registration, findings)
    if findings.evidence:
        return _judged(findings.evidence)
    if run.platform != "local" and not run.steps:
        sentence = f"Finished on {run.platform}, which has its steps and logs."
        return CardVerdict("quiet", "finished", sentence)
    if run.settings:
        return _trained_in_grid(run, findings)
    done = sum(step.status == "succeeded" for step in run.steps)
    steps = "1 step" if done == 1 else f"{done} steps"
    if run.submission and run.submission.unread:
        sentence = f"Finished: {steps} done. What they left could not be read."
        return CardVerdict("quiet", "finished", sentence, run.submission.unread)
    # a pipeline of the user's own may have no gate
    return CardVerdict(
        "quiet", "finished", f"Finished: {steps} done, and no gate in this pipeline."
    )


def _judged(evidence: Evidence) -> CardVerdict:
    """The verdict on a run whose pipeline has a gate and registers no model."""
    if evidence.promote:
        sentence = "The gate passed; this run registered no model."
        return CardVerdict("quiet", "passed", sentence, evidence.reason)
    sentence = "Refused by the gate; this run registered no model."
    return CardVerdict("bad", "refused", sentence, evidence.reason)


def _trained_in_grid(run: RunRecord, findings: RunFindings) -> CardVerdict:
    """The verdict on one training of a grid, which the gate does not see alone."""
    loss = findings.training.validation.get("loss") if findings.training else None
    score = "" if loss is None else f": validation loss {formats.metric(loss)}"
    return CardVerdict(
        "quiet",
        "trained",
        f"A training of a grid, with {' '.join(run.settings)}{score}. "
        "Only the best of the grid is judged.",
    )


def gate_metric(run: RunRecord, findings: RunFindings) -> str:
    """The metric that decides: the compared one, else the configured one,
    else accuracy."""
    if findings.evidence and findings.evidence.comparison:
        return findings.evidence.comparison.metric
    # a spec may be of another version, or of a pipeline without a gate
    configured = texts.setting(run.spec, "evaluate", "gate", "metric")
    return configured if isinstance(configured, str) else "accuracy"


def headline(run: RunRecord, findings: RunFindings) -> Headline | None:
    """The gate's metric on held-out data; without it, the first metric that there is."""
    evidence = findings.evidence
    if not evidence or not evidence.metrics:
        return None
    name = gate_metric(run, findings)
    if name not in evidence.metrics:
        name = next(iter(evidence.metrics))
    return Headline(name, evidence.metrics[name], evidence.champion_metrics.get(name))


def failed_steps(run: RunRecord) -> tuple[StepRecord, ...]:
    """The steps to look at when a run did not succeed: failed, or else under way."""
    failed = tuple(step for step in run.steps if step.status == "failed")
    if failed:
        return failed
    under_way = []
    for step in run.steps:
        if step.started_at and step.status in ("running", "cancelled"):
            under_way.append(step)
    return tuple(under_way)


def _unfinished(run: RunRecord, findings: RunFindings) -> CardVerdict:
    """The verdict on a run that has not succeeded, or not yet."""
    if run.status == "running":
        sentence = f"Running on {run.platform} when last looked at."
        if run.platform == "local":
            sentence = (
                "Still running, or killed: the record was never closed. "
                "If nothing is at work on it, resume it."
            )
        return CardVerdict("wait", "running", sentence)
    steps = failed_steps(run)
    where = f" in step {steps[0].name}" if steps else ""
    # a run may fail after it has promoted its model
    champion = "No model was promoted."
    registration = findings.registration
    if registration and "champion" in registration.aliases:
        champion = f"Version {registration.version} of {registration.name} "
        champion += "had become champion before."
    error = run.error or next((step.error for step in steps if step.error), "")
    # the first line says what, and the rest is on the card
    reason = (error.strip().splitlines() or [""])[0].strip()
    if run.status == "submitting":
        sentence = "Sent, or about to be; it is not known whether it arrived. Submit it again."
        return CardVerdict("wait", "submitting", sentence, reason)
    if run.status == "cancelled":
        return CardVerdict("wait", "cancelled", f"Cancelled{where}. {champion}", reason)
    if run.status == "preempted":
        sentence = f"Stopped from outside{where}, after a save. {champion}"
        return CardVerdict("wait", "preempted", sentence, reason)
    return CardVerdict("bad", "failed", f"Failed{where}. {champion}", reason)


def _registered(registration: Registration, findings: RunFindings) -> CardVerdict:
    """The verdict on a run that has registered a model,
    or found its own among those that are registered."""
    model = f"version {registration.version} of {registration.name}"
    reason = findings.evidence.reason if findings.evidence else ""
    if registration.decision == "rolled_back":
        reason = registration.tags.get("rolled_back_for", "") or reason
        sentence = f"Rolled back: {model} was champion, and is not promoted again by itself."
        return CardVerdict("bad", "rolled back", sentence, reason)
    if not registration.created:
        nothing_new = f"Nothing new: the same work is already {model}"
        if "champion" in registration.aliases:
            sentence = f"{nothing_new}, the champion. No version was made."
            return CardVerdict("good", "champion", sentence, reason)
        sentence = f"{nothing_new}, a challenger. No version was made."
        return CardVerdict("quiet", "unchanged", sentence, reason)
    if registration.decision == "promoted":
        return CardVerdict("good", "promoted", f"Promoted: {model} is now the champion.", reason)
    if registration.decision == "approval_needed":
        return CardVerdict(
            "wait",
            "approval needed",
            f"Waiting for approval: {model} passed the gate and becomes champion when a person "
            "promotes it.",
            reason,
        )
    champion_version = findings.evidence.champion_version if findings.evidence else ""
    remains = "there is still no champion"
    if champion_version:
        remains = f"version {champion_version} stays champion"
    sentence = f"Refused: {model} is kept as a challenger, {remains}."
    return CardVerdict("bad", "refused", sentence, reason)


def improvement(
    name: str,
    candidate: float | None,
    champion: float | None,
    comparison: Comparison | None = None,
    slice_: Slice | None = None,
) -> tuple[float | None, Tone]:
    """Candidate minus champion, and whether that is good for this metric, where chance
    does not explain it: by the interval of `comparison` if it is of this metric, as
    `rekindle compare` has it, or by the p-value of the `slice_`, which knows losses only.
    Else it is quiet."""
    if candidate is None or champion is None or not math.isfinite(candidate - champion):
        return None, "quiet"
    change = candidate - champion
    if comparison is not None and comparison.metric == name:
        # a comparison is turned so that more is better
        if comparison.lower > 0:
            return change, "good"
        if comparison.upper < 0:
            return change, "bad"
        return change, "quiet"
    if slice_ is None or slice_.p_value is None or change == 0:
        return change, "quiet"
    is_loss = (change > 0) == texts.lower_is_better(name)
    if is_loss and slice_.p_value <= _CHANCE:
        return change, "bad"
    return change, "quiet"
