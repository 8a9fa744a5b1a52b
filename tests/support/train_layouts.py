"""What tests share with train/test_layouts.py."""

NO_DROPOUT = {
    "distilbert": {"dropout": 0, "attention_dropout": 0, "seq_classif_dropout": 0},
    "bert": {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0},
}


MODELS = {
    "cnn": {"channels": [4, 6], "hidden": 10, "dropout": 0.2},
    "distilbert": {
        "model_type": "distilbert",
        "dim": 20,
        "n_layers": 5,
        "n_heads": 4,
        "hidden_dim": 36,
        "max_position_embeddings": 32,
    },
    "bert": {
        "model_type": "bert",
        "hidden_size": 20,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 36,
        "max_position_embeddings": 32,
    },
    "llama": {
        "model_type": "llama",
        "hidden_size": 16,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 40,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    },
    "mistral": {
        "model_type": "mistral",
        "hidden_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 40,
        "max_position_embeddings": 64,
        "sliding_window": None,
    },
    "qwen2": {
        "model_type": "qwen2",
        "hidden_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 40,
        "max_position_embeddings": 64,
    },
    "qwen3": {
        "model_type": "qwen3",
        "hidden_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 40,
        "max_position_embeddings": 64,
    },
    "starcoder2": {
        "model_type": "starcoder2",
        "hidden_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 40,
        "max_position_embeddings": 64,
        "residual_dropout": 0.1,
        "embedding_dropout": 0.1,
        "attention_dropout": 0.1,
    },
    "gpt2": {"model_type": "gpt2", "n_embd": 16, "n_layer": 4, "n_head": 4, "n_positions": 64},
}


TASKS = {
    "image": "image_classification",
    "text": "text_classification",
    "tags": "token_classification",
    "tokens": "causal_lm",
}
