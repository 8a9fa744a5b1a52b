"""GPT-2, whose fused and transposed projections the engine takes apart (train/modules.py)."""

from rekindle.families.family import Family, Modules, sizes

FAMILIES = {
    "gpt2": Family(
        sizes(768, 0, 12, 12, 50257, max_position_embeddings=1024, resid_pdrop=0.1, attn_pdrop=0.1,
              tie_word_embeddings=True),
        names={
            "hidden_size": "n_embd", "intermediate_size": "n_inner",
            "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions", "hidden_dropout_prob": "resid_pdrop",
            "attention_probs_dropout_prob": "attn_pdrop",
        },
        modules=Modules(
            blocks="h",
            matrices={
                "q": "attn.c_attn.q", "k": "attn.c_attn.k", "v": "attn.c_attn.v",
                "o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj",
            },
            regions=("attn", "mlp"),
            attention="attn",
            first=("wte", "wpe", "drop"),
            last=("ln_f",),
            table="wte",
            positions="wpe",
        ),
        spare_positions=0,
        gelu="written",
    ),
}  # fmt: skip
