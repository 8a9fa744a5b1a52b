"""The documents in the text of a compiled pipeline, which is YAML or JSON.

JSON is read as JSON, although nearly all of it is YAML, too: to YAML 1.1 `1e-07` is text, the two
halves of an emoji are an error, and so is a tab. A text that would fill the memory, by aliases that
multiply or by nesting, or take hours, by numbers of many digits (YAML 1.1 has them to the base 60,
too), is refused before its values are made."""

import json
import math
import re
import sys
from typing import Any

import yaml

MAX_BYTES = 32 << 20
MAX_VALUES = 1_000_000
MAX_LEVELS = 100
MAX_DIGITS = 400  # the largest float has 309

_HALF = re.compile("[\ud800-\udfff]")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def documents(text: str) -> list[Any]:
    """The documents that are not empty; yaml.YAMLError if there are none to be read, or more than
    the limits of this module allow."""
    if len(text) > MAX_BYTES:
        raise yaml.YAMLError(f"{len(text):,} characters; at most {MAX_BYTES:,} are read")
    if text.lstrip().startswith("{"):
        try:
            found = [json.loads(text)]
        except RecursionError:
            raise _too_much() from None
        except ValueError:
            pass  # YAML may begin so, too
        else:
            _check_values(found)
            return found
    _check_events(text)
    try:
        found = [document for document in yaml.load_all(text, _LOADER) if document is not None]
    except (ValueError, LookupError, ArithmeticError, AttributeError, TypeError) as error:
        # a date such as 2024-99-99, or a tag that its text does not fit
        raise yaml.YAMLError(f"a value cannot be read: {error}") from error
    _check_values(found)
    return found


def _too_much() -> yaml.YAMLError:
    return yaml.YAMLError(f"more than {MAX_VALUES:,} values or {MAX_LEVELS} levels")


def _check_values(level: list[Any]) -> None:
    count = 0
    for depth in range(MAX_LEVELS + 2):
        if not level:
            return
        count += len(level)
        if count > MAX_VALUES or depth > MAX_LEVELS:
            raise _too_much()
        for value in level:  # refuse what no platform can be sent
            for text in value if isinstance(value, dict) else [value]:
                if isinstance(text, str) and not text.isascii() and _HALF.search(text):
                    what = "holds half a character (a lone surrogate)"
                    raise yaml.YAMLError(f"{ascii(text)[:60]} {what}")
            large = isinstance(value, int) and abs(value) > sys.float_info.max
            if large or (isinstance(value, float) and not math.isfinite(value)):
                what = "a number is infinite, not a number at all, or too large for one"
                raise yaml.YAMLError(what)
        groups = (group for group in level if isinstance(group, dict | list))
        level = [e for g in groups for e in (g.values() if isinstance(g, dict) else g)]


def _check_events(text: str) -> None:
    """Counts what an alias stands for each time, as code that walks through the values will."""
    sizes: dict[str, int] = {}  # by anchor
    opened: list[tuple[str | None, int]] = []  # anchors of what is open, and the count before it
    count = 0
    for event in yaml.parse(text, _LOADER):
        if isinstance(event, yaml.AliasEvent):
            count += sizes.get(str(event.anchor), 1)
        elif isinstance(event, yaml.ScalarEvent):
            count += 1
            if len(event.value) > MAX_DIGITS and _is_number(event):
                raise yaml.YAMLError(f"a number of more than {MAX_DIGITS} digits")
            if event.anchor:
                sizes[event.anchor] = 1
        elif isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, count))
            count += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            if anchor:
                sizes[anchor] = count - before
        if count > MAX_VALUES or len(opened) > MAX_LEVELS:
            raise _too_much()


def _is_number(event: yaml.ScalarEvent) -> bool:
    if not event.implicit[0]:
        return str(event.tag).endswith((":int", ":float"))
    kinds = _LOADER.yaml_implicit_resolvers.get(event.value[0], ())
    numbers = (regex for tag, regex in kinds if tag.endswith((":int", ":float")))
    return any(regex.match(event.value) for regex in numbers)
