"""Spot or not: both ends, the limits, and the reasons."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time

import pytest

from rekindle.plan.risk import InterruptibleWork, hazard, interval, uninterrupted_seconds
from rekindle.plan.spot import Offer, SpotNeeds, weigh
from tests.docs.blocks import ROOT
from tests.plan.spot_table import HEADINGS, NEEDS, NODES, OFFER, WORK, table

PAGE = ROOT / "docs" / "spot.md"
CHEAP = Offer(100.0, 250.0)
ALONE_USD = uninterrupted_seconds(WORK, interval(WORK, 0.0)) / 3600 * OFFER.on_demand_usd_per_hour


KINDS = {
    "interrupted": "saving and starting again",
    "dear": "on demand",
    "late": "chance to take at most",
    "over_budget": "chance to cost at most",
    "deadline": "would not make",
}


def _kinds(reasons: tuple[str, ...]) -> list[str]:
    return [next(kind for kind, words in KINDS.items() if words in reason) for reason in reasons]


def test_both_ends_are_shown_with_one_interval_for_both() -> None:
    spot = weigh(WORK, hazard("rough"), 8, CHEAP, SpotNeeds())
    assert (spot.independent.mtbf_hours, spot.together.mtbf_hours) == pytest.approx((1.25, 10.0))
    assert spot.every == interval(WORK, 0.8)
    assert spot.independent.expected_usd > spot.together.expected_usd
    assert spot.viable == "yes"
    assert (spot.independent.in_time, spot.independent.fallback) == (None, None)
    one = weigh(WORK, hazard("rough"), 1, CHEAP, SpotNeeds())
    assert one.independent == one.together


def test_the_users_interval_is_taken_as_it_is_on_demand_too() -> None:
    spot = weigh(WORK, hazard(0.0), 8, Offer(250.0, 250.0), SpotNeeds(), every=100)
    assert spot.every == 100
    # a start, ten hours, 360 saves of 10 s, and the last commit
    usd = (300 + 36_000 + 3_600 + 60) / 3600 * 250
    assert spot.together.reasons == (f"${usd:,.2f} expected against ${usd:,.2f} on demand",)


def test_machines_that_hardly_start_before_they_go_are_a_reason() -> None:
    spot = weigh(WORK, hazard("hostile"), 8, CHEAP, SpotNeeds())
    assert spot.viable == "only if reclaimed together"
    assert spot.independent.mtbf_hours == pytest.approx(1 / 2.4)
    assert spot.independent.reasons[0] == (
        "an interruption every 25 min, and 6 min 10 s go into saving and starting again"
    )
    assert weigh(WORK, hazard(30.0), 8, CHEAP, SpotNeeds()).viable == "no"


def test_spot_at_nearly_the_same_price_is_dearer_after_what_is_lost() -> None:
    spot = weigh(WORK, hazard("rough"), 8, Offer(230.0, 250.0), SpotNeeds())
    assert _kinds(spot.independent.reasons) == ["dear"]
    assert spot.together.reasons == ()
    same = weigh(WORK, hazard(0.0), 8, Offer(250.0, 250.0), SpotNeeds())
    assert (_kinds(same.independent.reasons), same.viable) == (["dear"], "no")


def test_limits_that_are_kept_too_rarely_are_reasons() -> None:
    needs = SpotNeeds(max_run_hours=12.0, budget_usd=1_150.0)
    spot = weigh(WORK, hazard("rough"), 8, CHEAP, needs)
    late, over = spot.independent.reasons
    found = spot.independent
    assert late == f"{found.in_time:.0%} chance to take at most 12 h"
    assert over == f"{found.in_budget:.0%} chance to cost at most $1,150"
    assert 0 <= found.in_both <= min(found.in_time, found.in_budget)
    assert (
        weigh(WORK, hazard("rough"), 8, CHEAP, dataclasses.replace(needs, chance=0.01)).viable
        == "yes"
    )


def test_two_limits_that_are_each_kept_may_be_missed_too_often_together() -> None:
    needs = SpotNeeds(max_run_hours=13.4, budget_usd=1_170.0, chance=0.5)
    found = weigh(WORK, hazard("rough"), 8, CHEAP, needs).independent
    assert min(found.in_time or 0, found.in_budget or 0) > 0.5
    assert found.in_both < 0.5
    limits = "take at most 13.4 h and cost at most $1,170"
    assert found.reasons == (f"{found.in_both:.0%} chance to {limits}",)


def test_a_deadline_is_kept_on_demand_so_that_being_late_is_no_reason() -> None:
    without = weigh(WORK, hazard("rough"), 8, CHEAP, SpotNeeds(max_run_hours=13.0))
    assert _kinds(without.independent.reasons) == ["late"]
    with_it = weigh(
        WORK, hazard("rough"), 8, CHEAP, SpotNeeds(max_run_hours=13.0, deadline_hours=13.0)
    )
    assert with_it.independent.reasons == ()
    assert with_it.independent.fallback is not None
    assert with_it.independent.fallback.chance > 0.3
    assert with_it.independent.expected_usd < with_it.independent.fallback_usd < ALONE_USD


def test_a_budget_counts_as_missed_where_on_demand_machines_may_be_needed() -> None:
    needs = SpotNeeds(budget_usd=2_000.0, deadline_hours=13.0)
    spot = weigh(WORK, hazard("rough"), 8, CHEAP, needs).independent
    assert spot.in_budget == pytest.approx(1.0)
    assert spot.fallback is not None
    assert spot.reasons == (f"{1 - spot.fallback.chance:.0%} chance to cost at most $2,000",)


def test_with_a_deadline_it_saves_as_often_as_is_cheapest() -> None:
    work = InterruptibleWork(720, 10.0, 5.0, 120.0, wait_seconds=60.0)
    lax, tight = (
        weigh(work, hazard("calm"), 1, CHEAP, SpotNeeds(deadline_hours=h)) for h in (9.0, 2.6)
    )
    # an hour between saves is more than the deadline leaves: nothing would be begun on spot
    assert lax.every * 10 == 3_600
    assert tight.every * 10 < 1_200
    assert tight.independent.fallback is not None
    assert tight.independent.fallback.chance < 0.05


def test_a_deadline_that_nothing_makes_is_a_reason_and_what_cannot_end_has_no_chance() -> None:
    spot = weigh(WORK, hazard("calm"), 8, CHEAP, SpotNeeds(deadline_hours=5.0))
    assert _kinds(spot.independent.reasons) == ["deadline"]
    never = weigh(WORK, hazard(500.0), 8, CHEAP, SpotNeeds(max_run_hours=20.0, budget_usd=1e6))
    assert (never.independent.in_time, never.independent.in_both) == (0.0, 0.0)
    assert _kinds(never.independent.reasons) == ["interrupted", "dear", "late", "over_budget"]


def test_it_takes_tens_of_milliseconds() -> None:
    took = []
    for _ in range(3):
        began = time.perf_counter()
        weigh(WORK, hazard("rough"), NODES, OFFER, NEEDS)
        took.append(time.perf_counter() - began)
    assert min(took) < 0.2


def test_importing_it_loads_neither_numpy_nor_torch() -> None:
    code = (
        "import sys, rekindle.plan.spot; print([m for m in ('numpy', 'torch') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_the_table_in_docs_spot_is_what_the_code_prints_golden(
    request: pytest.FixtureRequest,
) -> None:
    page = PAGE.read_text(encoding="utf-8")
    start = page.index(f"| {HEADINGS[0]} |")
    end = page.index("\n\n", start) + 1
    if request.config.getoption("--regenerate"):
        PAGE.write_text(page[:start] + table() + page[end:], encoding="utf-8")
    assert page[start:end] == table()


def test_the_sentences_around_the_table_say_the_same() -> None:
    page = PAGE.read_text(encoding="utf-8")
    spot = weigh(WORK, hazard("hostile"), NODES, OFFER, NEEDS)
    hours = ALONE_USD / OFFER.on_demand_usd_per_hour
    assert f"{hours:.1f} h and ${ALONE_USD:,.0f}" in page
    assert "an interruption every 25 min, and 6 min 10 s" in spot.independent.reasons[0]
