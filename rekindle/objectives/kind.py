"""What is known of an objective without computing anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

AnswerType = Literal["text", "number", "count", "texts", "numbers"]
Label = Literal["class", "number", "class of each word", "none"]

LOWER_IS_BETTER = frozenset(
    {"log_loss", "calibration_error", "perplexity", "bits_per_byte", "rmse", "mae"}
)
"""The metrics of any objective of which less is better."""


@dataclasses.dataclass(frozen=True)
class ObjectiveKind:
    """An objective as data: read by the spec, the planner and reports, which import no
    torch."""

    name: str
    """As records and models' folders have it."""
    noun: str
    """A model of this kind, in messages: "a regression"."""
    label: Label
    """What each example is labelled with."""
    answer_fields: Mapping[str, AnswerType]
    """What a model's predictions consist of."""
    metrics: tuple[str, ...]
    """What models are judged by; `evaluate.metrics` chooses among them."""
    lowest: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The lowest value of those metrics of which more is better, where that is not 0. The highest
    is 1."""
    counts_right: bool = True
    """Whether a prediction is right or wrong, and nothing between."""
    divided_by_cp: bool = False
    """Whether context-parallel peers have targets of their own."""

    @property
    def writes(self) -> bool:
        """Whether a model answers with a text, token by token."""
        return "text" in self.answer_fields

    @property
    def has_classes(self) -> bool:
        """Whether a model answers with classes, of an example or of each word."""
        return self.label in ("class", "class of each word")
