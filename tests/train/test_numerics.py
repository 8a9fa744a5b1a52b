"""What a rank computes in: `auto`, TF32, deterministic algorithms, and what half precision loses."""

import os

import pytest
import torch
from torch import nn

from rekindle.errors import UnsupportedError
from rekindle.spec.layout import Layout
from rekindle.spec.model import TrainSpec
from rekindle.tasks import load_task
from rekindle.train import numerics, weights
from rekindle.train.mesh import Mesh
from rekindle.train.objective import Goal, Part
from rekindle.train.optimizer import Optimizer
from rekindle.train.parallel import Parts, Stage
from rekindle.train.score import settings_of

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
LLAMA = {
    "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 16, "vocab_size": 20,
}  # fmt: skip


def parts_of(network):
    part = Part(load_task("causal_lm"), network, Goal())
    return Parts((Stage(0, 1, part, part),), Mesh.of(Layout(), CPU), frozenset(), {}, {})


@pytest.fixture
def switches():
    """Torch's switches as they were, whatever a test does to them."""
    backend = torch.backends.cudnn
    before = (
        torch.get_float32_matmul_precision(),
        backend.deterministic,
        backend.benchmark,
        backend.allow_tf32,
    )
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision(before[0])
    backend.deterministic, backend.benchmark, backend.allow_tf32 = before[1:]


@pytest.mark.parametrize(
    ("device", "has_bf16", "asked", "began", "precision"),
    [
        (CPU, False, "auto", None, "fp32"), (CPU, False, "bf16", None, "bf16"), (CPU, False, "auto", "bf16", "bf16"),
        (GPU, True, "auto", None, "bf16"), (GPU, False, "auto", None, "fp32"), (GPU, True, "auto", "fp32", "fp32"),
        (GPU, True, "fp32", None, "fp32"), (GPU, False, "fp16", None, "fp16"),
    ],
)  # fmt: skip
def test_auto_is_what_the_device_has_unless_the_training_began_otherwise(
    monkeypatch, device, has_bf16, asked, began, precision
):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: has_bf16)
    assert numerics.decided(TrainSpec(precision=asked), device, began).precision == precision


@pytest.mark.parametrize(
    ("fields", "began", "where"),
    [
        ({"precision": "bf16"}, None, "train.precision"),
        ({"precision": "auto"}, "bf16", "train.precision"),
        ({"precision": "fp32", "weights": "bf16"}, None, "train.weights"),
    ],
)
def test_bf16_on_a_gpu_without_it_is_refused_by_name(monkeypatch, fields, began, where):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    with pytest.raises(UnsupportedError, match="Tesla V100") as caught:
        numerics.decided(TrainSpec.model_validate(fields), GPU, began)
    assert caught.value.problems[0].where == where
    assert "fp16" in caught.value.problems[0].fix


@pytest.mark.parametrize(
    ("device", "deterministic", "products"),
    [(GPU, False, "high"), (GPU, True, "highest"), (CPU, False, "medium"), (CPU, True, "medium")],
)
def test_gpus_multiply_in_tf32_unless_the_bits_have_to_come_again(
    switches, device, deterministic, products
):
    torch.set_float32_matmul_precision("medium")  # what a CPU has stays
    numerics.arrange(TrainSpec(deterministic=deterministic), device)
    assert torch.get_float32_matmul_precision() == products
    assert torch.are_deterministic_algorithms_enabled() is deterministic
    assert torch.backends.cudnn.deterministic is deterministic


def test_rotary_frequencies_are_never_made_narrower():
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {k: v for k, v in LLAMA.items() if k != "model_type"}
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **fields))
    exact = network.model.rotary_emb.inv_freq.clone()
    weights.convert(network, torch.bfloat16)
    assert {p.dtype for p in network.parameters()} == {torch.bfloat16}
    assert torch.equal(network.model.rotary_emb.inv_freq, exact)
    weights.convert(network, torch.float64)
    assert network.model.rotary_emb.inv_freq.dtype == torch.float64


def test_positions_keep_all_their_bits_while_all_else_is_in_tf32(switches):
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = LLAMA["model_type"]
    fields = {k: v for k, v in LLAMA.items() if k != "model_type"}
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields))
    torch.set_float32_matmul_precision("high")
    seen = {}
    plain = type(network.model.rotary_emb).forward

    class Watching(type(network.model.rotary_emb)):
        def forward(self, *args, **kwargs):
            seen["positions"] = torch.get_float32_matmul_precision()
            return plain(self, *args, **kwargs)

    Watching.__name__ = "LlamaRotaryEmbedding"
    network.model.rotary_emb.__class__ = Watching
    numerics.keep_positions(parts_of(network))
    network.lm_head.register_forward_pre_hook(
        lambda *_: seen.update(head=torch.get_float32_matmul_precision())
    )
    network(input_ids=torch.arange(8)[None])
    assert seen == {"positions": "highest", "head": "high"}
    with pytest.raises(TypeError):
        network.model.rotary_emb(None, None)
    assert torch.get_float32_matmul_precision() == "high"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_norm_of_gradients_is_as_exact_as_fp32_whatever_they_are_stored_in(dtype):
    network = nn.Linear(100, 33, bias=False).to(dtype)
    optimizer = Optimizer(parts_of(network), TrainSpec(weights="bf16"))
    torch.manual_seed(0)
    network.weight.grad = torch.randn_like(network.weight)
    exact = network.weight.grad.double().norm().item()
    norm = optimizer.collect().sqrt().item()
    assert norm == pytest.approx(exact, rel=1e-12 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize(
    ("driver", "precision"),
    [("echo 9.0; echo 8.0", "bf16"), ("echo 8.9; echo 7.5", "fp32"), ("exit 9", "fp32"), ("echo none", "fp32")],
)  # fmt: skip
def test_scores_on_gpus_are_kept_under_the_precision_that_auto_became(
    tmp_path, monkeypatch, driver, precision
):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{driver}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert settings_of(TrainSpec(), "", gpu=True).precision == precision
    assert settings_of(TrainSpec(), "bf16", gpu=True).precision == precision
    assert settings_of(TrainSpec(), "fp32", gpu=True).precision == "fp32", "as it was trained"
    assert settings_of(TrainSpec(precision="fp16"), "bf16", gpu=True).precision == "fp16"
    assert settings_of(TrainSpec(), "bf16", gpu=False).precision == "fp32"


def test_adamw_takes_its_settings_from_the_spec():
    network = nn.Linear(4, 4)
    spec = TrainSpec(betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3)
    adam = Optimizer(parts_of(network), spec).adam
    assert [(g["betas"], g["eps"], g["weight_decay"]) for g in adam.param_groups] == [
        ((0.8, 0.95), 1e-6, 0.3), ((0.8, 0.95), 1e-6, 0.0),
    ]  # fmt: skip
    assert Optimizer(parts_of(nn.Linear(4, 4)), TrainSpec()).adam.param_groups[0]["lr"] == 1e-3
