"""Checkpoints as others wrote them: transformers' own names, wrappers' prefixes, heads of other tasks, damaged files.

`from_pretrained` and `save_pretrained` of transformers are the authority."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from rekindle.errors import DataError
from rekindle.spec.model import ModelSpec
from rekindle.tasks import load_task
from rekindle.train import weights
from rekindle.train.stored import INDEX, Saving, _refuse_more_layers, headers_of

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
SETTINGS = {
    "pad_token_id": 0,
    "eos_token_id": 1,
    "vocab_size": 64,
    "max_length": 32,
    "form": "text",
}
LABELS = ("a", "b")


def saved(folder: Path, model_type: str, kind=AutoModelForCausalLM, **fields) -> Path:
    torch.manual_seed(0)
    model = kind.from_config(AutoConfig.for_model(model_type, **{**SIZES, **fields}))
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if value.is_floating_point() and (value.ndim > 1 or "bias" in name):
                value.normal_()
    model.save_pretrained(folder)
    return folder


def loaded(folder: Path, task: str = "causal_lm") -> tuple[torch.nn.Module, weights.WeightSource]:
    """The network as a rank fills it."""
    kind = load_task(task)
    labels = LABELS if task != "causal_lm" else ()
    with weights.deferred() as recorder:
        network = kind.build(ModelSpec(source=str(folder)), labels, SETTINGS, Path())
    source = weights.WeightSource(network, recorder, 0, folder, makes_head=kind.makes_head)
    weights.transform(network, lambda t: torch.empty_like(t, device="cpu") if t.is_meta else t)
    weights.fill([network], source, {})
    return network.eval(), source


def logits(network: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return network(input_ids=torch.arange(2, 14)[None]).logits


def assert_same_weights(network: torch.nn.Module, own: torch.nn.Module) -> None:
    mine, theirs = network.state_dict(), own.state_dict()
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
OLD_NAMES = {
    "gpt_neox": {},
    "mixtral": {"num_local_experts": 4, "num_key_value_heads": 2},
    "qwen3_moe": {**EXPERTS, "num_key_value_heads": 2, "head_dim": 8},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
    },
}


@pytest.mark.parametrize(("model_type", "fields"), OLD_NAMES.items(), ids=OLD_NAMES)
def test_names_that_transformers_converts_are_found_and_written_again(tmp_path, model_type, fields):
    folder = saved(tmp_path / "base", model_type, **fields)
    network, source = loaded(folder)
    assert source.fresh == ()
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert_same_weights(network, own)
    torch.testing.assert_close(logits(network), logits(own))
    state = network.state_dict()
    saving = Saving(network, state)
    written = dict(pair for name, value in state.items() for pair in saving.add(name, value))
    stored = load_file(folder / "model.safetensors")
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[name], value) for name, value in stored.items())


def rewritten(folder: Path, change) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


@pytest.mark.parametrize(
    ("prefix", "by", "fix"),
    [
        ("_orig_mod.", "torch.compile", "remove `_orig_mod.` from the names"),
        ("module.", "DistributedDataParallel", "remove `module.`"),
        ("base_model.model.", "PEFT", "merge_and_unload"),
        ("student.", "what wrapped the model", "remove `student.`"),
    ],
)
def test_a_prefix_of_a_wrapper_is_refused_with_what_left_it(tmp_path, prefix, by, fix):
    folder = saved(tmp_path, "llama")
    rewritten(folder, lambda state: {f"{prefix}{name}": value for name, value in state.items()})
    with pytest.raises(DataError, match=f"begin with `{prefix}`, as {by} leave") as refusal:
        loaded(folder)
    assert fix in str(refusal.value)


@pytest.mark.parametrize("task", ["causal_lm", "text_classification"])
def test_a_weight_that_is_not_there_is_named(tmp_path, task):
    kind = AutoModelForCausalLM if task == "causal_lm" else AutoModelForSequenceClassification
    folder = saved(tmp_path, "llama", kind)
    lost = "model.layers.1.mlp.up_proj.weight"
    rewritten(folder, lambda state: {name: v for name, v in state.items() if name != lost})
    with pytest.raises(DataError, match=f"lacks {lost} of "):
        loaded(folder, task)


def test_a_vocabulary_that_was_resized_in_the_configuration_alone_is_refused(tmp_path):
    folder = saved(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 72}))
    with pytest.raises(DataError, match="asks for: 64 x 32 for 72 x 32"):
        loaded(folder)


def test_a_classifier_on_a_masked_language_model_has_a_new_head_and_nothing_else(tmp_path):
    folder = saved(tmp_path, "bert", AutoModelForMaskedLM)
    network, source = loaded(folder, "text_classification")
    assert set(source.fresh) == {
        "bert.pooler.dense.weight",
        "bert.pooler.dense.bias",
        "classifier.weight",
        "classifier.bias",
    }
    own = AutoModelForMaskedLM.from_pretrained(folder)
    assert torch.equal(
        network.bert.embeddings.word_embeddings.weight, own.get_input_embeddings().weight
    )


def test_a_head_for_other_classes_is_replaced_and_one_of_a_wrong_body_is_not(tmp_path):
    folder = saved(tmp_path, "bert", AutoModelForSequenceClassification, num_labels=6)
    _, source = loaded(folder, "text_classification")
    assert set(source.fresh) == {"classifier.weight", "classifier.bias"}
    name = "bert.encoder.layer.0.output.dense.bias"
    rewritten(folder, lambda state: state | {name: torch.zeros(31)})
    with pytest.raises(DataError, match=f"holds {name} in another shape"):
        loaded(folder, "text_classification")


def test_the_problem_of_the_base_is_not_that_of_the_task(tmp_path):
    folder = saved(
        tmp_path,
        "bert",
        AutoModelForSequenceClassification,
        num_labels=6,
        problem_type="multi_label_classification",
    )
    network, _ = loaded(folder, "text_classification")
    assert network.config.problem_type == "single_label_classification"


def test_old_names_of_norms_are_read(tmp_path):
    folder = saved(tmp_path, "bert", AutoModelForSequenceClassification, num_labels=2)
    own = AutoModelForSequenceClassification.from_pretrained(folder)
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

    def aged(state):
        for new, legacy in old.items():
            state = {name.replace(new, legacy): value for name, value in state.items()}
        return state

    rewritten(folder, aged)
    network, source = loaded(folder, "text_classification")
    assert source.fresh == ()
    assert_same_weights(network, own)


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def cut_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:40])


def write_huge_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 62) + b"{}")


def write_no_json(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"[[[[" + bytes(64))


def index(folder: Path, files: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))


DAMAGES = {
    "truncated": (truncate, "the file is incomplete"),
    "half a header": (cut_header, "its header is incomplete"),
    "a header of many gigabytes": (write_huge_header, "its header is incomplete"),
    "a header that is not JSON": (write_no_json, "the header of this file cannot be read"),
    "an index that names a file elsewhere": (
        lambda folder: index(folder, {"lm_head.weight": "../other/model.safetensors"}),
        "is not a file of its folder",
    ),
    "an index that names a file that is not there": (
        lambda folder: index(folder, {"lm_head.weight": "model-00001-of-00002.safetensors"}),
        "which is not there",
    ),
    "an index that names a tensor that is not there": (
        lambda folder: index(folder, {"no.such": "model.safetensors"}),
        "holds `no.such`, and it does not",
    ),
    "an index that is not JSON": (
        lambda folder: (folder / INDEX).write_text("{"),
        "this is not an index of safetensors files",
    ),
}


@pytest.mark.parametrize(("damage", "said"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_refused_before_a_weight_is_read(tmp_path, damage, said):
    folder = saved(tmp_path, "llama")
    damage(folder)
    with pytest.raises(DataError, match=said):
        headers_of(folder)


def test_adapters_alone_are_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    save_file({"a": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(DataError, match="adapters, which are no model") as refusal:
        headers_of(tmp_path)
    assert "merge_and_unload" in str(refusal.value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.uint8])
def test_weights_of_few_bits_are_refused_whatever_the_configuration_says(tmp_path, dtype):
    """People remove `quantization_config` where a library complains of it."""
    folder = saved(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = (tensors[name] * 100).to(dtype)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match=rf"are quantised \(`{name}` is "):
        loaded(folder)


def test_weights_beside_which_scales_stand_are_refused(tmp_path):
    folder = saved(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match="weight_scale_inv` stands beside them"):
        loaded(folder)


def test_weights_that_are_quantised_are_refused(tmp_path):
    folder = saved(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    quantised = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantised}))
    with pytest.raises(DataError, match=r"are quantised \(fp8\)"):
        loaded(folder)


def test_layers_beyond_those_of_the_configuration_are_refused(tmp_path):
    folder = saved(tmp_path / "model", "llama", num_key_value_heads=4)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with pytest.raises(DataError, match=r"holds 9 weights \(model\.layers\.1\..*beyond the layers"):
        loaded(folder)


def test_what_a_layer_shares_or_predicts_beside_the_text_may_lie_in_the_file(tmp_path):
    """Gemma 3n files have keys for layers that take those of another one; DeepSeek's, a layer more."""
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    shared = "model.layers.1.self_attn.k_proj.weight"
    read = [name for name in network.state_dict() if name != shared]
    _refuse_more_layers(network, read, [shared], tmp_path)
    beyond = shared.replace(".1.", ".2.")
    with pytest.raises(DataError, match="beyond the layers"):
        _refuse_more_layers(network, read, [beyond], tmp_path)
    expert = "model.layers.1.mlp.experts.7.up_proj.weight"
    with pytest.raises(DataError, match="beyond the layers"):
        _refuse_more_layers(network, [*read, expert.replace(".7.", ".6.")], [expert], tmp_path)
    network.config.num_nextn_predict_layers = 1
    _refuse_more_layers(network, read, [beyond], tmp_path)
