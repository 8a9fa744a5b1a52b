"""What contenders achieved, a file an objective."""

from collections.abc import Mapping

from rekindle.evaluate.scores.base import ModelScores
from rekindle.evaluate.scores.classes import ClassScores
from rekindle.evaluate.scores.numbers import NumberScores
from rekindle.evaluate.scores.tags import TagScores
from rekindle.evaluate.scores.tokens import TokenScores
from rekindle.records import Objective

SCORES: Mapping[Objective, type[ModelScores]] = {
    "classes": ClassScores,
    "numbers": NumberScores,
    "tags": TagScores,
    "tokens": TokenScores,
}
"""By the objective of the candidate's task."""

__all__ = ["SCORES", "ClassScores", "ModelScores", "NumberScores", "TagScores", "TokenScores"]
