"""Gemma: Llama's blocks with wide heads and a scaled table, of which no pipeline is known."""

import dataclasses

from rekindle.families.family import sizes
from rekindle.families.llama import LLAMA

_GEMMA = dataclasses.replace(LLAMA, modules=None)
FAMILIES = {
    "gemma": dataclasses.replace(
        _GEMMA,
        defaults=sizes(3072, 24576, 28, 16, 256000, head_dim=256, tie_word_embeddings=True),
    ),
    "gemma2": dataclasses.replace(
        _GEMMA, norms=4,
        defaults=sizes(
            2304, 9216, 26, 8, 256000, num_key_value_heads=4, head_dim=256,
            tie_word_embeddings=True,
        ),
    ),
}  # fmt: skip
