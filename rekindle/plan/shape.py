"""The shape of a model from its Hugging Face config: every matrix of a block, what lies
before the first block and behind the last one.

What an architecture does with its numbers is in families/. Parameter counts are exact: a
test builds each architecture on the meta device. FLOPs, shares of tensor parallel ranks
and adapters are derived from the same matrices."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from rekindle.errors import RequestError, did_you_mean
from rekindle.families import FAMILIES, Family, config_of
from rekindle.families.family import Gelu, Norm

Divided = Literal["column", "row", ""]
Get = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A linear layer. `divided`:
    how tensor parallel ranks share it (Shoeybi et al. 2019)."""

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
    """A transformer. `matrices` and `block_norms` (elements) are those of one block;
    `table` is the token embedding [vocab, d_model], or what turns patches into tokens;
    `before` and `after` are the other elements on either side of the blocks; `head` is
    the last matrix, absent where it is the table. The other fields are those of
    families.Family."""

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
        """Parameters of the whole model; a tied head counts once.
        GPT-2 has 124,439,808."""
        ends = self.table + self.before + self.after
        if self.head is not None:
            ends += self.head.parameters
        return self.layers * self.block_parameters + ends

    @property
    def products(self) -> int:
        """Weights that a token is multiplied with: no table, but the head,
        tied or not."""
        block = sum(m.inputs * m.outputs for m in self.matrices)
        head = 0
        if self.head is not None:
            head = self.head.inputs * self.head.outputs
        elif self.causal:
            head = self.vocab * self.d_model
        return self.layers * block + head

    def flops_per_token(self, sequence: int, frozen: bool = False) -> float:
        """Forward and backward, no recomputation: 6 a weight, or 4 where gradients of
        weights are not computed, and 12 L d s of attention, half of it where it is causal
        (Chowdhery et al. 2022, arXiv 2204.02311). GPT-2 at 1,024 tokens: 0.80 GFLOP."""
        attention = 12.0 * self.layers * self.heads * self.head_dim * sequence
        if self.causal:
            attention *= 0.5
        flops_per_weight = 4.0 if frozen else 6.0
        return flops_per_weight * self.products + attention


def shape_of(config: Mapping[str, Any], classes: int | None = None) -> ModelShape:
    """The shape from a Hugging Face config; of a classifier of so many `classes`, or of
    the language model (of an encoder its body). Raises RequestError for an unknown one.
    `shape_of({"model_type": "gpt2"}).parameters` is 124,439,808."""
    model_type = str(config.get("model_type", ""))
    family_config = config_of(config)
    family = family_config.family
    get = family_config.get
    if family is None:
        message = f"the planner does not know the architecture `{model_type}`"
        fix = did_you_mean(model_type, FAMILIES) or f"it knows {', '.join(FAMILIES)}"
        raise RequestError(message, where="model.source", fix=fix)
    d_model = int(get("hidden_size"))
    heads = int(get("num_attention_heads"))
    kv_heads = int(get("num_key_value_heads", heads))
    head_dim = int(get("head_dim", d_model // heads))
    ffn = int(get("intermediate_size") or 4 * d_model)
    vocab = int(get("vocab_size"))
    norm = d_model if family.norm == "rms" else 2 * d_model  # layer norm has a bias, too
    block_norms = family.norms * norm
    if family.head_norms:
        block_norms += 2 * head_dim
    table = vocab * d_model
    if family.patches:
        patch = int(get("patch_size"))
        table = d_model * (int(get("num_channels")) * patch * patch + 1)
    head, after = _head(family, get, d_model, classes)
    if family.last_norm:
        after += norm
    if family.pooler:
        after += d_model * (d_model + 1)
    # architectures name the same number in two ways
    attention_dropout = get("attention_probs_dropout_prob", 0.0) or get("attention_dropout", 0.0)
    return ModelShape(
        model_type=model_type,
        layers=int(get("num_hidden_layers")),
        d_model=d_model,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        gated=family.gated,
        vocab=vocab,
        causal=family.causal,
        norm=family.norm,
        matrices=_matrices(family, get, d_model, heads * head_dim, kv_heads * head_dim, ffn),
        block_norms=block_norms,
        table=table,
        before=_before(family, get, d_model, norm),
        after=after,
        head=head,
        dropout=float(get("hidden_dropout_prob", 0.0)),
        attention_dropout=float(attention_dropout),
        head_norms=family.head_norms,
        dropouts=family.dropouts,
        gelu=family.gelu,
    )


def _matrices(
    family: Family, get: Get, d_model: int, query: int, kv: int, ffn: int
) -> tuple[Matrix, ...]:
    """The linear layers of a block, in the order in which a token meets them."""
    qkv_bias = family.qkv_bias
    out_bias = family.out_bias
    if not family.biases_fixed:
        qkv_bias = bool(get("attention_bias", get("qkv_bias", qkv_bias)))
        out_bias = bool(get("attention_bias", out_bias))
    ffn_bias = bool(get("mlp_bias", family.ffn_bias))
    # in order: recomputation ends before the last product of a block (steptime.py)
    matrices = [
        Matrix("q", d_model, query, qkv_bias, "column"),
        Matrix("k", d_model, kv, qkv_bias, "column"),
        Matrix("v", d_model, kv, qkv_bias, "column"),
        Matrix("o", query, d_model, out_bias, "row"),
    ]
    if family.gated:
        matrices.append(Matrix("gate", d_model, ffn, ffn_bias, "column"))
    matrices.append(Matrix("up", d_model, ffn, ffn_bias, "column"))
    matrices.append(Matrix("down", ffn, d_model, ffn_bias, "row"))
    return tuple(matrices)


def _before(family: Family, get: Get, d_model: int, norm: int) -> int:
    """Elements between the table and the first block: positions, types of tokens,
    a norm."""
    if family.patches:  # the class token and a position each
        side = int(get("image_size")) // int(get("patch_size"))
        return d_model * (side * side + 2)
    rows = 0
    if family.spare_positions is not None:
        rows += int(get("max_position_embeddings")) + family.spare_positions
    if family.token_types:
        rows += int(get("type_vocab_size"))
    elements = rows * d_model
    if family.first_norm:
        elements += norm
    return elements


def _head(family: Family, get: Get, d_model: int, classes: int | None) -> tuple[Matrix | None, int]:
    """The last matrix, and the elements of what only a classifier has before it."""
    if classes is not None:
        between = d_model * (d_model + 1) if family.pre_classifier else 0
        return Matrix("classifier", d_model, classes, family.score_bias), between
    if not family.causal or bool(get("tie_word_embeddings", False)):
        return None, 0
    return Matrix("head", d_model, int(get("vocab_size"))), 0
