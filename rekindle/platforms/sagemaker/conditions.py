"""Which conditions of KFP SageMaker Pipelines takes over, and its words for them.

The others a step looks at itself. The service has Equals and the four orders, Not and Or;
a list of conditions means that all hold. `and` inside an `or` is written with Not."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

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
Operand: TypeAlias = Callable[[Given | Output], object]
Condition: TypeAlias = dict[str, Any]


def divided(
    flats: Mapping[str, Flat], values: Mapping[str, Any]
) -> tuple[dict[str, Flat], dict[str, tuple[Guard, ...]]]:
    """The steps with the conditions that become Condition steps, and by path those that a
    step looks at itself: those that no Condition step can compare, those around what is
    read outside of the branch, since its steps have to run either way, and those inside
    of these."""
    in_step: set[str] = set()
    for flat in flats.values():
        in_step |= {guard.path for guard in flat.guards if not is_plain(guard, values)}
    for flat in flats.values():
        own_guards = {guard.path for guard in flat.guards}
        for source in read_by(flat):
            if isinstance(source, Output):
                around_source = {guard.path for guard in flats[source.path].guards}
                in_step |= around_source - own_guards
    steps = {}
    guarded = {}
    for path, flat in flats.items():
        outer = tuple(itertools.takewhile(lambda guard: guard.path not in in_step, flat.guards))
        steps[path] = dataclasses.replace(flat, guards=outer)
        guarded[path] = flat.guards[len(outer) :]
    return steps, guarded


def lowered(guard: Guard, operand: Operand) -> list[Condition]:
    """The conditions that all have to hold; `operand` says how a value is read."""
    return [_condition(part, guard, operand) for part in _conjuncts(guard.expression)]


def is_plain(guard: Guard, values: Mapping[str, Any]) -> bool:
    """Whether a Condition step can compare what `guard` reads;
    `values` are of parameters."""
    names = _names(guard.expression)
    return all(_is_comparable(guard.values.get(name), values) for name in names)


def _is_comparable(source: Source | None, values: Mapping[str, Any]) -> bool:
    if isinstance(source, Given):
        value = values.get(source.name)
        for key in source.keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value is not None
    return isinstance(source, Constant | Output)


def _names(part: ir.Expression | ir.Term) -> Iterator[str]:
    """The names that an expression refers to."""
    match part:
        case ir.ParameterReference(name):
            yield name
        case ir.Not(inner) | ir.Cast(_, inner):
            yield from _names(inner)
        case ir.Both(left, right) | ir.Either(left, right) | ir.Compare(left, _, right):
            yield from _names(left)
            yield from _names(right)


def _conjuncts(expression: ir.Expression) -> list[ir.Expression]:
    """The parts that are joined by `and` at the top."""
    if isinstance(expression, ir.Both):
        return [*_conjuncts(expression.left), *_conjuncts(expression.right)]
    return [expression]


def _condition(expression: ir.Expression, guard: Guard, operand: Operand) -> Condition:
    match expression:
        case ir.Compare(left, "!=", right):
            return _not(_condition(ir.Compare(left, "==", right), guard, operand))
        case ir.Compare(left, symbol, right):
            return {
                "Type": _TYPES[symbol],
                "LeftValue": _value(left, guard, operand),
                "RightValue": _value(right, guard, operand),
            }
        case ir.Not(inner):
            return _not(_condition(inner, guard, operand))
        case ir.Either(left, right):
            either = [_condition(side, guard, operand) for side in (left, right)]
            return {"Type": "Or", "Conditions": either}
        case ir.Both(left, right):
            # the service has no And: neither side may be false
            false_sides = [_not(_condition(side, guard, operand)) for side in (left, right)]
            return _not({"Type": "Or", "Conditions": false_sides})


def _value(term: ir.Term, guard: Guard, operand: Operand) -> object:
    match term:
        case ir.Value(plain):
            return plain
        case ir.Cast("int", ir.Value(plain)):
            return int(plain)
        case ir.Cast(_, inner):
            return _value(inner, guard, operand)
        case ir.ParameterReference(name):
            source = guard.values.get(name)
            if isinstance(source, Constant):
                return source.value
            assert isinstance(source, Given | Output), name  # is_plain
            return operand(source)
    raise AssertionError(term)


def _not(condition: Condition) -> Condition:
    if condition["Type"] == "Not":
        return dict(condition["Condition"])
    return {"Type": "Not", "Condition": condition}
