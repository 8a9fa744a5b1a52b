"""What is known of model architectures: the numbers of a config, and the names of its
modules. No torch: the spec, the planner and the engine read the same facts."""

from collections.abc import Mapping
from types import MappingProxyType

from rekindle.families.family import FAMILIES, Config, Family, Modules


def _divisible() -> dict[str, Modules]:
    """The modules of the families that have some, by `model_type`."""
    modules_by_name = {}
    for name, family in FAMILIES.items():
        if family.modules is not None:
            modules_by_name[name] = family.modules
    return modules_by_name


def _aliases(name: str) -> tuple[str, ...]:
    """The words of all families for a common one, each once."""
    aliases = [family.names[name] for family in FAMILIES.values() if name in family.names]
    return tuple(dict.fromkeys(aliases))


DIVISIBLE: Mapping[str, Modules] = MappingProxyType(_divisible())
"""The modules of those that the engine can cut: adapters, tensor parallelism, pipelines."""

_ALIASES: Mapping[str, tuple[str, ...]] = {
    name: _aliases(name) for name in ("num_hidden_layers", "num_attention_heads")
}


def config_of(config: Mapping[str, object]) -> Config:
    """A Hugging Face config to be asked in common words, an unknown one in those of all
    families, without defaults. `config_of({"model_type":
    "gpt2"}).get("num_hidden_layers")` is 12."""
    return Config(config, FAMILIES.get(str(config.get("model_type", ""))), _ALIASES)


__all__ = ["DIVISIBLE", "FAMILIES", "Config", "Family", "Modules", "config_of"]
