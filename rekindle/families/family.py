"""What a family of architectures is: `Family`, the numbers, and `Modules`, the names, as
transformers 5 has them. To add a family, add a row to `FAMILIES`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

Norm = Literal["rms", "layer"]
Gelu = Literal["fused", "written"]

DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout")
ROW = ("o", "down")  # matrices that tensor parallel ranks divide by rows, others by columns


@dataclasses.dataclass(frozen=True)
class Modules:
    """What the engine must know to cut a network of transformers: its blocks, the matrices that
    tensor parallelism divides, what only the first or the last pipeline stage runs.

    Names are relative to a block for `matrices`, `regions`, `per_head`, `sequence`, `attention` and
    `behind`, to the backbone otherwise. `matrices` are those of a block by plan/shape.py's names:
    q, k, v, o; gate, up, down. `regions` are the modules of a block whose input goes into divided
    columns. `first` are what only the first stage runs (modules, or rates of dropout), `last` what
    only the last does; `table` is the token embedding, `positions` an embedding that is added to
    it. `sequence` names the norms where the residual stream may be divided along the sequence
    between tp ranks. `summary` is the module that makes a text's summary of its first token, ""
    where what follows the backbone does; None where there is none. `behind` is the module of a
    block that attention's result goes into: from it on no token depends on another one."""

    blocks: str
    matrices: Mapping[str, str]
    regions: tuple[str, ...]
    attention: str
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    table: str = ""
    positions: str = ""
    per_head: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()
    summary: str | None = None
    behind: str = ""

    @property
    def column(self) -> tuple[str, ...]:
        """Matrices that are divided by their outputs."""
        return tuple(module for name, module in self.matrices.items() if name not in ROW)

    @property
    def row(self) -> tuple[str, ...]:
        """Matrices that are divided by their inputs."""
        return tuple(module for name, module in self.matrices.items() if name in ROW)


@dataclasses.dataclass(frozen=True)
class Family:
    """What an architecture does with the numbers of its config.

    `defaults` are those of its configuration class; `names` its own words for the common ones;
    `norms` are counted per block, `head_norms` are two more over each head's queries and keys;
    `biases_fixed`: the config does not decide on attention's. `spare_positions` are rows of the
    learnt position table that no position uses, None where there is no table. `dropouts` are those
    of a block behind attention and feed-forward. `gelu` tells whether one kernel computes it, or
    transformers writes it out. `modules` is None where the engine cuts nothing: such a model trains
    in layouts of dp and shard."""

    defaults: Mapping[str, Any]
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    modules: Modules | None = None
    gated: bool = False
    norm: Norm = "layer"
    norms: int = 2
    head_norms: bool = False
    qkv_bias: bool = True
    out_bias: bool = True
    ffn_bias: bool = True
    biases_fixed: bool = False
    spare_positions: int | None = None
    token_types: bool = False
    first_norm: bool = False
    last_norm: bool = True
    pooler: bool = False
    pre_classifier: bool = False
    causal: bool = True
    score_bias: bool = False
    patches: bool = False
    dropouts: int = 2
    gelu: Gelu = "fused"


def sizes(hidden: int, ffn: int, layers: int, heads: int, vocab: int, **own: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers,
        "num_attention_heads": heads, "vocab_size": vocab, **own,
    }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Config:
    """A config, asked in common words; where `family` is not known, `aliases` are tried."""

    given: Mapping[str, Any]
    family: Family | None
    aliases: Mapping[str, tuple[str, ...]]

    def get(self, name: str, otherwise: Any = None) -> Any:
        """The value under the family's own name or the common one, else its default."""
        places, names = [self.given], (*self.aliases.get(name, ()), name)
        if self.family is not None:
            places.append(self.family.defaults)
            names = (self.family.names.get(name, name), name)
        values = (place.get(each) for place in places for each in names)
        return next((value for value in values if value is not None), otherwise)


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

# by transformers' `model_type`
FAMILIES: Mapping[str, Family] = {
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
