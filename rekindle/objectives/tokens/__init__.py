"""The next token of each text."""

from rekindle.objectives.kind import ObjectiveKind

# Bytes of logits that the loss makes at a time. On a CPU they stay in its cache; a GPU needs so
# many that the matrix, which each piece reads twice, costs less to read than to multiply with.
LOGITS_BYTES = {"cpu": 1 << 25, "cuda": 1 << 29}
TAUGHT = 4  # matrices as large as the logits that a teacher's divergence makes, them included


def rows_at_once(columns: int, device: str) -> int:
    """Rows of logits that the loss makes at a time: of 128,256 columns 65,
    on a GPU 1,046."""
    return max(1, LOGITS_BYTES.get(device, LOGITS_BYTES["cpu"]) // (4 * max(1, columns)))


KIND = ObjectiveKind(
    name="tokens",
    noun="a language model",
    label="none",
    answer_fields={
        "text": "text",
        "prompt_tokens": "count",
        "tokens": "count",
        "finish_reason": "text",
    },
    metrics=("log_loss", "perplexity", "token_accuracy", "bits_per_byte"),
    divided_by_cp=True,
)
