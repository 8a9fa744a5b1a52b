"""What reaches the kernels of attention, and what the compiler sees of it. That layouts compute the same is compared in
test_layouts.py; here documents, windows and kernels are, and that of those that need a GPU the arguments are right."""

import contextlib

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rekindle.errors import UnsupportedError
from rekindle.objectives.loss import Goal
from rekindle.objectives.micro import Documents
from rekindle.spec.layout import Layout
from rekindle.spec.model import TrainSpec
from rekindle.tasks import load_task
from rekindle.train import attention, kernels, modules, parallel
from rekindle.train.mesh import Mesh
from tests.plan.traced.fakes import as_on_gpu
from tests.quick import first
from tests.train import varlen_reference

CPU = torch.device("cpu")
TINY = {
    "distilbert": {
        "dim": 16,
        "n_layers": 1,
        "n_heads": 2,
        "hidden_dim": 24,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "llama": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "pad_token_id": 0,
    },
}
WIDER = {
    "llama": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
    },
    "qwen3": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "head_dim": 8,
    },
    "gpt2": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
}


def layer(causal=True, **peers):
    module = torch.nn.Module()
    module.is_causal = causal
    setattr(module, attention.PEERS, attention.AttentionPeers(**peers))
    return module


def model(kind, **config):
    torch.manual_seed(0)
    made = AutoConfig.for_model(
        kind, vocab_size=30, bos_token_id=None, eos_token_id=None, pad_token_id=0, **config
    )
    return AutoModelForCausalLM.from_config(made).eval()


def packed(lengths, rows=1):
    """Documents of these lengths in one sequence, and their positions."""
    numbers = np.concatenate([np.full(n, i + 1) for i, n in enumerate(lengths)])[None].repeat(
        rows, 0
    )
    positions = torch.cat([torch.arange(n) for n in lengths])[None].expand(rows, -1)
    return Documents.of(numbers), positions


