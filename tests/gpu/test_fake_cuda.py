"""`make trace-gpu`: a step's forward pass on CUDA tensors without values, for which a CUDA build of torch needs no GPU.

A read of the device raises (DataDependentOutputException), so does an operation on two devices, and what reaches the kernels of
attention is recorded and judged. Autograd needs a real device, so the forward pass runs without gradients, and the loss' gradients
and the optimizer, which need none, run by themselves."""

import contextlib
import dataclasses
import types

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rekindle.objectives import loss_of
from rekindle.objectives.loss import Goal
from rekindle.objectives.micro import Documents
from rekindle.objectives.tokens import cross_entropy
from rekindle.spec.layout import Layout
from rekindle.spec.model import LoraSpec, ModelSpec, TrainSpec
from rekindle.tasks import load_task
from rekindle.train import (
    attention,
    compat,
    kernels,
    modules,
    parallel,
    part,
    quantised,
    weights,
)
from rekindle.train.batches import Batches
from rekindle.train.mesh import Mesh
from rekindle.train.optimizer import Optimizer
from rekindle.train.parts import DTYPES
from tests.gpu.here import Here
from tests.gpu.training import IMAGE, TEXT, TOKENS, Case, model, plain, shards_of

pytestmark = pytest.mark.skipif(
    torch.version.cuda is None,
    reason="this torch is built without CUDA: make trace-gpu uses one with it",
)
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
TINY = Here.of("cpu", True)
LENGTH = 112  # no other size of these models
BF16 = {"precision": "bf16"}
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
CASES = {
    "llama, packed": Case(plain("llama", TINY), train=BF16),
    "llama, packed, fp16": Case(plain("llama", TINY), train={"precision": "fp16"}),
    "llama, packed, fp32": Case(plain("llama", TINY)),
    "llama, unpacked": Case(plain("llama", TINY), packing=False, train=BF16),
    "llama, packed, LoRA of bf16 weights": Case(
        plain("llama", TINY), lora={"rank": 4}, train={**BF16, "weights": "bf16"}
    ),
    "mistral with a window": Case({**plain("mistral", TINY), "sliding_window": 16}, train=BF16),
    "qwen3, packed": Case({**plain("qwen3", TINY), "head_dim": 8}, train=BF16),
    "qwen2, packed": Case(plain("qwen2", TINY), train=BF16),
    "gpt2, packed": Case(plain("gpt2", TINY), train=BF16),
    "gpt2, packed, dropout": Case(model("gpt2", TINY), train=BF16),
    "gpt2, unpacked, dropout": Case(model("gpt2", TINY), packing=False, train=BF16),
    "bert": Case(plain("bert", TINY), TEXT, train=BF16, rows=8, micro=8),
    "bert, dropout": Case(model("bert", TINY), TEXT, train=BF16, rows=8, micro=8),
    "distilbert, fp32": Case(plain("distilbert", TINY), TEXT, rows=8, micro=8),
    "distilbert, dropout": Case(model("distilbert", TINY), TEXT, train=BF16, rows=8, micro=8),
    "images": Case({"channels": [4, 6], "hidden": 10, "dropout": 0.2}, IMAGE, 8, train=BF16),
    "resnet": Case({"architecture": "resnet18"}, IMAGE, 32, train=BF16),
}
CASES = {
    name: case if case.task == IMAGE else dataclasses.replace(case, length=LENGTH)
    for name, case in CASES.items()
}


class Attention(TorchFunctionMode):
    """Answers scaled_dot_product_attention, whose choice of a kernel would ask the driver, and records its arguments."""

    NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention:
            call = {**dict(zip(self.NAMES, args, strict=False)), **(kwargs or {})}
            self.calls.append(call)
            query, value = call["query"], call["value"]
            if call.get("attn_mask") is not None:  # devices and shapes, as a kernel would see them
                assert call["attn_mask"].device == query.device
                shape = (*query.shape[:3], call["key"].shape[2])
                assert torch.broadcast_shapes(call["attn_mask"].shape, shape) == shape
            return query.new_empty(*query.shape[:-1], value.shape[-1])
        return function(*args, **(kwargs or {}))


class Largest(TorchDispatchMode):
    """The most elements of a tensor of truth values or of scores, that is of one whose last two dimensions are long."""

    def __init__(self, length):
        super().__init__()
        self.length, self.found = length, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for made in tree_leaves(out):
            if (
                isinstance(made, torch.Tensor)
                and made.ndim > 1
                and min(made.shape[-2:]) >= self.length
            ):
                self.found.append(f"{function} {tuple(made.shape)}")
        return out


def kernel_for(network, device, precision):
    """What its trial would find on a GPU."""
    window = network.config.to_dict().get("sliding_window")
    known = not window or Version(torch.__version__).release >= (2, 11)
    return "varlen" if known and precision in attention.HALVES else "sdpa"


