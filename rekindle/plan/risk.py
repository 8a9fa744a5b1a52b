"""What interruptions of spot machines cost: hours, paid hours, lost work; and how often
to save.

The model. Machines are waited for (not paid), then start: load the checkpoint and warm
up. They train in segments of `every` steps, each with a save at its end. Interruptions
come at random with a constant rate while machines are paid for; one takes all machines,
and the work since the last committed checkpoint is done again. A save holds training up
for `save_seconds` and is committed `commit_seconds` later, beside training; the next one
waits for that, as train/checkpoint.py does.

The formula. With rate r and M = 1/r, a stretch of q seconds gets through after e^(rq)
attempts and M (e^(rq) - 1) seconds of running (Daly 2006, eq. 20), with a wait of mean w
before each. A segment needs s seconds from the commit before it to its own: it gets
through with probability e^(-rs), and else a stretch of q seconds is tried: the start, all
its steps, the save and its commit. So a segment has (1 - e^(-rs)) e^(rq) interruptions,
and the running time is M times the interruptions. Where saves block and machines are
there at once, this is Daly's M e^(rR) (e^(r(t+C)) - 1) a segment; the wait and the tail
of a save are ours. A notice is not counted on.

Sources: J. W. Young, A first order approximation to the optimum checkpoint interval, CACM
17 (1974); J. T. Daly, A higher order estimate of the optimum checkpoint interval for
restart dumps, FGCS 22 (2006), doi:10.1016/j.future.2004.11.016."""

import dataclasses
import math
from typing import Literal

from rekindle.catalog.tables import presets
from rekindle.errors import RequestError

Reclaims = Literal["independent", "together"]

LONGEST_SECONDS = 3600.0  # code and networks fail too, and no hazard counts them
LARGEST_SHARE = 0.01  # of the time that saves may take before that limit yields


@dataclasses.dataclass(frozen=True)
class Hazard:
    """Interruptions of one node per hour of running, and how the number was chosen."""

    per_node_hour: float
    chosen: str

    def per_hour(self, nodes: int, reclaims: Reclaims) -> float:
        """Interruptions of the whole cluster per hour, if nodes are reclaimed one by one,
        or all at once. The truth lies between: machines of a type in a zone go within
        minutes of each other (Spot-and-Scoot, arXiv 2604.16457).
        `hazard("rough").per_hour(8, "independent")` is 0.8."""
        if reclaims == "independent":
            return self.per_node_hour * nodes
        return self.per_node_hour


def hazard(choice: str | float) -> Hazard:
    """The hazard by the name of a preset, or as a number per node-hour.
    RequestError for a number below 0."""
    if not isinstance(choice, str):
        if not 0 <= choice < math.inf:
            raise RequestError(
                f"a hazard of {choice} interruptions per node-hour",
                fix="give a number from 0 on",
            )
        return Hazard(float(choice), "given")
    return Hazard(presets()[choice].per_node_hour, f"preset {choice}")


@dataclasses.dataclass(frozen=True)
class InterruptibleWork:
    """A training. A save holds it up for `save_seconds` and is committed `commit_seconds`
    later. `wait_seconds` is the mean time until machines are there, at the start and
    after each interruption: exponential."""

    steps: int
    step_seconds: float
    save_seconds: float
    restart_seconds: float
    commit_seconds: float = 0.0
    wait_seconds: float = 0.0

    @property
    def whole_save_seconds(self) -> float:
        """Seconds from the beginning of a save until it is committed."""
        return self.save_seconds + self.commit_seconds


@dataclasses.dataclass(frozen=True)
class Segment:
    """A stretch of steps up to a commit: seconds from the commit before it (`through`),
    seconds of an attempt that starts machines for it (`anew`), and how many like it
    follow each other."""

    through: float
    anew: float
    count: int = 1


def segments(work: InterruptibleWork, every: int) -> tuple[Segment, ...]:
    """The first segment, whose `through` lacks start and tail, those in the middle,
    the last."""
    saves = math.ceil(work.steps / every)
    first = _segment(work, min(every, work.steps), 0.0)
    if saves == 1:
        return (first,)
    # a save waits until the one before it is committed
    last = _segment(work, work.steps - (saves - 1) * every, work.commit_seconds)
    if saves == 2:
        return first, last
    middle = dataclasses.replace(_segment(work, every, work.commit_seconds), count=saves - 2)
    return first, middle, last


def _segment(work: InterruptibleWork, steps: int, shortest_seconds: float) -> Segment:
    """A segment of so many steps, which takes at least `shortest_seconds`."""
    trained = steps * work.step_seconds
    return Segment(
        through=max(trained, shortest_seconds) + work.save_seconds,
        anew=work.restart_seconds + trained + work.whole_save_seconds,
    )


