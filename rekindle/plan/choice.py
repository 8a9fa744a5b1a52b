"""Which machines and which layout: of what the config leaves open the cheapest that keep its
limits, under a budget alone the fastest. Fleets that could not be, even if the products took all
the time, are left out."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from rekindle.errors import RequestError
from rekindle.plan.advice import instead
from rekindle.plan.calibration import Speeds
from rekindle.plan.fleet import Fleet
from rekindle.plan.request import Asked, on_gpu
from rekindle.plan.search import Found, Option, search
from rekindle.spec.model import AUTO, Spec

Hours = tuple[float, float, float]  # least, expected, most: nine of ten lie within


@dataclasses.dataclass(frozen=True)
class Choice:
    fleet: Fleet
    option: Option

    @property
    def usd_per_step(self) -> float | None:
        usd = self.fleet.usd_per_hour()
        return None if usd is None else usd * self.option.step.seconds / 3600

    def hours(self, steps: int | None) -> Hours | None:
        """Of so many steps, uninterrupted."""
        if steps is None:
            return None
        low, high = self.option.seconds_between
        return (low * steps / 3600, self.option.step.seconds * steps / 3600, high * steps / 3600)

    def usd(self, steps: int | None) -> float | None:
        """Of so many steps, on demand, uninterrupted."""
        per_step = self.usd_per_step
        return None if steps is None or per_step is None else per_step * steps


def choose(
    spec: Spec, asked: Asked, offered: Sequence[Fleet], steps: int | None, speeds: Speeds
) -> tuple[list[Choice], Found]:
    """The best choice first, and what was found on its machines."""
    if spec.resources.machine != AUTO or offered[0].here:
        fleet = offered[0]
        found = search(asked, fleet.cluster)
        if not found.options:
            nearest = min(found.rejected, key=lambda r: r.needed_bytes or math.inf, default=None)
            said = f": {nearest.layout}: {nearest.reason}" if nearest else ""
            if nearest is not None and nearest.needed_bytes is None:
                message = f"no layout trains on {fleet}{said}"
                fix = "leave train.layout and train.micro_batch_size to the plan: `auto`"
                raise RequestError(message, where="train.layout", fix=fix)
            others = () if asked.zero else instead(asked, fleet.cluster)
            fix = "more or larger machines, resources.machine: auto, or adapters (model.lora)"
            fix += "; ".join([_divisible(asked), *others])
            raise RequestError(f"no layout fits on {fleet}{said}", where="resources", fix=fix)
        return [Choice(fleet, option) for option in speeds.applied(found.options)], found
    if all(fleet.usd_per_hour() is None for fleet in offered):
        where = f" in {offered[0].region}" if offered[0].region else ""
        message = f"no price of a machine{where} is known, so the cheapest cannot be chosen"
        fix = "add prices to prices.yaml in the home folder, or name a machine"
        raise RequestError(message, where="resources.machine", fix=fix)
    results = list(_among(spec, asked, offered, steps, speeds))
    if not results:
        message = "the model fits on none of the machines that may be chosen"
        fix = f"allow larger ones, or train adapters (model.lora){_divisible(asked)}"
        raise RequestError(message, where="resources.machine", fix=fix)
    ranked = sorted(results, key=lambda result: _preference(spec, result[0], steps))
    return [choice for choice, _ in ranked], ranked[0][1]


def _among(
    spec: Spec, asked: Asked, offered: Sequence[Fleet], steps: int | None, speeds: Speeds
) -> Iterator[tuple[Choice, Found]]:
    """What is worth a look, by what it could do at its peak: under a budget alone the fastest,
    until none can be faster than one within it; else of each kind as many as keep the limits, and
    no kind that would cost more at its peak than one that does."""
    # weights, gradients and moments of all ranks together; of adapters, the weights alone; none of
    # what the host holds
    least = asked.shape.parameters * (2 if asked.train.weights == "bf16" else 4)
    least *= 1 if asked.lora else 4
    if asked.zero is not None:
        least = 0 if asked.zero.optimizer_offloaded else 2 * asked.shape.parameters
    known = [f for f in _comparable(offered, asked) if least <= f.gpu.memory_bytes * f.cluster.gpus]
    able = [fleet for fleet in known if _may_do(spec, asked, fleet, steps, speeds)]
    if not able:  # the fastest of each kind, to show by how much they miss it
        able = list({_kind(fleet): fleet for fleet in known}.values())
    groups, bound = [[fleet] for fleet in able], _least_seconds
    if not _only_budget(spec):
        kinds: dict[tuple[Any, ...], list[Fleet]] = {}
        for fleet in able:
            kinds.setdefault(_kind(fleet), []).append(fleet)
        groups, bound = list(kinds.values()), _least_usd
    best = math.inf
    for some in sorted(groups, key=lambda some: bound(asked, some[0])):
        if bound(asked, some[0]) > best:
            return
        for fleet in some:
            found = search(asked, fleet.cluster)
            if not found.options:
                continue
            choice = Choice(fleet, speeds.applied(found.options[:1])[0])
            yield choice, found
            missed, value = _preference(spec, choice, steps)
            if not missed:
                best = min(best, value)
                break


def _only_budget(spec: Spec) -> bool:
    return spec.resources.budget_usd is not None and spec.resources.deadline_hours is None


def _kind(fleet: Fleet) -> tuple[str | None, int]:
    return fleet.machine.gpu, fleet.gpus_per_node


def _may_do(spec: Spec, asked: Asked, fleet: Fleet, steps: int | None, speeds: Speeds) -> bool:
    """Whether it could keep the limits if the products took all the time."""
    limits, usd = spec.resources, fleet.usd_per_hour() or 0.0
    if steps is None:
        return True
    profile = speeds.profile(fleet.cluster.gpu.name, asked.train.compile, asked.train.engine)
    seconds = _least_seconds(asked, fleet) / profile.constants.matrix_efficiency
    hours = seconds * min(1.0, profile.factor) * steps / 3600
    if limits.deadline_hours is not None and hours * (1 + profile.spread) > limits.deadline_hours:
        return False
    return limits.budget_usd is None or hours * usd <= limits.budget_usd


def _least_seconds(asked: Asked, fleet: Fleet) -> float:
    """Of a step, if the products took all the time, at the GPUs' peak."""
    gpu = fleet.cluster.gpu
    precision = on_gpu(asked, gpu).train.precision
    peak = (gpu.product_tflops(precision, not asked.train.deterministic) or 0.0) * 1e12
    tokens = asked.train.global_batch_size * asked.sequence
    flops = asked.shape.flops_per_token(asked.sequence, frozen=bool(asked.lora)) * tokens
    return flops / (peak * fleet.cluster.gpus)


