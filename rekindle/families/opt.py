"""OPT."""

from rekindle.families.family import Family, sizes

FAMILIES = {
    "opt": Family(
        sizes(768, 3072, 12, 12, 50272, max_position_embeddings=2048, dropout=0.1,
              tie_word_embeddings=True),
        names={"intermediate_size": "ffn_dim", "hidden_dropout_prob": "dropout"},
        spare_positions=2,
    ),
}  # fmt: skip
