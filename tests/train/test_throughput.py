"""FLOPs, peaks and the verdict of a profile."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rekindle.catalog.machines import peak_flops
from rekindle.data.ingest import ingest
from rekindle.data.shard import shard
from rekindle.records import Profile
from rekindle.spec import layout_support
from rekindle.spec.layout import Layout
from rekindle.spec.layout_support import Cell
from rekindle.spec.model import DataSpec, TrainSpec
from rekindle.train import modules
from rekindle.train.batches import StepWork
from rekindle.train.history import read_history
from rekindle.train.throughput import (
    Clock,
    StepCost,
    exposed_seconds,
    is_collective,
    judge_profile,
    tips,
)
from tests.support.train_resume import CNN, Gang


def network(kind, **fields):
    chosen = AutoModelForSequenceClassification if kind == "distilbert" else AutoModelForCausalLM
    with torch.device("meta"):
        made = chosen.from_config(AutoConfig.for_model(kind, **fields))
    modules.unfused(made)
    return made


def test_flops_count_matrix_products_and_the_squares_of_document_lengths():
    llama = network(
        "llama",
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        vocab_size=256,
    )
    block = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128
    weights = 4 * block + 64 * 256
    cost = StepCost.of(llama, frozen=False)
    assert cost == StepCost(6.0 * weights, 12 * 4 * 64 / 2)
    assert StepCost.of(llama, frozen=True).per_token == 4.0 * weights
    work = StepWork((), (), examples=2, targets=30, tokens=30, squares=10**2 + 20**2)
    assert cost.step(work) == 6 * weights * 30 + 1536 * 500


def test_the_tokens_of_a_step_are_its_own_however_times_scatter():
    clock = Clock(3, StepCost(1.0, 0.0), torch.device("cpu"), 1, TrainSpec())
    rows = [
        clock.tick(StepWork((), (), examples=2, targets=n, tokens=n, squares=0), 0.0, seconds)
        for n, seconds in ((30, 1.0), (50, 9.0), (40, 0.1))
    ]
    assert [row["tokens"] for row in rows] == [30, 50, 40]


def test_attention_that_sees_both_ways_costs_twice_as_much():
    bert = StepCost.of(
        network("distilbert", dim=64, n_layers=4, n_heads=4, vocab_size=256), frozen=False
    )
    assert bert.per_square == 12 * 4 * 64


@pytest.mark.parametrize(
    ("kind", "behind"), [("distilbert", 2 * 64 * 96), ("bert", 64 * 64 + 2 * 64 * 96)]
)
def test_the_last_block_counts_behind_its_attention_for_first_tokens_only(kind, behind):
    sizes = {"vocab_size": 256, "dim": 64, "n_layers": 4, "n_heads": 4, "hidden_dim": 96}
    if kind == "bert":
        sizes = {
            "vocab_size": 256,
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 96,
        }
    cost = StepCost.of(network(kind, **sizes), frozen=False)
    assert cost.first_only == 6 * behind
    work = StepWork((), (), examples=2, targets=2, tokens=30, squares=10**2 + 20**2)
    whole = cost.per_token * 30 + cost.per_square * 500
    assert cost.step(work) == whole - 6 * behind * 28


def test_a_1_3_billion_gpt_2_needs_8_gigaflops_a_token():
    gpt = network("gpt2", n_embd=2048, n_layer=24, n_head=16)
    assert StepCost.of(gpt, frozen=False).per_token == pytest.approx(6 * 1.311e9, rel=0.002)


def test_peaks_come_from_the_catalog_and_are_blank_where_it_knows_none():
    assert peak_flops("NVIDIA H200", "bf16") == 9.89e14
    assert peak_flops("NVIDIA H100 PCIe", "bf16") == 7.56e14
    assert peak_flops("NVIDIA A100-SXM4-80GB", "bf16") == 3.12e14
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp8") is None
    assert peak_flops("Radeon", "bf16") is None


@pytest.mark.parametrize(
    ("events", "waited", "bound", "shares"),
    [
        (
            [("c10d::allreduce_", 4, 0.6), ("aten::mm", 9, 0.3)],
            0.0,
            "communication",
            (0.3, 0.6, 0.0, 0.1),
        ),
        ([("aten::mm", 9, 0.7), ("aten::add", 9, 0.1)], 0.1, "compute", (0.8, 0.0, 0.1, 0.1)),
        ([("aten::mm", 9, 0.1)], 0.7, "data", (0.1, 0.0, 0.7, 0.2)),
        ([("aten::mm", 9, 0.2)], 0.0, "host", (0.2, 0.0, 0.0, 0.8)),
        (
            [("aten::mm", 9, 3.0), ("gloo:all_gather", 1, 1.0)],
            0.0,
            "compute",
            (0.75, 0.25, 0.0, 0.0),
        ),
    ],
)
def test_the_largest_share_of_the_time_is_the_verdict(events, waited, bound, shares):
    profile = judge_profile(events, steps=2, seconds=1.0, waited=waited)
    assert profile.bound == bound
    assert tuple(
        profile.shares[n] for n in ("compute", "communication", "data", "host")
    ) == pytest.approx(shares)
    assert profile.operators[0].share == pytest.approx(max(took for _, _, took in events))
    assert is_collective("nccl:all_reduce")


def test_a_collective_counts_where_no_operator_hides_it():
    collectives, operators = (
        [(1.0, 4.0), (3.0, 6.0), (9.0, 10.0)],
        [(0.0, 2.0), (1.5, 1.8), (5.0, 5.5)],
    )
    assert exposed_seconds(collectives, operators) == pytest.approx(3.0 + 0.5 + 1.0)
    assert exposed_seconds([], operators) == 0.0
    assert exposed_seconds(collectives, [(0.0, 20.0)]) == 0.0


# rank 1 comes late to each sum of gradients, and rank 0 waits in DDP, outside of any operator
LATE = """
import sys, time, torch, torch.distributed as dist
from pathlib import Path
from rekindle.train.parallel import _sum
from rekindle.train.throughput import SKIPPED, Profiler

