"""Which conditions of KFP SageMaker Pipelines takes over, and its words for them.

The others a step looks at itself. The service has Equals and the four orders, Not and Or; a list of
conditions means that all hold. `and` inside an `or` is written with Not."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rekindle.ir import condition as ir
from rekindle.ir.flatten import Flat, Given, Guard, Output, Source, read_by
from rekindle.ir.graph import Constant

_TYPES = {
    "==": "Equals",
    "<": "LessThan",
    "<=": "LessThanOrEqualTo",
    ">": "GreaterThan",
    ">=": "GreaterThanOrEqualTo",
}
Operand = Callable[[Given | Output], Any]


def divided(
    flats: Mapping[str, Flat], values: Mapping[str, Any]
) -> tuple[dict[str, Flat], dict[str, tuple[Guard, ...]]]:
    """The steps with the conditions that become Condition steps, and by path those that a step
    looks at itself: those that no Condition step can compare, those around what is read outside of
    the branch, since its steps have to run either way, and those inside of these."""
    guards = [guard for flat in flats.values() for guard in flat.guards]
    inside = {guard.path for guard in guards if not is_plain(guard, values)}
    for flat in flats.values():
        mine = {guard.path for guard in flat.guards}
        read = [source for source in read_by(flat) if isinstance(source, Output)]
        inside |= {guard.path for output in read for guard in flats[output.path].guards} - mine
    steps, guarded = {}, {}
    for path, flat in flats.items():
        kept = list(itertools.takewhile(lambda g: g.path not in inside, flat.guards))
        steps[path] = dataclasses.replace(flat, guards=tuple(kept))
        guarded[path] = flat.guards[len(kept) :]
    return steps, guarded


def lowered(guard: Guard, operand: Operand) -> list[dict[str, Any]]:
    """The conditions that all have to hold; `operand` says how a value is read."""
    return [_one(part, guard, operand) for part in _parts(guard.expression)]


def is_plain(guard: Guard, values: Mapping[str, Any]) -> bool:
    """Whether a Condition step can compare what `guard` reads; `values` are of parameters."""
    return all(_is_plain(guard.values.get(name), values) for name in _names(guard.expression))


def _is_plain(source: Source | None, values: Mapping[str, Any]) -> bool:
    if isinstance(source, Given):
        value = values.get(source.name)
        for key in source.keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value is not None
    return isinstance(source, Constant | Output)


def _names(part: ir.Expression | ir.Term) -> Iterator[str]:
    match part:
        case ir.Reference(name):
            yield name
        case ir.Not(inner) | ir.Cast(_, inner):
            yield from _names(inner)
        case ir.Both(left, right) | ir.Either(left, right) | ir.Compare(left, _, right):
            yield from _names(left)
            yield from _names(right)


def _parts(expression: ir.Expression) -> list[ir.Expression]:
    """What has to hold side by side."""
    if isinstance(expression, ir.Both):
        return [*_parts(expression.left), *_parts(expression.right)]
    return [expression]


def _one(expression: ir.Expression, guard: Guard, operand: Operand) -> dict[str, Any]:
    match expression:
        case ir.Compare(left, "!=", right):
            return _not(_one(ir.Compare(left, "==", right), guard, operand))
        case ir.Compare(left, symbol, right):
            sides = {"LeftValue": _term(left, guard, operand)}
            sides["RightValue"] = _term(right, guard, operand)
            return {"Type": _TYPES[symbol], **sides}
        case ir.Not(inner):
            return _not(_one(inner, guard, operand))
        case ir.Either(left, right):
            either = [_one(side, guard, operand) for side in (left, right)]
            return {"Type": "Or", "Conditions": either}
        case ir.Both(left, right):
            neither = [_not(_one(side, guard, operand)) for side in (left, right)]
            return _not({"Type": "Or", "Conditions": neither})


def _term(term: ir.Term, guard: Guard, operand: Operand) -> Any:
    match term:
        case ir.Value(plain):
            return plain
        case ir.Cast("int", ir.Value(plain)):
            return int(plain)
        case ir.Cast(_, inner):
            return _term(inner, guard, operand)
        case ir.Reference(name):
            if isinstance(source := guard.values.get(name), Constant):
                return source.value
            assert isinstance(source, Given | Output), name  # is_plain
            return operand(source)
    raise AssertionError(term)


def _not(condition: dict[str, Any]) -> dict[str, Any]:
    if condition["Type"] == "Not":
        return dict(condition["Condition"])
    return {"Type": "Not", "Condition": condition}
