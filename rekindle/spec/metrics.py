"""The metrics that a model is judged by: classifiers, taggers, language models."""

METRICS = ("accuracy", "macro_f1", "log_loss", "calibration_error")
TAG_METRICS = ("entity_f1", "entity_precision", "entity_recall", "token_accuracy", "log_loss")
TOKEN_METRICS = ("log_loss", "perplexity", "token_accuracy", "bits_per_byte")
LOWER_IS_BETTER = frozenset({"log_loss", "calibration_error", "perplexity", "bits_per_byte"})
