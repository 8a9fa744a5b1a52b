"""All objectives by name, as data."""

from collections.abc import Mapping

from rekindle.objectives import classes, numbers, tags, tokens
from rekindle.objectives.kind import ObjectiveKind

KINDS: Mapping[str, ObjectiveKind] = {
    kind.name: kind for kind in (classes.KIND, numbers.KIND, tags.KIND, tokens.KIND)
}
