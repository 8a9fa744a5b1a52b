"""Whether to train on spot machines: the time and money that it takes, the chances of
keeping the limits, and what speaks against it.

How reclaims of several machines are correlated is not known, so all is calculated for
both extremes: each machine is reclaimed alone, or all at once. Prices are for all
machines together. Time without machines costs nothing; where a platform keeps the rest of
a cluster while it waits for one machine, that wait belongs into `restart_seconds`."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal

from rekindle.formats import duration
from rekindle.plan import risk
from rekindle.plan.risk import Expectation, Hazard, InterruptibleWork, Reclaims, interval
from rekindle.plan.simulation import Fallback, fallback, simulate

# The time between two interruptions has to be this many times that of a save and a start.
# Below that the training's time grows exponentially with the hazard, which is not known
# to a factor of two.
FEWEST_CHANGEOVERS = 5.0
HALVINGS = 6  # of the interval between saves, in search of one that suits a deadline
# Simulated runs of each interval. All intervals get the same interruptions, so that their
# costs can be compared.
SEARCH_RUNS = 1024


@dataclasses.dataclass(frozen=True)
class Offer:
    """Prices of all machines together."""

    spot_usd_per_hour: float
    on_demand_usd_per_hour: float


@dataclasses.dataclass(frozen=True)
class SpotNeeds:
    """The limits that the training has to keep. Hours count from the first request for
    machines, waits included."""

    max_run_hours: float | None = None
    budget_usd: float | None = None
    deadline_hours: float | None = None
    """By then the training is done for sure: on-demand machines take over in time."""
    chance: float = 0.9
    """The probability with which the other two have to be kept."""


@dataclasses.dataclass(frozen=True)
class Outlook:
    """What to expect of spot machines at one rate of interruptions."""

    mtbf_hours: float
    """The mean time between two interruptions of the training."""
    expected: Expectation
    expected_usd: float
    in_time: float | None
    """The chance of `max_run_hours`; None without that limit."""
    in_budget: float | None
    """The chance of `budget_usd`; None without that limit."""
    in_both: float | None
    """The chance of both at once; None without either."""
    fallback: Fallback | None
    """On-demand machines that take over to meet the deadline; None without one."""
    fallback_usd: float | None
    """The expected cost with them."""
    reasons: tuple[str, ...] = ()
    """What speaks against spot machines, in words."""


@dataclasses.dataclass(frozen=True)
class Spot:
    """A training on spot machines, at both extremes of how reclaims are correlated."""

    every: int
    """Steps between two saves."""
    hazard: Hazard
    independent: Outlook
    """Each machine is reclaimed alone."""
    together: Outlook
    """All machines are reclaimed at once, which interrupts less often."""

    @property
    def viable(self) -> Literal["yes", "only if reclaimed together", "no"]:
        """Whether nothing speaks against it: at both extremes, at the better one, or at
        neither."""
        if not self.independent.reasons:
            return "yes"
        return "no" if self.together.reasons else "only if reclaimed together"


def weigh(
    work: InterruptibleWork,
    hazard: Hazard,
    nodes: int,
    offer: Offer,
    needs: SpotNeeds,
    every: int | None = None,
) -> Spot:
    """What a training on `nodes` spot machines comes to. `every` is the interval between
    saves that the user has set; None: the best one. It takes tens of milliseconds."""
    chosen = every or best_interval(work, hazard.per_hour(nodes, "independent"), offer, needs)
    hours = risk.uninterrupted_seconds(work, every or interval(work, 0.0)) / 3600
    on_demand_usd = hours * offer.on_demand_usd_per_hour

    def at(reclaims: Reclaims) -> Outlook:
        unjudged = outlook_at(work, chosen, hazard.per_hour(nodes, reclaims), offer, needs)
        reasons = tuple(_reasons(unjudged, work, on_demand_usd, needs))
        return dataclasses.replace(unjudged, reasons=reasons)

    return Spot(chosen, hazard, at("independent"), at("together"))


def best_interval(work: InterruptibleWork, per_hour: float, offer: Offer, needs: SpotNeeds) -> int:
    """Steps between two saves: those of `interval`, or the fraction of it that is
    cheapest where a deadline has to be met."""
    longest = interval(work, per_hour)
    deadline = needs.deadline_hours
    if deadline is None:
        return longest
    # a save has to be committed before the next one is due
    shortest = math.ceil(work.commit_seconds / work.step_seconds)
    candidates = {longest}
    for halving in range(HALVINGS):
        candidates.add(max(1, shortest, math.ceil(longest / 2**halving)))

    def cost_usd(every: int) -> float:
        mixed = fallback(work, every, per_hour, deadline, SEARCH_RUNS)
        return mixed.cost_usd(offer.spot_usd_per_hour, offer.on_demand_usd_per_hour)

    # `min` takes the first of equal ones: the longest interval, which saves least often
    return min(sorted(candidates, reverse=True), key=cost_usd)


def outlook_at(
    work: InterruptibleWork, every: int, per_hour: float, offer: Offer, needs: SpotNeeds
) -> Outlook:
    """What to expect at `per_hour` interruptions of the training; its reasons are still empty."""
    mean = risk.expected(work, every, per_hour)
    price = offer.spot_usd_per_hour
    runs = simulate(work, every, per_hour)
    in_time = in_budget = in_both = None
    if needs.max_run_hours is not None:
        in_time = runs.at_most(needs.max_run_hours)
    if needs.budget_usd is not None:
        paid_hours = needs.budget_usd / price
        in_budget = runs.at_most(None, paid_hours)
        if needs.max_run_hours is not None:
            in_both = runs.at_most(needs.max_run_hours, paid_hours)
    mixed = mixed_usd = None
    if needs.deadline_hours is not None:
        mixed = fallback(work, every, per_hour, needs.deadline_hours)
        mixed_usd = mixed.cost_usd(price, offer.on_demand_usd_per_hour)
    return Outlook(
        mtbf_hours=1 / per_hour if per_hour else math.inf,
        expected=mean,
        expected_usd=mean.cost_usd(price),
        in_time=in_time,
        in_budget=in_budget,
        in_both=in_both,
        fallback=mixed,
        fallback_usd=mixed_usd,
    )


def _reasons(
    outlook: Outlook, work: InterruptibleWork, on_demand_usd: float, needs: SpotNeeds
) -> Iterator[str]:
    """What speaks against spot machines, in words, the plainest first."""
    changeover_hours = (work.whole_save_seconds + work.restart_seconds) / 3600
    if outlook.mtbf_hours < FEWEST_CHANGEOVERS * changeover_hours:
        between = duration(3600 * outlook.mtbf_hours)
        changeover = duration(3600 * changeover_hours)
        yield (
            f"an interruption every {between}, and {changeover} go into saving and starting again"
        )
    cost_usd = outlook.expected_usd if outlook.fallback_usd is None else outlook.fallback_usd
    if outlook.fallback is not None and not outlook.fallback.feasible:
        yield f"on-demand machines would not make {needs.deadline_hours:g} h either"
    elif cost_usd >= on_demand_usd:
        yield f"${cost_usd:,.2f} expected against ${on_demand_usd:,.2f} on demand"
    missed_limits = tuple(_missed_limits(outlook, needs))
    yield from missed_limits
    if missed_limits or outlook.fallback is not None:
        return
    # each limit alone is kept often enough, and both at once may not be
    if outlook.in_both is not None and outlook.in_both < needs.chance:
        limits = f"take at most {needs.max_run_hours:g} h and cost at most ${_usd(needs)}"
        yield f"{outlook.in_both:.0%} chance to {limits}"


def _usd(needs: SpotNeeds) -> str:
    return f"{needs.budget_usd or 0.0:,.2f}".removesuffix(".00")


def _missed_limits(outlook: Outlook, needs: SpotNeeds) -> Iterator[str]:
    """Limits that are kept too rarely, in words.

    Where on-demand machines take over, the training is never later than the deadline. The
    budget is then taken to be kept only in the runs that do without them."""
    rescue = outlook.fallback
    limit = needs.max_run_hours
    latest = math.inf
    if rescue is not None and rescue.feasible and needs.deadline_hours is not None:
        latest = needs.deadline_hours
    late = outlook.in_time is not None and outlook.in_time < needs.chance
    if late and limit is not None and latest > limit:
        yield f"{outlook.in_time:.0%} chance to take at most {limit:g} h"
    if outlook.in_budget is not None:
        chance = outlook.in_budget
        if rescue is not None:
            chance = max(0.0, chance - rescue.chance)
        if chance < needs.chance:
            yield f"{chance:.0%} chance to cost at most ${_usd(needs)}"
