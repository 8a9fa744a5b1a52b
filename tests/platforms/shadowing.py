"""A roll-out through the shadow, the same on every platform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rekindle.serve.messages import ServedModel
from rekindle.serve.rollout import Rollout
from rekindle.spec.deploy import DeploySpec

SHADOW = DeploySpec(
    shadow=20,
    max_disagreement=0.1,
    canary=(),
    step_minutes=0,
    min_requests=100,
    max_error_rate=0.02,
)


def goes_through_the_shadow(
    rollout: Callable[[], Rollout],
    before: ServedModel,
    next_: ServedModel,
    shadowed: dict[str, Any],
) -> None:
    """One version is settled after its shadow, another one does not come out of it; `before` answers now."""

    def to(model: ServedModel, now: ServedModel) -> list[Any]:
        made = rollout()
        seen = len(made.log.events())
        made.spec, made.before = SHADOW, now
        made.to(model)
        return made.log.events()[seen:]

    shadowed.update(differed=250)
    events = to(next_, before)
    assert [event.state for event in events] == ["shadow", "roll_back", "rolled_back"]
    assert "answered 50.0% of 500 requests otherwise; 10.0% are allowed" in events[-1].reason
    assert rollout().endpoint.standing() == {before.version: ("ready", 100)}
    shadowed.update(differed=3)
    events = to(next_, before)
    assert [event.state for event in events] == ["shadow", "create", "smoke", "live", "settled"]
    assert events[1].reason.startswith("of 500 requests in the shadow, 3 otherwise")
    assert rollout().endpoint.standing() == {
        before.version: ("ready", 0),
        next_.version: ("ready", 100),
    }
