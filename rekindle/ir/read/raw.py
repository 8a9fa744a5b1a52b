"""Raw IR: the documents in the text of a compiled pipeline, walked by their known keys
only: what is not asked for is refused, so that nothing is ever dropped in silence.

JSON is read as JSON, although nearly all of it is YAML, too: to YAML 1.1 `1e-07` is text,
the two halves of an emoji are an error, and so is a tab. A text that would fill the
memory (aliases that multiply, nesting) or take hours (numbers of many digits) is refused
before its values are made.

`Fields` wraps one mapping of the IR with its place in it. `Refusals` are raised all
together when the reading is over; a document that is not a pipeline at all raises
RequestError at once."""

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import yaml

from rekindle.errors import Problem, RequestError, UnsupportedError
from rekindle.ir.values import shown

T = TypeVar("T")
NAME = re.compile(r"\w[\w .()-]*")
MAX_BYTES = 32 << 20
MAX_VALUES = 1_000_000
MAX_LEVELS = 100
MAX_DIGITS = 400  # the largest float has 309

_HALF = re.compile("[\ud800-\udfff]")
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
ELSEWHERE = "run it on Kubeflow Pipelines, or take it out of the pipeline"


class Refusals:
    """What the pipeline uses and rekindle does not read, each with its place and a way out."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def add(self, what: str, where: str, fix: str = ELSEWHERE) -> None:
        self.problems.append(Problem(what, where, fix))

    def raise_if_any(self) -> None:
        if self.problems:
            raise UnsupportedError(dict.fromkeys(self.problems))


class Fields:
    """One mapping of the IR; every key of it, and of what was read inside, has to be
    taken before `close`."""

    def __init__(self, data: Any, where: str, refusals: Refusals) -> None:
        if not isinstance(data, Mapping):
            raise malformed(data, "a mapping", where)
        self.data = data
        self.where = where
        self.refusals = refusals
        self.taken: set[str] = set()
        self.inside: dict[str, Fields] = {}

    def at(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key

    def take(self, key: str, kind: type[T], default: T) -> T:
        """The value of `key`, checked to be of `kind`; `default` where the key is absent."""
        value = self.any(key)
        if value is None:
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            if abs(value) > sys.float_info.max:
                raise malformed("a number of many digits", "a float", self.at(key))
            return kind(value)  # type: ignore[call-arg]
        if not isinstance(value, kind):
            raise malformed(value, f"a {kind.__name__}", self.at(key))
        if isinstance(value, float) and not math.isfinite(value):
            raise malformed(value, "a finite number", self.at(key))
        return value

    def any(self, key: str) -> Any:
        """The value of `key` whatever it is, or None."""
        self.taken.add(key)
        return self.data.get(key)

    def fields(self, key: str) -> "Fields":
        """The mapping under `key`, empty where it is absent."""
        value = self.any(key)
        return self._within(key, {} if value is None else value)

    def _within(self, place: str, data: Any) -> "Fields":
        if place not in self.inside:
            self.inside[place] = Fields(data, self.at(place), self.refusals)
        return self.inside[place]

    def each(self, key: str) -> Iterator[tuple[str, "Fields"]]:
        """Name and mapping of everything under `key`, in the order of the IR. Names
        become folders: no slashes, no leading dots."""
        group = self.fields(key)
        for name in group.data:
            if not NAME.fullmatch(str(name)):
                raise malformed(name, "a plain name", group.where)
            yield str(name), group.fields(name)

    def list_of(self, key: str) -> Iterator["Fields"]:
        """The mappings in the list under `key`, none where it is absent."""
        for i, item in enumerate(self.take(key, list, [])):
            yield self._within(f"{key}[{i}]", item)

    def has(self, key: str) -> bool:
        return self.data.get(key) is not None

    def refuse(self, key: str, what: str, fix: str = ELSEWHERE) -> None:
        """Refuse `key` for a stated reason, if it is there."""
        if self.any(key) not in (None, {}, [], False, ""):
            self.refusals.add(what, self.at(key), fix)

    def close(self) -> None:
        """Refuse every key that was not taken, also in what was read inside."""
        for fields in self.inside.values():
            if fields.taken:
                fields.close()
        self.inside.clear()
        for key in sorted(set(map(str, self.data)) - self.taken):
            self.refusals.add(f"`{key}` is nothing that rekindle knows of", self.at(key))


def malformed(value: Any, wanted: str, where: str) -> RequestError:
    """The error for a value of the wrong kind."""
    return RequestError(
        f"this is not a KFP pipeline: {shown(value)} stands where {wanted} belongs",
        where=where,
        fix="compile it with kfp 2.x; if that wrote it, its compiler went wrong here, as it does "
        "for a loop in a condition whose item no step reads, or a OneOf that only "
        "conditions read: write the pipeline otherwise",
    )


def documents(text: str) -> list[Any]:
    """The documents that are not empty; yaml.YAMLError if there are none, or beyond limits.

    Of a PipelineJob, which Vertex AI takes, it is the pipeline in it, with the job's
    parameters for defaults."""
    in_text = _documents_in(text)
    first = in_text[0] if in_text else None
    if isinstance(first, dict) and isinstance(first.get("pipelineSpec"), dict):
        in_text[0] = _pipeline_of_job(first)
    return in_text


def _pipeline_of_job(job: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = job["pipelineSpec"]
    values = (job.get("runtimeConfig") or {}).get("parameterValues") or {}
    definitions = (spec.get("root") or {}).get("inputDefinitions") or {}
    parameters = definitions.get("parameters") or {}
    for name, value in values.items():
        if isinstance(parameters.get(name), dict):
            parameters[name] = {**parameters[name], "defaultValue": value, "isOptional": True}
    return spec


def _documents_in(text: str) -> list[Any]:
    if len(text) > MAX_BYTES:
        raise yaml.YAMLError(f"{len(text):,} characters; at most {MAX_BYTES:,} are read")
    if text.lstrip().startswith("{"):
        try:
            in_text = [json.loads(text)]
        except RecursionError:
            raise _too_much() from None
        except ValueError:
            pass  # YAML may begin so, too
        else:
            _check_values(in_text)
            return in_text
    _check_events(text)
    try:
        in_text = [document for document in yaml.load_all(text, LOADER) if document is not None]
    except (ValueError, LookupError, ArithmeticError, AttributeError, TypeError) as error:
        # a date such as 2024-99-99, or a tag that its text does not fit
        raise yaml.YAMLError(f"a value cannot be read: {error}") from error
    _check_values(in_text)
    return in_text


def _too_much() -> yaml.YAMLError:
    return yaml.YAMLError(f"more than {MAX_VALUES:,} values or {MAX_LEVELS} levels")


def _check_values(level: list[Any]) -> None:
    """Refuse too many values, too deep ones, and what no platform can be sent, level by level."""
    count = 0
    for depth in range(MAX_LEVELS + 2):
        if not level:
            return
        count += len(level)
        if count > MAX_VALUES or depth > MAX_LEVELS:
            raise _too_much()
        next_level: list[Any] = []
        for value in level:
            _check_value(value)
            if isinstance(value, dict):
                for key in value:
                    if isinstance(key, str):
                        _check_value(key)
                next_level += value.values()
            elif isinstance(value, list):
                next_level += value
        level = next_level


def _check_value(value: Any) -> None:
    if isinstance(value, str) and not value.isascii() and _HALF.search(value):
        raise yaml.YAMLError(f"{ascii(value)[:60]} holds half a character (a lone surrogate)")
    is_large = isinstance(value, int) and abs(value) > sys.float_info.max
    if is_large or (isinstance(value, float) and not math.isfinite(value)):
        raise yaml.YAMLError("a number is infinite, not a number at all, or too large for one")


def _check_events(text: str) -> None:
    """Counts what an alias stands for each time, as code that walks through the values will."""
    sizes: dict[str, int] = {}  # by anchor
    opened: list[tuple[str | None, int]] = []  # anchors of what is open, and the count before it
    count = 0
    for event in yaml.parse(text, LOADER):
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
    kinds = LOADER.yaml_implicit_resolvers.get(event.value[0], ())
    regexes = [regex for tag, regex in kinds if tag.endswith((":int", ":float"))]
    return any(regex.match(event.value) for regex in regexes)
