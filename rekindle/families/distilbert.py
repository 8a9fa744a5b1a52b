"""DistilBERT: half of BERT's blocks, no token types, no pooler."""

from rekindle.families.family import Family, Modules, sizes

FAMILIES = {
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
}  # fmt: skip
