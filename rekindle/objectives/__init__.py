"""Objectives: what is minimised, what examples score, and what a model answers with, a
folder each.

    objectives/KIND/__init__.py   KIND: names, metrics, fields of answers; data alone
                   /loss.py       LOSS: micro-batches, their loss, the scores of single
                                  examples on a device; the one module that imports torch
                   /scores.py     SCORES: what contenders achieved, as the gate compares it
                   /answers.py    ANSWERS: scores as predictions

An objective is named by its task (`Task.objective`). A new one is a folder and a row in
registry.py; the other modules are imported when they are first asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rekindle.objectives.kind import LOWER_IS_BETTER
from rekindle.objectives.registry import KINDS, LOWEST, METRICS

if TYPE_CHECKING:
    from rekindle.objectives.answers import Answers
    from rekindle.objectives.loss import Loss, Scoring
    from rekindle.objectives.scores import ModelScores


def loss_of(name: str) -> Loss:
    """What is minimised. Imports torch."""
    loss: Loss = _module(name, "loss").LOSS
    return loss


def scoring_of(name: str) -> Scoring:
    """How single examples are scored. Imports torch."""
    scoring: Scoring = _module(name, "loss").LOSS
    return scoring


def scores_of(name: str) -> type[ModelScores]:
    """What contenders achieved."""
    scores: type[ModelScores] = _module(name, "scores").SCORES
    return scores


def answers_of(name: str) -> Answers:
    """How scores become predictions; not of tokens, which are written one by one."""
    answers: Answers = _module(name, "answers").ANSWERS
    return answers


def _module(name: str, part: str) -> Any:
    return importlib.import_module(f"{__name__}.{KINDS[name].name}.{part}")


__all__ = [
    "KINDS",
    "LOWER_IS_BETTER",
    "LOWEST",
    "METRICS",
    "answers_of",
    "loss_of",
    "scores_of",
    "scoring_of",
]
