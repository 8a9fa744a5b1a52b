"""What tests share with plan/test_risk.py."""

from __future__ import annotations

import functools

from hypothesis import strategies as st

from rekindle.plan.risk import InterruptibleWork, interval
from tests.plan.events import Runs, simulate
from tests.plan.scenarios import RUNS, SETTINGS


@functools.cache
def runs_of(
    setting: str, mtbf_hours: float, runs: int = RUNS
) -> tuple[InterruptibleWork, int, Runs]:
    work, every = SETTINGS[setting]
    every = every or interval(work, 1 / mtbf_hours)
    return work, every, simulate(work, every, 1 / mtbf_hours, runs, seed=20261123)


works = st.builds(
    InterruptibleWork,
    steps=st.integers(1, 20_000),
    step_seconds=st.floats(0.05, 60),
    save_seconds=st.floats(0, 300),
    restart_seconds=st.floats(0, 900),
    commit_seconds=st.floats(0, 600),
    wait_seconds=st.floats(0, 7200),
)


rates = st.floats(1e-6, 4.0)


everys = st.integers(1, 2_000)
