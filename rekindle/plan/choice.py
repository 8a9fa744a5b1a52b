"""Which machines and which layout: of what the config leaves open the cheapest that keep
its limits, under a budget alone the fastest. Fleets that could not be, even if the
products took all the time, are left out."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from rekindle.errors import RequestError
from rekindle.plan.advice import instead
from rekindle.plan.calibration import Speeds
from rekindle.plan.fleet import Fleet
from rekindle.plan.request import Asked, on_gpu
from rekindle.plan.search import Option, SearchResult, search
from rekindle.spec.model import AUTO, Spec

Hours = tuple[float, float, float]  # least, expected, most: nine of ten lie within


@dataclasses.dataclass(frozen=True)
class Choice:
    """Machines and how to train on them."""

    fleet: Fleet
    option: Option

    @property
    def usd_per_step(self) -> float | None:
        """Dollars of a step on demand; None where the machines have no price."""
        usd_per_hour = self.fleet.usd_per_hour()
        if usd_per_hour is None:
            return None
        return usd_per_hour * self.option.step.seconds / 3600

    def hours(self, steps: int | None) -> Hours | None:
        """Hours of so many steps, uninterrupted."""
        if steps is None:
            return None
        low, high = self.option.seconds_between
        return (
            low * steps / 3600,
            self.option.step.seconds * steps / 3600,
            high * steps / 3600,
        )

    def usd(self, steps: int | None) -> float | None:
        """Dollars of so many steps, on demand, uninterrupted."""
        per_step = self.usd_per_step
        if steps is None or per_step is None:
            return None
        return per_step * steps


def choose(
    spec: Spec, asked: Asked, offered: Sequence[Fleet], steps: int | None, speeds: Speeds
) -> tuple[list[Choice], SearchResult]:
    """The choices, best first, and what the search gave on the best one's machines.
    RequestError where nothing trains or fits, with the nearest miss."""
    if spec.resources.machine != AUTO or offered[0].here:
        return _choose_layout(asked, offered[0], speeds)
    if all(fleet.usd_per_hour() is None for fleet in offered):
        where = f" in {offered[0].region}" if offered[0].region else ""
        raise RequestError(
            f"no price of a machine{where} is known, so the cheapest cannot be chosen",
            where="resources.machine",
            fix="add prices to prices.yaml in the home folder, or name a machine",
        )
    results = list(_candidates(spec, asked, offered, steps, speeds))
    if not results:
        raise RequestError(
            "the model fits on none of the machines that may be chosen",
            where="resources.machine",
            fix=f"allow larger ones, or train adapters (model.lora){_any_layout(asked)}",
        )
    ranked = sorted(results, key=lambda result: _preference(spec, result[0], steps))
    return [choice for choice, _ in ranked], ranked[0][1]


def _choose_layout(asked: Asked, fleet: Fleet, speeds: Speeds) -> tuple[list[Choice], SearchResult]:
    """Layouts on machines that are given, best first.
    RequestError where none trains or fits."""
    result = search(asked, fleet.cluster)
    if result.options:
        return [Choice(fleet, option) for option in speeds.applied(result.options)], result
    # that which needs the least memory; those that do not train need none, and come last
    nearest = min(
        result.rejected,
        key=lambda rejected: rejected.needed_bytes or math.inf,
        default=None,
    )
    reason = f": {nearest.layout}: {nearest.reason}" if nearest else ""
    if nearest is not None and nearest.needed_bytes is None:
        raise RequestError(
            f"no layout trains on {fleet}{reason}",
            where="train.layout",
            fix="leave train.layout and train.micro_batch_size to the plan: `auto`",
        )
    ways_out = [_any_layout(asked)]
    if not asked.zero:
        ways_out += instead(asked, fleet.cluster)
    fix = "more or larger machines, resources.machine: auto, or adapters (model.lora)"
    raise RequestError(
        f"no layout fits on {fleet}{reason}",
        where="resources",
        fix=fix + "; ".join(ways_out),
    )


def _candidates(
    spec: Spec, asked: Asked, offered: Sequence[Fleet], steps: int | None, speeds: Speeds
) -> Iterator[tuple[Choice, SearchResult]]:
    """What is worth a look, by what it could do at its peak: under a budget alone the
    fastest, until none can be faster than one within it; else of each kind as many as
    keep the limits, and no kind that would cost more at its peak than one that does."""
    state_bytes = _least_state_bytes(asked)
    large_enough = []
    for fleet in _comparable(offered, asked):
        if state_bytes <= fleet.gpu.memory_bytes * fleet.cluster.gpus:
            large_enough.append(fleet)
    able = [fleet for fleet in large_enough if _may_keep_limits(spec, asked, fleet, steps, speeds)]
    if not able:  # the fastest of each kind, to show by how much they miss it
        able = list({_kind(fleet): fleet for fleet in large_enough}.values())
    bound: Callable[[Asked, Fleet], float]
    if _only_budget(spec):
        groups = [[fleet] for fleet in able]
        bound = _least_seconds
    else:
        groups = _by_kind(able)
        bound = _least_usd
    best = math.inf
    for group in sorted(groups, key=lambda group: bound(asked, group[0])):
        if bound(asked, group[0]) > best:
            return
        for fleet in group:
            result = search(asked, fleet.cluster)
            if not result.options:
                continue
            choice = Choice(fleet, speeds.applied(result.options[:1])[0])
            yield choice, result
            # small fleets come first, so the first of a kind within the limits is its
            # best
            missed_by, value = _preference(spec, choice, steps)
            if not missed_by:
                best = min(best, value)
                break


def _by_kind(fleets: Sequence[Fleet]) -> list[list[Fleet]]:
    """Fleets of the same GPUs and as many a machine, in the order in which they come."""
    groups: dict[tuple[str | None, int], list[Fleet]] = {}
    for fleet in fleets:
        groups.setdefault(_kind(fleet), []).append(fleet)
    return list(groups.values())


def _least_state_bytes(asked: Asked) -> int:
    """Weights, gradients and moments of all ranks together; of adapters, the weights
    alone; none of what the host holds."""
    if asked.zero is not None:
        return 0 if asked.zero.optimizer_offloaded else 2 * asked.shape.parameters
    # a weight, its gradient and two moments are as large as each other
    weights = asked.shape.parameters * (2 if asked.train.weights == "bf16" else 4)
    return weights if asked.lora else 4 * weights


def _only_budget(spec: Spec) -> bool:
    return spec.resources.budget_usd is not None and spec.resources.deadline_hours is None


def _kind(fleet: Fleet) -> tuple[str | None, int]:
    return fleet.machine.gpu, fleet.gpus_per_node


def _may_keep_limits(
    spec: Spec, asked: Asked, fleet: Fleet, steps: int | None, speeds: Speeds
) -> bool:
    """Whether it could keep the limits if the products took all the time."""
    if steps is None:
        return True
    limits = spec.resources
    usd_per_hour = fleet.usd_per_hour() or 0.0
    profile = speeds.profile(fleet.cluster.gpu.name, asked.train.compile, asked.train.engine)
    seconds = _least_seconds(asked, fleet) / profile.constants.matrix_efficiency
    hours = seconds * min(1.0, profile.factor) * steps / 3600
    if limits.deadline_hours is not None and hours * (1 + profile.spread) > limits.deadline_hours:
        return False
    return limits.budget_usd is None or hours * usd_per_hour <= limits.budget_usd


def _least_seconds(asked: Asked, fleet: Fleet) -> float:
    """Seconds of a step, if the products took all the time, at the GPUs' peak."""
    gpu = fleet.cluster.gpu
    precision = on_gpu(asked, gpu).train.precision
    peak = (gpu.product_tflops(precision, not asked.train.deterministic) or 0.0) * 1e12
    tokens = asked.train.global_batch_size * asked.sequence
    flops = asked.shape.flops_per_token(asked.sequence, frozen=bool(asked.lora)) * tokens
    return flops / (peak * fleet.cluster.gpus)


