"""What is known of model architectures, one file a family: the numbers of its config, and the names
of its modules. No torch: the spec, the planner and the engine read the same facts.

A new family is a file with its `FAMILIES` and a name in the list below. Names of fields, modules
and defaults are those of transformers 5."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rekindle.families import (
    bert,
    distilbert,
    gemma,
    gpt2,
    gpt_neox,
    llama,
    opt,
    qwen,
    starcoder2,
    vit,
)
from rekindle.families.family import Config, Family, Modules

_FILES = (llama, qwen, gemma, gpt2, gpt_neox, opt, starcoder2, bert, distilbert, vit)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {name: family for file in _FILES for name, family in file.FAMILIES.items()}
)
"""By transformers' `model_type`."""

DIVISIBLE: Mapping[str, Modules] = MappingProxyType(
    {name: family.modules for name, family in FAMILIES.items() if family.modules is not None}
)
"""The modules of those that the engine can cut: adapters, tensor parallelism, pipelines."""

_ALIASES: Mapping[str, tuple[str, ...]] = {
    name: tuple(dict.fromkeys(f.names[name] for f in FAMILIES.values() if name in f.names))
    for name in ("num_hidden_layers", "num_attention_heads")
}


def config_of(config: Mapping[str, object]) -> Config:
    """A Hugging Face config to be asked in common words; one of an unknown architecture in those
    of all families, without defaults.

    `config_of({"model_type": "gpt2"}).get("num_hidden_layers")` is 12."""
    return Config(config, FAMILIES.get(str(config.get("model_type", ""))), _ALIASES)


__all__ = ["DIVISIBLE", "FAMILIES", "Config", "Family", "Modules", "config_of"]
