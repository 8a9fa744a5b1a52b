"""What the engine must know of an architecture to cut it: its blocks, the matrices that tensor
parallelism divides, what only the first or the last pipeline stage runs.

Decides `Family` and the one table of them. transformers' own forward runs in every layout: a stage
is the whole network with the blocks of others replaced by `Skip`, so no architecture is written
down twice. GPT-2's fused, transposed projections are taken apart into plain linear layers while
training (`unfused`), so that tensor parallelism and LoRA see what they see elsewhere, and joined
again on export. Names are those of transformers 5."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from rekindle.errors import UnsupportedError


@dataclasses.dataclass(frozen=True)
class Family:
    """Names are relative to a block for `column`, `row`, `regions` and `per_head`, to the backbone
    otherwise.

    `first` are what only the first stage runs, `last` what only the last does; `table` is the
    token embedding. `regions` are the modules of a block whose input goes into divided columns.
    `sequence` names the norms where the residual stream may be divided along the sequence between
    tp ranks. `summary` is the module of the backbone that makes a text's summary of its first
    token, "" where what follows the backbone does; None where there is none. `behind` is the module
    of a block that attention's result goes into: from it on no token depends on another one."""

    blocks: str
    column: tuple[str, ...]
    row: tuple[str, ...]
    regions: tuple[str, ...]
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    table: str = ""
    per_head: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()
    attention: str = ""
    summary: str | None = None
    behind: str = ""


_LLAMA = Family(
    blocks="layers",
    column=(
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj",
    ),
    row=("self_attn.o_proj", "mlp.down_proj"),
    regions=("self_attn", "mlp"),
    first=("embed_tokens",),
    last=("norm",),
    table="embed_tokens",
    sequence=("input_layernorm", "post_attention_layernorm"),
    attention="self_attn",
)  # fmt: skip

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": _LLAMA,
        "mistral": _LLAMA,
        "qwen2": _LLAMA,
        "qwen3": dataclasses.replace(_LLAMA, per_head=("self_attn.q_norm", "self_attn.k_norm")),
        "gpt2": Family(
            blocks="h",
            column=("attn.c_attn.q", "attn.c_attn.k", "attn.c_attn.v", "mlp.c_fc"),
            row=("attn.c_proj", "mlp.c_proj"),
            regions=("attn", "mlp"),
            first=("wte", "wpe", "drop"),
            last=("ln_f",),
            table="wte",
            attention="attn",
        ),
        "bert": Family(
            blocks="encoder.layer",
            column=(
                "attention.self.query", "attention.self.key", "attention.self.value",
                "intermediate.dense",
            ),
            row=("attention.output.dense", "output.dense"),
            regions=("attention.self", "intermediate"),
            first=("embeddings",),
            last=("pooler",),
            attention="attention.self",
            summary="pooler",
            behind="attention.output",
        ),
        "distilbert": Family(
            blocks="transformer.layer",
            column=("attention.q_lin", "attention.k_lin", "attention.v_lin", "ffn.lin1"),
            row=("attention.out_lin", "ffn.lin2"),
            regions=("attention", "ffn"),
            first=("embeddings",),
            attention="attention",
            summary="",
            behind="sa_layer_norm",
        ),
    }
)  # fmt: skip


class Skip(nn.Module):
    """Stands where another stage's block stands: hands on the hidden states that it was given, the
    first tensor of floating point; positions are whole numbers."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = (v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor))
        return next(v for v in given if v.is_floating_point())


class Zero(nn.Module):
    """Stands for position embeddings that the first stage has added already."""

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), device=positions.device)


class Nothing(nn.Module):
    """Stands for a pooler that another stage runs; its result is not used."""

    def forward(self, hidden_BTH: torch.Tensor) -> torch.Tensor:
        return hidden_BTH


class FusedColumns(nn.Module):
    """Linear layers that a checkpoint stores side by side in one matrix; gives their outputs side
    by side."""

    def __init__(self, parts: Mapping[str, nn.Linear]) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x_BTH) for part in self.children()], dim=-1)


def model_type(network: nn.Module) -> str:
    """transformers' name of the architecture, or the class for a user's own network."""
    config = getattr(network, "config", None)
    return str(getattr(config, "model_type", "") or type(network).__name__)


def family_of(network: nn.Module) -> Family | None:
    """What is known of the network's architecture, or None."""
    return FAMILIES.get(model_type(network))


