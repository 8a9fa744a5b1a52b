"""Texts with a class share a sequence: no padding but in attention, and each is what it would be alone."""

import dataclasses
import functools
import types

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn import functional as F

from rekindle.objectives import loss_of
from rekindle.objectives.loss import Goal
from rekindle.objectives.micro import Documents, Feed
from rekindle.spec.layout import Layout
from rekindle.spec.model import ModelSpec, TrainSpec
from rekindle.tasks import load_task
from rekindle.train import attention, dropout, modules, parallel
from rekindle.train.batches import Batches
from rekindle.train.mesh import Mesh
from rekindle.train.optimizer import Optimizer
from rekindle.train.part import Part
from rekindle.train.parts import Parts, Stage
from rekindle.train.schedule import learning_rate
from tests.quick import first
from tests.train import varlen_reference
from tests.train.differential import made_shards

CPU = torch.device("cpu")
NETWORKS = {
    "distilbert": {
        "model_type": "distilbert",
        "dim": 16,
        "n_layers": 2,
        "n_heads": 2,
        "hidden_dim": 24,
        "max_position_embeddings": 32,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "seq_classif_dropout": 0.0,
    },
    "bert": {
        "model_type": "bert",
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 32,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
}
TASK, SHARDS = load_task("text_classification"), made_shards("text_classification", packing=False)
ROWS = np.array([3, 8, -1, 20, 5, 11, 30])


def network(kind, **more):
    torch.manual_seed(0)
    source = NETWORKS[kind] | more
    return TASK.build(
        ModelSpec(source=source), SHARDS.manifest.labels, SHARDS.manifest.settings, None
    )


def batches(layout=Layout(), joined=True):  # noqa: B008 - frozen
    order = types.SimpleNamespace(pack_length=None, global_batch_size=len(ROWS), by_length=False)
    return Batches(
        loss_of(TASK.objective), TASK, SHARDS, "train", order, Mesh(layout, CPU), 0, joined
    )


def on_cpu(micro):
    (moved,) = Feed(CPU, "fp32")([micro])
    return moved


def test_groups_pad_little_and_give_every_token_back():
    lengths = [3, 4, 6, 7, 7, 13, 40]
    documents = Documents.of_texts(lengths)
    assert [(g.rows, g.longest, g.tokens) for g in documents.groups] == [
        (3, 6, 13),
        (3, 13, 27),
        (1, 40, 40),
    ]
    assert documents.starts.tolist() == np.cumsum([0, *lengths]).tolist()
    tokens, start = torch.arange(sum(lengths)), 0
    for group in documents.groups:
        mine = tokens[start : start + group.tokens]
        padded = mine[group.places]
        assert padded[group.back].tolist() == mine.tolist()
        assert group.mask is None or group.mask.sum() == group.tokens
        places, back, _ = group.by_head(3)
        heads = torch.stack([mine, mine + 1000, mine + 2000], 1)
        by_head = heads.flatten()[places].view(group.rows, 3, group.longest)
        assert torch.equal(by_head[:, 1], padded.view(group.rows, -1) + 1000)
        assert torch.equal(by_head.flatten()[back].view(-1, 3), heads)
        start += group.tokens


@pytest.mark.parametrize("kernel", ["groups", "documents", "varlen"])
@pytest.mark.parametrize("kind", NETWORKS)
def test_a_joined_text_gets_the_scores_and_gradients_it_gets_alone(kind, kernel):
    micro = on_cpu(batches().arranged(ROWS, np.arange(len(ROWS))))
    assert micro.inputs["input_ids"].shape == (
        1,
        int(SHARDS.lengths("train")[np.maximum(ROWS, 0)].sum()),
    )
    if kernel == "documents":
        micro.documents.groups, micro.documents.grouped = (), False
    precision = torch.bfloat16 if kernel == "varlen" else torch.float32
    found = []
    for joined in (True, False):
        net = network(
            kind,
            **({"dim": 32, "n_heads": 2} if kind == "distilbert" and kernel == "varlen" else {}),
        ).train()
        if kernel == "varlen":
            varlen_reference.install()
        attention.install(
            net,
            attention.AttentionPeers(kernel="varlen" if kernel == "varlen" and joined else "sdpa"),
        )
        part = Part(loss_of(TASK.objective), TASK, net, Goal())
        assert part.joins_texts
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
            if joined:
                loss, right, count = part(micro=micro)[0]
                loss.backward()
            else:  # each text by itself
                parts = [
                    on_cpu(batches(joined=False).arranged(ROWS[i : i + 1], np.array([0])))
                    for i in range(len(ROWS))
                ]
                results = [part(micro=one)[0] for one in parts]
                loss, right, count = torch.stack(results).sum(0)
                loss.backward()
        found.append(
            [loss.detach(), right, count, *(p.grad for p in net.parameters() if p.grad is not None)]
        )
    assert float(found[0][2]) == sum(ROWS >= 0)
    for ours, alone in zip(*found, strict=True):
        gap = (ours - alone).norm() / (alone.norm() + 1e-3)
        assert gap <= (3e-2 if precision == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("kind", NETWORKS)
def test_the_last_block_computes_first_tokens_alone_behind_its_attention(kind):
    micro = on_cpu(batches().arranged(ROWS, np.arange(len(ROWS))))
    net = network(kind).train()
    attention.install(net, attention.AttentionPeers())
    part = Part(loss_of(TASK.objective), TASK, net, Goal())
    rows = {}
    for name, block in modules.blocks(net):
        for part_name in (
            ("ffn.lin1", "ffn.lin2")
            if kind == "distilbert"
            else ("attention.output.dense", "output.dense")
        ):
            block.get_submodule(part_name).register_forward_hook(
                lambda _, args, __, key=(name, part_name): rows.update({key: args[0].shape[1]})
            )
    part(micro=micro)
    tokens = micro.inputs["input_ids"].shape[1]
    assert list(rows.values()) == [tokens, tokens, len(ROWS), len(ROWS)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", first(1, NETWORKS))
def test_compiled_blocks_compute_what_others_do(kind, monkeypatch):
    """Blocks share their code, and only the last one has hooks: once compiled it ran without them."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    found = []
    for compiled in (False, True):
        net = network(kind).train()
        attention.install(net, attention.AttentionPeers())
        part = Part(loss_of(TASK.objective), TASK, net, Goal())
        parallel._recompute_and_compile(net, TrainSpec(compile=compiled), constants=False)
        for rows in (ROWS, ROWS[1:]):  # the second makes sizes symbols
            result = part(micro=on_cpu(batches().arranged(rows, np.arange(len(rows)))))
            result[0, 0].backward()
            found += [result[0].detach(), *(p.grad.clone() for p in net.parameters())]
    half = len(found) // 2
    torch.testing.assert_close(found[:half], found[half:])


@pytest.mark.slow
@pytest.mark.parametrize("kind", NETWORKS)
def test_two_lengths_are_compiled_and_no_more(kind, monkeypatch):
    """Whatever the texts' number of groups: lengths across a break of the graph were constants once, so that eight lengths
    made torch give up."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    net = network(kind).train()
    attention.install(net, attention.AttentionPeers())
    part = Part(loss_of(TASK.objective), TASK, net, Goal())
    parallel._recompute_and_compile(net, TrainSpec(compile=True), constants=False)
    graphs, groups = [], []
    for rows in np.array([[3, 8, -1], [20, 5, 11], [30, 3, 5], [8, 8, 8], [11, 30, 20], [3, 4, 6]]):
        micro = on_cpu(batches().arranged(rows, np.arange(len(rows))))
        part(micro=micro)
        groups.append(len(micro.documents.groups))
        graphs.append(counters["stats"]["unique_graphs"])
    assert len(set(groups)) > 1
    assert graphs[1:] == graphs[1:2] * 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "rates", [{"dropout": 0.2, "seq_classif_dropout": 0.2}, {"attention_dropout": 0.5}]
)
def test_dropout_changes_joined_texts_as_much_as_padded_ones_in_transformers_own_network(rates):
    """Over 1,200 draws each: the mean and the spread of the loss and of all gradients."""
    ours, theirs = network("distilbert", **rates).train(), network("distilbert", **rates).train()
    attention.install(ours, attention.AttentionPeers())
    dropout.install(ours)
    part = Part(loss_of(TASK.objective), TASK, ours, Goal())
    joined = on_cpu(batches().arranged(ROWS, np.arange(len(ROWS))))
    padded = on_cpu(batches(joined=False).arranged(ROWS, np.arange(len(ROWS))))

    def losses(number):
        yield ours, part(micro=dataclasses.replace(joined, key=number))[0][0]
        logits = theirs(**padded.inputs).logits
        each = F.cross_entropy(logits, padded.labels, reduction="none")
        yield theirs, (each * padded.weights).sum() / padded.count[0]

    drawn, found = 1200, [[], []]
    for number in range(drawn):
        for rows, (net, loss) in zip(found, losses(number), strict=True):
            net.zero_grad()
            loss.backward()
            # keys' bias has no gradient but rounding: softmax does not see it
            slopes = [p.grad.norm() for n, p in net.named_parameters() if "k_lin.bias" not in n]
            rows.append(torch.stack([loss.detach(), *slopes]))
    a, b = (torch.stack(rows).double() for rows in found)
    assert (a.mean(0) - b.mean(0)).abs().lt(4.5 * ((a.var(0) + b.var(0)) / drawn).sqrt()).all()
    torch.testing.assert_close(a.std(0), b.std(0), rtol=0.15, atol=0)


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_training_without_dropout_is_that_of_a_plain_loop_over_the_same_texts(kind):
    """AdamW, linear schedule, clipping: as its users would write it with transformers alone."""
    steps, spec = 12, TrainSpec(lr=2e-3, lr_schedule="linear", warmup=0.0, weight_decay=0.0)
    ours, theirs = network(kind).train(), network(kind).train()
    attention.install(ours, attention.AttentionPeers())
    dropout.install(ours)
    part = Part(loss_of(TASK.objective), TASK, ours, Goal())
    mesh = Mesh(Layout(), CPU)
    parts = Parts((Stage(0, 1, part, part),), mesh, frozenset(), {}, {})
    optimizer = Optimizer(parts, spec)
    adam = torch.optim.AdamW(theirs.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1 - step / steps)
    order = np.random.default_rng(0).permutation(SHARDS.rows("train"))
    for step in range(steps):
        rows = np.take(order, range(7 * step, 7 * step + 7), mode="wrap")
        joined = on_cpu(batches().arranged(rows, np.arange(7)))
        joined = dataclasses.replace(joined, count=torch.tensor([7.0]))
        padded = on_cpu(batches(joined=False).arranged(rows, np.arange(7)))
        loss = part(micro=joined)[0][0]
        loss.backward()
        optimizer.step(learning_rate(spec, step, steps), loss.detach(), optimizer.collect())
        optimizer.clear()
        wanted = F.cross_entropy(theirs(**padded.inputs).logits, padded.labels)
        wanted.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        schedule.step()
        torch.testing.assert_close(loss, wanted, rtol=2e-4, atol=0)


def test_a_pipeline_fills_joined_texts_up_to_one_length_that_nobody_looks_at():
    made = batches(Layout(pp=2))
    micro = [
        made._micro(rows, np.arange(2), 0, 0, torch.ones(1))
        for rows in (np.array([3, 8]), np.array([20, 5]))
    ]
    filled = made.loss.alike(made, micro)
    (length,) = {m.inputs["input_ids"].shape[1] for m in filled}
    assert length >= max(m.inputs["input_ids"].shape[1] for m in micro)
    net = network("distilbert").eval()
    attention.install(net, attention.AttentionPeers())
    part = Part(loss_of(TASK.objective), TASK, net, Goal())
    with torch.no_grad():
        for one, more in zip(micro, filled, strict=True):
            torch.testing.assert_close(part(micro=on_cpu(more)), part(micro=on_cpu(one)))


def test_a_network_without_a_summary_that_is_known_gets_padded_batches():
    class Own(torch.nn.Module):
        pass

    assert not Part(loss_of(TASK.objective), TASK, Own(), Goal()).joins_texts
    assert modules.known(Own()) is None
    micro = batches(joined=False).arranged(ROWS, np.arange(len(ROWS)))
    assert micro.documents is None
    assert set(micro.inputs) == {"input_ids", "attention_mask"}


def test_a_teacher_that_cannot_read_joined_texts_keeps_them_apart():
    class Teacher(torch.nn.Module):
        pass

    assert not Part(
        loss_of(TASK.objective), TASK, network("bert"), Goal(teacher=Teacher())
    ).joins_texts
