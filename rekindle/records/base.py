"""What all records are: frozen, strict, JSON in and out."""

import json
import os
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticSerializationError

SCHEMA_VERSION = 1


class Record(BaseModel):
    """Base of all records: frozen, unknown keys refused, JSON in and out; NaN and
    infinity survive, as strings."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """The record stored at `path`; raises FileNotFoundError or
        pydantic.ValidationError."""
        return cls.model_validate_json(Path(path).read_bytes())

    def write(self, path: str | Path) -> None:
        """Store the record at `path` atomically: a reader sees the old file or the new
        one, never a part."""
        write_atomically(path, self.to_json(indent=2) + "\n")

    def to_json(self, indent: int | None = None) -> str:
        """The record as JSON, with text that UTF-8 cannot encode escaped as `\\udc80`: a
        step may return a lone surrogate, and a path may hold any bytes."""
        try:
            return self.model_dump_json(indent=indent)
        except PydanticSerializationError:
            shown = type(self).model_validate(_escaped(self.model_dump()))
            return shown.model_dump_json(indent=indent)


class VersionedRecord(Record):
    """Base of what is stored, or printed, as an object of its own."""

    schema_version: int = SCHEMA_VERSION


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, Mapping):
        return {_escaped(name): _escaped(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(item) for item in value]
    return value


def write_atomically(path: str | Path, text: str) -> None:
    """Write `text` beside `path`, flush it to disk, then rename over it."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    try:
        with draft.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def moved(value: Any, before: str, now: str) -> Any:
    """JSON with paths under the folder `before` replaced by paths under `now`, also where
    they are part of a longer text: a URI, or JSON in a string."""
    if before == now or len(before) < len("/a"):
        return value
    if isinstance(value, str):
        if before not in value:  # much faster than the expression
            return value
        # the folder itself or what is below it, and not one whose name only begins alike
        as_path = rf"(?<![\w.-]){re.escape(before)}(?=[/\"'\s?#]|$)"
        return re.sub(as_path, lambda _: now, value)
    if isinstance(value, Mapping):
        return {name: moved(item, before, now) for name, item in value.items()}
    if isinstance(value, list):
        return [moved(item, before, now) for item in value]
    return value


def canonical_json(value: Any) -> str:
    """One text for one value, for hashes and keys: sorted keys, no spaces, no NaN."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
