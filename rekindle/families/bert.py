"""BERT and RoBERTa, encoders whose classifiers read a summary of the first token."""

import dataclasses

from rekindle.families.family import Family, Modules, sizes

_BERT = Family(
    sizes(768, 3072, 12, 12, 30522, max_position_embeddings=512, type_vocab_size=2,
          hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, tie_word_embeddings=True),
    modules=Modules(
        blocks="encoder.layer",
        matrices={
            "q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value",
            "o": "attention.output.dense", "up": "intermediate.dense", "down": "output.dense",
        },
        regions=("attention.self", "intermediate"),
        attention="attention.self",
        first=("embeddings",),
        last=("pooler",),
        summary="pooler",
        behind="attention.output",
    ),
    spare_positions=0, token_types=True, first_norm=True, last_norm=False, pooler=True,
    causal=False, score_bias=True,
)  # fmt: skip

FAMILIES = {
    "bert": _BERT,
    "roberta": dataclasses.replace(
        _BERT, defaults={**_BERT.defaults, "vocab_size": 50265}, modules=None, pooler=False,
        pre_classifier=True,
    ),
}  # fmt: skip
