"""A number for each example, such as a price or a score."""

import math

from rekindle.objectives.kind import ObjectiveKind

SCALE = ("target_mean", "target_std")
"""The settings of a regression that scale its network's numbers: mean and deviation."""

KIND = ObjectiveKind(
    name="numbers",
    noun="a regression",
    label="number",
    answer_fields={"value": "number"},
    metrics=("r2", "rmse", "mae"),
    lowest={"r2": -math.inf},
    counts_right=False,
)
