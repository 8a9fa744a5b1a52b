"""Alarms and a dashboard in the monitoring service of a platform, as the template beside each
platform's client has them.

What is written carries a digest of itself in one of its texts. So what was edited there by hand is
told from what is only of another config, and stays unless that is asked for."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import jinja2
import yaml

State = Literal["missing", "same", "other", "edited"]
_MARK, _OPEN = re.compile(r"rekindle:[0-9a-f]{16}"), "rekindle:"


class Monitoring(Protocol):
    """The service of a platform. What it raises is PlatformError."""

    template: Path
    values: Mapping[str, Any]  # for the template

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
    made = jinja2.Environment(undefined=jinja2.StrictUndefined)  # noqa: S701 - YAML; names are quoted
    text = made.from_string(service.template.read_text(encoding="utf-8")).render(
        {"mark": _OPEN, **service.values, **values}
    )
    for one in yaml.safe_load(text):
        kind, name, body = one["kind"], one["name"], one["body"]
        yield Watch(kind, name, _marked(body), _state(service.find(kind, name), body))


def _marked(body: Any) -> Any:
    """The definition with its digest where the template leaves it open."""
    text = json.dumps(body, sort_keys=True)
    # a service may give 0.0 back as 0
    digest = hashlib.sha256(re.sub(r"\.0\b", "", text).encode()).hexdigest()[:16]
    return json.loads(text.replace(_OPEN, f"{_OPEN}{digest}"))


def _state(found: Any, wanted: Any) -> State:
    if found is None:
        return "missing"
    for complete in (True, False):
        ours = _like(wanted, found, complete)
        if ours == _marked(wanted):
            return "same"
        plain = _MARK.sub(_OPEN, text := json.dumps(ours))
        if plain != text and ours == _marked(json.loads(plain)):
            return "other"
    return "edited"


def _like(wanted: Any, found: Any, complete: bool) -> Any:
    """What is there, without fields that the service added; `complete`: with those that it left
    out, as some do with what is 0 or empty."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        there = {key: type(value)() for key, value in wanted.items() if complete} | found
        return {key: _like(wanted[key], there[key], complete) for key in wanted if key in there}
    if isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        return [_like(*pair, complete) for pair in zip(wanted, found, strict=True)]
    return found
