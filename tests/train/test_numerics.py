"""What a rank computes in: `auto`, TF32, deterministic algorithms, and what half precision loses."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rekindle.errors import UnsupportedError
from rekindle.objectives import loss_of
from rekindle.objectives.loss import Goal
from rekindle.spec.layout import Layout
from rekindle.spec.model import ModelSpec, TrainSpec
from rekindle.tasks import image_classification, load_task
from rekindle.train import rank, weights
from rekindle.train.mesh import Mesh
from rekindle.train.optimizer import Optimizer
from rekindle.train.part import Part
from rekindle.train.parts import Parts, Stage
from rekindle.train.schedule import peak_rate
from rekindle.train.score import settings_of
from tests.quick import first
from tests.support.train_layouts import MODELS
from tests.support.train_step import case, ranks
from tests.train.differential import trainer_of

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 20,
}


def parts_of(network):
    part = Part(loss_of(load_task("causal_lm").objective), load_task("causal_lm"), network, Goal())
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
        (CPU, False, "auto", None, "fp32"),
        (CPU, False, "bf16", None, "bf16"),
        (CPU, False, "auto", "bf16", "bf16"),
        (GPU, True, "auto", None, "bf16"),
        (GPU, False, "auto", None, "fp32"),
        (GPU, True, "auto", "fp32", "fp32"),
        (GPU, True, "fp32", None, "fp32"),
        (GPU, False, "fp16", None, "fp16"),
    ],
)
def test_auto_is_what_the_device_has_unless_the_training_began_otherwise(
    monkeypatch, device, has_bf16, asked, began, precision
):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: has_bf16)
    assert rank.with_precision(TrainSpec(precision=asked), device, began).precision == precision


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
        rank.with_precision(TrainSpec.model_validate(fields), GPU, began)
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
    rank.arrange(TrainSpec(deterministic=deterministic), device)
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
    rank.keep_positions(parts_of(network))
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
    [
        ("echo 9.0; echo 8.0", "bf16"),
        ("echo 8.9; echo 7.5", "fp32"),
        ("exit 9", "fp32"),
        ("echo none", "fp32"),
    ],
)
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
    adam = Optimizer(parts_of(network), spec).update.adam
    assert [(g["betas"], g["eps"], g["weight_decay"]) for g in adam.param_groups] == [
        ((0.8, 0.95), 1e-6, 0.3),
        ((0.8, 0.95), 1e-6, 0.0),
    ]
    assert peak_rate(TrainSpec()) == 1e-3


# What torch refuses on CUDA tensors with deterministic algorithms (the second list in the docstring of
# torch.use_deterministic_algorithms of 2.10 to 2.13), by the operators that its modules end in.
REFUSED = {
    "_adaptive_avg_pool2d_backward",
    "_adaptive_avg_pool3d_backward",
    "adaptive_max_pool2d_backward",
    "avg_pool3d_backward",
    "fractional_max_pool2d_backward",
    "fractional_max_pool3d_backward",
    "max_unpool2d",
    "max_unpool3d",
    "upsample_linear1d_backward",
    "upsample_bilinear2d_backward",
    "upsample_bicubic2d_backward",
    "upsample_trilinear3d_backward",
    "reflection_pad1d_backward",
    "reflection_pad2d_backward",
    "reflection_pad3d_backward",
    "nll_loss2d_forward",
    "nll_loss2d_backward",
    "_ctc_loss_backward",
    "_embedding_bag_dense_backward",
    "put_",
    "histc",
    "bincount",
    "median",
    "kthvalue",
    "grid_sampler_2d_backward",
    "grid_sampler_3d_backward",
    "cumsum",
    "cumprod",
}


class Refused(TorchDispatchMode):
    """Operators that have no deterministic kernel on CUDA; a sum of whole numbers has no order."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        whole = "cum" in name and not args[0].is_floating_point()
        if name in REFUSED and not whole:
            self.found.add(name)
        return function(*args, **(kwargs or {}))


SMALL = {"channels": [4, 6], "hidden": 10, "dropout": 0.2}


@pytest.mark.parametrize("size", [(8, 8), (28, 28), (32, 32), (9, 21), (40, 3)])
@pytest.mark.parametrize(
    "source", [SMALL, {**SMALL, "channels": [4]}, {"architecture": "resnet18"}]
)
def test_networks_of_images_train_with_deterministic_algorithms(source, size):
    if "architecture" in source:
        size = (32 + size[0], 32 + size[1])
    labels, settings = ("a", "b"), {"image_shape": (*size, 1)}
    with torch.device("meta"):
        network = load_task("image_classification").build(
            ModelSpec(source=source), labels, settings, Path()
        )
        pixels = torch.empty(2, 1, *size)
        with Refused() as refused:
            network(pixels).float().square().mean().backward()
    assert refused.found == set()


@pytest.mark.parametrize("size", [(7, 7), (8, 16), (5, 4), (4, 13)])
def test_pooling_by_sides_is_adaptive_pooling(size):
    images = torch.randn(2, 3, *size, dtype=torch.float64)
    ours = image_classification._pool(4, 4)(images)
    assert torch.allclose(ours, nn.AdaptiveAvgPool2d(4)(images), rtol=1e-12)


@pytest.mark.parametrize(
    "name",
    first(3, ["distilbert", "llama", "gpt2", "bert", "mistral", "qwen2", "qwen3", "starcoder2"]),
)
def test_steps_of_our_tasks_train_with_deterministic_algorithms(name):
    task = "text_classification" if name in ("distilbert", "bert") else "causal_lm"
    with ranks(1):
        trainer = trainer_of(case(task, MODELS[name]))
        work = trainer.batches.make(0)
        with Refused() as refused:
            trainer._backward(work)
            trainer.optimizer.step(1e-3, *[trainer.optimizer.collect()] * 2)
    assert refused.found == set()


def test_an_operator_without_a_fixed_order_is_seen():
    images = torch.zeros(1, 1, 8, 8, requires_grad=True)
    with Refused() as refused:
        nn.AdaptiveAvgPool2d(4)(images).sum().backward()
        torch.cumsum(torch.zeros(3, dtype=torch.int64), 0)
    assert refused.found == {"_adaptive_avg_pool2d_backward"}
