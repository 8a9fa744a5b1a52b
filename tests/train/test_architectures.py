"""The tiny models of every architecture, with which other tests look at the kind and not at a list of names."""

import pytest
import torch
import transformers

from tests.support.architectures import (
    ARCHITECTURES,
    NOT_BUILT,
    NotBuilt,
    build,
    example_ids,
    tiny_config,
    tiny_model,
)

# Of transformers 5.23: how many architectures an auto class knows, and how many of them give logits.
COUNTS = {
    "AutoModelForCausalLM": (189, 184),
    "AutoModelForSequenceClassification": (127, 126),
    "AutoModelForTokenClassification": (101, 99),
}
FEW = [
    ("AutoModelForCausalLM", "llama"),
    ("AutoModelForCausalLM", "gpt_neox"),
    ("AutoModelForCausalLM", "deepseek_v3"),
    ("AutoModelForCausalLM", "jamba"),
    ("AutoModelForCausalLM", "qwen3_next"),
    ("AutoModelForCausalLM", "gemma4"),
    ("AutoModelForSequenceClassification", "bart"),
    ("AutoModelForSequenceClassification", "modernbert"),
    ("AutoModelForTokenClassification", "bert"),
    ("AutoModelForTokenClassification", "t5"),
]
needs_this_transformers = pytest.mark.skipif(
    not transformers.__version__.startswith("5.23."),
    reason="the architectures were counted in transformers 5.23",
)


def logits_of(auto: str, model_type: str) -> torch.Tensor:
    with torch.no_grad():
        return build(auto, model_type)(input_ids=example_ids()).logits


@needs_this_transformers
@pytest.mark.parametrize(("auto", "model_type"), FEW)
def test_a_tiny_model_gives_the_same_logits_each_time_it_is_built(auto, model_type):
    torch.manual_seed(0)
    logits = logits_of(auto, model_type)
    assert logits.isfinite().all()
    assert logits.shape[0] == 2
    torch.manual_seed(1)
    assert torch.equal(logits_of(auto, model_type), logits)


def test_a_tiny_model_has_no_weights_that_hide_a_mistake():
    model = tiny_model("AutoModelForCausalLM", "deepseek_v3")
    router = model.model.layers[1].mlp.gate
    assert router.e_score_correction_bias.all()
    assert len(router.e_score_correction_bias.unique()) == 8
    assert model.model.norm.weight.std() > 0.05
    assert tiny_config("granite").logits_scaling == 1.5
    # one dense layer and one of experts
    assert model.config.num_hidden_layers == 2
    assert model.config.first_k_dense_replace == 1


def test_one_layer_of_each_kind_stays():
    kinds = tiny_config("qwen3_next").layer_types
    assert kinds == ["linear_attention", "full_attention"]
    assert tiny_config("smollm3").no_rope_layers == [1, 0]


def test_fields_are_overridden_also_those_of_an_inner_configuration():
    config = tiny_config("gemma4", text_config={"num_hidden_layers": 2}, image_token_id=5)
    assert config.text_config.num_hidden_layers == 2
    assert config.image_token_id == 5
    model = tiny_model("AutoModelForSequenceClassification", "bert", num_labels=3)
    assert model.classifier.out_features == 3


def test_what_is_not_built_is_refused_with_its_reason():
    with pytest.raises(NotBuilt, match="box of each word"):
        tiny_model("AutoModelForTokenClassification", "bros")


@pytest.mark.slow
@needs_this_transformers
@pytest.mark.parametrize("auto", COUNTS)
def test_nearly_every_architecture_gives_logits_for_token_ids(auto):
    built = []
    for model_type in ARCHITECTURES[auto]:
        if model_type in NOT_BUILT:
            continue
        logits = logits_of(auto, model_type)
        assert logits.isfinite().all(), model_type
        assert logits.std() > 0, model_type
        built.append(model_type)
    assert (len(ARCHITECTURES[auto]), len(built)) == COUNTS[auto]


@pytest.mark.slow
@needs_this_transformers
@pytest.mark.parametrize("auto", COUNTS)
def test_each_architecture_that_is_not_built_fails_as_the_table_says(auto):
    for model_type in ARCHITECTURES[auto]:
        if model_type not in NOT_BUILT:
            continue
        with pytest.raises(Exception) as raised:  # noqa: PT011 - each library raises its own
            logits_of(auto, model_type)
        message = " ".join(str(raised.value).split())
        assert NOT_BUILT[model_type].error in message, model_type
