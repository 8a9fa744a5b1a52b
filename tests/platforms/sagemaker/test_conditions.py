"""Conditions for SageMaker decide as KFP's do, as the emulator of its service understands them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from rekindle.ir.condition import evaluate, parse
from rekindle.ir.flatten import FirstOf, Given, Guard, Listed, Output, Source, TemplatedConstant
from rekindle.ir.graph import Constant
from rekindle.ir.placeholders import Template
from rekindle.platforms.sagemaker.conditions import is_plain, lowered
from tests.servers.aws.sagemaker import Execution, Pipelines, holds_all

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
]


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_they_hold_for_the_same_values(text: str) -> None:
    expression = parse(text)
    guard = Guard("c", str(expression), expression, {"n": Given("n"), "m": Given("m")})

    def operand(source: Given | Output) -> dict[str, str]:
        assert isinstance(source, Given)
        return {"Get": f"Parameters.{source.name}"}

    conditions = lowered(guard, operand)
    service = Pipelines(None, Path())
    for n, m in itertools.product((1, 2, 3), repeat=2):
        values = {"n": n, "m": m}
        here = evaluate(expression, values)
        assert holds_all(service, Execution("x"), values, conditions) == here, values


@pytest.mark.parametrize(
    ("source", "plain"),
    [
        (Constant(1), True),
        (Output("a", "x"), True),
        (Given("p"), True),
        (Given("p", ("deep",)), True),
        (Given("p", ("missing",)), False),
        (Given("nobody gave it"), False),
        (Listed(()), False),
        (FirstOf((Output("a", "x"), Output("b", "x"))), False),
        (TemplatedConstant(Template(("1",)), {}), False),
    ],
)
def test_what_no_condition_step_can_compare_is_left_to_the_step(
    source: Source, plain: bool
) -> None:
    guard = Guard("c", f"{N} == 1", parse(f"{N} == 1"), {"n": source})
    assert is_plain(guard, {"p": {"deep": 1}}) is plain
