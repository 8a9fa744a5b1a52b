"""The shape of a model from its Hugging Face config: every matrix of a block, what lies before the
first block and behind the last one.

Decides `ModelShape` and the one table of architectures. Parameter counts are exact: a test builds
each architecture of transformers on the meta device and compares. Everything else (FLOPs, shares of
tensor parallel ranks, adapters) is derived from the same list of matrices. Names of fields and
their defaults are those of transformers 5."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from rekindle.errors import RequestError

Divided = Literal["column", "row", ""]
Norm = Literal["rms", "layer"]


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A linear layer. `divided`: how tensor parallel ranks share it (Shoeybi et al. 2019)."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    divided: Divided = ""

    @property
    def parameters(self) -> int:
        """Weights and biases."""
        return self.outputs * (self.inputs + self.bias)


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """A transformer. `matrices` and `block_norms` (elements) are those of one block; `table` is the
    token embedding [vocab, d_model], or what turns patches into tokens; `before` are the other
    elements before the first block, `after` those behind the last one without the head
    (final norm, pooler); `head` is the last matrix, absent where it is the table itself."""

    model_type: str
    layers: int
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool
    vocab: int
    causal: bool
    norm: Norm
    matrices: tuple[Matrix, ...]
    block_norms: int
    table: int
    before: int
    after: int
    head: Matrix | None
    dropout: float = 0.0
    attention_dropout: float = 0.0

    @property
    def block_parameters(self) -> int:
        """Of one block."""
        return sum(matrix.parameters for matrix in self.matrices) + self.block_norms

    @property
    def parameters(self) -> int:
        """Of the whole model; a tied head counts once. GPT-2 has 124,439,808."""
        head = self.head.parameters if self.head else 0
        return self.layers * self.block_parameters + self.table + self.before + self.after + head

    @property
    def products(self) -> int:
        """Weights that a token is multiplied with: no table, but the head, tied or not."""
        block = sum(m.inputs * m.outputs for m in self.matrices)
        head = self.head.inputs * self.head.outputs if self.head else 0
        return self.layers * block + (head or (self.vocab * self.d_model if self.causal else 0))

    def flops_per_token(self, sequence: int) -> float:
        """Forward and backward, of the model alone (no recomputation): 6 a weight, and 12 L d s of
        attention, half of it where it is causal (Chowdhery et al. 2022, arXiv 2204.02311).

        GPT-2 at 1,024 tokens: 0.80 GFLOP."""
        attention = 12.0 * self.layers * self.heads * self.head_dim * sequence
        return 6.0 * self.products + attention * (0.5 if self.causal else 1.0)


@dataclasses.dataclass(frozen=True)
class _Family:
    """What an architecture does with the numbers of its config. `norms` per block; `defaults` are
    those of its configuration class; `names` are its own words for ours; `table_offset` are rows of
    the position table that no position uses."""

    defaults: Mapping[str, Any]
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gated: bool = False
    norm: Norm = "layer"
    norms: int = 2
    qk_norm: bool = False
    qkv_bias: bool = True
    out_bias: bool = True
    ffn_bias: bool = True
    positions: int = 0
    token_types: bool = False
    first_norm: bool = False
    last_norm: bool = True
    pooler: bool = False
    pre_classifier: bool = False
    causal: bool = True
    score_bias: bool = False
    patches: bool = False


def _numbers(
    hidden: int, ffn: int, layers: int, heads: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers,
        "num_attention_heads": heads, "vocab_size": vocab, **more,
    }  # fmt: skip


_LLAMA = _Family(
    _numbers(4096, 11008, 32, 32, 32000),
    gated=True, norm="rms", qkv_bias=False, out_bias=False, ffn_bias=False,
)  # fmt: skip
_BERT = _Family(
    _numbers(768, 3072, 12, 12, 30522, max_position_embeddings=512, type_vocab_size=2,
             hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, tie_word_embeddings=True),
    positions=1, token_types=True, first_norm=True, last_norm=False, pooler=True, causal=False,
    score_bias=True,
)  # fmt: skip

FAMILIES: Mapping[str, _Family] = MappingProxyType(
    {
        "llama": _LLAMA,
        "mistral": dataclasses.replace(
            _LLAMA, defaults=_numbers(4096, 14336, 32, 32, 32000, num_key_value_heads=8)
        ),
        "qwen2": dataclasses.replace(
            _LLAMA, defaults=_numbers(4096, 22016, 32, 32, 151936), qkv_bias=True
        ),
        "qwen3": dataclasses.replace(
            _LLAMA, defaults=_numbers(4096, 22016, 32, 32, 151936, head_dim=128), qk_norm=True
        ),
        "smollm3": dataclasses.replace(
            _LLAMA,
            defaults=_numbers(
                2048, 11008, 36, 16, 128256, num_key_value_heads=4, tie_word_embeddings=True
            ),
        ),
        "phi3": dataclasses.replace(_LLAMA, defaults=_numbers(3072, 8192, 32, 32, 32064)),
        "gemma": dataclasses.replace(
            _LLAMA,
            defaults=_numbers(3072, 24576, 28, 16, 256000, head_dim=256, tie_word_embeddings=True),
        ),
        "gemma2": dataclasses.replace(
            _LLAMA,
            defaults=_numbers(
                2304, 9216, 26, 8, 256000, num_key_value_heads=4, head_dim=256,
                tie_word_embeddings=True,
            ),
            norms=4,
        ),
        "gpt_neox": _Family(_numbers(6144, 24576, 44, 64, 50432)),
        "opt": _Family(
            _numbers(768, 3072, 12, 12, 50272, max_position_embeddings=2048, dropout=0.1,
                     tie_word_embeddings=True),
            names={"intermediate_size": "ffn_dim", "hidden_dropout_prob": "dropout"},
            positions=3,
        ),
        "gpt2": _Family(
            _numbers(768, 0, 12, 12, 50257, max_position_embeddings=1024, resid_pdrop=0.1,
                     attn_pdrop=0.1, tie_word_embeddings=True),
            names={
                "hidden_size": "n_embd", "intermediate_size": "n_inner",
                "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
                "max_position_embeddings": "n_positions", "hidden_dropout_prob": "resid_pdrop",
                "attention_probs_dropout_prob": "attn_pdrop",
            },
            positions=1,
        ),
        "bert": _BERT,
        "roberta": dataclasses.replace(
            _BERT, defaults={**_BERT.defaults, "vocab_size": 50265}, pooler=False,
            pre_classifier=True,
        ),
        "distilbert": dataclasses.replace(
            _BERT,
            defaults={
                **_numbers(768, 3072, 6, 12, 30522, max_position_embeddings=512, dropout=0.1),
                "attention_dropout": 0.1,
            },
            names={
                "hidden_size": "dim", "intermediate_size": "hidden_dim",
                "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
                "hidden_dropout_prob": "dropout",
                "attention_probs_dropout_prob": "attention_dropout",
            },
            token_types=False, pooler=False, pre_classifier=True,
        ),
        "vit": _Family(
            _numbers(768, 3072, 12, 12, 0, image_size=224, patch_size=16, num_channels=3),
            causal=False, score_bias=True, patches=True,
        ),
    }
)  # fmt: skip


def shape_of(config: Mapping[str, Any], classes: int | None = None) -> ModelShape:
    """From a Hugging Face config; `classes` asks for a classifier of so many, None for the
    architecture's language model (of an encoder: its body alone). Raises RequestError for one that
    is not known.

    `shape_of({"model_type": "gpt2"}).parameters` is 124,439,808."""
    kind = str(config.get("model_type", ""))
    family = FAMILIES.get(kind)
    if family is None:
        near = difflib.get_close_matches(kind, FAMILIES, 1)
        raise RequestError(
            f"the planner does not know the architecture `{kind}`",
            where="model.source",
            fix=f"did you mean {near[0]}?" if near else f"it knows {', '.join(FAMILIES)}",
        )
    return _Reader(family, config).shape(kind, classes)


class _Reader:
    """A config, asked in our words."""

    def __init__(self, family: _Family, config: Mapping[str, Any]) -> None:
        self.family, self.config = family, config

    def get(self, name: str, otherwise: Any = None) -> Any:
        """The config's value under its own name or ours, else the class's default."""
        for alias in (self.family.names.get(name, name), name):
            if self.config.get(alias) is not None:
                return self.config[alias]
        for alias in (name, self.family.names.get(name, name)):
            if self.family.defaults.get(alias) is not None:
                return self.family.defaults[alias]
        return otherwise

    def shape(self, kind: str, classes: int | None) -> ModelShape:
        family, d_model = self.family, int(self.get("hidden_size"))
        heads = int(self.get("num_attention_heads"))
        kv_heads = int(self.get("num_key_value_heads", heads))
        head_dim = int(self.get("head_dim", d_model // heads))
        ffn = int(self.get("intermediate_size") or 4 * d_model)
        vocab = int(self.get("vocab_size"))
        matrices = self._matrices(d_model, heads * head_dim, kv_heads * head_dim, ffn)
        norm = d_model * (1 if family.norm == "rms" else 2)
        head, extra = self._head(d_model, vocab, classes)
        pooler = d_model * (d_model + 1) if family.pooler else 0
        return ModelShape(
            model_type=kind, layers=int(self.get("num_hidden_layers")), d_model=d_model,
            heads=heads, kv_heads=kv_heads, head_dim=head_dim, ffn=ffn, gated=family.gated,
            vocab=vocab, causal=family.causal, norm=family.norm, matrices=matrices,
            block_norms=family.norms * norm + (2 * head_dim if family.qk_norm else 0),
            table=self._table(d_model, vocab), before=self._before(d_model, norm),
            after=(norm if family.last_norm else 0) + pooler + extra, head=head,
            dropout=float(self.get("hidden_dropout_prob", 0.0)),
            attention_dropout=float(
                self.get("attention_probs_dropout_prob", 0.0) or self.get("attention_dropout", 0.0)
            ),
        )  # fmt: skip

    def _matrices(self, d_model: int, query: int, kv: int, ffn: int) -> tuple[Matrix, ...]:
        family = self.family
        qkv_bias = bool(self.get("attention_bias", self.get("qkv_bias", family.qkv_bias)))
        out_bias = bool(self.get("attention_bias", family.out_bias))
        ffn_bias = bool(self.get("mlp_bias", family.ffn_bias))
        if self.config.get("model_type") == "qwen2":  # its config has no say in it
            qkv_bias, out_bias = True, False
        up = ("gate", "up") if family.gated else ("up",)
        return (
            Matrix("q", d_model, query, qkv_bias, "column"),
            Matrix("k", d_model, kv, qkv_bias, "column"),
            Matrix("v", d_model, kv, qkv_bias, "column"),
            Matrix("o", query, d_model, out_bias, "row"),
            *(Matrix(name, d_model, ffn, ffn_bias, "column") for name in up),
            Matrix("down", ffn, d_model, ffn_bias, "row"),
        )

    def _table(self, d_model: int, vocab: int) -> int:
        if not self.family.patches:
            return vocab * d_model
        patch = int(self.get("patch_size"))
        return d_model * (int(self.get("num_channels")) * patch * patch + 1)

    def _before(self, d_model: int, norm: int) -> int:
        family = self.family
        if family.patches:  # the class token and a position each
            side = int(self.get("image_size")) // int(self.get("patch_size"))
            return d_model * (side * side + 2)
        rows = 0
        if family.positions:
            rows += int(self.get("max_position_embeddings")) + family.positions - 1
        if family.token_types:
            rows += int(self.get("type_vocab_size"))
        return rows * d_model + (norm if family.first_norm else 0)

    def _head(self, d_model: int, vocab: int, classes: int | None) -> tuple[Matrix | None, int]:
        """The last matrix, and the elements of what only a classifier has before it."""
        family = self.family
        if classes is not None:
            between = d_model * (d_model + 1) if family.pre_classifier else 0
            return Matrix("classifier", d_model, classes, family.score_bias), between
        if not family.causal or bool(self.get("tie_word_embeddings", False)):
            return None, 0
        return Matrix("head", d_model, vocab), 0
