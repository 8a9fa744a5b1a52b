"""One class for each example, of texts or images."""

from rekindle.objectives.kind import ObjectiveKind

OF_CURVES = ("roc_auc", "average_precision", "recall_at_90_precision")
"""Metrics of the curves that a threshold draws, which take time to compare."""

KIND = ObjectiveKind(
    name="classes",
    noun="a classifier",
    label="class",
    answer_fields={"label": "text", "probability": "number"},
    metrics=("accuracy", "macro_f1", "log_loss", "calibration_error", *OF_CURVES),
)