@contextlib.contextmanager
def traced(monkeypatch):
    """Fake tensors, the first of one rank, and what asks the driver answered: the kernel's trial and the seeds."""
    varlen, real = [], compat.varlen_attn

    def recorded(*args, **kwargs):
        varlen.append((args, kwargs))
        return real(*args, **kwargs)

    monkeypatch.setattr(compat, "varlen_attn", recorded)
    monkeypatch.setattr(kernels, "kernel_for", kernel_for)
    monkeypatch.setattr(part, "seed", lambda key, device: None)
    torch._C._set_cudnn_enabled(False)  # which algorithm a convolution takes would ask its library
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode, varlen
    finally:
        torch._C._set_cudnn_enabled(True)
        dist.destroy_process_group()


def parts_of(case, mode):
    """On the fake device."""
    given = {
        "steps": 9,
        "lr": 1e-3,
        "global_batch_size": case.rows,
        "micro_batch_size": case.micro,
        "precision": "fp32",
    }
    train = TrainSpec.model_validate({**given, **case.train})
    task, shards = load_task(case.task), shards_of(case)
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily(), weights.deferred() as recorder:
        network = task.build(
            ModelSpec(source=dict(case.model)),
            shards.manifest.labels,
            shards.manifest.settings,
            shards.assets,
        )
    origins, lora = modules.unfused(network), None
    if case.lora:
        with unset_fake_temporarily(), weights.deferred(recorder):
            lora = modules.inject(network, LoraSpec(**case.lora), origins)
    dtype = DTYPES.get(train.weights)
    with unset_fake_temporarily():
        if dtype is not None:
            weights.transform(network, lambda t: t.to(dtype) if t.is_floating_point() else t)
        # values that are not deferred are moved by hand: a real tensor does not go to a device that is not there
        weights.transform(network, lambda t: t.to("meta"))
    parts = parallel.build(
        task, network, origins, train, Goal(), Mesh(Layout(micro_batch_size=case.micro), CUDA), lora
    )
    part = parts.stages[0].part
    with unset_fake_temporarily():
        packs = case.task == TOKENS and case.packing
        order = shards.order(
            "train",
            global_batch_size=case.rows,
            seed=0,
            pack_length=case.length if packs else None,
        )
        host = Mesh(Layout(micro_batch_size=case.micro), CPU)
        work = Batches(
            loss_of(task.objective), task, shards, "train", order, host, 0, part.joins_texts
        ).make(0)
    moved = [m.with_each(lambda t: mode.from_tensor(t).to(CUDA)) for m in work.micro]
    exact = [m.with_each(lambda t: t.float() if t.is_floating_point() else t) for m in moved]
    return parts, train, exact


@contextlib.contextmanager
def autocast(train):
    """What torch.autocast("cuda") sets, which refuses where there is no driver."""
    half = HALVES.get(train.precision)
    if half is None:
        yield
        return
    torch.set_autocast_dtype("cuda", half)
    torch.set_autocast_enabled("cuda", True)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", False)


@pytest.mark.parametrize("name", CASES)
def test_a_forward_pass_reads_nothing_and_hands_kernels_what_they_take(name, monkeypatch):
    case = CASES[name]
    with traced(monkeypatch) as (mode, varlen), Attention() as seen:
        parts, train, micro = parts_of(case, mode)
        half = HALVES.get(train.precision)
        for one in micro:
            with torch.no_grad(), autocast(train), Largest(case.length) as largest:
                result = parts.stages[0].part(micro=one)
            assert result.device == CUDA
            assert result.shape == (1, 3)
            joined = sum(one.documents.queries) if one.documents is not None else 0
            if case.packing and case.task == TOKENS:
                assert joined == one.inputs["input_ids"].numel()
                scores = [
                    text for text in largest.found if f"{case.length}, {case.length})" in text
                ]
                assert not scores, scores
    for args, kwargs in varlen:
        q, k, v, starts, key_starts, longest, longest_key = args
        assert {x.dtype for x in (q, k, v)} <= set(attention.HALVES)
        assert len({x.dtype for x in (q, k, v)}) == 1
        assert {x.device for x in args[:5]} == {CUDA}
        assert {starts.dtype, key_starts.dtype} == {torch.int32}
        assert isinstance(longest, int)
        assert isinstance(longest_key, int)
        assert all(x.stride(-1) == 1 for x in (q, k, v))
        assert kwargs["enable_gqa"] == (q.shape[1] != k.shape[1])
        assert kwargs["window_size"][0] == (15 if "window" in name else -1)
    for call in seen.calls:
        q, k, v = (call[n] for n in ("query", "key", "value"))
        # autocast has a kernel take its own type
        assert half is not None or len({x.dtype for x in (q, k, v)}) == 1
        repeated = call.get("attn_mask") is not None or half is None
        assert bool(call.get("enable_gqa")) == (k.shape[1] != q.shape[1])
        if case.model.get("num_key_value_heads"):
            assert (k.shape[1] == q.shape[1]) == repeated, (
                "half precision takes fewer keys as they are"
            )
    blocks = len(modules.blocks(parts.network)) if case.task != IMAGE else 0
    drops = "dropout" in name
    if half is not None and blocks:
        by_documents = case.packing or case.task == TEXT
        in_one = by_documents and not drops and parts.attention == "varlen"
        assert len(varlen) == (blocks * len(micro) if in_one else 0)
        assert bool(seen.calls) != in_one
    if drops and blocks:
        assert {call["dropout_p"] for call in seen.calls} == {0.1}


