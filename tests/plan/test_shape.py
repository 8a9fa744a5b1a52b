"""Parameter counts against transformers' own networks, built without values."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.catalog import tables
from rekindle.errors import RequestError
from rekindle.families import FAMILIES
from rekindle.plan.shape import shape_of

LLAMA_3_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
CONFIGS = [
    *({"model_type": kind} for kind in FAMILIES),
    LLAMA_3_8B,
    LLAMA_3_8B
    | {
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
    },
    {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 1000,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    {"model_type": "gpt2", "n_embd": 2048, "n_layer": 24, "n_head": 16},
    {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 100},
    {
        "model_type": "bert",
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
    {"model_type": "distilbert", "dim": 128, "n_layers": 2, "n_heads": 4, "hidden_dim": 256},
    {
        "model_type": "vit",
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "intermediate_size": 1536,
        "image_size": 32,
        "patch_size": 4,
    },
]


def names(config):
    return "-".join(str(value) for value in list(config.values())[:4])


@pytest.mark.parametrize("config", CONFIGS, ids=names)
def test_counts_are_those_of_transformers(config):
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageClassification,
        AutoModelForSequenceClassification,
    )
    from transformers.pytorch_utils import Conv1D

    kind = config["model_type"]
    given = {key: value for key, value in config.items() if key != "model_type"}
    made = AutoConfig.for_model(kind, **given, num_labels=5, pad_token_id=0)
    classifier = (
        AutoModelForImageClassification if kind == "vit" else AutoModelForSequenceClassification
    )
    with torch.device("meta"):
        assert shape_of(config, 5).parameters == _count(classifier.from_config(made).parameters())
        if not shape_of(config).causal:
            return
        network = AutoModelForCausalLM.from_config(made)
    assert shape_of(config).parameters == _count(network.parameters())
    linear = [m.weight for m in network.modules() if isinstance(m, torch.nn.Linear | Conv1D)]
    assert shape_of(config).products == _count(linear), "the weights a token is multiplied with"


def _count(tensors):
    return sum(tensor.numel() for tensor in tensors)


ROWS = tables.rows(Path(tables.__file__).with_name("models.yaml"))["models"]


@pytest.mark.parametrize("name", ROWS)
def test_configs_of_the_catalog_have_as_many_parameters_as_their_weights_say(name):
    row = ROWS[name]
    assert shape_of(row["config"]).parameters == row["parameters"]
    for alias in (name, *row.get("also", ())):
        assert tables.known_configs()[alias] == row["config"]


def test_frozen_weights_cost_two_thirds():
    gpt2 = shape_of({"model_type": "gpt2"})
    whole, frozen = (gpt2.flops_per_token(1024, frozen=each) for each in (False, True))
    assert whole == pytest.approx(0.80e9, rel=0.01)
    assert whole - frozen == 2 * gpt2.products


def test_an_architecture_nobody_knows_is_refused_with_the_nearest():
    with pytest.raises(RequestError, match="does not know the architecture `lama`") as caught:
        shape_of({"model_type": "lama"})
    assert caught.value.problems[0].fix == "did you mean `llama`?"
