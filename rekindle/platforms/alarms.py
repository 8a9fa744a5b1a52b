"""Alarms and a dashboard in the monitoring service of a platform, as the template beside
each platform's client has them.

What is written carries a digest of itself in one of its texts. So what was edited there
by hand is told from what is only of another config, and stays unless that is asked
for."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import jinja2
import yaml

State = Literal["missing", "same", "other", "edited"]
_MARK = re.compile(r"rekindle:[0-9a-f]{16}")
_OPEN = "rekindle:"  # a mark whose digest is still to come


class Monitoring(Protocol):
    """The service of a platform. What it raises is PlatformError."""

    @property
    def template(self) -> Path:
        """The alarms and the dashboard, as Jinja that renders to YAML."""

    @property
    def values(self) -> Mapping[str, Any]:
        """What the template is filled with."""

    def find(self, kind: str, name: str) -> dict[str, Any] | None:
        """The definition of this name, also one that rekindle did not write."""

    def put(self, kind: str, name: str, body: Mapping[str, Any]) -> None:
        """Create it, or change it to this."""

    def remove(self, kind: str, name: str) -> None:
        """It may be gone already."""


class Watch(NamedTuple):
    """An alarm or a dashboard as it should be, and how what is there compares."""

    kind: str
    name: str
    body: dict[str, Any]
    state: State


def watches(service: Monitoring, **values: Any) -> Iterator[Watch]:
    """What the template has for these `values`; changes nothing."""
    jinja = jinja2.Environment(undefined=jinja2.StrictUndefined)  # noqa: S701 - YAML; names are quoted
    template = jinja.from_string(service.template.read_text(encoding="utf-8"))
    text = template.render({"mark": _OPEN, **service.values, **values})
    for row in yaml.safe_load(text):
        existing = service.find(row["kind"], row["name"])
        state = _state(existing, row["body"])
        yield Watch(row["kind"], row["name"], _marked(row["body"]), state)


def _marked(body: Any) -> Any:
    """The definition with its digest where the template leaves it open."""
    text = json.dumps(body, sort_keys=True)
    # a service may give 0.0 back as 0
    digest = hashlib.sha256(re.sub(r"\.0\b", "", text).encode()).hexdigest()[:16]
    return json.loads(text.replace(_OPEN, f"{_OPEN}{digest}"))


def _state(existing: Any, body: Any) -> State:
    """How what is there compares with the `body` that is to be there."""
    if existing is None:
        return "missing"
    for is_completed in (True, False):
        own_part = _own_part(body, existing, is_completed)
        if own_part == _marked(body):
            return "same"
        # of another config, if its own digest is that of what it says now
        text = json.dumps(own_part)
        unmarked = _MARK.sub(_OPEN, text)
        if unmarked != text and own_part == _marked(json.loads(unmarked)):
            return "other"
    return "edited"


def _own_part(body: Any, existing: Any, is_completed: bool) -> Any:
    """What is there, without fields that the service added; if `is_completed`, with those
    that it left out, as some do with what is 0 or empty."""
    if isinstance(body, dict) and isinstance(existing, dict):
        completed = dict(existing)
        if is_completed:
            for key, value in body.items():
                completed.setdefault(key, type(value)())
        part = {}
        for key in body:
            if key in completed:
                part[key] = _own_part(body[key], completed[key], is_completed)
        return part
    if isinstance(body, list) and isinstance(existing, list) and len(body) == len(existing):
        pairs = zip(body, existing, strict=True)
        return [_own_part(own, other, is_completed) for own, other in pairs]
    return existing
