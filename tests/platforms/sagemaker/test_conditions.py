"""Conditions for SageMaker decide as KFP's do, as the emulator of its service understands them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from rekindle.errors import UnsupportedError
from rekindle.ir.condition import evaluate, parse
from rekindle.ir.flatten import Given, Guard, Listed, Output
from rekindle.platforms.sagemaker.conditions import lowered
from tests.servers.sagemaker import Execution, Pipelines, holds_all

N, M = ("int(inputs.parameter_values['n'])", "int(inputs.parameter_values['m'])")
COMPARES = [
    f"{N} {sign} {right}" for sign in ("==", "!=", "<", "<=", ">", ">=") for right in ("2", M)
]
EXPRESSIONS = [
    *COMPARES,
    f"!({N} < 2)",
    f"!({N} == 2) && {M} > 1",
    f"{N} == 1 || {M} == 1",
    f"!({N} == 1 || {M} == 1)",
    f"({N} > 1 && {M} > 1) || {N} == {M}",
    f"!({N} > 1 && {M} > 1)",
    f"!(!({N} >= 2))",
]  # fmt: skip


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_they_hold_for_the_same_values(text: str) -> None:
    expression = parse(text)
    guard = Guard("c", str(expression), expression, {"n": Given("n"), "m": Given("m")})

    def operand(source: Given | Output, where: str) -> dict[str, str]:
        assert isinstance(source, Given)
        return {"Get": f"Parameters.{source.name}"}

    conditions = lowered(guard, operand)
    service = Pipelines(None, Path())
    for n, m in itertools.product((1, 2, 3), repeat=2):
        values = {"n": n, "m": m}
        here = evaluate(expression, values)
        assert holds_all(service, Execution("x"), values, conditions) == here, values


def test_a_list_cannot_be_compared() -> None:
    guard = Guard("c", f"{N} == 1", parse(f"{N} == 1"), {"n": Listed(())})
    with pytest.raises(UnsupportedError, match="compares a list"):
        lowered(guard, lambda source, where: None)
