"""What is known of model architectures: the numbers of their configs, the names of their modules.

Names of fields, modules and defaults are those of transformers 5. To add a family, add a row to
`FAMILIES`."""

import dataclasses

from rekindle.families.family import Family, Modules, sizes

_LLAMA_MODULES = Modules(
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
_LLAMA = Family(
    sizes(4096, 11008, 32, 32, 32000), modules=_LLAMA_MODULES, gated=True, norm="rms",
    qkv_bias=False, out_bias=False, ffn_bias=False,
)  # fmt: skip
_GEMMA = dataclasses.replace(_LLAMA, modules=None)
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
    # Llama and those whose blocks are Llama's own.
    "llama": _LLAMA,
    "mistral": dataclasses.replace(
        _LLAMA, defaults=sizes(4096, 14336, 32, 32, 32000, num_key_value_heads=8)
    ),
    # it trains, but no test has cut it yet
    "smollm3": dataclasses.replace(
        _LLAMA, modules=None,
        defaults=sizes(
            2048, 11008, 36, 16, 128256, num_key_value_heads=4, tie_word_embeddings=True
        ),
    ),
    # queries, keys and values are one matrix, gate and up another
    "phi3": dataclasses.replace(
        _LLAMA, modules=None, defaults=sizes(3072, 8192, 32, 32, 32064)
    ),
    # Qwen's language models: Llama's blocks with biases (2), or with norms of each head (3).
    "qwen2": dataclasses.replace(
        _LLAMA, qkv_bias=True, biases_fixed=True,
        defaults=sizes(4096, 22016, 32, 32, 151936, num_key_value_heads=32),
    ),
    "qwen3": dataclasses.replace(
        _LLAMA, head_norms=True,
        defaults=sizes(4096, 22016, 32, 32, 151936, num_key_value_heads=32, head_dim=128),
        modules=dataclasses.replace(
            _LLAMA_MODULES, per_head=("self_attn.q_norm", "self_attn.k_norm")
        ),
    ),
    # Gemma: Llama's blocks with wide heads and a scaled table, of which no pipeline is known.
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
    # GPT-2, whose fused and transposed projections the engine takes apart (train/modules.py).
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
    # GPT-NeoX and Pythia.
    "gpt_neox": Family(sizes(6144, 24576, 44, 64, 50432)),
    # OPT.
    "opt": Family(
        sizes(768, 3072, 12, 12, 50272, max_position_embeddings=2048, dropout=0.1,
              tie_word_embeddings=True),
        names={"intermediate_size": "ffn_dim", "hidden_dropout_prob": "dropout"},
        spare_positions=2,
    ),
    # StarCoder2: Llama's attention, with layer norms, biases and a feed-forward without a gate.
    "starcoder2": Family(
        sizes(3072, 12288, 30, 24, 49152, num_key_value_heads=2, use_bias=True,
              residual_dropout=0.0, tie_word_embeddings=True),
        names={
            "attention_bias": "use_bias", "mlp_bias": "use_bias",
            "hidden_dropout_prob": "residual_dropout",
        },
        modules=dataclasses.replace(
            _LLAMA_MODULES,
            first=("embed_tokens", "embedding_dropout"),
            sequence=(),  # tp ranks that divide it would draw the residual dropout of parts
            matrices={
                **{name: _LLAMA_MODULES.matrices[name] for name in ("q", "k", "v", "o")},
                "up": "mlp.c_fc", "down": "mlp.c_proj",
            },
        ),
    ),
    # BERT and RoBERTa, encoders whose classifiers read a summary of the first token.
    "bert": _BERT,
    "roberta": dataclasses.replace(
        _BERT, defaults={**_BERT.defaults, "vocab_size": 50265}, modules=None, pooler=False,
        pre_classifier=True,
    ),
    # DistilBERT: half of BERT's blocks, no token types, no pooler.
    "distilbert": Family(
        {
            **sizes(768, 3072, 6, 12, 30522, max_position_embeddings=512, dropout=0.1),
            "attention_dropout": 0.1,
        },
        names={
            "hidden_size": "dim", "intermediate_size": "hidden_dim",
            "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
            "hidden_dropout_prob": "dropout", "attention_probs_dropout_prob": "attention_dropout",
        },
        modules=Modules(
            blocks="transformer.layer",
            matrices={
                "q": "attention.q_lin", "k": "attention.k_lin", "v": "attention.v_lin",
                "o": "attention.out_lin", "up": "ffn.lin1", "down": "ffn.lin2",
            },
            regions=("attention", "ffn"),
            attention="attention",
            first=("embeddings",),
            summary="",
            behind="sa_layer_norm",
        ),
        spare_positions=0, first_norm=True, last_norm=False, pre_classifier=True, causal=False,
        score_bias=True,
        dropouts=1,  # none behind attention
    ),
    # ViT, which reads patches of images.
    "vit": Family(
        sizes(768, 3072, 12, 12, 0, image_size=224, patch_size=16, num_channels=3),
        causal=False, score_bias=True, patches=True,
    ),
}  # fmt: skip
