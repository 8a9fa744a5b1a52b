"""Objectives: what is minimised, and what examples score."""

from collections.abc import Mapping

from rekindle.tasks.base import Task
from rekindle.train.objectives.base import Objective
from rekindle.train.objectives.classes import Classes, Tags
from rekindle.train.objectives.numbers import SquaredError
from rekindle.train.objectives.tokens import Tokens

OBJECTIVES: Mapping[str, Objective] = {
    "classes": Classes(),
    "numbers": SquaredError(),
    "tags": Tags(),
    "tokens": Tokens(),
}
"""By the name that a task gives its own."""


def objective_of(task: Task) -> Objective:
    """What this task minimises."""
    return OBJECTIVES[task.objective]
