"""Whether a canary is worse than the version before, by the requests that both got.

The canary is looked at when it has had 10, 20, 40, ... requests, and at the end of a
step. Look k spends alpha/((k+1)(k+2)) of the probability `alpha` that a version which is
as good is rolled back, so that any number of looks spends at most all of it; the signals
share it evenly. Errors and latency each have to be significantly worse than those of the
version before, and than what is allowed: one-sided tests, Fisher's exact and the binomial
one. Requests that are refused (4xx) are compared with those of the version before alone:
which version a request was given to is drawn, so both get the same share of bad ones,
however many there are, in whatever bursts they come."""

import math
from itertools import accumulate

from rekindle.serve.messages import BOUNDS_MS, Shadowed, Traffic
from rekindle.spec.deploy import DeploySpec

FIRST_LOOK = 10
MOST_ENDS = 1
# an answer is slow above 1.4 times (2 bounds) the 95th percentile of the version before,
# whose own answers are slow in 5 % of cases at most; those of a canary may be twice as
# often
_SLOW = 0.05
_SLOW_ALLOWED = 0.10


def look_of(requests: int) -> int:
    """The number of the look that so many requests allow, from 0; -1 for none."""
    return int(math.log2(requests / FIRST_LOOK)) if requests >= FIRST_LOOK else -1


def breach(canary: Traffic, stable: Traffic, spec: DeploySpec, look: int) -> str:
    """Why the canary is to be rolled back; "" if nothing speaks against it at this look,
    or so far if there is none (-1)."""
    # at any look: a process that ends needs no test
    if canary.ends > max(MOST_ENDS, stable.ends):
        return f"its process ended by itself {canary.ends} times"
    if look < 0:
        return ""
    # errors, refusals, latency beside the version
    # before, and the bound where there is one
    signals = 4 if spec.max_p99_ms else 3
    level = _level(spec, signals, look)
    return (
        _breach_by_errors(canary, stable, spec, level)
        or _breach_by_refusals(canary, stable, spec, level)
        or _breach_by_latency(canary, stable, level)
        or _breach_by_p99(canary, spec, level)
    )


def _level(spec: DeploySpec, signals: int, look: int) -> float:
    """The probability of a false alarm that one signal may spend at a look: those of all
    looks add up to its share of alpha, as the sum of 1/((k+1)(k+2)) over k is 1."""
    return spec.alpha / signals / ((look + 1) * (look + 2))


def _breach_by_errors(canary: Traffic, stable: Traffic, spec: DeploySpec, level: float) -> str:
    allowed = spec.max_error_rate
    failed = (canary.errors, canary.requests)
    failed_before = (stable.errors, stable.requests)
    if not _worse(failed, failed_before, allowed, level):
        return ""
    message = f"it failed {canary.errors:,} of {canary.requests:,} requests; {allowed:.1%} are "
    message += f"allowed, and the version before failed {stable.errors:,} of {stable.requests:,}"
    return message


def _breach_by_refusals(canary: Traffic, stable: Traffic, spec: DeploySpec, level: float) -> str:
    if not stable.requests or spec.allow_other_inputs:
        return ""
    refused = (canary.refused, canary.requests)
    refused_before = (stable.refused, stable.requests)
    if not _worse(refused, refused_before, 0.0, level):
        return ""
    message = f"it refused {canary.refused:,} of {canary.requests:,} requests (4xx), and the "
    message += f"version before refused {stable.refused:,} of {stable.requests:,}"
    return message


def _breach_by_latency(canary: Traffic, stable: Traffic, level: float) -> str:
    answered = sum(canary.latencies)
    answered_before = sum(stable.latencies)
    if not answered_before:
        return ""
    bound = min(quantile(stable, 1 - _SLOW) + 2, len(BOUNDS_MS) - 1)
    slow = _above(canary, bound)
    slow_before = _above(stable, bound)
    if not _worse((slow, answered), (slow_before, answered_before), _SLOW_ALLOWED, level):
        return ""
    message = f"{slow / answered:.0%} of its answers took more than {BOUNDS_MS[bound]:,.0f} ms, "
    return message + f"as {slow_before / answered_before:.0%} of the version before"


def _breach_by_p99(canary: Traffic, spec: DeploySpec, level: float) -> str:
    answered = sum(canary.latencies)
    if not spec.max_p99_ms or not answered:
        return ""
    bound = min(i for i, bound_ms in enumerate(BOUNDS_MS) if bound_ms >= spec.max_p99_ms)
    slow = _above(canary, bound)
    if not _worse((slow, answered), (0, 0), 0.01, level):
        return ""
    return f"{slow / answered:.1%} of its answers took more than {BOUNDS_MS[bound]:,.0f} ms"


def breach_in_shadow(shadowed: Shadowed, spec: DeploySpec, look: int) -> str:
    """Why the version in the shadow is to be rolled back; "" as for `breach`."""
    if look < 0:
        return ""
    level = _level(spec, 2, look)  # the signals: failures, and other answers
    answered = shadowed.answered
    refused = 0 if spec.allow_other_inputs else shadowed.refused
    if _worse((shadowed.failed + refused, answered), (0, 0), spec.max_error_rate, level):
        message = f"in the shadow it failed {shadowed.failed:,} of {answered:,} requests"
        if refused:
            message += f" and refused {refused:,} (4xx), which the version before answered"
        return message
    most = spec.max_disagreement
    if most is not None and _worse((shadowed.differed, answered), (0, 0), most, level):
        share = f"{shadowed.differed / answered:.1%} of {answered:,} requests"
        return f"in the shadow it answered {share} otherwise; {most:.1%} are allowed"
    return ""


def _worse(canary: tuple[int, int], stable: tuple[int, int], allowed: float, level: float) -> bool:
    """Whether the share (events, trials) of the canary is above what is allowed, and
    above that of the stable version where it had any, each at this level."""
    from scipy.stats import binom, hypergeom

    events, trials = canary
    events_before, trials_before = stable
    # sf(n - 1) is the probability of n or more
    if not events or binom.sf(events - 1, trials, allowed) >= level:
        return False
    if not trials_before:
        return True
    # Fisher's exact test: which of all trials the events fell on is drawn
    all_events = events + events_before
    all_trials = trials + trials_before
    return bool(hypergeom.sf(events - 1, all_trials, all_events, trials) < level)


def quantile(traffic: Traffic, share: float) -> int:
    """The index of the bound below which this share of answers lies."""
    answers = share * sum(traffic.latencies)
    for bound, answers_so_far in enumerate(accumulate(traffic.latencies)):
        if answers_so_far >= answers:
            # behind the last bound are those that took longer than it
            return min(bound, len(BOUNDS_MS) - 1)
    raise ValueError("the traffic has no latencies")


def _above(traffic: Traffic, bound: int) -> int:
    return sum(traffic.latencies[bound + 1 :])
