"""Values by IR type: the casts that YAML and protobuf make necessary, and the check of a run's
arguments.

In the IR every number is a double. Where a parameter is NUMBER_INTEGER the value is cast to int;
inside a LIST or STRUCT, where the IR has no types, a number without a fraction becomes an int
(`[1.0, 2.5]` reads as `[1, 2.5]`), as KFP's own backend shows it to a component. Values that steps
hand over as JSON at run time keep their JSON type."""

import json
import sys
from collections.abc import Mapping
from typing import Any

from rekindle.errors import Problem, RequestError, did_you_mean
from rekindle.ir.graph import Graph, ParameterType
from rekindle.ir.placeholders import mapped

_WORDS: Mapping[ParameterType, str] = {
    "STRING": "text", "NUMBER_INTEGER": "a whole number", "NUMBER_DOUBLE": "a number",
    "BOOLEAN": "true or false", "LIST": "a list", "STRUCT": "a mapping",
    "TASK_FINAL_STATUS": "the final status of a step",
    "TASK_CONFIG": "the configuration of a step",
}  # fmt: skip


def integral(value: Any) -> Any:
    """`value` with every float that has no fraction as an int, at any depth."""
    return mapped(value, lambda x: int(x) if isinstance(x, float) and x.is_integer() else x)


def from_ir(value: Any, kind: ParameterType) -> Any:
    """A constant of the IR as a value of `kind`, or ValueError; None stays None."""
    if value is None:
        return None
    if kind in ("LIST", "STRUCT"):
        value = integral(value)
    if kind == "NUMBER_INTEGER" and isinstance(value, float) and value.is_integer():
        value = int(value)
    if (reason := mismatch(value, kind)) is not None:
        raise ValueError(reason)
    return float(value) if kind == "NUMBER_DOUBLE" else value


def mismatch(value: Any, kind: ParameterType) -> str | None:
    """Why `value` is not of `kind`, or None. A bool is not a number, an int is a valid double."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = {
        "STRING": isinstance(value, str), "BOOLEAN": isinstance(value, bool),
        "NUMBER_INTEGER": number and isinstance(value, int),
        "NUMBER_DOUBLE": number and abs(value) <= sys.float_info.max,
        "LIST": isinstance(value, list),
    }.get(kind, isinstance(value, dict))  # fmt: skip
    if not fits:
        return f"{shown(value)} is not {_WORDS[kind]}"
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        return f"{shown(value)} is not valid JSON: {error}"
    return None


def bind(graph: Graph, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters with `arguments` and defaults; RequestError with every problem at once. Tuples
    count as lists, whole numbers as doubles; optional parameters without a value are left out."""
    problems = [_unknown(name, graph) for name in arguments if name not in graph.inputs.parameters]
    values: dict[str, Any] = {}
    for name, parameter in graph.inputs.parameters.items():
        value = mapped(arguments.get(name), lambda leaf: leaf)  # JSON knows no tuples
        if value is None:
            if parameter.required:
                what = f"the pipeline needs `{name}` ({_WORDS[parameter.type]})"
                problems.append(Problem(what, name, "give it a value"))
            elif parameter.default is not None:
                values[name] = parameter.default
        elif reason := mismatch(value, parameter.type):
            problems.append(Problem(f"`{name}`: {reason}", name))
        elif parameter.literals and value not in parameter.literals:
            known = ", ".join(map(repr, parameter.literals))
            problems.append(Problem(f"`{name}`: {shown(value)} is not one of {known}", name))
        else:
            values[name] = float(value) if parameter.type == "NUMBER_DOUBLE" else value
    for name, artifact in graph.inputs.artifacts.items():
        if not artifact.optional:
            what = f"the pipeline takes the artifact `{name}` as an argument"
            problems.append(Problem(what, name, "make it a step's output"))
    if problems:
        raise RequestError(problems)
    return values


def _unknown(name: str, graph: Graph) -> Problem:
    known = list(graph.inputs.parameters)
    fix = did_you_mean(name, known) or f"it takes {', '.join(known) or 'none'}"
    return Problem(f"the pipeline has no parameter `{name}`", name, fix)


def shown(value: Any) -> str:
    """A value in a message: the beginning of a long one."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
