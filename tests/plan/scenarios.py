"""Trainings that the formulas are held against: what differs is how they save, start and wait."""

from __future__ import annotations

import dataclasses

from rekindle.plan.risk import InterruptibleWork

RUNS = 10_000
MTBF_HOURS = (1 / 3, 1.0, 6.0, 24.0, 168.0, 720.0)

_PLAIN = InterruptibleWork(
    steps=720, step_seconds=10.0, save_seconds=30.0, restart_seconds=120.0, wait_seconds=300.0
)


def _with(**changes: object) -> InterruptibleWork:
    return dataclasses.replace(_PLAIN, **changes)


# name -> the training, and the steps between two saves if the user fixed them
SETTINGS: dict[str, tuple[InterruptibleWork, int | None]] = {
    "saves that block": (_PLAIN, None),
    "saves beside training": (_with(save_seconds=5.0, commit_seconds=90.0), None),
    "saves faster than they are committed": (
        _with(steps=240, save_seconds=5.0, commit_seconds=90.0),
        5,
    ),
    "slow saves, slow starts": (_with(save_seconds=120.0, restart_seconds=400.0), None),
    "machines at once": (_with(wait_seconds=0.0), None),
    "long waits, a rest of steps": (_with(steps=701, wait_seconds=1800.0), 70),
}
