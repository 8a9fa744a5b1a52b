"""A class for each word of a text."""

from rekindle.objectives.kind import ObjectiveKind

KIND = ObjectiveKind(
    name="tags",
    noun="a tagger",
    label="class of each word",
    answer_fields={"tags": "texts", "probabilities": "numbers"},
    metrics=("entity_f1", "entity_precision", "entity_recall", "token_accuracy", "log_loss"),
)
