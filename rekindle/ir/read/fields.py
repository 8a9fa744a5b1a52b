"""Walk raw IR by its known keys only: what is not asked for is refused, so that nothing is ever
dropped in silence.

`Fields` wraps one mapping of the IR with its place in it. Refusals are collected in a `Refusals`,
which raises all of them together when the reading is over; a document that is not a pipeline at all
raises RequestError at once."""

import math
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from rekindle.errors import Problem, RequestError, UnsupportedError
from rekindle.ir.values import shown

T = TypeVar("T")
NAME = re.compile(r"\w[\w .()-]*")
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
    """One mapping of the IR; every key has to be taken before `close`."""

    def __init__(self, data: Any, where: str, refusals: Refusals) -> None:
        if not isinstance(data, Mapping):
            raise malformed(data, "a mapping", where)
        self.data, self.where, self.refusals = data, where, refusals
        self.taken: set[str] = set()

    def at(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key

    def take(self, key: str, kind: type[T], default: T) -> T:
        """The value of `key`, checked to be of `kind`; `default` where the key is absent."""
        self.taken.add(key)
        if (value := self.data.get(key)) is None:
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
        self.taken.add(key)
        value = self.data.get(key)
        return Fields({} if value is None else value, self.at(key), self.refusals)

    def each(self, key: str) -> Iterator[tuple[str, "Fields"]]:
        """Name and mapping of everything under `key`, in the order of the IR. Names become folders:
        no slashes, no leading dots."""
        group = self.fields(key)
        for name in group.data:
            if not NAME.fullmatch(str(name)):
                raise malformed(name, "a plain name", group.where)
            yield str(name), group.fields(name)

    def list_of(self, key: str) -> Iterator["Fields"]:
        """The mappings in the list under `key`, none where it is absent."""
        for i, item in enumerate(self.take(key, list, [])):
            yield Fields(item, f"{self.at(key)}[{i}]", self.refusals)

    def has(self, key: str) -> bool:
        return self.data.get(key) is not None

    def refuse(self, key: str, what: str, fix: str = ELSEWHERE) -> None:
        """Refuse `key` for a stated reason, if it is there."""
        self.taken.add(key)
        if self.data.get(key) not in (None, {}, [], False, ""):
            self.refusals.add(what, self.at(key), fix)

    def close(self) -> None:
        """Refuse every key that was not taken."""
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
