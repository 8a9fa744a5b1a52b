"""KFP's conditions as conditions of SageMaker Pipelines.

It has Equals and the four orders, Not and Or; a list of conditions means that all hold. `and`
inside an `or` is written with Not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rekindle.errors import UnsupportedError
from rekindle.ir.condition import (
    Both,
    Cast,
    Compare,
    Either,
    Expression,
    Not,
    Reference,
    Term,
    Value,
)
from rekindle.ir.flatten import Given, Guard, Output
from rekindle.ir.graph import Constant

_TYPES = {
    "==": "Equals", "<": "LessThan", "<=": "LessThanOrEqualTo", ">": "GreaterThan",
    ">=": "GreaterThanOrEqualTo",
}  # fmt: skip
Operand = Callable[[Given | Output, str], Any]


def lowered(guard: Guard, operand: Operand) -> list[dict[str, Any]]:
    """The conditions that all have to hold; `operand` says how a value is read."""
    return [_one(part, guard, operand) for part in _parts(guard.expression)]


def _parts(expression: Expression) -> list[Expression]:
    """What has to hold side by side."""
    if isinstance(expression, Both):
        return [*_parts(expression.left), *_parts(expression.right)]
    return [expression]


def _one(expression: Expression, guard: Guard, operand: Operand) -> dict[str, Any]:
    match expression:
        case Compare(left, "!=", right):
            return _not(_one(Compare(left, "==", right), guard, operand))
        case Compare(left, symbol, right):
            sides = {"LeftValue": _term(left, guard, operand)}
            sides["RightValue"] = _term(right, guard, operand)
            return {"Type": _TYPES[symbol], **sides}
        case Not(inner):
            return _not(_one(inner, guard, operand))
        case Either(left, right):
            either = [_one(side, guard, operand) for side in (left, right)]
            return {"Type": "Or", "Conditions": either}
        case Both(left, right):
            neither = [_not(_one(side, guard, operand)) for side in (left, right)]
            return _not({"Type": "Or", "Conditions": neither})


def _term(term: Term, guard: Guard, operand: Operand) -> Any:
    match term:
        case Value(plain):
            return plain
        case Cast("int", Value(plain)):
            return int(plain)
        case Cast(_, inner):
            return _term(inner, guard, operand)
        case Reference(name):
            source = guard.values.get(name)
            if isinstance(source, Constant):
                return source.value
            if isinstance(source, Given | Output):
                return operand(source, guard.path)
    raise UnsupportedError(
        f"the condition of `{guard.path}` compares a list or formatted text", where=guard.path,
        fix="compare a value that a component computes",
    )  # fmt: skip


def _not(condition: dict[str, Any]) -> dict[str, Any]:
    if condition["Type"] == "Not":
        inner: dict[str, Any] = condition["Condition"]
        return inner
    return {"Type": "Not", "Condition": condition}
