"""How the card writes names and settings; and what must never be written: credentials."""

import math
import re
from collections.abc import Mapping
from typing import Any

from rekindle.masking import LOOKS_SECRET
from rekindle.objectives import LOWER_IS_BETTER

# ECMA-48: control sequences (colours, moves), operating system commands up to their end
# (titles, links), and sequences of two characters
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
# all but tab and line feed
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
# what a log or an error says of itself; a value of fewer than six characters is hardly
# one
_ASSIGNED = re.compile(
    r"(?i)\b(\w*(?:password|passwd|secret|token|api_?key|access_?key|sas)\s*[=:]\s*)"
    r"(\"[^\"]*\"|'[^']*'|\S{6,})"
)
_METRIC_NAMES = {"macro_f1": "macro F1", "roc_auc": "ROC AUC"}


def metric_name(name: str) -> str:
    """What a metric is called in text."""
    return _METRIC_NAMES.get(name, name.replace("_", " "))


def lower_is_better(name: str) -> bool:
    """Whether a smaller value of the metric is the better one."""
    # own metrics of tasks are known by their names alone
    return name in LOWER_IS_BETTER or "loss" in name or "error" in name


def shorten(text: str, length: int) -> str:
    """`text` cut to `length` characters, the last one an ellipsis."""
    if len(text) <= length:
        return text
    return text[: length - 1] + "…"


def shorten_middle(text: str, length: int) -> str:
    """`text` cut to `length` characters in the middle, where names differ least."""
    if len(text) <= length:
        return text
    head = length // 2
    tail = length - head - 1
    return f"{text[:head]}…{text[-tail:]}"


def setting(spec: Mapping[str, Any], *path: str) -> Any:
    """The value under `path` in nested mappings, or None."""
    value: Any = spec
    for key in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def number_setting(spec: Mapping[str, Any], *path: str) -> float | None:
    """The number under `path`, or None."""
    value = setting(spec, *path)
    # for Python a bool is a number
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def plain(text: str) -> str:
    """Terminal output as text: no colour codes, rewritten lines in their last state."""
    lines = []
    for line in _ESCAPES.sub("", text).replace("\r\n", "\n").split("\n"):
        # a terminal goes back to the beginning of the line
        last_state = line.rstrip("\r").rsplit("\r", 1)[-1]
        lines.append(_CONTROL.sub("", last_state))
    return "\n".join(lines)


def without_credentials(text: str) -> str:
    """`text` with passwords in URLs and known kinds of tokens blotted out, as a net."""
    return LOOKS_SECRET.sub("•••", text)


def without_assignments(text: str) -> str:
    """Free text (a log, an error) without `password=...` and its like;
    too eager for YAML."""
    return without_credentials(_ASSIGNED.sub(r"\1•••", text))
