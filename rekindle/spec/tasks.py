"""The built-in tasks as the spec and the planner know them, which import none of them."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from rekindle.objectives import KINDS
from rekindle.objectives.kind import ObjectiveKind

LayoutKind = Literal["image", "text", "tags", "tokens"]
"""What a task's networks are like, by which layouts are proven."""


@dataclasses.dataclass(frozen=True)
class BuiltInTask:
    """A task of `rekindle.tasks`: its objective, and which layouts are proven for it."""

    objective: ObjectiveKind
    layout: LayoutKind


BUILT_IN_TASKS: Mapping[str, BuiltInTask] = {
    "causal_lm": BuiltInTask(KINDS["tokens"], "tokens"),
    "image_classification": BuiltInTask(KINDS["classes"], "image"),
    "text_classification": BuiltInTask(KINDS["classes"], "text"),
    "text_regression": BuiltInTask(KINDS["numbers"], "text"),
    "token_classification": BuiltInTask(KINDS["tags"], "tags"),
}


def objective_of_task(name: str) -> ObjectiveKind:
    """The objective of a built-in task; of a user's own, whose class is not read here, that
    of most: classes."""
    task = BUILT_IN_TASKS.get(name)
    return KINDS["classes"] if task is None else task.objective
