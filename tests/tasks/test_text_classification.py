"""Text classification: a pretrained folder gives shape and tokenizer, its weights are read later."""

from __future__ import annotations

import pyarrow as pa
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, DistilBertConfig

from rekindle.errors import RequestError
from rekindle.spec.model import DataSpec, ModelSpec
from rekindle.tasks.encoder import TextClassification, TextRegression, TokenClassification

TASK = TextClassification()
SHAPE = {"dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 64, "max_position_embeddings": 16}
SETTINGS = {"vocab_size": 50, "pad_token_id": 3}
LABELS = ("bad", "good", "neutral")


def test_an_inline_config_is_completed_by_tokenizer_and_labels(tmp_path):
    spec = ModelSpec(source={"model_type": "distilbert", **SHAPE})
    config = TASK.build(spec, LABELS, SETTINGS, tmp_path).config
    assert (config.vocab_size, config.pad_token_id, config.num_labels) == (50, 3, 3)
    assert config.id2label == {0: "bad", 1: "good", 2: "neutral"}
    assert TASK.weights(spec) is None


def test_a_folder_gives_its_shape_with_a_head_for_these_labels(tmp_path):
    config = DistilBertConfig(**SHAPE, vocab_size=70, num_labels=5, dtype="bfloat16")
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    spec = ModelSpec(source=str(tmp_path))
    network = TASK.build(spec, LABELS, SETTINGS, tmp_path)
    assert network.config.vocab_size == 70
    assert network.classifier.out_features == 3
    assert {p.dtype for p in network.parameters()} == {torch.float32}
    assert TASK.weights(spec) == tmp_path


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"model_type": "distilbart", "dim": 3}, "not a configuration of distilbart"),
        pytest.param("no/where", "cannot load the configuration", marks=pytest.mark.slow),
    ],
)
def test_what_is_no_model_is_refused(source, said, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(RequestError, match=said):
        TASK.build(ModelSpec(source=source), LABELS, SETTINGS, tmp_path)
    with pytest.raises(RequestError, match="model_type"):
        TASK.check(DataSpec(source="x"), ModelSpec(source={"dim": 3}))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            {"model_type": "distilbert", "n_layer": 1},
            "distilbert has no setting `n_layer`\n.*\n.*did you mean `n_layers`",
        ),
        ({"model_type": "llama", **SHAPE}, "llama has no setting `dim`"),
        ({"model_type": "bert", "hiden_size": 16}, "did you mean `hidden_size`"),
    ],
)
def test_a_setting_that_the_architecture_does_not_have_is_refused_and_not_ignored(
    source, said, tmp_path
):
    with pytest.raises(RequestError, match=said):
        TASK.build(ModelSpec(source=source), LABELS, SETTINGS, tmp_path)


NETWORK = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
}


def test_common_and_older_names_of_settings_are_taken(tmp_path):
    for source in (
        {
            "model_type": "distilbert",
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "n_heads": 2,
            "hidden_dim": 8,
        },
        {
            "model_type": "llama",
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 8,
            "rope_theta": 5e5,
        },
        # which their code reads, and their configuration classes do not name
        {"model_type": "qwen2", **NETWORK, "head_dim": 32},
        {"model_type": "phi", **NETWORK, "partial_rotary_factor": 0.25},
        {"model_type": "gpt_neox", **NETWORK, "rotary_pct": 0.5},
    ):
        assert TASK.build(ModelSpec(source=source), LABELS, SETTINGS, tmp_path)


DECODER = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 8,
}
DECODERS = {
    "llama": DECODER,
    "mistral": {**DECODER, "model_type": "mistral"},
    "qwen2": {**DECODER, "model_type": "qwen2"},
    "gpt2": {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2},
}


def decoder_in(folder, name, **fields):
    """A classifier on a decoder whose config has no pad token."""
    config = AutoConfig.for_model(**DECODERS[name], vocab_size=50, pad_token_id=None, **fields)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return ModelSpec(source=str(folder))


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_without_a_pad_token_classifies_padded_texts_as_each_alone(name, tmp_path):
    torch.manual_seed(0)
    network = TASK.build(decoder_in(tmp_path, name), LABELS, SETTINGS, tmp_path).eval()
    assert network.config.pad_token_id == SETTINGS["pad_token_id"]
    table = pa.table({"input_ids": [[5, 6, 7, 8, 9], [11, 12]]})
    together = TASK.logits(network, TASK.collate(table, SETTINGS))
    for row in range(2):
        alone = TASK.logits(network, TASK.collate(table.slice(row, 1), SETTINGS))
        assert torch.allclose(together[row], alone[0], atol=1e-6)
    network.save_pretrained(tmp_path / "exported")
    assert AutoConfig.from_pretrained(tmp_path / "exported").pad_token_id == 3


def test_a_pad_token_that_a_model_has_stays(tmp_path):
    spec = decoder_in(tmp_path, "llama")
    config = AutoConfig.from_pretrained(tmp_path, pad_token_id=7)
    config.save_pretrained(tmp_path)
    assert TASK.build(spec, LABELS, SETTINGS, tmp_path).config.pad_token_id == 7


@pytest.mark.parametrize("task", [TextClassification(), TextRegression(), TokenClassification()])
def test_a_tokenizer_with_more_tokens_than_the_matrix_is_refused_with_both_numbers(task, tmp_path):
    config = DistilBertConfig(**SHAPE, vocab_size=49)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    settings = {**SETTINGS, "target_mean": 0.0, "target_std": 1.0}
    with pytest.raises(RequestError, match="the model knows 49 tokens, the tokenizer 50"):
        task.build(ModelSpec(source=str(tmp_path)), LABELS, settings, tmp_path)
