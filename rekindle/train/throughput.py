"""How fast a run goes and how far it has come."""

from __future__ import annotations

import time
from typing import Any

from rekindle.launch.events import emit
from rekindle.records import HistoryRow
from rekindle.train.batches import Batches, Work
from rekindle.train.mesh import Mesh

PROGRESS_SECONDS = 0.25


class Clock:
    """Throughput of the gang and time to the end, from a moving window of recent steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.before = time.perf_counter()
        self.smooth = self.said = 0.0

    def tick(self, work: Work, mesh: Mesh, batches: Batches) -> dict[str, Any]:
        now = time.perf_counter()
        seconds, self.before = max(now - self.before, 1e-9), now
        self.smooth = seconds if not self.smooth else 0.9 * self.smooth + 0.1 * seconds
        size = batches.order.global_batch_size
        return {"samples_per_second": round(size / self.smooth, 2)}

    def report(self, row: HistoryRow) -> None:
        now = time.perf_counter()
        if now - self.said < PROGRESS_SECONDS and row.step < self.steps:
            return
        self.said = now
        emit(
            "progress", step=row.step, steps=self.steps, loss=row.loss,
            samples_per_second=row.samples_per_second,
            eta_seconds=(self.steps - row.step) * self.smooth,
        )  # fmt: skip
