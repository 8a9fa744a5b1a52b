"""The modules of a network by purpose: body, blocks, tables, what a pipeline stage leaves out.

transformers' own forward runs in every layout: a stage is the whole network with the blocks of
others replaced by `Skip` (`cut`), so no architecture is written down twice; its names are in
families/. GPT-2's fused, transposed projections are plain linear layers while training (`unfused`),
so that tensor parallelism and LoRA see what they see elsewhere."""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from rekindle.errors import RequestError, UnsupportedError
from rekindle.families import DIVISIBLE, Modules
from rekindle.spec.layout import Layout, Shape
from rekindle.spec.model import LoraSpec


class Skip(nn.Module):
    """Stands for another stage's block: hands on the first tensor of floating point."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = (v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor))
        return next(v for v in given if v.is_floating_point())


class Zero(nn.Module):
    """Stands for position embeddings that the first stage has added already."""

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), device=positions.device)


class FusedColumns(nn.Module):
    """Linear layers that a checkpoint stores side by side in one matrix."""

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


def shape_of(network: nn.Module) -> Shape | None:
    """What of the network has to be divisible; None for a user's own."""
    config = getattr(network, "config", None)
    return Shape.of(config.to_dict()) if config is not None else None


def known(network: nn.Module) -> Modules | None:
    """The names of its modules, or None for an architecture that the engine does not cut."""
    return DIVISIBLE.get(model_type(network))


def required(network: nn.Module, what: str) -> Modules:
    """The same; raises UnsupportedError that names the model where there are none."""
    found = known(network)
    if found is None:
        families = ", ".join(DIVISIBLE)
        why = f"there is no {what} plan for {model_type(network)}"
        where, fix = "train.layout", f"use dp, or shard; {what} knows {families}"
        if what == "LoRA":
            where, fix = "model.lora", f"leave it out, or use one of these: {families}"
        raise UnsupportedError(why, where=where, fix=fix)
    return found


def backbone(network: nn.Module) -> nn.Module:
    """The network without its head: `LlamaForCausalLM.model`."""
    prefix = getattr(network, "base_model_prefix", "")
    found = getattr(network, prefix, network) if prefix else network
    if found is network:  # Llama 4's prefix names what only its kin with pictures have
        inside = [child for child in network.children() if hasattr(child, "base_model_prefix")]
        found = inside[0] if len(inside) == 1 else network
    assert isinstance(found, nn.Module)
    return found


def usable_positions(network: nn.Module) -> int | None:
    """How many tokens a text may have where a table of positions keeps rows for padding: RoBERTa
    and its kin number tokens from behind it, so that 514 rows are 512 positions. None elsewhere:
    the configuration says it then."""
    for name, module in network.named_modules():
        # by its fields, not by its class: I-BERT has a table of its own
        padding, table = getattr(module, "padding_idx", None), getattr(module, "weight", None)
        if "position" in name.rpartition(".")[2] and padding is not None and table is not None:
            return len(table) - int(padding) - 1
    return None


def blocks(network: nn.Module) -> list[tuple[str, nn.Module]]:
    """Name and module of each repeated block, in order, stand-ins included. Of a `Sequential` each
    layer with weights is one; other networks of a user's own have none."""
    names = known(network)
    if names is not None:
        body = backbone(network)
        prefix = next(name for name, module in network.named_modules() if module is body)
        path = f"{prefix}.{names.blocks}" if prefix else names.blocks
        return [(f"{path}.{i}", m) for i, m in enumerate(network.get_submodule(path).children())]
    marked = set(getattr(network, "_no_split_modules", None) or ())
    if marked:
        return [(n, m) for n, m in network.named_modules() if type(m).__name__ in marked]
    if isinstance(network, nn.Sequential):
        return [(n, m) for n, m in network.named_children() if any(True for _ in m.parameters())]
    return []


