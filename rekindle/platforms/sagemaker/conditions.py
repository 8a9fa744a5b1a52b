"""Which conditions of KFP become Condition steps of SageMaker Pipelines, and their JSON.

The steps behind the other conditions evaluate these themselves, in their container
(mounted.py). The service has Equals and the four orders, Not and Or; a list of conditions
means that all hold. It has no And, so `and` inside an `or` is written with Not and Or."""

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
"""How a definition refers to a value that only the run knows."""
Condition: TypeAlias = dict[str, Any]
"""A condition as the service reads it."""


def divided(
    flats: Mapping[str, Flat], values: Mapping[str, Any]
) -> tuple[dict[str, Flat], dict[str, tuple[Guard, ...]]]:
    """Who evaluates which conditions: the steps with those that become Condition steps,
    and by the path of a step those that it evaluates itself.

    A step evaluates conditions that no Condition step can compare; those around a step
    whose outputs are read outside of the branch, which has to run in any case, to leave
    word that it was skipped; and all that lie inside of such a condition."""
    in_step: set[str] = set()  # paths of conditions
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
        # guards stand from the outermost to the innermost
        outer = tuple(itertools.takewhile(lambda guard: guard.path not in in_step, flat.guards))
        steps[path] = dataclasses.replace(flat, guards=outer)
        guarded[path] = flat.guards[len(outer) :]
    return steps, guarded


def lowered(guard: Guard, operand: Operand) -> list[Condition]:
    """The list of conditions of a Condition step; `operand` gives a value's place in JSON."""
    return [_condition(part, guard, operand) for part in _conjuncts(guard.expression)]


def is_plain(guard: Guard, values: Mapping[str, Any]) -> bool:
    """Whether a Condition step can compare what `guard` reads.

    `values` are those of the pipeline's parameters, by name."""
    names = _names(guard.expression)
    return all(_is_comparable(guard.values.get(name), values) for name in names)


def _is_comparable(source: Source | None, values: Mapping[str, Any]) -> bool:
    """Whether a definition can name the source, and it has a value."""
    if isinstance(source, Given):
        value = values.get(source.name)
        for key in source.keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value is not None
    return isinstance(source, Constant | Output)


def _names(part: ir.Expression | ir.Term) -> Iterator[str]:
    """The names of the parameters that an expression reads."""
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
            # the service has no And: both hold if not one of them is false
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
            assert isinstance(source, Given | Output), name  # `divided` asked `is_plain`
            return operand(source)
    raise AssertionError(term)


def _not(condition: Condition) -> Condition:
    if condition["Type"] == "Not":
        return dict(condition["Condition"])
    return {"Type": "Not", "Condition": condition}
