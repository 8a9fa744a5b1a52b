"""What interruptions cost a choice: its training as risk.py sees it; what neither the config nor
the catalog knows is assumed (assumptions.yaml)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rekindle.catalog.tables import rows
from rekindle.plan import risk
from rekindle.plan.choice import Choice
from rekindle.plan.spot import Needs, Offer, Spot, weigh
from rekindle.spec.model import Spec


@functools.cache
def assumed() -> Mapping[str, Any]:
    table: Mapping[str, Any] = rows(Path(__file__).with_name("assumptions.yaml"))
    return table


def training(choice: Choice, steps: int) -> risk.Work:
    """What saving, starting and waiting take, as far as it is known."""
    known, option = assumed(), choice.option
    per_weight = 3 * option.work.weights_bytes  # a weight and two moments
    saved = per_weight * option.work.shape.parameters
    ranks = option.cluster.gpus
    stored = known["store_bytes_per_second"]["value"] * choice.fleet.nodes
    return risk.Work(
        steps=steps, step_seconds=option.step.seconds,
        save_seconds=saved / ranks / known["save_bytes_per_second"]["value"],
        commit_seconds=saved / stored,
        restart_seconds=known["start_seconds"]["value"] + saved / stored,
        wait_seconds=known["wait_seconds"]["value"],
        notice_seconds=known["notice_seconds"].get(choice.fleet.machine.cloud, 0.0),
    )  # fmt: skip


def spot_of(spec: Spec, choice: Choice, steps: int | None) -> Spot | None:
    """Spot machines instead; None if the steps, or a price below on demand, are not known."""
    dear, cheap = choice.fleet.usd_per_hour(), choice.fleet.usd_per_hour(spot=True)
    if steps is None or dear is None or cheap is None:
        return None
    limits = spec.resources
    needs = Needs(limits.max_run_hours, limits.budget_usd, limits.deadline_hours)
    work = training(choice, steps)
    given = "every" in spec.train.checkpoint.model_fields_set
    every = spec.train.checkpoint.every if given else None
    return weigh(
        work, risk.hazard(limits.hazard), choice.fleet.nodes, Offer(cheap, dear), needs, every
    )
