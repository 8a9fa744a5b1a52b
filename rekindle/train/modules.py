"""The modules of a network by purpose: body, blocks, tables, what a pipeline stage leaves
out.

transformers' own forward runs in every layout: a stage is the whole network with the
blocks of others replaced by `Skip` (`cut`), so no architecture is written down twice; its
names are in families/. GPT-2's fused, transposed projections are plain linear layers
while training (`unfused`), so that tensor parallelism and LoRA see what they see
elsewhere."""

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
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                return value
        raise RuntimeError("a block was called without a tensor of floating point")


class ZeroPositions(nn.Module):
    """Stands for position embeddings that the first stage has added already."""

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """Zero, [], which is added to what there is."""
        return torch.zeros((), device=positions.device)


class FusedColumns(nn.Module):
    """Linear layers that a checkpoint stores side by side in one matrix."""

    def __init__(self, parts: Mapping[str, nn.Linear]) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        """What the one matrix would give."""
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


def required(network: nn.Module, feature: str) -> Modules:
    """The same; raises UnsupportedError that names the model where there are none."""
    names = known(network)
    if names is None:
        families = ", ".join(DIVISIBLE)
        message = f"there is no {feature} plan for {model_type(network)}"
        if feature == "LoRA":
            where = "model.lora"
            fix = f"leave it out, or use one of these: {families}"
        else:
            where = "train.layout"
            fix = f"use dp, or shard; {feature} knows {families}"
        raise UnsupportedError(message, where=where, fix=fix)
    return names


def backbone(network: nn.Module) -> nn.Module:
    """The network without its head: `LlamaForCausalLM.model`."""
    prefix = getattr(network, "base_model_prefix", "")
    body = getattr(network, prefix, network) if prefix else network
    if body is network:  # Llama 4's prefix names what only its kin with pictures have
        networks = [child for child in network.children() if hasattr(child, "base_model_prefix")]
        if len(networks) == 1:
            body = networks[0]
    assert isinstance(body, nn.Module)
    return body


def usable_positions(network: nn.Module) -> int | None:
    """How many tokens a text may have where a table of positions keeps rows for padding.

    RoBERTa and its kin number tokens from behind it, so that 514 rows are 512 positions.
    None elsewhere: the configuration says it then."""
    for name, module in network.named_modules():
        # by its fields, not by its class: I-BERT has a table of its own
        padding = getattr(module, "padding_idx", None)
        table = getattr(module, "weight", None)
        if "position" in name.rpartition(".")[2] and padding is not None and table is not None:
            return len(table) - int(padding) - 1
    return None


def blocks(network: nn.Module) -> list[tuple[str, nn.Module]]:
    """Name and module of each repeated block, in order, stand-ins included.

    Of a `Sequential` each layer with weights is one; other networks of a user's own have
    none."""
    names = known(network)
    if names is not None:
        body = backbone(network)
        prefix = next(name for name, module in network.named_modules() if module is body)
        path = f"{prefix}.{names.blocks}" if prefix else names.blocks
        children = network.get_submodule(path).children()
        return [(f"{path}.{number}", block) for number, block in enumerate(children)]
    class_names = set(getattr(network, "_no_split_modules", None) or ())
    if class_names:
        modules = network.named_modules()
        return [(name, module) for name, module in modules if type(module).__name__ in class_names]
    if isinstance(network, nn.Sequential):
        return [(name, layer) for name, layer in network.named_children() if _has_weights(layer)]
    return []


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def matrices(network: nn.Module) -> set[str]:
    """Names of the weights of linear layers in a transformer's blocks."""
    if not hasattr(network, "config"):
        return set()
    names = set()
    for block_name, block in blocks(network):
        for name, module in block.named_modules():
            if isinstance(module, nn.Linear):
                names.add(f"{block_name}.{name}.weight")
    return names


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a parameter lies in a checkpoint."""

    name: str
    transposed: bool = False
    """Whether `[rows, columns]` of the parameter are `[columns, start + rows]` there."""
    start: int = 0
    """Where its rows begin there."""


def unfused(network: nn.Module) -> dict[str, Origin]:
    """Replace GPT-2's Conv1D by linear layers; returns where each new parameter comes from."""
    if not hasattr(network, "config"):  # none of transformers, whose import takes its time
        return {}
    from transformers.pytorch_utils import Conv1D

    origins: dict[str, Origin] = {}
    for name, module in list(network.named_modules()):
        if not isinstance(module, Conv1D):
            continue
        inputs, outputs = module.weight.shape  # Conv1D keeps its matrix transposed
        if not name.endswith("attn.c_attn"):
            network.set_submodule(name, _linear(module, inputs, outputs))
            origins[f"{name}.weight"] = Origin(f"{name}.weight", transposed=True)
            continue
        size = outputs // 3
        parts = {part: _linear(module, inputs, size) for part in "qkv"}
        network.set_submodule(name, FusedColumns(parts))
        for number, part in enumerate(parts):
            start = number * size
            origins[f"{name}.{part}.weight"] = Origin(f"{name}.weight", True, start)
            origins[f"{name}.{part}.bias"] = Origin(f"{name}.bias", False, start)
    return origins