@pytest.mark.parametrize("name", ["adamw", "muon", "adamw8bit"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_the_optimizer_steps_on_one_device_without_a_read(name, precision, clip, monkeypatch):
    given = {"precision": precision, "clip_norm": clip, "optimizer": name}
    case = Case(plain("llama", TINY), train=given)
    with traced(monkeypatch) as (mode, _):
        parts, train, _ = parts_of(case, mode)
        optimizer = Optimizer(parts, train)
        for _ in range(2):
            for _, parameter in parts.parameters():
                parameter.grad = torch.empty_like(parameter, requires_grad=False)
            squares = optimizer.collect()
            count = optimizer.divided_by_scale(torch.ones(1, dtype=torch.float64, device=CUDA))
            numbers = optimizer.step(1e-3, count[0], squares)
            optimizer.clear()
        assert numbers.device == CUDA
        state = [t for s in optimizer.update.state.values() for t in s.values()]
        assert {t.device for t in [*state, optimizer.shares]} == {CUDA}


def test_the_loss_makes_its_gradients_on_the_device_without_a_read():
    with FakeTensorMode():
        states = torch.empty(3000, 64, dtype=torch.bfloat16, device=CUDA)
        head = torch.empty(128_256, 64, dtype=torch.bfloat16, device=CUDA)
        labels = torch.empty(3000, dtype=torch.int64, device=CUDA)
        scale = torch.empty((), dtype=torch.float64, device=CUDA)
        kept = []
        context = types.SimpleNamespace(
            needs_input_grad=(True, True, False, False),
            save_for_backward=lambda *made: kept.extend(made),
        )
        share = cross_entropy._Share(len(head), len(head))
        loss, right = cross_entropy._LinearCrossEntropy.forward(
            context, states, head, labels, scale, share, True, None, 0.0
        )
        assert {t.device for t in (loss, right, *kept)} == {CUDA}
        assert [t.dtype for t in kept] == [torch.bfloat16, torch.bfloat16]


def test_a_layer_in_4_bits_brings_its_weight_back_on_the_device_without_a_read():
    pytest.importorskip("bitsandbytes", reason="the extra `qlora` is not installed")
    with FakeTensorMode():
        layer = quantised.FourBit(torch.nn.Linear(128, 64, device="meta").requires_grad_(False))
        weights.transform(layer, lambda t: torch.empty_like(t, device=CUDA))
        layer.load(torch.empty(64, 128))
        x, context = torch.empty(3, 128, dtype=torch.bfloat16, device=CUDA), types.SimpleNamespace()
        out = quantised._Product.forward(context, x, layer)
        gradient, _ = quantised._Product.backward(context, torch.empty_like(out))
        assert (out.shape, gradient.shape) == ((3, 64), x.shape)
        made = (out, gradient, layer.packed, layer.scales, layer.whole())
        assert {t.device for t in made} == {CUDA}


@pytest.mark.parametrize("kernel", ["varlen", "sdpa"])
def test_a_long_sequence_of_many_ranks_makes_no_whole_mask(kernel, monkeypatch):
    import numpy as np

    with traced(monkeypatch) as (mode, varlen), Attention() as seen, Largest(8192) as largest:
        documents = Documents.of(np.ones((1, 32_768), np.int64), 4, 3)
        documents = documents.with_each(lambda t: mode.from_tensor(t).to(CUDA))
        query, keys = (
            torch.empty(1, 32, 8192, 128, dtype=torch.bfloat16, device=CUDA),
            torch.empty(sum(documents.keys), 8, 128, dtype=torch.bfloat16, device=CUDA),
        )
        call = attention.Call(True, None, 0.0, None, attention.AttentionPeers(kernel=kernel))
        attend = attention._varlen if kernel == "varlen" else attention._by_document
        out = attend(query, keys, keys, documents, call)
        assert out.shape == (1, 8192, 32, 128)
    assert len(varlen) == (kernel == "varlen")
    masks = [call["attn_mask"].shape for call in seen.calls if call.get("attn_mask") is not None]
    assert all(shape[-2] <= attention.QUERIES_AT_ONCE for shape in masks)
    assert not largest.found, largest.found