def matrices(network: nn.Module) -> set[str]:
    """Names of the weights of linear layers in a transformer's blocks."""
    held = blocks(network) if hasattr(network, "config") else []
    inside = ((f"{name}.{inner}", m) for name, block in held for inner, m in block.named_modules())
    return {f"{name}.weight" for name, module in inside if isinstance(module, nn.Linear)}


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a parameter lies in a checkpoint: `[rows, columns]` of the parameter are
    `[columns, start + rows]` of a transposed one, `[start + rows]` otherwise."""

    name: str
    transposed: bool = False
    start: int = 0


def unfused(network: nn.Module) -> dict[str, Origin]:
    """Replace GPT-2's Conv1D by linear layers; returns where each new parameter comes from."""
    if not hasattr(network, "config"):  # none of transformers, whose import takes its time
        return {}
    from transformers.pytorch_utils import Conv1D

    origins: dict[str, Origin] = {}
    for name, module in list(network.named_modules()):
        if not isinstance(module, Conv1D):
            continue
        inside, out = module.weight.shape
        if not name.endswith("attn.c_attn"):
            network.set_submodule(name, _linear(module, inside, out))
            origins[f"{name}.weight"] = Origin(f"{name}.weight", transposed=True)
            continue
        size = out // 3
        parts = {part: _linear(module, inside, size) for part in "qkv"}
        network.set_submodule(name, FusedColumns(parts))
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
    return dict(keys) if keys and getattr(config, "tie_word_embeddings", False) else {}


def tables(network: nn.Module) -> list[nn.Module]:
    """The embeddings that only the first stage runs; none where the head is the same table."""
    names = known(network)
    if names is None or tied(network):
        return []
    body = backbone(network)
    found = [getattr(body, name, None) for name in names.first]
    return [m for m in found if m is not None and any(True for _ in m.parameters())]


def cut(network: nn.Module, index: int, layout: Layout) -> nn.Module:
    """A copy of the network with only stage `index` of its blocks; earlier stages get one more."""
    names = [name for name, _ in blocks(network)]
    if len(names) < layout.stages:
        many = f"{len(names)} blocks and cannot be cut into {layout.stages} stages"
        what, fix = f"{model_type(network)} has {many}", "use fewer stages, or a layout without pp"
        raise UnsupportedError(what, where="train.layout.pp", fix=fix)
    parts = [part.tolist() for part in np.array_split(np.array(names), layout.stages)]
    made = copy.deepcopy(network)
    if isinstance(made, nn.Sequential):
        starts, stage = {part[0]: i for i, part in enumerate(parts)}, 0
        for name, _ in list(made.named_children()):
            stage = starts.get(name, stage)  # layers without weights stay with the block before
            if stage != index:
                made.set_submodule(name, Skip())
    else:
        _cut_transformer(made, set(names) - set(parts[index]), index, layout.stages)
    return made


def _cut_transformer(network: nn.Module, others: set[str], index: int, count: int) -> None:
    names = required(network, "pipeline")
    for name in others:
        network.set_submodule(name, Skip())
    body = backbone(network)
    last = index == count - 1
    stand_ins: list[tuple[str, nn.Module]] = []
    if index > 0:
        stand_ins += [(n, Zero() if n == names.positions else Skip()) for n in names.first]
    if not last:  # the result of a pooler is not used by the stages before the last
        stand_ins += [(n, nn.Identity() if n == names.summary else Skip()) for n in names.last]
    for name, stand_in in stand_ins:
        found = getattr(body, name, None)
        if isinstance(found, nn.Module):
            body.set_submodule(name, stand_in)
        elif isinstance(found, float | int):
            setattr(body, name, 0.0)
    heads = [name for name, child in network.named_children() if child is not body]
    for name in [] if last else heads:
        network.set_submodule(name, Skip())


def inject(network: nn.Module, spec: LoraSpec, origins: dict[str, Origin]) -> float:
    """Put low-rank adapters (Hu et al. 2021, arXiv 2106.09685) of peft on the spec's layers, freeze
    everything else but a new head, and note in `origins` where the wrapped weights lie; returns the
    factor of B A in their updates. Raises RequestError for a target that no block has."""
    from peft import LoraConfig, inject_adapter_in_model

    names = required(network, "LoRA")
    known = [*names.column, *names.row]
    targets = list(spec.targets) or known
    lost = [t for t in targets if not any(name.endswith(t) for name in known)]
    if lost:
        what = f"{model_type(network)} has no layer called {lost[0]}"
        fix = f"use some of {', '.join(name.rpartition('.')[2] for name in known)}"
        raise RequestError(what, where="model.lora.targets", fix=fix)
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=cast(int, spec.alpha),
        lora_dropout=spec.dropout,
        target_modules=targets,
    )
    inject_adapter_in_model(config, network)
    body = backbone(network)
    model: Any = network
    if model.get_output_embeddings() is None:  # a head for classes starts fresh
        for child in network.children():
            if child is not body:
                child.requires_grad_(True)
    for name, _ in network.named_parameters():
        if ".base_layer." in name:
            plain = name.replace(".base_layer.", ".")
            origins[name] = origins.pop(plain, Origin(plain))
    return spec.alpha / spec.rank
