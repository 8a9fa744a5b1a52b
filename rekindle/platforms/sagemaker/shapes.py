"""Does a request fit the service's own shapes? Unknown and missing members, kinds, enums,
patterns and all bounds: botocore itself checks neither maxima nor patterns, so what it
lets through the service would refuse.

The shapes are an excerpt of botocore's model, committed as shapes.json beside it,
so that compiling needs no SDK. A value that the pipeline fills in at run time
(`{"Get": ...}`, `{"Std:Join": ...}`) fits any scalar."""

import difflib
import functools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from rekindle.errors import Problem

_FILE = Path(__file__).with_name("shapes.json")
_KINDS: Mapping[str, tuple[type, ...]] = {
    "structure": (dict,),
    "map": (dict,),
    "list": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "long": (int,),
    "float": (int, float),
    "double": (int, float),
    "timestamp": (str,),
}

Shape: TypeAlias = Mapping[str, Any]
"""A shape of botocore's model: its `type`, bounds and members."""


@functools.cache
def _shapes() -> Mapping[str, Shape]:
    return dict(json.loads(_FILE.read_text(encoding="utf-8"))["shapes"])


def misfits(
    name: str, value: Any, where: str, filled_in: frozenset[str] = frozenset()
) -> Iterator[Problem]:
    """What in `value` does not fit the shape `name`;
    the service gives the members `filled_in`."""
    shape = _shapes()[name]
    kind = shape["type"]
    if kind not in ("structure", "map", "list") and _is_variable(value):
        return
    if not _is_of_kind(value, kind):
        yield Problem(f"{str(value)[:60]!r} is no {kind}", where, f"the service wants a {name}")
        return
    yield from _out_of_bounds(shape, value, where)
    if kind == "structure":
        yield from _misfits_of_structure(shape, value, where, filled_in)
    elif kind == "map":
        for key, item in value.items():
            yield from misfits(shape["key"], key, f"{where}.{key}")
            yield from misfits(shape["value"], item, f"{where}.{key}")
    elif kind == "list":
        for i, item in enumerate(value):
            yield from misfits(shape["member"], item, f"{where}[{i}]")


def _is_variable(value: object) -> bool:
    """Whether the pipeline fills this in at run time."""
    return isinstance(value, dict) and list(value) in (
        ["Get"],
        ["Std:Join"],
        ["Std:JsonGet"],
    )


def _is_of_kind(value: object, kind: str) -> bool:
    if isinstance(value, bool):  # an int in Python, and none there
        return kind == "boolean"
    return isinstance(value, _KINDS[kind])


def _misfits_of_structure(
    shape: Shape, value: Mapping[str, object], where: str, filled_in: frozenset[str]
) -> Iterator[Problem]:
    for member in shape.get("required", ()):
        if member not in value and member not in filled_in:
            fix = "this is a bug in rekindle, please report it"
            yield Problem(f"`{member}` is missing", where, fix)
    for member, item in value.items():
        if member not in shape["members"]:
            yield Problem(f"`{member}` is unknown to the service", where, "leave it out")
        else:
            yield from misfits(shape["members"][member], item, f"{where}.{member}")


def _out_of_bounds(shape: Shape, value: Any, where: str) -> Iterator[Problem]:
    """What is too large or small, or is not one of the shape's values or of its form."""
    if isinstance(value, int | float):
        size = value
        unit = ""
    else:
        size = len(value)
        unit = " characters" if isinstance(value, str) else " items"
    if "max" in shape and size > shape["max"]:
        message = f"{size:,}{unit} are more than the {shape['max']:,} that the service takes"
        yield Problem(message, where, "make it smaller")
    if "min" in shape and size < shape["min"]:
        message = f"{size:,}{unit} are less than the {shape['min']:,} that the service wants"
        yield Problem(message, where, "make it larger")
    if "enum" in shape and value not in shape["enum"]:
        near = difflib.get_close_matches(value, shape["enum"], n=3) or shape["enum"][:3]
        message = f"`{value}` is none that the service knows"
        yield Problem(message, where, f"such as {', '.join(near)}")
    if "pattern" in shape and not re.fullmatch(_pattern(shape["pattern"]), value):
        yield Problem(f"`{value}` does not have the form {shape['pattern']}", where, "rename it")


def _pattern(text: str) -> str:
    """A pattern of Java as one of Python, which lacks classes of letters, digits and
    space."""
    text = text.replace(r"\p{L}", r"\w")
    text = text.replace(r"\p{N}", r"\d")
    return text.replace(r"\p{Z}", r"\s")