def require_family(network: nn.Module, what: str) -> Family:
    """The family; raises UnsupportedError that names the model where there is none."""
    family = family_of(network)
    if family is None:
        raise UnsupportedError(
            f"there is no {what} plan for {model_type(network)}",
            where="train.layout",
            fix=f"use dp, or shard; {what} knows {', '.join(FAMILIES)}",
        )
    return family


def backbone(network: nn.Module) -> nn.Module:
    """The network without its head: `LlamaForCausalLM.model`."""
    prefix = getattr(network, "base_model_prefix", "")
    found = getattr(network, prefix, network) if prefix else network
    assert isinstance(found, nn.Module)
    return found


def blocks(network: nn.Module) -> list[tuple[str, nn.Module]]:
    """Name and module of each repeated block, in order; stand-ins of other stages included.

    A `Sequential` counts each layer with weights as a block; other networks of a user's own have
    none."""
    family = family_of(network)
    if family is not None:
        body = backbone(network)
        prefix = next(name for name, module in network.named_modules() if module is body)
        path = f"{prefix}.{family.blocks}" if prefix else family.blocks
        return [(f"{path}.{i}", m) for i, m in enumerate(network.get_submodule(path).children())]
    marked = set(getattr(network, "_no_split_modules", None) or ())
    if marked:
        return [(n, m) for n, m in network.named_modules() if type(m).__name__ in marked]
    if isinstance(network, nn.Sequential):
        return [(n, m) for n, m in network.named_children() if any(True for _ in m.parameters())]
    return []


def replace(network: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` where the submodule `name` is."""
    parent, _, child = name.rpartition(".")
    setattr(network.get_submodule(parent), child, module)


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a parameter lies in a checkpoint: `[rows, columns]` of the parameter are
    `[columns, start + rows]` of a transposed one, `[start + rows]` otherwise."""

    name: str
    transposed: bool = False
    start: int = 0


def unfused(network: nn.Module) -> dict[str, Origin]:
    """Replace GPT-2's Conv1D by linear layers, its fused projection by three; returns where each
    new parameter comes from. Other networks stay as they are, with nothing returned."""
    if not hasattr(network, "config"):  # none of transformers, whose import takes its time
        return {}
    from transformers.pytorch_utils import Conv1D

    origins: dict[str, Origin] = {}
    for name, module in list(network.named_modules()):
        if not isinstance(module, Conv1D):
            continue
        inside, out = module.weight.shape
        if not name.endswith("attn.c_attn"):
            replace(network, name, _linear(module, inside, out))
            origins[f"{name}.weight"] = Origin(f"{name}.weight", transposed=True)
            continue
        size = out // 3
        parts = {part: _linear(module, inside, size) for part in "qkv"}
        replace(network, name, FusedColumns(parts))
        for i, part in enumerate(parts):
            origins[f"{name}.{part}.weight"] = Origin(f"{name}.weight", True, i * size)
            origins[f"{name}.{part}.bias"] = Origin(f"{name}.bias", False, i * size)
    return origins


def _linear(like: nn.Module, inside: int, out: int) -> nn.Linear:
    weight = like.weight
    assert isinstance(weight, torch.Tensor)
    return nn.Linear(inside, out, device="meta", dtype=weight.dtype)


def tied(network: nn.Module) -> dict[str, str]:
    """Parameters that are another one: `{"lm_head.weight": "model.embed_tokens.weight"}`."""
    config = getattr(network, "config", None)
    keys = getattr(network, "_tied_weights_keys", None)
    if not keys or not getattr(config, "tie_word_embeddings", False):
        return {}
    return dict(keys)


def tables(network: nn.Module) -> list[nn.Module]:
    """The embeddings that only the first stage runs; none where the head is the same table."""
    family = family_of(network)
    if family is None or tied(network):
        return []
    body = backbone(network)
    found = [getattr(body, name, None) for name in family.first]
    return [m for m in found if m is not None and any(True for _ in m.parameters())]


def stand_ins(family: Family, first: bool, last: bool) -> Iterator[tuple[str, nn.Module]]:
    """What a stage puts in place of the modules of the backbone that it does not run."""
    if not first:
        for name in family.first:
            yield name, Zero() if name == "wpe" else Skip()
    if not last:
        for name in family.last:
            yield name, Nothing() if name == "pooler" else Skip()
