"""Llama and those whose blocks are Llama's own."""

import dataclasses

from rekindle.families.family import Family, Modules, sizes

MODULES = Modules(
    blocks="layers",
    matrices={
        "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
        "o": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    },
    regions=("self_attn", "mlp"),
    attention="self_attn",
    first=("embed_tokens",),
    last=("norm",),
    table="embed_tokens",
    sequence=("input_layernorm", "post_attention_layernorm"),
)  # fmt: skip
LLAMA = Family(
    sizes(4096, 11008, 32, 32, 32000), modules=MODULES, gated=True, norm="rms", qkv_bias=False,
    out_bias=False, ffn_bias=False,
)  # fmt: skip

FAMILIES = {
    "llama": LLAMA,
    "mistral": dataclasses.replace(
        LLAMA, defaults=sizes(4096, 14336, 32, 32, 32000, num_key_value_heads=8)
    ),
    # it trains, but no test has cut it yet
    "smollm3": dataclasses.replace(
        LLAMA, modules=None,
        defaults=sizes(
            2048, 11008, 36, 16, 128256, num_key_value_heads=4, tie_word_embeddings=True
        ),
    ),
    # queries, keys and values are one matrix, gate and up another
    "phi3": dataclasses.replace(
        LLAMA, modules=None, defaults=sizes(3072, 8192, 32, 32, 32064)
    ),
}  # fmt: skip
