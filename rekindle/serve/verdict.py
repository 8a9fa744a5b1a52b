"""Whether a canary is worse than the version before, by the requests that both were given.

The canary is looked at when it has had 10, 20, 40, ... requests, and at the end of a step. Look k
spends alpha/((k+1)(k+2)) of the probability `alpha` that a version which is as good is rolled back,
so that any number of looks spends at most all of it; the signals share it evenly. Errors and
latency each have to be significantly worse than those of the version before, and than what is
allowed: one-sided tests, Fisher's exact and the binomial one. Requests that are refused (4xx) are
compared with those of the version before alone: which version a request was given to is drawn, so
both get the same share of bad ones, however many there are, in whatever bursts they come."""

import math
from itertools import accumulate

from rekindle.serve.messages import BOUNDS_MS, Shadowed, Traffic
from rekindle.spec.deploy import DeploySpec

FIRST_LOOK, MOST_ENDS = 10, 1
_SLOW, _SLOW_ALLOWED = 0.05, 0.10  # shares above 1.4 times (2 bounds) the 95th percentile before


def look_of(requests: int) -> int:
    """The number of the look that so many requests allow, from 0; -1 for none."""
    return int(math.log2(requests / FIRST_LOOK)) if requests >= FIRST_LOOK else -1


def breach(canary: Traffic, stable: Traffic, spec: DeploySpec, look: int) -> str:
    """Why the canary is to be rolled back; "" if nothing speaks against it at this look, or so far
    if there is none (-1)."""
    if canary.ends > max(MOST_ENDS, stable.ends):
        return f"its process ended by itself {canary.ends} times"
    signals = 4 if spec.max_p99_ms else 3
    if look < 0:
        return ""
    level = spec.alpha / signals / ((look + 1) * (look + 2))
    errors, requests = canary.errors, canary.requests
    allowed = spec.max_error_rate
    if _worse((errors, requests), (stable.errors, stable.requests), allowed, level):
        what = f"it failed {errors:,} of {requests:,} requests; {allowed:.1%} are allowed, and the "
        return f"{what}version before failed {stable.errors:,} of {stable.requests:,}"
    compares = stable.requests > 0 and not spec.allow_other_inputs
    refused, refused_before = (canary.refused, requests), (stable.refused, stable.requests)
    if compares and _worse(refused, refused_before, 0.0, level):
        what = f"it refused {canary.refused:,} of {requests:,} requests (4xx), and the version "
        return f"{what}before refused {stable.refused:,} of {stable.requests:,}"
    answered, before = sum(canary.latencies), sum(stable.latencies)
    if before:
        cut = min(quantile(stable, 1 - _SLOW) + 2, len(BOUNDS_MS) - 1)
        slow, slow_before = _above(canary, cut), _above(stable, cut)
        if _worse((slow, answered), (slow_before, before), _SLOW_ALLOWED, level):
            took = f"{slow / answered:.0%} of its answers took more than {BOUNDS_MS[cut]:,.0f} ms"
            return f"{took}, as {slow_before / before:.0%} of the version before"
    if spec.max_p99_ms and answered:
        cut = min(i for i, bound in enumerate(BOUNDS_MS) if bound >= spec.max_p99_ms)
        slow = _above(canary, cut)
        if _worse((slow, answered), (0, 0), 0.01, level):
            return f"{slow / answered:.1%} of its answers took more than {BOUNDS_MS[cut]:,.0f} ms"
    return ""


def breach_in_shadow(shadowed: Shadowed, spec: DeploySpec, look: int) -> str:
    """The same of a version in the shadow."""
    if look < 0:
        return ""
    level, answered = spec.alpha / 2 / ((look + 1) * (look + 2)), shadowed.answered
    refused = 0 if spec.allow_other_inputs else shadowed.refused
    if _worse((shadowed.failed + refused, answered), (0, 0), spec.max_error_rate, level):
        what = f"in the shadow it failed {shadowed.failed:,} of {answered:,} requests"
        if refused:
            what += f" and refused {refused:,} (4xx), which the version before answered"
        return what
    most = spec.max_disagreement
    if most is not None and _worse((shadowed.differed, answered), (0, 0), most, level):
        share = f"{shadowed.differed / answered:.1%} of {answered:,} requests"
        return f"in the shadow it answered {share} otherwise; {most:.1%} are allowed"
    return ""


def _worse(canary: tuple[int, int], stable: tuple[int, int], allowed: float, level: float) -> bool:
    """Whether the share (events, trials) of the canary is above what is allowed, and above that of
    the stable version where it had any, each at this level."""
    from scipy.stats import binom, hypergeom

    (events, trials), (before, trials_before) = canary, stable
    if not events or binom.sf(events - 1, trials, allowed) >= level:
        return False
    both, every = events + before, trials + trials_before
    return not trials_before or bool(hypergeom.sf(events - 1, every, both, trials) < level)


def quantile(traffic: Traffic, share: float) -> int:
    """The index of the bound below which this share of answers lies."""
    wanted = share * sum(traffic.latencies)
    found = (i for i, total in enumerate(accumulate(traffic.latencies)) if total >= wanted)
    return min(next(found), len(BOUNDS_MS) - 1)


def _above(traffic: Traffic, bound: int) -> int:
    return sum(traffic.latencies[bound + 1 :])
