"""KFP's conditions as conditions of SageMaker Pipelines.

It has Equals and the four orders, Not and Or; a list of conditions means that all hold. `and`
inside an `or` is written with Not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

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
from rekindle.ir.flatten import Given, Guard, Output, Source
from rekindle.ir.graph import Constant

_TYPES = {
    "==": "Equals", "<": "LessThan", "<=": "LessThanOrEqualTo", ">": "GreaterThan",
    ">=": "GreaterThanOrEqualTo",
}  # fmt: skip
Operand = Callable[[Given | Output], Any]


def lowered(guard: Guard, operand: Operand) -> list[dict[str, Any]]:
    """The conditions that all have to hold; `operand` says how a value is read."""
    return [_one(part, guard, operand) for part in _parts(guard.expression)]


def is_plain(guard: Guard, values: Mapping[str, Any]) -> bool:
    """Whether a Condition step can compare all that `guard` reads: outputs, constants, and
    parameters of the pipeline, `values`, that have a value."""
    return all(_is_plain(guard.values.get(name), values) for name in _names(guard.expression))


def _is_plain(source: Source | None, values: Mapping[str, Any]) -> bool:
    if isinstance(source, Given):
        value = values.get(source.name)
        for key in source.keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value is not None
    return isinstance(source, Constant | Output)


def _names(part: Expression | Term) -> Iterator[str]:
    match part:
        case Reference(name):
            yield name
        case Not(inner) | Cast(_, inner):
            yield from _names(inner)
        case Both(left, right) | Either(left, right) | Compare(left, _, right):
            yield from _names(left)
            yield from _names(right)


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
            assert isinstance(source, Given | Output), name  # is_plain
            return operand(source)
    raise AssertionError(term)


def _not(condition: dict[str, Any]) -> dict[str, Any]:
    if condition["Type"] == "Not":
        inner: dict[str, Any] = condition["Condition"]
        return inner
    return {"Type": "Not", "Condition": condition}
