"""Names that platforms take, made of ours: one rule for steps, jobs and schedules."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection

_DIGITS = 8


def plain_name(
    name: str, illegal: str, longest: int, *, joint: str = "-", taken: Collection[str] = (),
    distinct: bool = False,
) -> str:  # fmt: skip
    """`name` with `joint` for what is `illegal` (a regular expression), at most `longest` long.

    A hash of the name ends one that had to be cut or is `taken`, and with `distinct` each that was
    changed, so that names that differ stay so."""
    plain = re.sub(illegal, joint, name)
    if len(plain) <= longest and plain not in taken and (plain == name or not distinct):
        return plain
    digest = hashlib.sha256(name.encode()).hexdigest()[:_DIGITS]
    return f"{plain[: longest - _DIGITS - 1]}{joint}{digest}"
