"""What came of a run, in one plain sentence, and the one number that stands for it.

The registry's record has the last word, then the gate's evidence, then the run's own status.
Nothing is claimed that no record says: a run that failed after its gate passed is a failure."""

import dataclasses
import math
from pathlib import Path
from typing import Literal, NamedTuple

from rekindle import formats
from rekindle.records import Comparison, Registration, RunRecord, Slice, StepRecord
from rekindle.report import texts
from rekindle.report.collect import Findings
from rekindle.tables import rows

_CHANCE = 0.025  # one-sided, as of an interval of 95 %
_VERDICTS = Path(__file__).with_name("verdicts.yaml")
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
        return _said("passed" if evidence.promote else "not passed", evidence.reason)
    if run.platform != "local" and not run.steps:
        return _said("finished elsewhere", platform=run.platform)
    if run.settings:
        loss = (found.training.validation if found.training else {}).get("loss")
        score = "" if loss is None else f": validation loss {formats.metric(loss)}"
        return _said("of a grid", settings=" ".join(run.settings), score=score)
    done = sum(step.status == "succeeded" for step in run.steps)
    return _said("finished", steps=f"{done} step{'' if done == 1 else 's'}")


def _said(case: str, reason: str = "", **facts: str) -> Verdict:
    """The verdict of that name in verdicts.yaml, with `facts` in its sentence."""
    tone, word, sentence = rows(_VERDICTS)[case]
    return Verdict(tone, word, sentence.format(**facts), reason)


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
    if run.status == "running":
        case = "running" if run.platform == "local" else "running elsewhere"
        return _said(case, platform=run.platform)
    steps = failed_steps(run)
    where = f" in step {steps[0].name}" if steps else ""
    champion, held = "No model was promoted.", found.registration
    if held and "champion" in held.aliases:
        champion = f"Version {held.version} of {held.name} had become champion before."
    error = run.error or next((step.error for step in steps if step.error), "")
    reason = (error.strip().splitlines() or [""])[0].strip()
    return _said(run.status, reason, where=where, champion=champion)


def _registered(registration: Registration, found: Findings) -> Verdict:
    case: str = registration.decision
    reason, old = "", ""
    if found.evidence:
        reason, old = found.evidence.reason, found.evidence.champion_version
    if case == "rolled_back":
        reason = registration.tags.get("rolled_back_for", "") or reason
    elif not registration.created:
        case = "known champion" if "champion" in registration.aliases else "known challenger"
    model = f"version {registration.version} of {registration.name}"
    remains = f"version {old} stays champion" if old else "there is still no champion"
    return _said(case, reason, model=model, remains=remains)


def improvement(
    name: str,
    candidate: float | None,
    champion: float | None,
    comparison: Comparison | None = None,
    slice_: Slice | None = None,
) -> tuple[float | None, Tone]:
    """Candidate minus champion, and whether that is good for this metric, where chance does not
    explain it: by the interval of `comparison` if it is of this metric, as `rekindle compare` has
    it, or by the p-value of the `slice_`, which knows losses only. Else it is quiet."""
    if candidate is None or champion is None or not math.isfinite(candidate - champion):
        return None, "quiet"
    change = candidate - champion
    if comparison is not None and comparison.metric == name:
        if comparison.lower > 0:
            return change, "good"
        return change, "bad" if comparison.upper < 0 else "quiet"
    is_loss = (change > 0) == texts.lower_is_better(name) and change != 0
    if slice_ is not None and slice_.p_value is not None and is_loss:
        return change, "bad" if slice_.p_value <= _CHANCE else "quiet"
    return change, "quiet"