def _least_usd(asked: Asked, fleet: Fleet) -> float:
    return (fleet.usd_per_hour() or 0.0) * _least_seconds(asked, fleet) / 3600


def _comparable(offered: Sequence[Fleet], asked: Asked) -> Iterator[Fleet]:
    """Of machines with the same GPUs the cheapest; those without a price cannot be compared."""
    best: dict[tuple[Any, ...], Fleet] = {}
    for fleet in offered:
        usd = fleet.usd_per_hour()
        gpu = fleet.cluster.gpu
        if usd is None or on_gpu(asked, gpu).train.precision not in gpu.tflops:
            continue
        key = (fleet.machine.gpu, fleet.gpus_per_node, fleet.nodes)
        known = best[key].usd_per_hour() if key in best else None
        if known is None or usd < known:
            best[key] = fleet
    yield from best.values()


def _preference(spec: Spec, choice: Choice, steps: int | None) -> tuple[float, float]:
    """Within the limits first, then the cheapest; under a budget alone the fastest."""
    limits, hours, usd = spec.resources, choice.hours(steps), choice.usd(steps)
    late = over = 0.0
    if hours is not None and limits.deadline_hours is not None:
        late = max(0.0, hours[2] - limits.deadline_hours)
    if usd is not None and limits.budget_usd is not None:
        over = max(0.0, usd - limits.budget_usd)
    if _only_budget(spec):
        return over, choice.option.step.seconds
    return late + over, choice.usd_per_step or math.inf


def _divisible(asked: Asked) -> str:
    """What to say where the optimizer forbids layouts that would take less memory."""
    return "" if asked.train.optimizer == "adamw" else "; or train.optimizer: adamw in any layout"
