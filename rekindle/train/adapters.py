"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685) through peft: injected before the network is
cut and sharded, merged on export (see export.py)."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from rekindle.errors import RequestError
from rekindle.spec.model import LoraSpec
from rekindle.train import modules
from rekindle.train.modules import Origin


def inject(network: nn.Module, spec: LoraSpec, origins: dict[str, Origin]) -> float:
    """Put adapters on the spec's layers, freeze everything else but a new head, and note in
    `origins` where the wrapped weights lie; returns the factor of their updates, which are that
    times B A. Raises RequestError for a target that no block has."""
    from peft import LoraConfig, inject_adapter_in_model

    names = modules.required(network, "LoRA")
    known = [*names.column, *names.row]
    targets = list(spec.targets) or known
    lost = [t for t in targets if not any(name.endswith(t) for name in known)]
    if lost:
        raise RequestError(
            f"{modules.model_type(network)} has no layer called {lost[0]}",
            where="model.lora.targets",
            fix=f"use some of {', '.join(name.rpartition('.')[2] for name in known)}",
        )
    config = LoraConfig(
        r=spec.rank, lora_alpha=cast(int, spec.alpha), lora_dropout=spec.dropout,
        target_modules=targets,
    )  # fmt: skip
    inject_adapter_in_model(config, network)
    body = modules.backbone(network)
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
