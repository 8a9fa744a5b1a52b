"""Does a request fit the service's own shapes? Unknown and missing members, kinds, enums, patterns
and all bounds: botocore itself checks neither maxima nor patterns, so what it lets through the
service would refuse.

The shapes are an excerpt of botocore's model, committed as catalog/sagemaker_shapes.json, so that
compiling needs no SDK. A value that the pipeline fills in at run time (`{"Get": ...}`,
`{"Std:Join": ...}`) fits any scalar."""

import difflib
import functools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rekindle import catalog
from rekindle.errors import Problem

_FILE = Path(catalog.__file__).with_name("sagemaker_shapes.json")
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


@functools.cache
def _shapes() -> Mapping[str, Any]:
    return dict(json.loads(_FILE.read_text(encoding="utf-8"))["shapes"])


def misfits(
    name: str, value: Any, where: str, given: frozenset[str] = frozenset()
) -> Iterator[Problem]:
    """What in `value` does not fit the shape `name`; the service fills in the members `given`."""
    shape = _shapes()[name]
    kind, content = shape["type"], value
    # what the pipeline fills in at run time
    is_variable = isinstance(value, dict) and [*value] in (["Get"], ["Std:Join"], ["Std:JsonGet"])
    if kind not in ("structure", "map", "list") and is_variable:
        return
    if not isinstance(value, _KINDS[kind]) or (isinstance(value, bool) and kind != "boolean"):
        yield Problem(f"{str(value)[:60]!r} is no {kind}", where, f"the service wants a {name}")
        return
    yield from _out_of_bounds(shape, value, where)
    if kind == "structure":
        yield from _of_structure(shape, content, where, given)
    elif kind == "map":
        for key, item in content.items():
            yield from misfits(shape["key"], key, f"{where}.{key}")
            yield from misfits(shape["value"], item, f"{where}.{key}")
    elif kind == "list":
        for i, item in enumerate(content):
            yield from misfits(shape["member"], item, f"{where}[{i}]")


def _of_structure(
    shape: Mapping[str, Any], value: Mapping[str, Any], where: str, given: frozenset[str]
) -> Iterator[Problem]:
    for member in shape.get("required", ()):
        if member not in value and member not in given:
            fix = "this is a bug in rekindle, please report it"
            yield Problem(f"`{member}` is missing", where, fix)
    for member, item in value.items():
        if member not in shape["members"]:
            yield Problem(f"`{member}` is unknown to the service", where, "leave it out")
        else:
            yield from misfits(shape["members"][member], item, f"{where}.{member}")


def _out_of_bounds(shape: Mapping[str, Any], value: Any, where: str) -> Iterator[Problem]:
    size = value if isinstance(value, int | float) else len(value)
    unit = {int: "", float: "", str: " characters"}.get(type(value), " items")
    if "max" in shape and size > shape["max"]:
        what = f"{size:,}{unit} are more than the {shape['max']:,} that the service takes"
        yield Problem(what, where, "make it smaller")
    if "min" in shape and size < shape["min"]:
        what = f"{size:,}{unit} are less than the {shape['min']:,} that the service wants"
        yield Problem(what, where, "make it larger")
    if "enum" in shape and value not in shape["enum"]:
        near = difflib.get_close_matches(value, shape["enum"], n=3) or shape["enum"][:3]
        what = f"`{value}` is none that the service knows"
        yield Problem(what, where, f"such as {', '.join(near)}")
    if "pattern" in shape and not re.fullmatch(_pattern(shape["pattern"]), value):
        yield Problem(f"`{value}` does not have the form {shape['pattern']}", where, "rename it")


def _pattern(text: str) -> str:
    """Java's classes of letters, digits and space in Python's words."""
    for theirs, ours in ((r"\p{L}", r"\w"), (r"\p{N}", r"\d"), (r"\p{Z}", r"\s")):
        text = text.replace(theirs, ours)
    return text
