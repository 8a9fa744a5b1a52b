"""The shape of a model from its Hugging Face config: every matrix of a block, what lies before the
first block and behind the last one.

What an architecture does with its numbers is in families/. Parameter counts are exact: a test
builds each architecture on the meta device. FLOPs, shares of tensor parallel ranks and adapters are
derived from the same matrices."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from rekindle.errors import RequestError, did_you_mean
from rekindle.families import FAMILIES, Config, Family, config_of
from rekindle.families.family import Gelu, Norm

Divided = Literal["column", "row", ""]


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
        return self.outputs * (self.inputs + self.bias)


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """A transformer. `matrices` and `block_norms` (elements) are those of one block; `table` is the
    token embedding [vocab, d_model], or what turns patches into tokens; `before` and `after` are
    the other elements on either side of the blocks; `head` is the last matrix, absent where it is
    the table. The other fields are those of families.Family."""

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
    head_norms: bool = False
    dropouts: int = 2
    gelu: Gelu = "fused"

    @property
    def block_parameters(self) -> int:
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

    def flops_per_token(self, sequence: int, frozen: bool = False) -> float:
        """Forward and backward, no recomputation: 6 a weight, or 4 where gradients of weights are
        not computed, and 12 L d s of attention, half of it where it is causal (Chowdhery et al.
        2022, arXiv 2204.02311). GPT-2 at 1,024 tokens: 0.80 GFLOP."""
        attention = 12.0 * self.layers * self.heads * self.head_dim * sequence
        return (4.0 if frozen else 6.0) * self.products + attention * (0.5 if self.causal else 1.0)


def shape_of(config: Mapping[str, Any], classes: int | None = None) -> ModelShape:
    """From a Hugging Face config; of a classifier of so many `classes`, or of the language model
    (of an encoder its body). Raises RequestError for an unknown one. `shape_of({"model_type":
    "gpt2"}).parameters` is 124,439,808."""
    kind, known = str(config.get("model_type", "")), config_of(config)
    if known.family is None:
        what = f"the planner does not know the architecture `{kind}`"
        fix = did_you_mean(kind, FAMILIES) or f"it knows {', '.join(FAMILIES)}"
        raise RequestError(what, where="model.source", fix=fix)
    return _Reader(known.family, known).shape(kind, classes)


class _Reader:
    def __init__(self, family: Family, config: Config) -> None:
        self.family, self.get = family, config.get

    def shape(self, kind: str, classes: int | None) -> ModelShape:
        family, d_model = self.family, int(self.get("hidden_size"))
        heads = int(self.get("num_attention_heads"))
        kv_heads = int(self.get("num_key_value_heads", heads))
        head_dim = int(self.get("head_dim", d_model // heads))
        ffn = int(self.get("intermediate_size") or 4 * d_model)
        vocab = int(self.get("vocab_size"))
        matrices = self._matrices(d_model, heads * head_dim, kv_heads * head_dim, ffn)
        norm = d_model * (1 if family.norm == "rms" else 2)
        table = vocab * d_model
        if family.patches:
            patch = int(self.get("patch_size"))
            table = d_model * (int(self.get("num_channels")) * patch * patch + 1)
        head, extra = self._head(d_model, vocab, classes)
        pooler = d_model * (d_model + 1) if family.pooler else 0
        return ModelShape(
            model_type=kind, layers=int(self.get("num_hidden_layers")), d_model=d_model,
            heads=heads, kv_heads=kv_heads, head_dim=head_dim, ffn=ffn, gated=family.gated,
            vocab=vocab, causal=family.causal, norm=family.norm, matrices=matrices,
            block_norms=family.norms * norm + (2 * head_dim if family.head_norms else 0),
            table=table, before=self._before(d_model, norm),
            after=(norm if family.last_norm else 0) + pooler + extra, head=head,
            dropout=float(self.get("hidden_dropout_prob", 0.0)),
            attention_dropout=float(
                self.get("attention_probs_dropout_prob", 0.0) or self.get("attention_dropout", 0.0)
            ),
            head_norms=family.head_norms, dropouts=family.dropouts, gelu=family.gelu,
        )  # fmt: skip

    def _matrices(self, d_model: int, query: int, kv: int, ffn: int) -> tuple[Matrix, ...]:
        family = self.family
        qkv_bias, out_bias = family.qkv_bias, family.out_bias
        if not family.biases_fixed:
            qkv_bias = bool(self.get("attention_bias", self.get("qkv_bias", qkv_bias)))
            out_bias = bool(self.get("attention_bias", out_bias))
        ffn_bias = bool(self.get("mlp_bias", family.ffn_bias))
        up = ("gate", "up") if family.gated else ("up",)
        return (
            Matrix("q", d_model, query, qkv_bias, "column"),
            Matrix("k", d_model, kv, qkv_bias, "column"),
            Matrix("v", d_model, kv, qkv_bias, "column"),
            Matrix("o", query, d_model, out_bias, "row"),
            *(Matrix(name, d_model, ffn, ffn_bias, "column") for name in up),
            Matrix("down", ffn, d_model, ffn_bias, "row"),
        )

    def _before(self, d_model: int, norm: int) -> int:
        family = self.family
        if family.patches:  # the class token and a position each
            side = int(self.get("image_size")) // int(self.get("patch_size"))
            return d_model * (side * side + 2)
        rows = 0
        if family.spare_positions is not None:
            rows += int(self.get("max_position_embeddings")) + family.spare_positions
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
