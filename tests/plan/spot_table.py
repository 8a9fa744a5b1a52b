"""The table in docs/spot.md: what the four presets mean for one training. `python -m
tests.plan.spot_table` prints it."""

from __future__ import annotations

import sys
from typing import get_args

import numpy as np

from rekindle.catalog.tables import presets
from rekindle.plan.risk import InterruptibleWork, Reclaims, hazard
from rekindle.plan.simulation import simulate
from rekindle.plan.spot import Offer, Outlook, SpotNeeds, weigh

# ten hours of steps on eight nodes; prices are round, so that nobody takes them for an offer
WORK = InterruptibleWork(
    steps=36_000,
    step_seconds=1.0,
    save_seconds=10.0,
    commit_seconds=60.0,
    restart_seconds=300.0,
    wait_seconds=600.0,
)
NODES = 8
OFFER = Offer(spot_usd_per_hour=100.0, on_demand_usd_per_hour=250.0)
NEEDS = SpotNeeds(max_run_hours=16.0, budget_usd=1_500.0, deadline_hours=16.0)
HEADINGS = (
    "hazard",
    "reclaims",
    "interrupted every",
    "save every",
    "hours p50 (p10 to p90)",
    "lost",
    "cost",
    "in 16 h",
    "under $1,500",
    "on demand in the end",
    "cost then",
)


def table() -> str:
    """As Markdown, two lines a preset."""
    lines = [f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
    for name in presets():
        spot = weigh(WORK, hazard(name), NODES, OFFER, NEEDS)
        for reclaims in get_args(Reclaims):
            cells = (name, reclaims, *_cells(getattr(spot, reclaims), spot.every))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cells(outlook: Outlook, every: int) -> tuple[str, ...]:
    mixed = outlook.fallback
    assert mixed is not None
    wall = simulate(WORK, every, 1 / outlook.mtbf_hours).wall
    low, middle, high = np.quantile(wall, (0.1, 0.5, 0.9))
    return (
        _duration(outlook.mtbf_hours),
        f"{every * WORK.step_seconds / 60:.0f} min",
        f"{middle:.1f} ({low:.1f} to {high:.1f})",
        f"{outlook.expected.lost_hours:.1f} h",
        f"${outlook.expected_usd:,.0f}",
        f"{outlook.in_time:.0%}",
        f"{outlook.in_budget:.0%}",
        f"{mixed.chance:.0%}",
        f"${outlook.fallback_usd:,.0f}",
    )


def _duration(hours: float) -> str:
    if hours < 2:
        return f"{hours * 60:.0f} min"
    return f"{hours:.0f} h" if hours < 72 else f"{hours / 24:.0f} days"


if __name__ == "__main__":
    sys.stdout.write(table())
