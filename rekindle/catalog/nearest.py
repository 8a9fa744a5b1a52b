"""The refusal of a name that the catalog has not, with those that it has."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from rekindle.errors import RequestError


def unknown(kind: str, name: str, known: Iterable[str]) -> RequestError:
    """To raise for a `name` that is not in `known`: the fix names the nearest, ignoring case."""
    names = list(known)
    folded = {each.casefold(): each for each in names}
    near = difflib.get_close_matches(name.casefold(), folded, n=2, cutoff=0.5)
    fix = f"such as {' or '.join(folded[each] for each in near)}" if near else _some(names)
    return RequestError(f"the catalog has no {kind} `{name}`", fix=fix)


def _some(names: list[str]) -> str:
    return f"it has {', '.join(names[:8])}" + (", ..." if len(names) > 8 else "")
