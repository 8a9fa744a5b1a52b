"""The built-in tasks: the one table of them, for the spec and the planner, which import none, and
for `rekindle.tasks`, which loads them."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from rekindle.objectives import KINDS
from rekindle.objectives.kind import ObjectiveKind

Rates = Literal["encoder", "language_model", "own"]
"""Which learning rates are usual for weights that were trained before: a row of rates.yaml."""
LayoutKind = Literal["image", "text", "tags", "tokens"]
"""What a task's networks are like, by which layouts are proven."""


@dataclasses.dataclass(frozen=True)
class BuiltInTask:
    """A task of `rekindle.tasks`: its class, as `module:Class`, its objective, which layouts are
    proven for it, and which learning rates are usual."""

    target: str
    objective: ObjectiveKind
    layout: LayoutKind
    rates: Rates


BUILT_IN_TASKS: Mapping[str, BuiltInTask] = {
    "causal_lm": BuiltInTask(
        target="rekindle.tasks.causal_lm:CausalLM",
        objective=KINDS["tokens"],
        layout="tokens",
        rates="language_model",
    ),
    "image_classification": BuiltInTask(
        target="rekindle.tasks.image_classification:ImageClassification",
        objective=KINDS["classes"],
        layout="image",
        rates="own",
    ),
    "text_classification": BuiltInTask(
        target="rekindle.tasks.encoder:TextClassification",
        objective=KINDS["classes"],
        layout="text",
        rates="encoder",
    ),
    "text_regression": BuiltInTask(
        target="rekindle.tasks.encoder:TextRegression",
        objective=KINDS["numbers"],
        layout="text",
        rates="encoder",
    ),
    "token_classification": BuiltInTask(
        target="rekindle.tasks.encoder:TokenClassification",
        objective=KINDS["tags"],
        layout="tags",
        rates="encoder",
    ),
}


def objective_of_task(name: str) -> ObjectiveKind:
    """The objective of a built-in task; of a user's own, whose class is not read here, that
    of most: classes."""
    task = BUILT_IN_TASKS.get(name)
    return KINDS["classes"] if task is None else task.objective
