"""`rekindle.planned`: the value, and what a notebook shows of it."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pandas as pd
import pytest

import rekindle
from rekindle.app.forecast import Forecast, lines

ROOT = Path(__file__).parents[2]
SEVEN = ROOT / "configs" / "plan" / "7b-spot.yaml"


@pytest.fixture(scope="module")
def seven() -> Forecast:
    return rekindle.planned(SEVEN)


def memory(plan: Forecast) -> dict[str, float]:
    return {term.name: term.amount for term in plan.record.memory}


@pytest.mark.slow
def test_the_name_stays_a_function_whatever_was_imported_or_run_before(tmp_path):
    """`rekindle.plan` could not: it is the package from its first import on."""
    (tmp_path / "one.py").write_text(
        "from kfp import dsl\n\n\n@dsl.component(install_kfp_package=False)\ndef hello() -> int:\n"
        "    return 1\n\n\n@dsl.pipeline\ndef one():\n    hello()\n"
    )
    (tmp_path / "one.yaml").write_text("name: one\npipeline: one.py:one\n")
    code = (
        "import rekindle\n"
        "assert rekindle.run('one.yaml', quiet=True).status == 'succeeded'\n"
        f"first, second = (rekindle.planned({str(SEVEN)!r}) for _ in range(2))\n"
        "import rekindle.plan.plan\n"
        f"assert rekindle.planned({str(SEVEN)!r}) == first == second\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_a_plan_is_a_value_with_figures_and_rows(seven):
    spec = rekindle.load(SEVEN)
    assert rekindle.planned(spec) == seven
    assert (seven.layout, seven.machines) == ("shard 8", "1 x p4de.24xlarge")
    least, expected, most = seven.hours
    assert least < expected < most
    assert seven.on_demand_usd[1] == pytest.approx(expected * 27.44705)
    assert seven.record.spot.usd[0] < seven.on_demand_usd[0]
    record = seven.record
    assert sum(memory(seven).values()) == record.chosen.memory_bytes
    assert sum(term.amount for term in record.time) == pytest.approx(record.chosen.step_seconds[1])
    assert seven.refused == []
    table = pd.DataFrame(seven.rows)
    assert list(table["chosen"]) == [True] + [False] * 5
    assert table["needed_gib"].lt(table["device_gib"]).all()
    assert "as fast within the error" in pd.DataFrame(seven.rejected)["reason"][0]
    assert str(seven) == "\n".join(lines(seven.record))
    assert repr(seven) == "Forecast('plan-7b-spot', shard 8 on 1 x p4de.24xlarge)"


def test_platform_region_prices_and_examples_are_those_of_the_command_line(tmp_path):
    own = tmp_path / "own.yaml"
    row = "{machine: p4de.24xlarge, region: eu-west-1, on_demand: 90, source: a contract, as_of: 2026-11-23}"
    own.write_text(f"prices:\n  - {row}\n")
    there = rekindle.planned(SEVEN, region="eu-west-1", prices=[own], home=tmp_path)
    assert there.record.chosen.on_demand_usd_per_hour == 90
    small = ROOT / "configs" / "plan" / "distilbert.yaml"
    assert rekindle.planned(small).hours is None
    assert rekindle.planned(small, examples=1_000_000).hours is not None
    with pytest.raises(rekindle.RekindleError, match="there is no platform `vertx`"):
        rekindle.planned(SEVEN, platform="vertx")
    assert list(tmp_path.iterdir()) == [own], "a plan writes nothing"


def test_a_notebook_shows_what_the_command_line_says(seven):
    record = seven.record.model_copy(update={"name": "<script>x</script>", "notes": ("<b>&",)})
    page = ET.fromstring(Forecast(record)._repr_html_())
    assert (page.tag, len(page)) == ("pre", 0), "what a config says is text"
    assert page.text == "\n".join(lines(record))
    assert "█" in page.text


def test_what_speaks_against_a_plan_is_shown():
    tight = ["resources.deadline_hours=10", "resources.budget_usd=100"]
    plan = rekindle.planned(SEVEN, tight)
    assert len(plan.refused) == 2
    assert "resources.deadline_hours is 10" in plan.refused[0]
    assert "resources.budget_usd is $100" in plan.refused[1]
    assert all(line in str(plan) for line in plan.refused)
