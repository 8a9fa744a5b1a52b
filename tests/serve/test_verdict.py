"""How often a canary is rolled back that is as good as the version before, and one that is worse."""

import bisect

import numpy as np
import pytest

from rekindle.serve.messages import BOUNDS_MS, Shadowed, Traffic, is_refusal
from rekindle.serve.verdict import breach, breach_in_shadow, look_of, quantile
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


@pytest.mark.slow
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


def refusing(rng, canary, stable, requests=640, share=0.5):
    """Whether a canary is rolled back that refuses such a share of requests, as the version before does; bad requests come
    in bursts of one client."""
    looks = [(10 * 2**k, k) for k in range(look_of(requests) + 1)]
    total = int(requests / share)
    bad_N = np.repeat(rng.random(total // 20 + 1) < stable, 20)[:total]
    mine_N = rng.random(total) < share  # drawn, whatever the client
    refused_N = np.where(mine_N, bad_N | (rng.random(total) < canary - stable), bad_N)
    for count, look in [*looks, (requests, look_of(requests) + 1)]:
        end = np.searchsorted(np.cumsum(mine_N), count)
        seen = [
            Traffic(
                int(who[:end].sum()), 0, _counts(0), refused=int(refused_N[:end][who[:end]].sum())
            )
            for who in (mine_N, ~mine_N)
        ]
        if breach(*seen, SPEC, look):
            return True
    return False


@pytest.mark.parametrize("bad", [0.0, 0.1, 0.9])
def test_bad_requests_of_clients_roll_no_canary_back(bad):
    rng = np.random.default_rng(3)
    assert sum(refusing(rng, bad, bad) for _ in range(200)) / 200 <= SPEC.alpha


@pytest.mark.parametrize(("canary", "stable"), [(1.0, 0.0), (0.2, 0.05), (0.06, 0.0)])
def test_one_that_refuses_what_the_version_before_answers_is_rolled_back(canary, stable):
    rng = np.random.default_rng(4)
    assert sum(refusing(rng, canary, stable) for _ in range(100)) >= 95


def test_refusals_are_compared_and_not_limited():
    every, none = Traffic(20, 0, _counts(0), refused=20), Traffic(20, 0, _counts(20))
    what = breach(every, none, SPEC, look_of(20))
    expected = "it refused 20 of 20 requests (4xx), and the version before refused 0 of 20"
    assert what == expected
    assert breach(every, every, SPEC, look_of(20)) == "", "clients send what nobody reads"
    assert breach(every, Traffic(0, 0, ()), SPEC, look_of(20)) == "", "nothing to compare with"
    asked_for = SPEC.model_copy(update={"allow_other_inputs": True})
    assert breach(every, none, asked_for, look_of(20)) == ""


@pytest.mark.parametrize("status", range(400, 500))
def test_only_what_says_that_the_request_is_not_read_is_a_refusal(status):
    assert is_refusal(status) == (status not in (404, 408, 413, 429, 499))
    assert not is_refusal(status - 200)
    assert not is_refusal(status + 100)


def test_refusals_in_the_shadow_count_as_failures_unless_they_are_asked_for():
    seen = Shadowed("a", 100, 0, 0, 0, refused=30)
    what = breach_in_shadow(seen, SPEC, look_of(100))
    assert what.endswith(
        "it failed 0 of 100 requests and refused 30 (4xx), which the version before answered"
    )
    asked_for = SPEC.model_copy(update={"allow_other_inputs": True})
    assert breach_in_shadow(seen, asked_for, look_of(100)) == ""


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