def _least_usd(asked: Asked, fleet: Fleet) -> float:
    """Dollars of a step, if the products took all the time, at the GPUs' peak."""
    return (fleet.usd_per_hour() or 0.0) * _least_seconds(asked, fleet) / 3600


def _comparable(offered: Sequence[Fleet], asked: Asked) -> Iterator[Fleet]:
    """The cheapest of machines with the same GPUs;
    those without a price cannot be compared."""
    cheapest: dict[tuple[str | None, int, int], Fleet] = {}
    for fleet in offered:
        usd_per_hour = fleet.usd_per_hour()
        gpu = fleet.cluster.gpu
        if usd_per_hour is None or on_gpu(asked, gpu).train.precision not in gpu.tflops:
            continue
        key = (fleet.machine.gpu, fleet.gpus_per_node, fleet.nodes)
        least_usd = cheapest[key].usd_per_hour() if key in cheapest else None
        if least_usd is None or usd_per_hour < least_usd:
            cheapest[key] = fleet
    yield from cheapest.values()


def _preference(spec: Spec, choice: Choice, steps: int | None) -> tuple[float, float]:
    """Orders choices. First is by how much one misses the limits, in hours and dollars
    together; second the cost of a step, or under a budget alone its time."""
    limits = spec.resources
    hours = choice.hours(steps)
    usd = choice.usd(steps)
    late = 0.0
    if hours is not None and limits.deadline_hours is not None:
        late = max(0.0, hours[2] - limits.deadline_hours)
    over = 0.0
    if usd is not None and limits.budget_usd is not None:
        over = max(0.0, usd - limits.budget_usd)
    if _only_budget(spec):
        return over, choice.option.step.seconds
    return late + over, choice.usd_per_step or math.inf


def _any_layout(asked: Asked) -> str:
    """What to add to a fix where the optimizer forbids layouts that would take less
    memory."""
    return "" if asked.train.optimizer == "adamw" else "; or train.optimizer: adamw in any layout"
