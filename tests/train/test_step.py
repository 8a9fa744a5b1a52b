"""What one optimizer step asks of a device: nothing but one read, a step late, and one small collective. On a CPU nobody would
notice, so reads and collectives are counted, and tensors without values stand for a GPU's."""

import collections
import json
import math
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from rekindle.data.order import SampleOrder
from rekindle.objectives import loss_of
from rekindle.objectives.loss import Goal
from rekindle.objectives.micro import Documents
from rekindle.objectives.tokens import cross_entropy as linear_loss
from rekindle.objectives.tokens import rows_at_once
from rekindle.spec.layout import Layout
from rekindle.spec.model import ModelSpec, TrainSpec
from rekindle.tasks import load_task
from rekindle.train import parallel, part, weights
from rekindle.train.batches import Batches
from rekindle.train.loop import StepLog, StopFlag
from rekindle.train.mesh import Mesh
from rekindle.train.optimizer import Optimizer
from tests.plan.traced.fakes import Live
from tests.support.train_step import BERT, UNSAVED, Collectives, Reads, case, ranks
from tests.train.differential import GLOBAL, PACK, ROWS, made_shards, trainer_of

GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64}


@pytest.mark.parametrize(
    ("world", "given"),
    [
        (1, case()),
        (1, case(precision="fp16")),
        (1, case(precision="bf16", checkpointing="full")),
        (1, case(model=GPT2)),
        (1, case("text_classification", BERT)),
        (1, case("image_classification", {"channels": [4, 6], "hidden": 10, "dropout": 0.2})),
        (2, case(axes=("shard",))),
        (2, case(axes=("tp",))),
        (2, case(axes=("cp",))),
    ],
    ids=lambda value: (
        " ".join(
            [
                "x".join(value["cell"]["axes"]) or "one",
                value["task"],
                value["model"].get("model_type", ""),
                value["cell"]["precision"],
            ]
        )
        if isinstance(value, dict)
        else str(value)
    ),
)
def test_a_step_reads_once_and_agrees_once(world, given):
    with ranks(world):
        trainer = trainer_of(given)
        trainer.spec = trainer.optimizer.spec = trainer.spec.model_copy(update={"clip_norm": 1.0})
        stop, moved = StopFlag(60), trainer.feed
        # what comes from the loader is a copy on a GPU: reading it there is a read, too
        trainer.feed = lambda micro: [m.with_each(lambda t: t.clone()) for m in moved(micro)]
        made = [trainer.batches.make(step) for step in range(3)]
        before = trainer._launch(0, made[0], stop, UNSAVED)
        with Reads() as reads, Collectives() as collectives:
            launched = trainer._launch(1, made[1], stop, UNSAVED)
            assert reads.found == []
            trainer._read(before, UNSAVED)
        assert len(reads.found) == 1, reads.found
        if world > 1:
            assert [n for dtype, n in collectives.found if dtype == torch.float64] == [5]
        trainer._read(launched, UNSAVED)