TIPS = {"communication": "wait less", "host": "sleep less"}
dist.init_process_group("gloo")
rank = dist.get_rank()
network = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100))
network.register_comm_hook(None, _sum)
profiler = Profiler(3, torch.device("cpu"), Path(sys.argv[1]) / f"{rank}.json", TIPS)
profiler.step(0.0)
for _ in range(SKIPPED + 3):
    loss = network(torch.ones(4, 100)).sum()
    time.sleep(0.1 * rank)
    loss.backward()
    profiler.step(0.0)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_waiting_for_a_late_rank_is_communication(tmp_path):
    (tmp_path / "late.py").write_text(LATE)
    words = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        tmp_path / "late.py",
        tmp_path,
    ]
    subprocess.run([sys.executable, *map(str, words)], check=True, timeout=120)
    waits, sleeps = (Profile.read(tmp_path / f"{rank}.json") for rank in range(2))
    assert waits.bound == "communication"
    assert waits.shares["communication"] > 0.8
    assert sleeps.bound == "host"
    assert (waits.advice, sleeps.advice) == ("wait less", "sleep less")


def test_advice_names_nothing_that_is_so_already_and_nothing_that_would_be_refused():
    train = TrainSpec(steps=1, global_batch_size=16, precision="fp32")
    one = Layout(micro_batch_size=16)
    said = tips(train, one, Cell("text"))
    assert "bf16" in said["compute"]
    assert "compile" in said["compute"]
    assert "micro_batch_size" not in said["host"]
    assert "max_length" in said["compute"]
    assert "max_length" not in tips(train, one, Cell("image"))["compute"]
    there = TrainSpec(steps=1, global_batch_size=16, precision="bf16", compile=True)
    said = tips(there, one, Cell("text", precision="bf16", compile=True))
    assert "bf16" not in said["compute"]
    assert "compile" not in said["compute"] + said["host"]
    divided = Layout(tp=2, micro_batch_size=4)
    said = tips(train, divided, Cell("tokens", ("tp",)))
    assert "layout.tp" in said["communication"]
    assert "layout.shard" not in said["communication"]
    assert "micro_batch_size" in said["host"]
    pictures = Cell("image", ("tp",))
    assert dataclasses.replace(pictures, compile=True) not in layout_support.tested()
    said = tips(train, divided, pictures)
    assert "compile" not in said["compute"] + said["host"]


SLOW = """
import time
from rekindle.tasks.image_classification import ImageClassification

class Slow(ImageClassification):
    def logits(self, network, inputs):
        if not network.training:
            time.sleep(2.0)
        return super().logits(network, inputs)
"""


@pytest.mark.slow
def test_the_time_of_a_validation_is_in_no_step(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    task, data = f"{tmp_path / 'slow.py'}:Slow", DataSpec(source="sklearn:digits")
    ingest(data, "image", "", tmp_path / "examples")
    shard(tmp_path / "examples", data, CNN, task, tmp_path / "shards")
    train = TrainSpec(steps=4, validate_every=2, lr=1e-3, global_batch_size=32)
    gang = Gang(tmp_path / "g", tmp_path / "shards", ranks=1, train=train, task=task).start()
    rows = list(read_history(gang.finish().folder / "training-1" / "history.jsonl"))
    assert [row.step for row in rows if row.validation_loss is not None] == [2, 4]
    assert max(row.step_seconds for row in rows) < 2.0
    assert min(row.samples_per_second for row in rows) > 32 / 2.0
