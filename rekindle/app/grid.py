"""A grid: a training for each combination of values, and the pipeline to its end for the best one.

Decides what a grid is (`--set` with several values where the field takes one) and which training is
the best: the one with the lowest validation loss. Only that one is scored, judged and registered,
so that the test split judges a single model, once. Trainings share the cached steps before them,
and a grid that is run again trains what is missing."""

import contextlib
import dataclasses
import itertools
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

from rekindle.app.pipeline import TRAINING, training_of
from rekindle.app.run import OnChange, OnEvent, Options, execute, windows
from rekindle.errors import RequestError, SpecError, StepError
from rekindle.records import RunRecord, TrainingSummary
from rekindle.spec.load import load_target
from rekindle.spec.model import Spec
from rekindle.spec.yaml_document import parse_value
from rekindle.tables import problems_in

_MOST = 100
_problem = problems_in(__file__)


@dataclasses.dataclass(frozen=True)
class Point:
    """One training of a grid: the values that it has for itself, by `--set`, and its spec."""

    settings: tuple[str, ...]
    spec: Spec


@dataclasses.dataclass(frozen=True)
class Trained:
    """What came of a point. `summary` is None where the training failed."""

    point: Point
    record: RunRecord
    summary: TrainingSummary | None

    @property
    def loss(self) -> float:
        """Validation loss; infinite where there is none that is a number."""
        found = (self.summary.validation if self.summary else {}).get("loss", math.inf)
        return found if math.isfinite(found) else math.inf


def points(config: Path, overrides: Sequence[str]) -> list[Point]:
    """The trainings that the overrides ask for; a single one, with no settings of its own, where
    each has one value. Raises SpecError with what is wrong."""
    try:
        return [Point((), load_target(config, overrides))]
    except SpecError:
        choices = [_choices(override) for override in overrides]
        if all(len(each) == 1 for each in choices):
            raise

    def is_taken(number: int, override: str) -> bool:
        others = [override if n == number else each[0] for n, each in enumerate(choices)]
        with contextlib.suppress(SpecError):
            load_target(config, others)
            return True
        return False

    for number, override in enumerate(overrides):
        key, _, text = override.partition("=")
        if is_taken(number, override):  # a field that takes a list is no choice
            choices[number] = [override]
        elif re.fullmatch(r"-?\d+,0\d+", text) or (
            re.fullmatch(r"-?0,\d+", text) and is_taken(number, f"{key}={text.replace(',', '.')}")
        ):  # a decimal comma, or one between thousands
            parts, items = text.replace(",", " and with "), text.replace(",", ", ")
            raise RequestError([_problem("comma", text=text, parts=parts, key=key, items=items)])
    count = math.prod(map(len, choices))
    if count > _MOST:
        raise RequestError([_problem("many", count=count, most=_MOST)])
    several = [len(each) > 1 for each in choices]
    loaded = ((chosen, load_target(config, chosen)) for chosen in itertools.product(*choices))
    return [Point(tuple(itertools.compress(chosen, several)), spec) for chosen, spec in loaded]


def train(point: Point, options: Options, on_change: OnChange, on_event: OnEvent) -> Trained:
    """The pipeline up to its training."""
    if point.spec.pipeline is not None or point.spec.train.entrypoint:
        raise RequestError([_problem("own_training")])
    only = dataclasses.replace(options, until=TRAINING, settings=point.settings)
    record = execute(windows(point.spec)[-1], only, on_change, on_event)
    return Trained(point, record, TrainingSummary.read(training_of(record)))


def best_of(trained: Sequence[Trained]) -> Trained:
    """The one with the lowest validation loss, the first of equals; StepError where none has."""
    best = min(trained, key=lambda each: each.loss)
    if best.loss == math.inf:
        raise StepError([_problem("no_loss")])
    return best


def _choices(override: str) -> list[str]:
    """The overrides of one: `a=[1, 2]` and `a=1,2` are two."""
    key, _, text = override.partition("=")
    value = parse_value(text)
    if isinstance(value, list) and value:
        return [f"{key}={json.dumps(each)}" for each in value]
    if isinstance(value, str) and not set(text) & set("[]{}'\""):
        return [f"{key}={each.strip()}" for each in text.split(",")]
    return [override]
