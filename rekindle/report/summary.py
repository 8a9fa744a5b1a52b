"""What a run came to, as `run --json` ends with it and lists show it."""

from __future__ import annotations

from rekindle.records import Decision, GateSummary, ModelSummary, RunRecord, RunSummary, StepSummary
from rekindle.report.collect import Findings, collect


def summarised(record: RunRecord, findings: Findings | None = None, card: str = "") -> RunSummary:
    """The run and what its steps found; `card` is the path of its card."""
    found = findings or collect(record, history=False)
    return RunSummary(
        run_id=record.run_id,
        run_key=found.fingerprint.run_key if found.fingerprint else "",
        status=record.status,
        seconds=record.seconds,
        steps=tuple(
            StepSummary(
                name=s.name, status=s.status, seconds=s.seconds, cached=s.cached, reason=s.reason
            )
            for s in record.steps
        ),
        metrics=found.evidence.metrics if found.evidence else {},
        gate=gate_of(found),
        model=model_of(found),
        card=card,
        warnings=found.evidence.warnings if found.evidence else (),
        window=found.fingerprint.window if found.fingerprint else "",
        ignored=record.ignored,
    )


def gate_of(found: Findings) -> GateSummary | None:
    """Whether the model of this run is the champion now, and why or why not."""
    if found.evidence is None:
        return None
    waits: Decision = "pending" if found.evidence.promote else "refused"
    decision = found.registration.decision if found.registration else waits
    return GateSummary(
        promoted=decision == "promoted",
        decision=decision,
        passed=found.evidence.promote,
        reason=found.evidence.reason,
        champion_version=found.evidence.champion_version,
        comparison=found.evidence.comparison,
    )


def model_of(found: Findings) -> ModelSummary | None:
    """Where the registry holds the model."""
    if (where := found.registration) is None:
        return None
    return ModelSummary(
        name=where.name, version=where.version, aliases=where.aliases, created=where.created
    )
