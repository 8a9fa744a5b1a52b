"""What came of a run, in one plain sentence, and the one number that stands for it.

The registry's record has the last word, then the gate's evidence, then the run's own status.
Nothing is claimed that no record says: a run that failed after its gate passed is a failure."""

import dataclasses
import math
from typing import Literal, NamedTuple

from rekindle import formats
from rekindle.records import Registration, RunRecord, StepRecord
from rekindle.report import texts
from rekindle.report.collect import Findings

Tone = Literal["good", "bad", "wait", "quiet"]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """`word` for a badge, `sentence` for a person, `reason` as the gate or the error put it."""

    tone: Tone
    word: str
    sentence: str
    reason: str = ""


class Headline(NamedTuple):
    """The metric that the gate looks at."""

    name: str
    value: float
    champion: float | None = None


def verdict(run: RunRecord, found: Findings) -> Verdict:
    """What the reader wants to know first."""
    if run.status != "succeeded":
        return _unfinished(run, found)
    if found.registration:
        return _registered(found.registration, found)
    if evidence := found.evidence:
        unused = "this run registered no model"
        if evidence.promote:
            return Verdict("quiet", "passed", f"The gate passed; {unused}.", evidence.reason)
        return Verdict("bad", "refused", f"Refused by the gate; {unused}.", evidence.reason)
    if run.platform != "local" and not run.steps:
        sentence = f"Finished on {run.platform}, which has its steps and logs."
        return Verdict("quiet", "finished", sentence)
    if run.settings:
        loss = (found.training.validation if found.training else {}).get("loss")
        score = "" if loss is None else f": validation loss {formats.metric(loss)}"
        sentence = f"A training of a grid, with {' '.join(run.settings)}{score}."
        sentence += " Only the best of the grid is judged."
        return Verdict("quiet", "trained", sentence)
    done = sum(step.status == "succeeded" for step in run.steps)
    steps = f"{done} step{'' if done == 1 else 's'}"
    return Verdict("quiet", "finished", f"Finished: {steps} done, and no gate in this pipeline.")


def gate_metric(run: RunRecord, found: Findings) -> str:
    """The metric that decides: the compared one, else the configured one, else accuracy."""
    if found.evidence and found.evidence.comparison:
        return found.evidence.comparison.metric
    configured = texts.setting(run.spec, "evaluate", "gate", "metric")
    return configured if isinstance(configured, str) else "accuracy"


def headline(run: RunRecord, found: Findings) -> Headline | None:
    """The gate's metric on held-out data; without it, the first metric that there is."""
    evidence = found.evidence
    if not evidence or not evidence.metrics:
        return None
    wanted = gate_metric(run, found)
    name = wanted if wanted in evidence.metrics else next(iter(evidence.metrics))
    return Headline(name, evidence.metrics[name], evidence.champion_metrics.get(name))


def failed_steps(run: RunRecord) -> tuple[StepRecord, ...]:
    """The steps to look at when a run did not succeed: failed, or else under way."""
    failed = tuple(step for step in run.steps if step.status == "failed")
    begun = (step for step in run.steps if step.started_at)
    return failed or tuple(step for step in begun if step.status in ("running", "cancelled"))


def _unfinished(run: RunRecord, found: Findings) -> Verdict:
    steps = failed_steps(run)
    where = f" in step {steps[0].name}" if steps else ""
    champion, held = " No model was promoted.", found.registration
    if held and "champion" in held.aliases:
        champion = f" Version {held.version} of {held.name} had become champion before."
    error = run.error or next((step.error for step in steps if step.error), "")
    reason = (error.strip().splitlines() or [""])[0].strip()
    match run.status:
        case "submitting":
            sentence = "Sent, or about to be; it is not known whether it arrived. Submit it again."
            return Verdict("wait", "submitting", sentence, reason)
        case "running" if run.platform != "local":
            return Verdict("wait", "running", f"Running on {run.platform} when last looked at.")
        case "running":
            sentence = "Still running, or killed: the record was never closed."
            sentence += " If nothing is at work on it, resume it."
            return Verdict("wait", "running", sentence)
        case "cancelled":
            return Verdict("wait", "cancelled", f"Cancelled{where}.{champion}", reason)
        case "preempted":
            sentence = f"Stopped from outside{where}, after a save.{champion}"
            return Verdict("wait", "preempted", sentence, reason)
        case _:
            return Verdict("bad", "failed", f"Failed{where}.{champion}", reason)


def _registered(registration: Registration, found: Findings) -> Verdict:
    model = f"version {registration.version} of {registration.name}"
    reason = found.evidence.reason if found.evidence else ""
    is_champion = "champion" in registration.aliases
    if registration.decision == "rolled_back":
        because = registration.tags.get("rolled_back_for", "")
        sentence = f"Rolled back: {model} was champion, and is not promoted again by itself."
        return Verdict("bad", "rolled back", sentence, because or reason)
    if not registration.created:
        role = "the champion" if is_champion else "a challenger"
        sentence = f"Nothing new: the same work is already {model}, {role}. No version was made."
        tone: Tone = "good" if is_champion else "quiet"
        return Verdict(tone, "champion" if is_champion else "unchanged", sentence, reason)
    match registration.decision:
        case "promoted":
            return Verdict("good", "promoted", f"Promoted: {model} is now the champion.", reason)
        case "approval_needed":
            sentence = f"Waiting for approval: {model} passed the gate"
            sentence += " and becomes champion when a person promotes it."
            return Verdict("wait", "approval needed", sentence, reason)
        case _:
            old = found.evidence.champion_version if found.evidence else ""
            remains = f"version {old} stays champion" if old else "there is still no champion"
            sentence = f"Refused: {model} is kept as a challenger, {remains}."
            return Verdict("bad", "refused", sentence, reason)


def improvement(
    name: str, candidate: float | None, champion: float | None
) -> tuple[float | None, Tone]:
    """Candidate minus champion, and whether that is good for this metric."""
    if candidate is None or champion is None or not math.isfinite(candidate - champion):
        return None, "quiet"
    change = candidate - champion
    if abs(change) < 5e-5:
        return change, "quiet"
    return change, "good" if (change < 0) == texts.lower_is_better(name) else "bad"
