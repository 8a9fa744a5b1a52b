"""All objectives by name, as data."""

from collections.abc import Mapping

from rekindle.objectives import classes, numbers, tags, tokens
from rekindle.objectives.kind import ObjectiveKind

KINDS: Mapping[str, ObjectiveKind] = {
    kind.name: kind for kind in (classes.KIND, numbers.KIND, tags.KIND, tokens.KIND)
}
LOWER_IS_BETTER = frozenset().union(*(kind.lower_is_better for kind in KINDS.values()))
"""The metrics of any kind of which less is better."""
