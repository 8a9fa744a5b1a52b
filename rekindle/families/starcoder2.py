"""StarCoder2: Llama's attention, with layer norms, biases and a feed-forward without a gate."""

import dataclasses

from rekindle.families.family import Family, sizes
from rekindle.families.llama import MODULES

FAMILIES = {
    "starcoder2": Family(
        sizes(3072, 12288, 30, 24, 49152, num_key_value_heads=2, use_bias=True,
              residual_dropout=0.0, tie_word_embeddings=True),
        names={
            "attention_bias": "use_bias", "mlp_bias": "use_bias",
            "hidden_dropout_prob": "residual_dropout",
        },
        modules=dataclasses.replace(
            MODULES,
            first=("embed_tokens", "embedding_dropout"),
            sequence=(),  # tp ranks that divide it would draw the residual dropout of parts
            matrices={
                **{name: MODULES.matrices[name] for name in ("q", "k", "v", "o")},
                "up": "mlp.c_fc", "down": "mlp.c_proj",
            },
        ),
    ),
}  # fmt: skip
