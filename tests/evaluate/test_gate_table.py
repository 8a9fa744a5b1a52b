"""The gate errs as rarely as promised in the cases of docs/gate.md: all of them (slow), and a few of the hardest."""

import pytest

from tests.evaluate import gate_table as table

WRONG = [*table.NOT_WORSE, *table.BETTER]
HARD = (
    ("breaks 1.0 % of rows, fixes none", 50),
    ("sure and wrong in 1 % of rows", 200),
    ("30 clusters, one has half the rows", 580),
    ("log-normal errors", 20),
)


def named(case):
    return f"{case.name}, {case.rows} {case.metric}"


@pytest.mark.parametrize("case", [c for c in WRONG if (c.name, c.rows) in HARD], ids=named)
def test_the_hardest_cases_err_no_more_than_promised(case):
    """40 draws: what decided before errs in several of them."""
    now, before, _ = table.measure(case, 40)
    assert now <= table.most_by_chance(40)
    assert now <= before


@pytest.mark.slow
@pytest.mark.parametrize("case", WRONG, ids=named)
def test_no_case_errs_more_than_promised(case):
    now, _, _ = table.measure(case, table.REPEATS)
    assert now <= table.most_by_chance(table.REPEATS)


@pytest.mark.slow
@pytest.mark.parametrize("case", table.POWER, ids=named)
def test_a_better_model_is_promoted_no_more_often_than_before_and_with_rows_enough_it_is(case):
    now, before, _ = table.measure(case, 100)
    assert now <= before + 0.05
    kin = [other.rows for other in table.POWER if other.metric == case.metric]
    if case.rows == max(kin):
        assert now > 2 * table.PROMISED


def test_the_table_in_the_docs_has_every_case_that_may_err():
    text = table.DOCS.read_text(encoding="utf-8")
    for case in WRONG:
        assert f"| {case.name} | {case.rows:,} | `{case.metric}` |" in text
