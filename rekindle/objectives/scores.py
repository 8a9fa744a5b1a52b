"""What a contender achieved on the rows that decide, in the form that the gate compares.
Shapes: N examples, C classes or tags, R resamples."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol, Self, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rekindle.objectives.kind import LOWER_IS_BETTER
from rekindle.records import CalibrationBin, Check, ClassResult, Contender

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

EPSILON = 1e-12  # the least probability that a loss counts with
FloatOrArray = TypeVar("FloatOrArray", float, Floats)


def gain(metric: str, value: FloatOrArray, reference: FloatOrArray) -> FloatOrArray:
    """By how much `value` is better than `reference` in `metric`; negative where it is
    worse. The only place that knows that less of a loss is better."""
    if metric in LOWER_IS_BETTER:
        return reference - value
    return value - reference


def beats(
    name: str, metric: str, value: float, blind: float, blind_answer: str, form: str = ".4f"
) -> Check:
    """The check `name`: whether `value` is better than that of an answer blind to the
    input, which `blind_answer` describes; `form` writes both."""
    passed = gain(metric, value, blind) > 0
    relation = "beats" if passed else "does not beat"
    detail = f"{metric} {value:{form}} {relation} {blind_answer} ({blind:{form}})"
    return Check(name=name, passed=passed, detail=detail, value=value, threshold=blind)


class ModelScores(Protocol):
    METRIC: ClassVar[str]
    """What contenders are compared in unless `evaluate.gate.metric` says otherwise."""
    SLICE_METRIC: ClassVar[str]
    """What they are compared in on slices."""

    @classmethod
    def of(cls, rows: pa.Table, who: str, contender: Contender) -> Self:
        """From records.Scores' `rows`, the column `who`. DataError for unknown labels."""

    def __len__(self) -> int:
        """N."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """All metrics by name; NaN where a prediction is."""

    def measured(self, names: Sequence[str]) -> Mapping[str, float]:
        """Metrics of all examples, none where there are no examples."""
        if not len(self):
            return {}
        once_1N = np.ones((1, len(self)))
        return {name: float(self.weighted(name, once_1N)[0]) for name in names}

    @property
    def finite(self) -> bool:
        """Whether every prediction is a number."""

    @property
    def sizes_N(self) -> Floats:
        """How many answers each example holds: one, or so many words or targets."""
        return np.ones(len(self))

    def weighted(self, metric: str, weights_RN: Floats) -> Floats:
        """[R] values of `metric`, where examples count as a row of `weights_RN` says."""

    def is_right(self, metric: str) -> Bools | None:
        """[N]: which answers are right, if the metric is their share;
        None if it is not."""
        return None

    def worst(self, metric: str, other: Self, rare: bool = False) -> float:
        """The most that one more example may cost a model of which these are known,
        beside what it costs the `other`: as `with_one_more` takes it. The bound of the
        metric where it has one; else the most that both differ by on an example, or what
        a blind answer costs. With `rare` also what no example here shows: see each kind
        of scores."""

    def with_one_more(self, cost: float) -> Self:
        """The same and one more example of the mean size, that hurts most where it is
        answered wrong: at this `cost`; at 0 as well as can be. Only for `weighted`."""

    def trivial(self, metric: str) -> Check:
        """Whether it beats the best answer that ignores the input:
        of classes in this metric."""

    def picked(self, pick_N: np.ndarray) -> Self:
        """The same of some of the examples."""

    def answers(self) -> tuple[Ints, Ints] | None:
        """The class of each answer and the true one; None where there are no classes."""
        return None

    def confidence(self) -> Floats | None:
        """[N]: how probable each answer is; None where there is no one class."""
        return None

    def numbers(self) -> Floats | None:
        """[N]: the predicted numbers; None where classes or tokens are predicted."""
        return None

    def confusion(self) -> tuple[tuple[int, ...], ...]:
        """Counts by true class and predicted class; () where there are no classes."""
        return ()

    def classes(self) -> tuple[ClassResult, ...]:
        """How good it is at each class or type of entity; () where there are none."""
        return ()

    def calibration(self) -> tuple[CalibrationBin, ...]:
        """The reliability diagram; nothing where there is none."""
        return ()
