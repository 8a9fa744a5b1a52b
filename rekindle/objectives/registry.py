"""All objectives by name, as data."""

from collections.abc import Mapping

from rekindle.objectives import classes, numbers, tags, tokens
from rekindle.objectives.kind import ObjectiveKind

KINDS: Mapping[str, ObjectiveKind] = {
    kind.name: kind for kind in (classes.KIND, numbers.KIND, tags.KIND, tokens.KIND)
}
METRICS = tuple(dict.fromkeys(name for kind in KINDS.values() for name in kind.metrics))
"""Those of any objective."""
LOWEST: Mapping[str, float] = {
    name: lowest for kind in KINDS.values() for name, lowest in kind.lowest.items()
}
"""The lowest value of a metric of which more is better, where that is not 0."""
