"""Values by IR type: what an input receives, and the check of a run's arguments.

Authority: kubeflow/pipelines 2.17.0, backend/src/v2/driver/resolve.go. Its driver binds
every input of a node (a component, a nested pipeline, the branch of a condition, a loop
and each of its turns) by the type of that input, wherever the value comes from: an input
of type STRING takes any value as text, every other type takes its own kind and nothing
else. `received` is that rule; a run here, the compilers that unroll loops, and the steps
of SageMaker and Azure ML all bind with it. protojson.py says what KFP's protobuf makes of
the values themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rekindle.errors import Problem, RequestError, did_you_mean
from rekindle.protojson import carried, text_of

if TYPE_CHECKING:  # bundles carry this module without the Graph
    from rekindle.ir.graph import Graph, ParameterType

_WORDS: Mapping[str, str] = {
    "STRING": "text",
    "NUMBER_INTEGER": "a whole number",
    "NUMBER_DOUBLE": "a number",
    "BOOLEAN": "true or false",
    "LIST": "a list",
    "STRUCT": "a mapping",
    "TASK_FINAL_STATUS": "the final status of a step",
    "TASK_CONFIG": "the configuration of a step",
}
# what to do about a value that an input cannot receive
FIT = (
    "give it a value of its type, or change the type of the input; the items of a plain `list` are "
    "text, those of a `List[int]` are numbers"
)


def received(value: Any, kind: str, literals: Sequence[Any] = ()) -> Any:
    """What an input of the IR type `kind` receives where `value` arrives; None is a null.

    `received(1, "STRING")` is `1` as text, a null there is the empty text; `received(2.0,
    "NUMBER_DOUBLE")` is the int 2. KFP checks of numbers only that they are numbers, so
    1.5 passes at a NUMBER_INTEGER. Raises ValueError for a value of another kind, and for
    one that is not among the `literals`, if there are any."""
    if kind == "STRING":
        bound: Any = text_of(value)
    else:
        bound = carried(value)
        if not _fits(bound, kind):
            raise ValueError(f"{shown(value)} is not {_WORDS[kind]}")
    if literals and bound not in literals:
        raise ValueError(f"{shown(bound)} is not one of {', '.join(map(repr, literals))}")
    return bound


def element(value: Any, keys: Sequence[str]) -> Any:
    """What `keys` lead to in a mapping, or in the JSON text of one; ValueError where
    there is no such key, or a null behind it, which KFP's driver does not take either."""
    for key in keys:
        if isinstance(value, str):
            value = parsed(value)
        if not isinstance(value, dict) or key not in value:
            raise ValueError(f"there is no `{key}` in {shown(value)}")
        value = value[key]
        if value is None:
            raise ValueError(f"`{key}` is null, which no input can receive")
    return value


def parsed(text: str) -> Any:
    """The value that a JSON text spells; any other text as it is."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def from_ir(value: Any, kind: ParameterType) -> Any:
    """A constant of the IR as a value of `kind`, or ValueError; None stays None.

    In the IR every number is a double: a whole one is cast to int, but where `kind` is
    NUMBER_DOUBLE."""
    if value is None:
        return None
    if (reason := mismatch(value, kind)) is not None:
        raise ValueError(reason)
    return float(value) if kind == "NUMBER_DOUBLE" else carried(value)


def mismatch(value: Any, kind: ParameterType) -> str | None:
    """Why `value` is not of `kind`, or None. A bool is not a number; as in KFP, a number
    with a fraction passes where a whole one is declared."""
    if not _fits(value, kind):
        return f"{shown(value)} is not {_WORDS[kind]}"
    try:
        json.dumps(carried(value), allow_nan=False)
    except (TypeError, ValueError) as error:
        return f"{shown(value)} is not valid JSON: {error}"
    return None


def _fits(value: Any, kind: str) -> bool:
    if kind == "STRING":
        return isinstance(value, str)
    if kind == "BOOLEAN":
        return isinstance(value, bool)
    if kind in ("NUMBER_INTEGER", "NUMBER_DOUBLE"):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, list if kind == "LIST" else dict)


def bind(graph: Graph, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters with `arguments` and defaults; RequestError with every problem at
    once. Tuples count as lists, whole numbers as doubles; optional parameters without a
    value are left out."""
    problems = [_unknown(name, graph) for name in arguments if name not in graph.inputs.parameters]
    values: dict[str, Any] = {}
    for name, parameter in graph.inputs.parameters.items():
        value = _without_tuples(arguments.get(name))  # JSON has no tuples
        if value is None:
            if parameter.required:
                message = f"the pipeline needs `{name}` ({_WORDS[parameter.type]})"
                problems.append(Problem(message, name, "give it a value"))
            elif parameter.default is not None:
                values[name] = parameter.default
        elif reason := mismatch(value, parameter.type):
            problems.append(Problem(f"`{name}`: {reason}", name))
        elif parameter.literals and value not in parameter.literals:
            literals = ", ".join(map(repr, parameter.literals))
            problems.append(Problem(f"`{name}`: {shown(value)} is not one of {literals}", name))
        else:
            values[name] = from_ir(value, parameter.type)
    for name, artifact in graph.inputs.artifacts.items():
        if not artifact.optional:
            message = f"the pipeline takes the artifact `{name}` as an argument"
            problems.append(Problem(message, name, "make it a step's output"))
    if problems:
        raise RequestError(problems)
    return values


def _without_tuples(value: Any) -> Any:
    """`value` with lists in the place of tuples, which JSON does not know."""
    if isinstance(value, list | tuple):
        return [_without_tuples(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _without_tuples(item) for key, item in value.items()}
    return value


def _unknown(name: str, graph: Graph) -> Problem:
    names = list(graph.inputs.parameters)
    fix = did_you_mean(name, names) or f"it takes {', '.join(names) or 'none'}"
    return Problem(f"the pipeline has no parameter `{name}`", name, fix)


def shown(value: Any) -> str:
    """A value in a message: the beginning of a long one."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
