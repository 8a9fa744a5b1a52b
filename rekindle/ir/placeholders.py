"""KFP's placeholders, parsed once when the IR is read: `{{$}}`,
`{{$.inputs.parameters['x']}}`, Concat, IfPresent.

A text becomes a `Template`: literal pieces and references, which are looked up side by
side at run time, so that a value which happens to contain a placeholder is never expanded
again. `lower` gives the plain JSON that `launch/shim.py` renders; it is the only thing
the two share. What is unknown is refused with its place in the IR."""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rekindle.errors import UnsupportedError

_PLACEHOLDER = re.compile(r"\{\{\$(.*?)\}\}", re.DOTALL)
# `.inputs.artifacts['model'].metadata['framework']`, of which `field` and `key` may be missing
_PORT = re.compile(
    r"""\.(?P<side>inputs|outputs)\.(?P<kind>parameters|artifacts)\[(?P<quote>'{1,2}|")(?P<name>[^'"\]]+)(?P=quote)\]
        (?:\.(?P<field>path|uri|metadata|output_file)(?:\['(?P<key>[^'\]]+)'\])?)?""",
    re.VERBOSE,
)
INPUT_IN_TEXT = re.compile(r"\{\{\$\.inputs\.parameters\['([^']+)'\]\}\}")
"""The placeholder of a parameter, as KFP's driver looks for it."""
_ESCAPED_INPUT = re.compile(r"\.inputs\.parameters\['[^']+'\]\.json_escape\[\d+\]")
# Facts of a run that every platform can give, and those that only some have
RUN_FACTS = (
    "pipeline_job_name",
    "pipeline_job_uuid",
    "pipeline_job_resource_name",
    "pipeline_job_create_time_utc",
    "pipeline_job_schedule_time_utc",
    "pipeline_task_name",
    "pipeline_task_uuid",
    "pipeline_root",
)
PLATFORM_FACTS = (
    "pipeline_google_cloud_project_id",
    "pipeline_google_cloud_location",
    "pipeline_persistent_resource_id",
    "pipeline_service_account",
    "pipeline_network",
    "pipeline_encryption_key_name",
    "json_escape[1]",  # ExecutorInput inside a text that is JSON itself
    "workspace_path",
)
# which fields a port may be asked for; None: the value itself
_FIELDS = {
    ("inputs", "parameters"): (None,),
    ("inputs", "artifacts"): (None, "path", "uri", "metadata"),
    ("outputs", "parameters"): ("output_file",),
    ("outputs", "artifacts"): ("path", "uri", "metadata"),
}


@dataclasses.dataclass(frozen=True)
class Reference:
    """Something known only at run time."""

    path: tuple[str, ...]
    """Where the shim finds it: `("inputs", "parameters", "x")`, `("outputs", "artifacts",
    "model", "path")`, `("run", "pipeline_job_name")`, ..."""


@dataclasses.dataclass(frozen=True)
class Template:
    """Pieces that join to one text."""

    parts: tuple[str | Reference, ...]

    @property
    def literal(self) -> str | None:
        """The text; None where a value is missing in it until the run."""
        if any(isinstance(part, Reference) for part in self.parts):
            return None
        return "".join(map(str, self.parts))


@dataclasses.dataclass(frozen=True)
class Concat:
    """Items that join to one argument; an absent IfPresent among them adds nothing."""

    items: "tuple[Argument, ...]"


@dataclasses.dataclass(frozen=True)
class IfPresent:
    """Stands for the arguments in `then` if the input has a value, else for those in
    `otherwise`; either may be empty."""

    input: str
    then: "tuple[Argument, ...]"
    otherwise: "tuple[Argument, ...]"


Argument = Template | Concat | IfPresent


def parse(text: str, where: str) -> Template:
    """`text` as a Template; UnsupportedError at `where` for an unknown placeholder."""
    parts: list[str | Reference] = []
    for number, piece in enumerate(_PLACEHOLDER.split(text)):
        if number % 2 == 1:  # every other piece stood between `{{$` and `}}`
            parts.append(_reference(piece, where))
        elif piece:
            parts.append(piece)
    return Template(tuple(parts) or ("",))


def parse_argument(text: str, where: str) -> Argument:
    """An element of a command or args, which may be a Concat or IfPresent written as JSON."""
    if text.startswith(('{"Concat": ', '{"IfPresent": ')):
        try:
            return _structure(json.loads(text), where)
        except json.JSONDecodeError as error:
            message = f"a Concat or IfPresent is not valid JSON: {error}"
            raise UnsupportedError(message, where=where) from error
    return parse(text, where)