class Recorder(TorchFunctionMode):
    """The arguments of each call of scaled_dot_product_attention; `answer` says whether it is made."""

    def __init__(self, answer=True):
        super().__init__()
        self.calls, self.answer = [], answer

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention:
            names = (
                "query",
                "key",
                "value",
                "attn_mask",
                "dropout_p",
                "is_causal",
                "scale",
                "enable_gqa",
            )
            self.calls.append({**dict(zip(names, args, strict=False)), **(kwargs or {})})
            if not self.answer:
                return args[0]
        return function(*args, **(kwargs or {}))


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that is made, by the operation that made it, and of the largest mask."""

    def __init__(self):
        super().__init__()
        self.size, self.by, self.mask = 0, "", 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for made in (leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)):
            size = made.untyped_storage().nbytes()
            self.mask = max(self.mask, size if made.dtype == torch.bool else 0)
            if size > self.size:
                self.size, self.by = size, f"{function} {tuple(made.shape)}"
        return out


@contextlib.contextmanager
def alone_of(world):
    """The first of so many ranks that do not exist."""
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


# Documents


def test_runs_of_queries_end_where_their_keys_end():
    numbers = np.array([[1, 1, 1, 2, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1, 0, 0]])
    whole = Documents.of(numbers)
    assert (whole.queries, whole.keys, whole.ranges) == ([3, 5, 6, 2], [3, 5, 6, 2], ())
    assert whole.starts.tolist() == [0, 3, 8, 14, 16]
    assert len(whole.ruler) == 6
    # of four chunks of two tokens the first of two ranks holds the first and the last
    first = Documents.of(numbers, cp=2, cp_rank=0)
    assert first.queries == [2, 2, 2, 2]
    assert first.keys == [2, 5, 2, 2]
    assert first.ranges == ((0, 0, 2), (0, 3, 8), (1, 0, 2), (1, 6, 8))
    second = Documents.of(numbers, cp=2, cp_rank=1)
    assert second.queries == [1, 1, 2, 2, 2]
    assert second.keys == [3, 1, 3, 4, 6]
    assert second.ranges == ((0, 0, 4), (0, 3, 6), (1, 0, 4), (1, 0, 6))


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("kind", ["mistral", "qwen2"])
def test_documents_and_windows_give_what_transformers_gives_each_document_alone(kind, window):
    config = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
    }
    if kind == "mistral":
        config["sliding_window"] = window
    elif window:
        config |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1}
    network = model(kind, **config)
    lengths = [32, 3, 20]
    ids = torch.randint(1, 30, (1, sum(lengths)))
    with torch.no_grad():
        # transformers' own, a document at a time
        alone = torch.cat([network(input_ids=part).logits for part in ids.split(lengths, 1)], 1)
        attention.install(network, attention.AttentionPeers())
        documents, positions = packed(lengths)
        ours = network(input_ids=ids, position_ids=positions, documents=documents).logits
        unpacked = network(input_ids=ids[:, :32]).logits
    torch.testing.assert_close(ours, alone, atol=1e-5, rtol=0)
    torch.testing.assert_close(unpacked, alone[:, :32], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["softcap", "s_aux", "head_mask", "anything_new"])
def test_a_keyword_that_changes_attention_is_refused_by_name(name):
    qkv = [torch.zeros(1, 2, 4, 8)] * 3
    attention.attend(layer(), *qkv, None, **{name: None})
    with pytest.raises(UnsupportedError, match=f"`{name}`"):
        attention.attend(layer(), *qkv, None, **{name: 1.0})


# Kernels


def test_no_mask_meets_fewer_key_value_heads_in_a_kernel():
    """CUDA has no fast kernel for both: it would make all scores (transformers/integrations/sdpa_attention.py says so, too)."""
    q, k = torch.randn(1, 4, 40, 8), torch.randn(1, 2, 40, 8)
    documents, _ = packed([28, 12])
    with Recorder() as recorder:
        attention.attend(layer(), q, k, k, None, documents=documents, sliding_window=8)
        attention.attend(layer(), q, k, k, torch.ones(1, 1, 40, 40, dtype=torch.bool))
    assert recorder.calls
    for call in recorder.calls:
        if call.get("attn_mask") is not None:
            assert not call.get("enable_gqa")
            assert call["key"].shape[1] == 4


def test_on_cuda_only_kernels_that_take_them_are_given_fewer_heads_or_dropout():
    """Traced on tensors without values: fp32 repeats keys, half precision does not, and dropout is the kernel's own."""
    with FakeTensorMode(), Recorder(answer=False) as recorder:  # a build without CUDA cannot
        for dtype in (torch.float32, torch.bfloat16):
            q, k = (torch.empty(1, n, 40, 8, device="cuda", dtype=dtype) for n in (4, 2))
            attention.attend(layer(), q, k, k, None, dropout=0.1)
    assert [bool(call.get("enable_gqa")) for call in recorder.calls] == [False, True]
    assert [call["dropout_p"] for call in recorder.calls] == [0.1, 0.1]


@pytest.mark.parametrize("kind", WIDER)
def test_the_varlen_kernel_gets_half_precision_from_autocast_and_agrees(kind):
    """Rotary embedding leaves queries and keys in fp32 under autocast, which no flash kernel takes."""
    varlen_reference.install()
    network = model(kind, **WIDER[kind])
    documents, positions = packed([10, 1, 21], rows=2)
    ids = torch.randint(1, 30, positions.shape)
    found = {}
    for kernel in ("sdpa", "varlen"):
        attention.install(network, attention.AttentionPeers(kernel=kernel))
        varlen_reference.CALLS.clear()
        network.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            logits = network(
                input_ids=ids, position_ids=positions, documents=documents, use_cache=False
            ).logits
        logits.float().square().mean().backward()
        found[kernel] = [logits.detach().float(), *(p.grad.clone() for p in network.parameters())]
    assert [
        {"dtype": torch.bfloat16, "documents": 6, "window": (-1, 0), "gqa": kind != "gpt2"}
    ] * len(modules.blocks(network)) == varlen_reference.CALLS
    for ours, theirs in zip(found["varlen"], found["sdpa"], strict=True):
        assert (ours - theirs).norm() <= 0.03 * theirs.norm() + 1e-6


def test_the_varlen_kernel_is_judged_with_gradients_even_where_they_are_off():
    varlen_reference.install()
    with torch.no_grad():
        assert kernels.kernel_difference(CPU, torch.bfloat16, 4, 2, 16, (None, 8)) < 0.02
    with pytest.raises(RuntimeError, match="only support fp16 and bf16"):
        kernels.kernel_difference(CPU, torch.float32, 4, 2, 16, (None,))