def uninterrupted_seconds(work: InterruptibleWork, every: int) -> float:
    """Running time without an interruption: start, steps, saves, and the last commit."""
    first, *later_segments = segments(work, every)
    return first.anew + sum(segment.count * segment.through for segment in later_segments)


@dataclasses.dataclass(frozen=True)
class Expectation:
    """Means. `running_hours` are paid,
    of which `lost_hours` are of work that is done again."""

    wall_hours: float
    running_hours: float
    lost_hours: float
    interruptions: float

    def cost_usd(self, price_usd_per_hour: float) -> float:
        """Cost of the running hours at the price of all machines together."""
        return self.running_hours * price_usd_per_hour


def expected(work: InterruptibleWork, every: int, per_hour: float) -> Expectation:
    """Expected hours with a save every `every` steps and `per_hour` interruptions of the
    cluster; infinite where an attempt has next to no chance to get through.

    An hour in steps of 10 s, saves of 30 s every 60 of them, starts of 2 min, no wait,
    and two interruptions an hour: 1.3783 h are paid, 0.2072 h of them lost, with 2.757
    interruptions."""
    rate = per_hour / 3600
    useful = work.steps * work.step_seconds
    saving = math.ceil(work.steps / every) * work.save_seconds + work.commit_seconds
    interruptions = _interruptions(work, every, rate)
    if math.isinf(interruptions):
        return Expectation(math.inf, math.inf, math.inf, math.inf)
    # `start`: mean of a start, or of the time until an interruption, if that is shorter
    if rate:
        start = _chance_within(work.restart_seconds, rate) / rate
        running = interruptions / rate
    else:
        start = work.restart_seconds
        running = uninterrupted_seconds(work, every)
    restarting = (1 + interruptions) * start
    waiting = (1 + interruptions) * work.wait_seconds
    lost = max(0.0, running - useful - saving - restarting)
    return Expectation(
        wall_hours=(running + waiting) / 3600,
        running_hours=running / 3600,
        lost_hours=lost / 3600,
        interruptions=interruptions,
    )


def _interruptions(work: InterruptibleWork, every: int, rate: float) -> float:
    """Expected interruptions of a training that goes back to the last commit."""
    first, *later_segments = segments(work, every)
    in_later_segments = 0.0
    for segment in later_segments:
        # attempts that go on from the commit before it and fail, and then those that
        # start for it
        failed_through = segment.count * _chance_within(segment.through, rate)
        in_later_segments += failed_through * (1 + _failed_attempts(segment.anew, rate))
    return _failed_attempts(first.anew, rate) + in_later_segments


def _failed_attempts(seconds: float, rate: float) -> float:
    """Attempts that fail before one of that length gets through: e^(rq) - 1."""
    try:
        return math.expm1(rate * seconds)
    except OverflowError:
        return math.inf  # next to no chance to get through


def _chance_within(seconds: float, rate: float) -> float:
    """Chance of an interruption within that time."""
    return -math.expm1(-rate * seconds)


def daly_seconds(save_seconds: float, mtbf_seconds: float) -> float:
    """Training time between two saves that makes the expected time least: Daly's estimate
    (eq. 37), whose first term is Young's sqrt(2 C M). `daly_seconds(300, 86_400)`: 117
    min, his figure 3."""
    if math.isinf(mtbf_seconds) or save_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    ratio = save_seconds / (2 * mtbf_seconds)
    young = math.sqrt(2 * save_seconds * mtbf_seconds)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds


def interval(work: InterruptibleWork, per_hour: float) -> int:
    """Optimizer steps between two saves: Daly's estimate, or what divides the work evenly
    near it, whichever is expected to take less. Never shorter than a save takes to be
    committed, nor longer than an hour, or the time in which saves take 1 %: other things
    than reclaims end a training."""
    best = daly_seconds(work.save_seconds, 3600 / per_hour if per_hour else math.inf)
    longest = max(LONGEST_SECONDS, work.save_seconds / LARGEST_SHARE)
    shortest = min(work.steps, max(1, math.ceil(work.commit_seconds / work.step_seconds)))
    # an interval is whole steps, and so is what divides the work evenly
    steps = min(best, longest) / work.step_seconds
    most = min(work.steps, max(shortest, math.ceil(steps)))
    candidates = {max(1, math.floor(steps)), max(1, math.ceil(steps))}
    # segments of equal length near it: a short last one would cost a save for little work
    for candidate in tuple(candidates):
        saves = round(work.steps / candidate)
        for count in (saves, saves + 1):
            candidates.add(math.ceil(work.steps / max(1, count)))
    # the longest first, so that the fewest saves win where the expectation is the same
    legal = sorted({min(max(steps, shortest), most) for steps in candidates}, reverse=True)
    return min(legal, key=lambda every: _interruptions(work, every, per_hour / 3600))
