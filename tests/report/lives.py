"""A home in which a model lived through ten months: candidates, and what a monitor found.

`python -m tests.report.lives FOLDER` writes one and its index."""

from __future__ import annotations

import sys
from pathlib import Path

from rekindle.records import Comparison, Evidence, Monitored, RunRecord, Signal
from tests.report.homes import Home, began, digest, registration, spec, steps

# a month: the candidate's accuracy, that of the champion on the same rows, and what became of it
MONTHS = (
    (1, 0.712, None, "promoted"),
    (2, 0.731, 0.708, "promoted"),
    (3, 0.728, 0.730, "refused"),
    (4, 0.752, 0.726, "promoted"),
    (5, 0.741, 0.745, "refused"),
    (6, 0.760, 0.735, "promoted"),
    (7, 0.699, 0.731, "refused"),
    (9, 0.744, 0.690, "promoted"),
    (10, 0.751, 0.748, "approval_needed"),
)
LIVE = {2: 0.72, 3: 0.73, 4: 0.71, 5: 0.735, 6: 0.72, 7: 0.655, 8: 0.641, 9: 0.72, 10: 0.738}
ALARMS = (7, 8)


def candidate(
    home: Home,
    name: str,
    month: int,
    value: float,
    champion: float | None,
    decision: str,
    metric: str = "accuracy",
) -> RunRecord:
    """A run of the 28th of a month, by the gate's `metric`; the interval reaches 0.02 to each side."""
    run_id = f"2026{month:02}28-060000-{name}-{month:04x}"
    sign = -1 if metric == "log_loss" else 1
    comparison = None
    if champion is not None:
        gain = sign * (value - champion)
        comparison = Comparison(
            metric=metric,
            estimate=gain,
            lower=gain - 0.02,
            upper=gain + 0.02,
            confidence=0.95,
            resamples=2000,
            seed=0,
        )
    evidence = Evidence(
        run_key=digest(run_id),
        promote=decision != "refused",
        reason=f"{decision} by the gate",
        checks=(),
        metrics={metric: value},
        champion_metrics={metric: champion} if champion else {},
        comparison=comparison,
        rows=450,
        examples="e",
    )
    aliases = ("champion",) if decision == "promoted" else ()
    artifacts = {
        "evaluate": home.artifact(run_id, "evaluate", "evidence", evidence),
        "register": home.artifact(
            run_id, "register", "registration", registration(name, str(month), decision, aliases)
        ),
    }
    return home.run(
        run_id=run_id,
        name=name,
        status="succeeded",
        started_at=began(run_id),
        seconds=204.0,
        spec=spec(name, "text_classification", "configs/data/reviews.jsonl", metric=metric),
        steps=steps(home, run_id, artifacts, {"evaluate": 12.0, "register": 4.0}),
    )


def check(name: str, month: int, now: float | None, *, alarm: bool) -> Monitored:
    """What a monitor found on the 20th of a month; without `now` no labels had arrived."""
    at = f"2026-{month:02}-20T06:00:00+00:00"
    fields = {"before": 0.1, "effect": 0.03, "rows": 400, "p_value": 0.001}
    signals = [Signal(name="unknown", now=0.13, alarm=alarm, **fields)]
    if now is not None:
        signals.append(Signal(name="accuracy", now=now, **fields))
    return Monitored(
        name=name,
        version="1",
        at=at,
        start=at,
        end=at,
        verdict="alarm" if alarm else "quiet",
        reason="unknown words went from 10.0% to <13.0%>" if alarm else "2 signals are as before",
        rows=400,
        signals=tuple(signals),
    )


def lived(home: Home, name: str = "reviews", labels: bool = True) -> None:
    """Nine candidates of a year, and nine checks of which two are alarms."""
    for month in MONTHS:
        candidate(home, name, *month)
    found = [
        check(name, month, now if labels else None, alarm=month in ALARMS)
        for month, now in LIVE.items()
    ]
    file = home.root / "monitored" / f"{name}.jsonl"
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(f"{one.to_json()}\n" for one in found), encoding="utf-8")


if __name__ == "__main__":
    from rekindle.report.index import render_index

    lived(Home(Path(sys.argv[1])))
    print(render_index(Path(sys.argv[1])))
