"""A grid: a training for each combination of values, and a whole run for the best one.

Decides what a grid is (`--set` with several values where the field takes one) and which
training is the best: the one with the lowest validation loss. Only that one is scored,
judged and registered, so that the test split judges a single model, once. Trainings share
the cached steps before them, and a grid that is run again trains what is missing."""

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

from rekindle.app.pipeline import TRAINING, training_of
from rekindle.app.prepared import prepare_here
from rekindle.app.run import OnChange, OnEvent, RunOptions, execute, windows
from rekindle.errors import RequestError, SpecError, StepError
from rekindle.records import RunRecord, TrainingSummary
from rekindle.spec.load import load_target
from rekindle.spec.model import Spec
from rekindle.spec.yaml_document import parse_value

_MOST = 100  # trainings of a grid


@dataclasses.dataclass(frozen=True)
class Point:
    """One training of a grid: the `--set` values of its own, and its spec."""

    settings: tuple[str, ...]
    spec: Spec


@dataclasses.dataclass(frozen=True)
class GridTraining:
    """A training of a grid that ended. `summary` is None where it failed."""

    point: Point
    record: RunRecord
    summary: TrainingSummary | None

    @property
    def loss(self) -> float:
        """Validation loss; infinite where there is none that is a number."""
        if self.summary is None:
            return math.inf
        loss = self.summary.validation.get("loss", math.inf)
        # a training that diverged is never the best
        return loss if math.isfinite(loss) else math.inf


def points(config: Path, overrides: Sequence[str]) -> list[Point]:
    """The trainings that the overrides ask for; a single one, with no settings of its
    own, where each has one value. Raises SpecError with what is wrong."""
    try:
        return [Point((), load_target(config, overrides))]
    except SpecError:
        choices = [_choices(override) for override in overrides]
        if all(len(values) == 1 for values in choices):
            raise  # no grid: the config is wrong
    for number, override in enumerate(overrides):
        if _loads(config, choices, number, override):
            choices[number] = [override]  # a field that takes a list is no choice
        else:
            _refuse_comma(config, choices, number, override)
    count = math.prod(map(len, choices))
    if count > _MOST:
        raise RequestError(
            f"that is a grid of {count:,} trainings",
            where="--set",
            fix=f"at most {_MOST} are run",
        )
    has_several = [len(values) > 1 for values in choices]
    grid = []
    for combination in itertools.product(*choices):
        spec = load_target(config, combination)
        settings = tuple(itertools.compress(combination, has_several))
        grid.append(Point(settings, spec))
    return grid


def _loads(config: Path, choices: Sequence[Sequence[str]], number: int, override: str) -> bool:
    """Whether the config takes this override beside the first choices of the others."""
    combination = [values[0] for values in choices]
    combination[number] = override
    try:
        load_target(config, combination)
    except SpecError:
        return False
    return True


def _refuse_comma(
    config: Path, choices: Sequence[Sequence[str]], number: int, override: str
) -> None:
    """Raise RequestError for a decimal comma, and for one between thousands."""
    key, _, text = override.partition("=")
    # only what looks like one number: 1,1e-9 stays a grid
    has_leading_zero = re.fullmatch(r"-?\d+,0\d+", text) is not None
    is_decimal = re.fullmatch(r"-?0,\d+", text) is not None and _loads(
        config, choices, number, f"{key}={text.replace(',', '.')}"
    )
    if has_leading_zero or is_decimal:
        parts = text.replace(",", " and with ")
        items = text.replace(",", ", ")
        raise RequestError(
            f"`{text}` would be two trainings, with {parts}",
            where=f"--set {key}",
            fix=f"write a number as 0.001 or 10000, or two trainings as {key}=[{items}]",
        )


def train(
    point: Point, options: RunOptions, on_change: OnChange, on_event: OnEvent
) -> GridTraining:
    """Run the pipeline up to its training."""
    if point.spec.pipeline is not None or point.spec.train.entrypoint:
        raise RequestError(
            "a grid needs the shipped pipeline and rekindle's own training",
            where="--set",
            fix="run the combinations one by one",
        )
    until_training = dataclasses.replace(options, until=TRAINING, settings=point.settings)
    newest_window = windows(point.spec)[-1]
    prepared = prepare_here(newest_window, options.home)
    record = execute(prepared, until_training, on_change, on_event)
    return GridTraining(point, record, TrainingSummary.read(training_of(record)))


def best_of(trained: Sequence[GridTraining]) -> GridTraining:
    """The training with the lowest validation loss, the first of equals.

    StepError where none has a loss."""
    best = min(trained, key=lambda training: training.loss)
    if best.loss == math.inf:
        raise StepError(
            "no training of the grid has a validation loss",
            fix="see the logs of the runs above, or give data.split a validation share",
        )
    return best


def _choices(override: str) -> list[str]:
    """The overrides that one stands for: `a=[1, 2]` and `a=1,2` are two."""
    key, _, text = override.partition("=")
    value = parse_value(text)
    if isinstance(value, list) and value:
        return [f"{key}={json.dumps(item)}" for item in value]
    if isinstance(value, str) and not set(text) & set("[]{}'\""):
        return [f"{key}={item.strip()}" for item in text.split(",")]
    return [override]
