"""The table of tasks: what it says of each is what its class, its rates and its layouts say."""

from pathlib import Path

import pytest

from rekindle.objectives import KINDS, LOWER_IS_BETTER, LOWEST, METRICS
from rekindle.spec import layout_support, rates
from rekindle.spec.tasks import BUILT_IN_TASKS
from rekindle.tables import rows
from rekindle.tasks import load_task


@pytest.mark.parametrize("name", BUILT_IN_TASKS)
def test_a_task_is_what_its_row_says(name):
    row = BUILT_IN_TASKS[name]
    assert load_task(name).kind is row.objective
    assert row.rates in rows(Path(rates.__file__).with_suffix(".yaml"))
    assert any(cell.kind == row.layout for cell in layout_support.tested())


def test_what_is_said_of_a_metric_is_said_of_one_that_some_objective_has():
    assert set(METRICS) == {name for kind in KINDS.values() for name in kind.metrics}
    assert len(set(METRICS)) == len(METRICS)
    assert {*LOWER_IS_BETTER, *LOWEST} <= set(METRICS)
    assert not LOWER_IS_BETTER & LOWEST.keys()
