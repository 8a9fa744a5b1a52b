"""Attention as the compiler sees it. What it computes is compared layout by layout in test_layouts.py."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from rekindle.train import attention, families

TINY = {
    "distilbert": {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 24, "dropout": 0.0, "attention_dropout": 0.0},
    "llama": {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24,
        "pad_token_id": 0,
    },
}  # fmt: skip


def test_any_number_of_heads_is_compiled_as_one_graph():
    module = torch.nn.Module()
    module.is_causal = True
    setattr(module, attention.PEERS, attention.Peers())

    def attend(*qkv):
        return attention.attend(module, *qkv, None)[0]

    compiled = torch.compile(attend, dynamic=True, fullgraph=True, backend="eager")
    for heads, groups, length in ((4, 2, 5), (6, 3, 7), (4, 4, 6)):
        qkv = [torch.randn(2, n, length, 8) for n in (heads, groups, groups)]
        torch.testing.assert_close(compiled(*qkv), attend(*qkv))


def test_dropout_is_part_of_the_graph_and_drawn_once_a_layer():
    module = torch.nn.Module()
    module.is_causal = True
    setattr(module, attention.PEERS, attention.Peers())

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


@pytest.mark.parametrize("kind", TINY)
@pytest.mark.parametrize("padding", [True, False])
def test_a_block_is_compiled_as_one_graph_whatever_its_length(kind, padding):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=30, **TINY[kind])
    network = AutoModelForSequenceClassification.from_config(config).eval()
    attention.install(network, attention.Peers())
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
    ((_, block),) = families.blocks(network)
    block.forward = torch.compile(block.forward, dynamic=True, fullgraph=True, backend="eager")
    for batch, logits in zip(batches, said, strict=True):
        torch.testing.assert_close(network(**batch).logits, logits)