@pytest.mark.parametrize("factor", [1.2, float("nan")])
def test_a_kernel_that_disagrees_ends_the_start_with_an_error(monkeypatch, factor):
    varlen_reference.install()
    right = attention._varlen
    monkeypatch.setattr(attention, "_varlen", lambda *given: right(*given) * factor)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    difference = kernels.kernel_difference
    monkeypatch.setattr(kernels, "kernel_difference", lambda device, *more: difference(CPU, *more))
    with pytest.raises(
        UnsupportedError, match=r"varlen attention of torch .* differs by (0\.4\d|nan) .* on a GPU"
    ):
        kernels.kernel_for(model("llama", **WIDER["llama"]), torch.device("cuda"), torch.bfloat16)


def test_a_kernel_that_is_not_there_leaves_one_call_a_document(monkeypatch, caplog):
    def missing(*given):
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.\nmore")

    monkeypatch.setattr(kernels, "kernel_difference", missing)
    network = model("llama", **WIDER["llama"])
    assert kernels.kernel_for(network, torch.device("cuda"), torch.bfloat16) == "sdpa"
    assert (
        "because of the varlen kernel: FlashAttention only supports Ampere GPUs or newer."
        in caplog.text
    )
    assert kernels.kernel_for(network, torch.device("cuda"), torch.float32) == "sdpa"


@pytest.mark.parametrize(("dropout", "attention_of_steps"), [(0.0, "varlen"), (0.1, "sdpa")])
def test_dropout_of_attention_is_reported_as_one_call_a_document_with_the_way_out(
    caplog, dropout, attention_of_steps
):
    varlen_reference.install()
    network = model("gpt2", **{**WIDER["gpt2"], "attn_pdrop": dropout})
    documents, positions = packed([10, 22])
    train = TrainSpec(precision="bf16")
    with caplog.at_level("INFO", "rekindle"), as_on_gpu():
        parts = parallel.build(
            load_task("causal_lm"), network, {}, train, Goal(), Mesh(Layout(), CPU)
        )
    assert parts.attention == attention_of_steps
    assert caplog.text.count("attention: one") == 1
    assert ("set `attn_pdrop: 0` in the model's config" in caplog.text) == (dropout > 0)
    inputs = {"input_ids": torch.ones_like(positions), "position_ids": positions}
    for training in (True, False):
        varlen_reference.CALLS.clear()
        with torch.autocast("cpu", torch.bfloat16):
            network.train(training)(**inputs, documents=documents, use_cache=False)
        kernel = attention_of_steps if training else "varlen"
        assert len(varlen_reference.CALLS) == (2 if kernel == "varlen" else 0)


def test_selective_recomputation_keeps_what_the_varlen_kernel_gave():
    varlen_reference.install()
    network = model("llama", **WIDER["llama"]).train()
    attention.install(network, attention.AttentionPeers(kernel="varlen"))
    documents, positions = packed([10, 6])
    for (_, block), context in zip(
        modules.blocks(network), (parallel._selective, None), strict=True
    ):
        block.forward = parallel.functools.partial(parallel._again, block.forward, context)
    varlen_reference.CALLS.clear()
    with torch.autocast("cpu", torch.bfloat16):
        logits = network(
            input_ids=torch.ones_like(positions),
            position_ids=positions,
            documents=documents,
            use_cache=False,
        ).logits
    assert len(varlen_reference.CALLS) == 2
    logits.float().sum().backward()
    assert len(varlen_reference.CALLS) == 3, (
        "only the block that recomputes everything does it twice"
    )