@pytest.mark.parametrize("world", [1, 2])
def test_a_batch_that_is_not_full_has_as_many_micro_batches_as_it_fills(world):
    with ranks(world):
        trainer = trainer_of(case("text_classification", BERT, axes=("shard",) * (world - 1)))
        last = trainer.batches.make(ROWS // GLOBAL)
        assert last.examples == ROWS % GLOBAL == 5
        assert len(last.micro) == {1: 3, 2: 2}[world]
        assert len(trainer.batches.make(0).micro) == GLOBAL // 2 // world
        trainer.batches.order = SampleOrder(rows=[ROWS], global_batch_size=1 << 20, seed=0)
        everything = trainer.batches.make(0)
        assert everything.examples == ROWS
        assert len(everything.micro) == {1: 19, 2: 10}[world]


class Gathers(TorchDispatchMode):
    """Sizes of what was gathered from other ranks."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "allgather" in str(function) or "all_gather_into_tensor" in str(function):
            self.found.append(args[0].numel())
        return function(*args, **(kwargs or {}))


def test_a_micro_batch_gathers_norm_and_head_once_and_each_block_once_a_pass():
    with ranks(2):
        trainer = trainer_of(case(axes=("shard",)))
        network = trainer.parts.network
        blocks, rest = network.model.layers, (network.model.norm, network.lm_head)
        work = trainer.batches.make(0)
        with Gathers() as gathers:
            trainer._backward(work)

    def size(*modules):
        """Rows are filled up so that two ranks hold as many."""
        parameters = [p for module in modules for p in module.parameters()]
        return sum(-(-len(p) // 2) * 2 * math.prod(p.shape[1:]) for p in parameters)

    assert gathers.found.count(size(blocks[0])) == 2 * len(work.micro) * len(blocks)
    assert gathers.found.count(size(*rest)) == len(work.micro)


def test_gradients_of_norms_that_tp_ranks_share_are_added_up_at_once():
    with ranks(2):
        trainer = trainer_of(case(axes=("tp",)))
        trainer._backward(trainer.batches.make(0))
        with Collectives() as collectives:
            trainer.optimizer.collect()
        shared = [h for h in trainer.optimizer.trained if h.name in trainer.parts.partial]
        assert len(shared) > 2
        assert collectives.found == [(torch.float32, sum(h.local.numel() for h in shared))]


def test_numbers_that_are_read_late_change_nothing_but_when_it_stops(tmp_path):
    """A GPU's way on a CPU: each step's numbers are read while the next one runs."""
    found = {}
    for behind in (False, True):
        with ranks(1):
            trainer = trainer_of(case())
            trainer.reads_later = behind
            rows, saved, stop = [], [], StopFlag(60)
            history = types.SimpleNamespace(append=rows.append)
            clock = types.SimpleNamespace(
                tick=lambda work, waited, seconds: {"samples_per_second": seconds},
                report=lambda row: None,
            )
            checkpointer = types.SimpleNamespace(
                pending=None,
                written=lambda: True,
                settle=lambda save: None,
                fits=lambda left: True,
                save=lambda step, tensors, state, to=saved: to.append(step),
            )
            make, profiler = trainer.batches.make, types.SimpleNamespace(step=lambda waited: None)

            def made(step, make=make, stop=stop):
                if step == 0:
                    stop.raise_it()
                return make(step)

            trainer.batches.work = lambda step, last, made=made: made(step)
            last = trainer.fit(0, checkpointer, StepLog(0, history, clock), profiler, stop)
            found[behind] = last, saved, [(row.step, row.loss, row.grad_norm) for row in rows]
    (early, late), rows = (found[False], found[True]), [found[b][2] for b in (False, True)]
    assert (early[0], early[1]) == (1, [1])
    assert (late[0], late[1]) == (2, [2])
    assert rows[1][:1] == rows[0]
    assert [step for step, *_ in rows[1]] == [1, 2]


# The optimizer


def parts_of(given, device, **train):
    task, shards = load_task(given["task"]), made_shards(given["task"], given["packing"])
    with weights.deferred():
        network = task.build(
            ModelSpec(source=given["model"]),
            shards.manifest.labels,
            shards.manifest.settings,
            Path(),
        )
    spec = TrainSpec(lr=1e-2, **train)
    return parallel.build(
        task, network, {}, spec, Goal(), Mesh(Layout(), torch.device(device))
    ), spec


def test_all_state_of_the_optimizer_lies_where_its_parameter_does():
    """CUDA's fused kernel refuses a step counter on the host; `meta` stands for the device."""
    parts, spec = parts_of(case(), "meta", precision="fp16")
    optimizer = Optimizer(parts, spec)
    state = [t for held in optimizer.trained for t in optimizer.update.state[held.local].values()]
    assert len(state) == 3 * len(optimizer.trained)
    assert {
        t.device.type
        for t in [*state, optimizer.shares, optimizer.scale.value, optimizer.scale.finite_steps]
    } == {"meta"}


def test_a_step_whose_gradient_is_not_finite_is_skipped_without_asking():
    with ranks(1):
        trainer = trainer_of(case(precision="fp16"))
        optimizer = trainer.optimizer
        optimizer.scale.value.fill_(2.0**40)  # overflows
        before = [held.local.clone() for held in optimizer.trained]
        for step in range(2):
            _, norm, *_ = trainer._launch(
                step, trainer.batches.make(step), StopFlag(60), UNSAVED
            ).numbers.read()
            assert not np.isfinite(norm)
        assert all(
            torch.equal(held.local, old)
            for held, old in zip(optimizer.trained, before, strict=True)
        )
        assert {
            float(optimizer.update.state[held.local]["step"]) for held in optimizer.trained
        } == {0.0}
        assert optimizer.loss_scale == 2.0**38, "halved twice"


# The loss


def test_the_loss_of_a_large_vocabulary_takes_few_passes_and_little_memory_on_a_gpu(monkeypatch):
    """8,192 tokens of Llama-3-8B's head, 128,256 x 4,096, traced without values with a GPU's pieces."""
    tokens, hidden, vocabulary = 8_192, 4_096, 128_256
    monkeypatch.setattr(
        linear_loss, "rows_at_once", lambda columns, device: rows_at_once(columns, "cuda")
    )
    found, head_gib = {}, vocabulary * hidden * 2 / 2**30
    for frozen in (False, True):
        live, products = Live(), Products()
        with FakeTensorMode():
            states = torch.empty(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
            head = torch.empty(vocabulary, hidden, dtype=torch.bfloat16, requires_grad=not frozen)
            labels, count = torch.empty(tokens, dtype=torch.int64), torch.empty(())
            with live.counting(), products:
                loss, _ = linear_loss.linear_cross_entropy(states, head, labels, count)
                loss.backward()
        found[frozen] = products.count, live.peak / 2**30
        print(
            f"{'frozen' if frozen else 'trained'} head: {products.count} products, {live.peak / 2**30:.2f} GiB"
        )
    pieces = -(-tokens // 1_046)
    assert [count for count, _ in found.values()] == [3 * pieces, 2 * pieces]
    assert found[True][1] < head_gib + 1.25, (
        "0.5 of logits, as much in half precision, and gradients of states"
    )
    assert found[False][1] < head_gib + 1.25 + 3 * head_gib, "a sum in fp32 and a product"
    assert rows_at_once(vocabulary, "cpu") == 65


def test_where_no_gradient_is_wanted_the_loss_is_one_product_and_the_same():
    """Validation: weights that are trained ask for none then, which autograd's own functions are not told."""
    torch.manual_seed(0)
    states = torch.randn(40, 8, requires_grad=True)
    head, labels = torch.randn(61, 8, requires_grad=True), torch.randint(0, 61, (40,))
    losses, counts = [], []
    for wanted in (True, False):
        with torch.set_grad_enabled(wanted), Products() as products:
            loss, right = linear_loss.linear_cross_entropy(states, head, labels, torch.ones(()))
        losses.append((loss.item(), right.item()))
        counts.append(products.count)
    assert losses[0] == losses[1]
    assert counts == [3, 1]


class Products(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten.mm.default
        return function(*args, **(kwargs or {}))


# Documents


class Block(torch.nn.Linear):
    def forward(self, hidden, documents):
        return super().forward(hidden)


@pytest.mark.parametrize(
    "made",
    [
        Documents.of_texts,
        lambda lengths: Documents.of(np.repeat(np.arange(len(lengths)), lengths)[None]),
    ],
)
def test_a_sharded_block_takes_as_many_python_calls_for_500_documents_as_for_5(made):
    calls = {}
    with ranks(2):
        block = fully_shard(Block(4, 4), mesh=init_device_mesh("cpu", (2,)))
        hidden = torch.zeros(1, 4, requires_grad=True)
        for count in (5, 5, 500):  # the first forward pass sets FSDP up
            documents, seen = made([7] * count), collections.Counter()
            sys.setprofile(lambda frame, event, argument, seen=seen: seen.update([event]))
            try:
                block(hidden, documents=documents)
            finally:
                sys.setprofile(None)
            calls[count] = seen["call"]
    assert calls[500] == calls[5]


# Seeds


@pytest.mark.slow
def test_seeding_dropout_leaves_nothing_behind_for_devices_that_are_not_there():
    """`torch.manual_seed` keeps the stack of each caller for every kind of device until that is used."""
    script = (
        "import torch, torch.distributed as dist, json, sys\n"
        "from tests.support.train_step import BERT, case, ranks\n"
        "from tests.train.differential import trainer_of\n"
        "with ranks(1):\n"
        "    trainer = trainer_of(case('text_classification', BERT))\n"
        "    kept = lambda: [id(m._lazy_seed_tracker.manual_seed_all_cb) for m in (torch.cuda, torch.xpu)]\n"
        "    before = kept()\n"
        "    trainer._backward(trainer.batches.make(0))\n"
        "    print(json.dumps([before, kept()]))\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    before, after = json.loads(said.stdout.splitlines()[-1])
    assert after == before


def test_a_seed_gives_the_bits_of_manual_seed():
    torch.manual_seed(12345)
    theirs = torch.rand(5)
    part.seed(12345, torch.device("cpu"))
    assert torch.equal(torch.rand(5), theirs)


# Shapes of a pipeline


@pytest.mark.parametrize("task", ["causal_lm", "text_classification"])
def test_a_pipeline_sees_few_lengths_however_many_texts_have(task):
    shards = made_shards(task, packing=False)
    lengths = shards.lengths("train")
    order = types.SimpleNamespace(pack_length=None, global_batch_size=1)
    batches = Batches(
        loss_of(load_task(task).objective),
        load_task(task),
        shards,
        "train",
        order,
        Mesh(Layout(pp=2), torch.device("cpu")),
        0,
    )
    seen = set()
    for row in range(len(lengths)):
        if task == "causal_lm":
            seen.add(batches._longest(lengths[[row]], np.array([0])))
        else:
            (micro,) = batches.loss.alike(
                batches, [batches._micro(np.array([row]), np.array([0]), 0, 0, torch.ones(1))]
            )
            seen.add(micro.inputs["input_ids"].shape[1])
    assert len(set(lengths.tolist())) > 8
    assert len(seen) <= 8
    assert max(seen) == max(lengths), "positions that a model does not have are not asked for"
    assert max(lengths) < PACK


@pytest.mark.slow
def test_a_pipeline_that_evaluates_asks_the_device_for_a_shape_once(tmp_path):
    script = (
        "import json, os, torch.distributed as dist\n"
        "from pathlib import Path\n"
        "from tests.train.differential import trainer_of\n"
        "from tests.support.train_step import Reads, case\n"
        "child = os.fork()\n"
        "rank = int(child == 0)\n"
        f"dist.init_process_group('gloo', init_method='file://{tmp_path}/meet', rank=rank, world_size=2)\n"
        "trainer, found = trainer_of(case(axes=('pp',))), []\n"
        "micro = trainer.validation.make(0).micro\n"
        "for _ in range(2):\n"
        "    with Reads() as reads:\n"
        "        found.append(trainer.evaluation.losses(micro).tolist())\n"
        "    found.append([read for read in reads.found if 'pipeline.py' in read])\n"
        f"Path('{tmp_path}', str(rank)).write_text(json.dumps([len(micro), *found]))\n"
        "dist.barrier()\n"
        "if child: os.waitpid(child, 0)\n"
        "os._exit(0)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, env=environment)
    _, *first = json.loads((tmp_path / "0").read_text())
    count, sums, asked, again, asked_again = json.loads((tmp_path / "1").read_text())
    assert count > 1
    assert (len(asked), asked_again) == (1, [])
    assert sums == again
    assert first[1::2] == [[], []]


def test_results_of_micro_batches_are_not_kept_beyond_their_step():
    """Each would hold a piece of the device's memory until the end of training."""
    with ranks(1):
        trainer = trainer_of(case("text_classification", BERT))
        kept = trainer.parts.stages[0].part.results
        work = trainer.batches.make(0)
        for _ in range(3):
            trainer._backward(work)
            assert len(kept) == len(work.micro)
        trainer.evaluation.losses(work.micro)
        assert len(kept) <= len(work.micro)
