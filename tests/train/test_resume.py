"""A training that is killed, stopped or corrupted anywhere ends with the same bits as one that was left alone.

Real torchrun, real signals, digits, two ranks on gloo.
"""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rekindle.data.ingest import ingest
from rekindle.data.manifest import open_shards
from rekindle.data.order import SampleOrder
from rekindle.data.shard import shard
from rekindle.launch.rendezvous import Rendezvous
from rekindle.records import TrainingSummary
from rekindle.spec.identity import file_sha256
from rekindle.spec.model import DataSpec, ModelSpec, TrainSpec
from rekindle.train.checkpoint import broken, newest
from rekindle.train.history import read_history
from rekindle.train.job import Job
from rekindle.train.ledger import read_ledger

STEPS = 60
EVERY = 10
TASK = "image_classification"
TRAIN = TrainSpec(steps=STEPS, checkpoint={"every": EVERY, "keep": 2}, lr=1e-3)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    data = DataSpec(source="sklearn:digits")
    ingest(data, "image", "", folder / "examples")
    shard(folder / "examples", data, ModelSpec(), TASK, folder / "shards")
    return folder / "shards"


@dataclasses.dataclass
class Gang:
    """A job in a folder, and the process that runs it."""

    folder: Path
    shards: Path
    ranks: int = 2
    train: TrainSpec = TRAIN

    def start(self):
        self.attempt = getattr(self, "attempt", 0) + 1
        self.log = self.folder / f"log-{self.attempt}.txt"
        job = Job.of(
            artifact_root=str(self.folder), run_key="key", task=TASK, shards=str(self.shards),
            output=str(self.folder / f"model-{self.attempt}"), history=str(self.folder / f"training-{self.attempt}"),
            init="", init_from="base", train=self.train,
            model=ModelSpec(source={"channels": [32, 64], "hidden": 64, "dropout": 0.3}),
        )  # fmt: skip
        job.write(self.folder / "job.json")
        environment = {
            **os.environ,
            **Rendezvous(ranks_per_node=self.ranks).environment(),
            "OMP_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("gang.py")), str(self.folder / "job.json")],
            stdout=self.log.open("w"), stderr=subprocess.STDOUT, env=environment, start_new_session=True,
        )  # fmt: skip
        return self

    def until_step(self, step):
        """Wait until the history of this attempt has reached `step`."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            rows = list(read_history(self.checkpoints / "history.jsonl"))
            if rows and rows[-1].step >= step:
                return self
            assert self.process.poll() is None, self.said
            time.sleep(0.005)
        raise AssertionError(f"step {step} was not reached\n{self.said}")

    def finish(self, code=0):
        assert self.process.wait(120) == code, self.said
        return self

    @property
    def checkpoints(self):
        return self.folder / "checkpoints" / "key"

    @property
    def said(self):
        return self.log.read_text()

    @property
    def weights(self):
        return file_sha256(self.folder / f"model-{self.attempt}" / "model.safetensors")

    @property
    def losses(self):
        rows = read_history(self.folder / f"training-{self.attempt}" / "history.jsonl")
        return [(row.step, row.loss, row.lr, row.grad_norm) for row in rows]

    def workers(self):
        return [
            p
            for p in psutil.Process(self.process.pid).children(recursive=True)
            if "rekindle.train.worker" in " ".join(p.cmdline())
            and "torch.distributed.run" not in " ".join(p.cmdline())
        ]


@pytest.fixture
def gang(tmp_path, shards):
    made = Gang(tmp_path, shards)
    yield made
    process = getattr(made, "process", None)
    if process is not None and process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, shards):
    return Gang(tmp_path_factory.mktemp("whole"), shards).start().finish()


def same(gang, uninterrupted):
    assert gang.losses == uninterrupted.losses
    assert gang.weights == uninterrupted.weights


def test_an_uninterrupted_run_learns_and_says_so(uninterrupted):
    summary = TrainingSummary.read(uninterrupted.folder / "training-1" / "training.json")
    assert (summary.steps, summary.world_size) == (STEPS, 2)
    assert [step for step, *_ in uninterrupted.losses] == list(range(1, STEPS + 1))
    assert uninterrupted.losses[-1][1] < 0.5 * uninterrupted.losses[0][1]
    assert newest(uninterrupted.checkpoints, "key").step == STEPS


def test_a_killed_worker_restarts_the_gang_and_changes_no_bit(gang, uninterrupted):
    gang.start().until_step(25)
    gang.workers()[1].send_signal(signal.SIGKILL)
    gang.finish()
    assert "restarting all ranks (1 of 3)" in gang.said
    assert re.search(r"resumed from the checkpoint of step (10|20) of 60 on 2 ranks", gang.said)
    same(gang, uninterrupted)


def test_a_killed_tree_resumes_and_changes_no_bit(gang, uninterrupted):
    gang.start().until_step(35)
    workers = gang.workers()
    gang.process.kill()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive, "workers outlived their supervisor"
    gang.process.wait()
    gang.start().finish()
    assert re.search(r"resumed from the checkpoint of step (20|30) of 60", gang.said)
    same(gang, uninterrupted)


def test_sigterm_saves_exits_with_75_and_resumes_where_it_stopped(gang, uninterrupted):
    gang.start().until_step(13)
    gang.process.send_signal(signal.SIGTERM)
    gang.finish(75)
    stopped = newest(gang.checkpoints, "key").step
    assert stopped >= 13
    assert stopped % EVERY, "the save came from the signal, not from the interval"
    gang.start().finish()
    assert f"resumed from the checkpoint of step {stopped} of 60" in gang.said
    same(gang, uninterrupted)


def test_a_broken_checkpoint_falls_back_loudly(gang, uninterrupted):
    gang.start().until_step(35)
    workers = gang.workers()
    gang.process.kill()
    psutil.wait_procs(workers, timeout=20)
    gang.process.wait()
    last = newest(gang.checkpoints, "key")
    victim = next(last.folder.glob("*.distcp"))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    assert "does not match its hash" in broken(last)
    gang.start().finish()
    assert f"{last.name} is broken" in gang.said
    assert f"resumed from the checkpoint of step {last.step - EVERY}" in gang.said
    same(gang, uninterrupted)


def test_one_rank_gives_the_same_curve_as_two_up_to_rounding(gang, uninterrupted):
    gang.ranks = 1
    gang.start().finish()
    for (step, loss, lr, _), (other_step, other_loss, other_lr, _) in zip(
        gang.losses, uninterrupted.losses, strict=True
    ):
        assert (step, lr) == (other_step, other_lr)
        assert loss == pytest.approx(other_loss, rel=1e-3, abs=1e-5)


def test_a_diverged_loss_is_not_tried_again(gang):
    # decoupled decay multiplies the weights by 1 - 99 * 10 a step, past the range of fp32 in 13 steps
    gang.train = TrainSpec(steps=40, lr=99.0, warmup=0, weight_decay=10, lr_schedule="constant")
    gang.start().finish(1)
    assert "restarting" not in gang.said
    assert "lower train.lr" in gang.said


def test_metrics_of_every_step_are_handed_on_once(gang, uninterrupted):
    handed = [
        step
        for line in uninterrupted.said.splitlines()
        if line.startswith("rows ")
        for step in json.loads(line[5:])
    ]
    assert handed == list(range(1, STEPS + 1))


LAYOUTS = {
    "four replicas": (4, "auto"),
    "two shards": (2, {"shard": 2}),
    "four shards": (4, {"shard": 4}),
    "divided matrices": (2, {"tp": 2}),
    "replicas of divided matrices": (4, {"tp": 2}),
    "a pipeline": (2, {"pp": 2}),
}


def laid_out(ranks_and_layout):
    ranks, layout = ranks_and_layout
    return {
        "ranks": ranks,
        "train": TRAIN.model_copy(update={"layout": TrainSpec(layout=layout).layout}),
    }


def killed_at(gang, step):
    """Start it, and kill everything at once when it has reached the step; returns the step of the newest checkpoint."""
    gang.start().until_step(step)
    workers = gang.workers()
    gang.process.kill()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive
    gang.process.wait()
    return newest(gang.checkpoints, "key").step


@pytest.mark.parametrize(
    "layout",
    [pytest.param(n, marks=() if n == "two shards" else pytest.mark.slow) for n in LAYOUTS],
)
def test_a_killed_tree_resumes_to_the_same_bits_in_this_layout(tmp_path, shards, layout):
    whole = Gang(tmp_path / "whole", shards, **laid_out(LAYOUTS[layout]))
    killed = Gang(tmp_path / "killed", shards, **laid_out(LAYOUTS[layout]))
    for gang in (whole, killed):
        gang.folder.mkdir()
    whole.start().finish()
    step = killed_at(killed, 25)
    killed.start().finish()
    assert f"resumed from the checkpoint of step {step} of 60" in killed.said
    same(killed, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((4, {"shard": 4}), (2, {"shard": 2})),
        ((4, {"dp": 2, "shard": 2}), (1, "auto")),
        ((2, {"shard": 2}), (2, {"tp": 2})),
        ((4, {"tp": 2, "shard": 2}), (2, {"pp": 2})),
    ],
    ids=[
        "4 shards to 2",
        "2 x 2 to 1",
        "shards to divided matrices",
        "shards of divided matrices to a pipeline",
    ],
)
def test_another_layout_goes_on_where_the_first_stopped(tmp_path, shards, before, after):
    whole = Gang(tmp_path / "whole", shards, **laid_out(before))
    moved = Gang(tmp_path / "moved", shards, **laid_out(before))
    for gang in (whole, moved):
        gang.folder.mkdir()
    whole.start().finish()
    step = killed_at(moved, 25)
    for name, value in laid_out(after).items():
        setattr(moved, name, value)
    moved.start().finish()
    assert f"resumed from the checkpoint of step {step} of 60 on {after[0]} ranks" in moved.said
    for (a, loss, lr, _), (b, other, other_lr, _) in zip(
        whole.losses[step : step + 5], moved.losses[step : step + 5], strict=True
    ):
        assert (a, lr) == (b, other_lr)
        assert other == pytest.approx(loss, rel=1e-6)


def test_the_ledger_of_an_interrupted_and_resized_run_holds_every_example_once(gang):
    gang.train = TRAIN.model_copy(update={"ledger": True})
    killed_at(gang, 25)
    gang.ranks = 1
    gang.start().until_step(40)
    workers = gang.workers()
    gang.process.kill()
    psutil.wait_procs(workers, timeout=20)
    gang.process.wait()
    gang.ranks = 2
    gang.start().finish()
    rows = open_shards(gang.shards)
    names = rows.table("train").column("id").to_pylist()
    order = SampleOrder(rows=len(names), global_batch_size=TRAIN.global_batch_size, seed=TRAIN.seed)
    expected = {
        step + 1: sorted(names[row] for row in order.batch(step).rows if row >= 0)
        for step in range(STEPS)
    }
    assert read_ledger(gang.checkpoints) == expected