def _linear(like: nn.Module, inputs: int, outputs: int) -> nn.Linear:
    weight = like.weight
    assert isinstance(weight, torch.Tensor)
    return nn.Linear(inputs, outputs, device="meta", dtype=weight.dtype)


def tied(network: nn.Module) -> dict[str, str]:
    """Parameters that are another one: `{"lm_head.weight": "model.embed_tokens.weight"}`."""
    config = getattr(network, "config", None)
    if not getattr(config, "tie_word_embeddings", False):
        return {}
    return dict(getattr(network, "_tied_weights_keys", None) or {})


def tables(network: nn.Module) -> list[nn.Module]:
    """The embeddings that only the first stage runs; none where the head is the same table."""
    names = known(network)
    if names is None or tied(network):
        return []
    body = backbone(network)
    embeddings = [getattr(body, name, None) for name in names.first]
    return [table for table in embeddings if table is not None and _has_weights(table)]


def cut(network: nn.Module, index: int, layout: Layout) -> nn.Module:
    """A copy of the network with only stage `index` of its blocks; earlier stages get one more."""
    names = [name for name, _ in blocks(network)]
    if len(names) < layout.stages:
        message = f"{model_type(network)} has {len(names)} blocks and cannot be cut into "
        message += f"{layout.stages} stages"
        fix = "use fewer stages, or a layout without pp"
        raise UnsupportedError(message, where="train.layout.pp", fix=fix)
    names_of_stages = [part.tolist() for part in np.array_split(np.array(names), layout.stages)]
    piece = copy.deepcopy(network)
    if isinstance(piece, nn.Sequential):
        _cut_sequential(piece, names_of_stages, index)
    else:
        names_elsewhere = set(names) - set(names_of_stages[index])
        _cut_transformer(piece, names_elsewhere, index, layout.stages)
    return piece


def _cut_sequential(network: nn.Sequential, names_of_stages: list[list[str]], index: int) -> None:
    """Leave the layers of stage `index` alone in place."""
    stage_that_begins = {names[0]: stage for stage, names in enumerate(names_of_stages)}
    stage = 0
    for name, _ in list(network.named_children()):
        # layers without weights stay with the block before
        stage = stage_that_begins.get(name, stage)
        if stage != index:
            network.set_submodule(name, Skip())


def _cut_transformer(network: nn.Module, elsewhere: set[str], index: int, count: int) -> None:
    """Put stand-ins in place of the blocks that lie `elsewhere`, and of what other stages run."""
    names = required(network, "pipeline")
    for name in elsewhere:
        network.set_submodule(name, Skip())
    body = backbone(network)
    is_last = index == count - 1
    for name, stand_in in _stand_ins(names, is_first=index == 0, is_last=is_last).items():
        replaced = getattr(body, name, None)
        if isinstance(replaced, nn.Module):
            body.set_submodule(name, stand_in)
        elif isinstance(replaced, float | int):  # a rate of dropout
            setattr(body, name, 0.0)
    if not is_last:
        heads = [name for name, child in network.named_children() if child is not body]
        for name in heads:
            network.set_submodule(name, Skip())


def _stand_ins(names: Modules, is_first: bool, is_last: bool) -> dict[str, nn.Module]:
    """What stands for the modules of the body that the first and the last stage alone run."""
    stand_ins: dict[str, nn.Module] = {}
    if not is_first:
        for name in names.first:
            stand_ins[name] = ZeroPositions() if name == names.positions else Skip()
    if not is_last:
        for name in names.last:
            # the result of a pooler is not used by the stages before the last
            stand_ins[name] = nn.Identity() if name == names.summary else Skip()
    return stand_ins


def inject(network: nn.Module, spec: LoraSpec, origins: dict[str, Origin]) -> float:
    """Put low-rank adapters (Hu et al. 2021, arXiv 2106.09685) of peft on the spec's
    layers.

    Everything else but a new head is frozen, and `origins` gets where the wrapped weights
    lie. Returns the factor of B A in their updates. Raises RequestError for a target that
    no block has."""
    from peft import LoraConfig, inject_adapter_in_model

    names = required(network, "LoRA")
    layers = [*names.column, *names.row]
    targets = list(spec.targets) or layers
    for target in targets:
        if not any(layer.endswith(target) for layer in layers):
            message = f"{model_type(network)} has no layer called {target}"
            fix = f"use some of {', '.join(layer.rpartition('.')[2] for layer in layers)}"
            raise RequestError(message, where="model.lora.targets", fix=fix)
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
