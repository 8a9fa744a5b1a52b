"""Qwen's language models: Llama's blocks with biases (2), or with norms of each head (3)."""

import dataclasses

from rekindle.families.family import sizes
from rekindle.families.llama import LLAMA, MODULES

FAMILIES = {
    "qwen2": dataclasses.replace(
        LLAMA, qkv_bias=True, biases_fixed=True,
        defaults=sizes(4096, 22016, 32, 32, 151936, num_key_value_heads=32),
    ),
    "qwen3": dataclasses.replace(
        LLAMA, head_norms=True,
        defaults=sizes(4096, 22016, 32, 32, 151936, num_key_value_heads=32, head_dim=128),
        modules=dataclasses.replace(MODULES, per_head=("self_attn.q_norm", "self_attn.k_norm")),
    ),
}  # fmt: skip