def parse_value(value: Any, where: str) -> Any:
    """`value` with a Template in place of each text that has placeholders.

    UnsupportedError at `where` for placeholders of anything but parameters of the same
    step and facts of the run."""

    def parsed(leaf: Any) -> Any:
        if not isinstance(leaf, str):
            return leaf
        template = parse(leaf, where)
        paths = references(template)
        if any(path[:2] != ("inputs", "parameters") and path[0] != "run" for path in paths):
            message = f"a constant refers to an artifact or output: {leaf}"
            raise UnsupportedError(message, where=where)
        return leaf if template.literal is not None else template

    return mapped(value, parsed)


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of `value` with `change` applied to every leaf of its lists and mappings.

    Tuples become lists."""
    if isinstance(value, list | tuple):
        return [mapped(item, change) for item in value]
    if isinstance(value, Mapping):
        return {key: mapped(item, change) for key, item in value.items()}
    return change(value)


def filled(value: Any, fill: Callable[[Template], Any]) -> Any:
    """A copy of `value` with every Template in it replaced by what `fill` returns for it."""
    return mapped(value, lambda leaf: fill(leaf) if isinstance(leaf, Template) else leaf)


def has_templates(value: Any) -> bool:
    """Whether there is a Template anywhere in `value`."""
    return any(True for _ in templates(value))


def templates(value: Any) -> Iterator[Template]:
    """Every Template anywhere in `value`."""
    if isinstance(value, Template):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from templates(item)
    elif isinstance(value, dict):
        yield from templates(list(value.values()))


def references(argument: Argument) -> Iterator[tuple[str, ...]]:
    """The path of every reference in an argument."""
    match argument:
        case Template(parts):
            yield from (part.path for part in parts if isinstance(part, Reference))
        case Concat(items):
            for item in items:
                yield from references(item)
        case IfPresent(name, then, otherwise):
            yield ("inputs", "any", name)  # IfPresent does not say which kind of input
            for item in (*then, *otherwise):
                yield from references(item)


def lower(argument: Argument) -> Any:
    """The argument as the JSON that the shim renders: text, `{"ref": path}`, `{"concat":
    [...]}`, `{"if": ...}`."""
    match argument:
        case Template(parts):
            if argument.literal is not None:
                return argument.literal
            pieces = [_lowered_part(part) for part in parts]
            return pieces[0] if len(pieces) == 1 else {"concat": pieces}
        case Concat(items):
            return {"concat": [lower(item) for item in items]}
        case IfPresent(name, then, otherwise):
            return {
                "if": name,
                "then": [lower(item) for item in then],
                "else": [lower(item) for item in otherwise],
            }


def _lowered_part(part: str | Reference) -> Any:
    return part if isinstance(part, str) else {"ref": list(part.path)}


def _reference(body: str, where: str) -> Reference:
    """What a placeholder stands for; `body` is what it has between `{{$` and `}}`."""
    if body == "":
        return Reference(("executor_input",))
    if body in (".outputs.output_file", ".outputMetadataUri"):
        return Reference(("outputs", "output_file"))
    if body.removeprefix(".") in (*RUN_FACTS, *PLATFORM_FACTS):
        return Reference(("run", body.removeprefix(".")))
    if _ESCAPED_INPUT.fullmatch(body):  # the value of an input, for a text that is JSON itself
        return Reference(("run", "json_escape[1]"))
    match = _PORT.fullmatch(body)
    if match and match["field"] in _FIELDS[match["side"], match["kind"]]:
        fields = [match["field"], match["key"]]
        # of an output parameter only the file can be asked for: its name says enough
        path = [field for field in fields if field and field != "output_file"]
        if match["key"] is None or match["field"] == "metadata":
            return Reference((match["side"], match["kind"], match["name"], *path))
    message = f"the placeholder {{{{${body}}}}} is none that KFP writes"
    raise UnsupportedError(
        message, where=where, fix="pass the value as a parameter of the pipeline"
    )


def _structure(node: Any, where: str) -> Argument:
    """An argument from the JSON of a Concat or IfPresent, at any depth.

    Keys that KFP does not write are refused, because they would be dropped otherwise."""
    match node:
        case str():
            return parse(node, where)
        case {"Concat": list(items), **rest} if not rest:
            return Concat(tuple(_structure(item, where) for item in items))
        case {"IfPresent": {"InputName": str(name), "Then": then, **more}, **rest} if not rest:
            if more.keys() <= {"Else"}:
                return IfPresent(name, _several(then, where), _several(more.get("Else", []), where))
    message = f"this argument is not a Concat or IfPresent that KFP writes: {node}"
    raise UnsupportedError(message, where=where)


def _several(node: Any, where: str) -> tuple[Argument, ...]:
    """The arguments of a branch of IfPresent, which has one or a list of them."""
    items = node if isinstance(node, list) else [node]
    return tuple(_structure(item, where) for item in items)
