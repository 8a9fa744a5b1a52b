"""The metrics that a model is judged by, of classifiers and of language models."""

METRICS = ("accuracy", "macro_f1", "log_loss", "calibration_error")
TOKEN_METRICS = ("log_loss", "perplexity", "token_accuracy", "bits_per_byte")
LOWER_IS_BETTER = frozenset({"log_loss", "calibration_error", "perplexity", "bits_per_byte"})