@pytest.mark.parametrize("kernel", ["varlen", "sdpa"])
def test_a_context_parallel_block_of_32k_tokens_makes_nothing_of_a_gigabyte(kernel):
    """Llama-3-8B's attention, sequences of 32,768 tokens on 4 ranks: a mask of one rank's queries would be 0.25 GiB, its scores
    16 GiB. The forward pass is traced; the backward pass keeps what it made."""
    numbers, cp, tokens = np.ones((1, 32_768), np.int64), 4, 32_768 // 4
    documents = Documents.of(numbers, cp, 0)
    with alone_of(cp):
        group = dist.new_group(list(range(cp)))
        module = layer(cp_size=cp, cp_group=group, kernel=kernel)
        with FakeTensorMode(allow_non_fake_inputs=True), Largest() as largest:
            q, k = (torch.empty(1, n, tokens, 128, dtype=torch.bfloat16) for n in (32, 8))
            out, _ = attention.attend(module, q, k, k, None, documents=documents)
            assert out.shape == (1, tokens, 32, 128)
    print(f"{kernel}: {largest.size / 2**20:.0f} MiB by {largest.by}")
    assert largest.size <= 2**28
    assert largest.mask <= 512 * 32_768, "of 512 queries at a time"


# Compiling


@pytest.mark.slow
def test_any_number_of_heads_is_compiled_as_one_graph():
    def attend(*qkv):
        return attention.attend(layer(), *qkv, None)[0]

    compiled = torch.compile(attend, dynamic=True, fullgraph=True, backend="eager")
    for heads, groups, length in ((4, 2, 5), (6, 3, 7), (4, 4, 6)):
        qkv = [torch.randn(2, n, length, 8) for n in (heads, groups, groups)]
        torch.testing.assert_close(compiled(*qkv), attend(*qkv))


@pytest.mark.slow
def test_dropout_is_part_of_the_graph_and_drawn_once_a_layer():
    module = layer()

    def layers(*qkv):
        return torch.stack([attention.attend(module, *qkv, None, dropout=0.5)[0] for _ in range(2)])

    compiled = torch.compile(
        layers, dynamic=True, fullgraph=True, backend="aot_eager_decomp_partition"
    )
    for length in (6, 9):
        qkv = [torch.randn(2, 4, length, 8, requires_grad=True) for _ in range(3)]
        found = []
        for both in (layers, compiled):
            torch.manual_seed(length)
            made = both(*qkv)
            assert not torch.equal(*made), "each layer has a mask of its own"
            found.append([made, *torch.autograd.grad(made.square().sum(), qkv)])
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("kind", first(1, TINY))
@pytest.mark.parametrize("padding", [True, False])
def test_a_block_is_compiled_as_one_graph_whatever_its_length(kind, padding):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=30, **TINY[kind])
    network = AutoModelForSequenceClassification.from_config(config).eval()
    attention.install(network, attention.AttentionPeers())
    batches = []
    for length in (7, 12):
        ids = torch.randint(1, 30, (3, length))
        seen = torch.arange(length) < torch.tensor([[length], [4], [5]])
        batches.append(
            {"input_ids": ids * seen, "attention_mask": seen.long()}
            if padding
            else {"input_ids": ids}
        )
    said = [network(**batch).logits for batch in batches]
    ((_, block),) = modules.blocks(network)
    block.forward = torch.compile(block.forward, dynamic=True, fullgraph=True, backend="eager")
    for batch, logits in zip(batches, said, strict=True):
        torch.testing.assert_close(network(**batch).logits, logits)


@pytest.mark.parametrize("kind", first(1, WIDER))
def test_packed_documents_are_compiled_as_one_graph_however_many_there_are(kind):
    varlen_reference.install()
    torch._dynamo.reset()
    network = model(
        kind, **{**WIDER[kind], "num_hidden_layers" if kind != "gpt2" else "n_layer": 1}
    )
    attention.install(network, attention.AttentionPeers(kernel="varlen"))
    batches = [
        packed(lengths, rows=2) for lengths in ([10, 6], [3, 12, 1], [16], [4, 4, 4, 4], [2, 14])
    ]
    ids = torch.randint(1, 30, (2, 16))
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def logits(documents, positions):
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            return network(
                input_ids=ids, position_ids=positions, documents=documents, use_cache=False
            ).logits

    said = [logits(*batch) for batch in batches]
    ((_, block),) = modules.blocks(network)
    block.forward = torch.compile(block.forward, fullgraph=True, backend=counted)
    for batch, expected in zip(batches, said, strict=True):
        torch.testing.assert_close(logits(*batch), expected)
    assert len(graphs) <= 2, "once as it comes, once with sizes that vary"
