"""How often a canary is rolled back that is as good as the version before, and one that is worse."""

import bisect

import numpy as np
import pytest

from rekindle.serve.messages import BOUNDS_MS, Traffic
from rekindle.serve.verdict import breach, look_of, quantile
from rekindle.spec.deploy import DeploySpec

SPEC = DeploySpec()


def rolled_back(rng, canary_errors, stable_errors, factor, requests=640, spec=SPEC):
    """Whether a canary that gets a request in ten is rolled back within so many, looked at as the roll-out does."""
    size = requests * 10
    fails = rng.random(requests) < canary_errors, rng.random(size) < stable_errors
    taken = rng.lognormal(3, 0.5, requests) * factor, rng.lognormal(3, 0.5, size)

    def traffic(i, count):
        failed = int(fails[i][:count].sum())
        places = np.searchsorted(BOUNDS_MS, taken[i][:count][~fails[i][:count]])
        return Traffic(count, failed, tuple(np.bincount(places, minlength=len(BOUNDS_MS) + 1)))

    looks = [10 * 2**k for k in range(look_of(requests) + 1)]
    at = [(count, look_of(count)) for count in looks] + [(requests, look_of(requests) + 1)]
    return any(breach(traffic(0, n), traffic(1, n * 10), spec, look) for n, look in at)


def share(runs=300, **world):
    rng = np.random.default_rng(7)
    return sum(rolled_back(rng, **world) for _ in range(runs)) / runs


@pytest.mark.parametrize("errors", [0.0, 0.01, 0.05])
def test_as_good_a_version_is_rolled_back_in_at_most_alpha_of_all_roll_outs(errors):
    assert share(canary_errors=errors, stable_errors=errors, factor=1.0) <= SPEC.alpha


def test_a_slightly_slower_one_within_what_is_allowed_stays():
    assert share(canary_errors=0, stable_errors=0, factor=1.1) <= SPEC.alpha


@pytest.mark.parametrize(
    "world",
    [
        {"canary_errors": 0.05, "stable_errors": 0.0, "factor": 1.0},
        {"canary_errors": 0.15, "stable_errors": 0.03, "factor": 1.0},
        {"canary_errors": 0.0, "stable_errors": 0.0, "factor": 2.5},
    ],
)
def test_a_clearly_worse_one_is_nearly_always_rolled_back(world):
    assert share(**world) >= 0.95


def test_one_that_fails_every_request_is_rolled_back_after_ten():
    failed, fine = Traffic(10, 10, (0,) * (len(BOUNDS_MS) + 1)), Traffic(90, 0, _counts(90))
    assert "it failed 10 of 10 requests" in breach(failed, fine, SPEC, look_of(10))
    assert breach(Traffic(9, 9, failed.latencies), fine, SPEC, look_of(9)) == ""


def test_one_whose_process_ends_twice_is_rolled_back_whatever_it_answered():
    once, twice = (Traffic(0, 0, _counts(0), ends) for ends in (1, 2))
    assert (
        breach(twice, Traffic(900, 0, _counts(900)), SPEC, -1)
        == "its process ended by itself 2 times"
    )
    assert breach(once, Traffic(900, 0, _counts(900)), SPEC, -1) == ""
    assert breach(twice, twice, SPEC, -1) == "", "the one before does so, too"


def test_a_limit_of_latency_counts_by_itself():
    slow = Traffic(100, 0, _counts(100, 300.0))
    spec = DeploySpec(max_p99_ms=200)
    assert "100.0% of its answers took more than" in breach(slow, slow, spec, look_of(100))
    assert breach(slow, slow, SPEC, look_of(100)) == ""


def test_quantiles_are_upper_bounds():
    traffic = Traffic(
        100, 0, tuple(map(sum, zip(_counts(98, 10.0), _counts(2, 500.0), strict=True)))
    )
    assert 10 <= BOUNDS_MS[quantile(traffic, 0.5)] < 12
    assert 500 <= BOUNDS_MS[quantile(traffic, 0.99)] < 600


def _counts(number, ms=5.0):
    counts = [0] * (len(BOUNDS_MS) + 1)
    counts[bisect.bisect_left(BOUNDS_MS, ms)] = number
    return tuple(counts)
