"""A training that is killed, stopped or corrupted anywhere ends with the same bits as one that was left alone.

Real torchrun, real signals, one to four ranks on gloo: a network of convolutions on digits, and for the layouts a GPT-2 with
dropout wherever it has one, on packed documents of mixed length, several micro-batches a step.
"""

import json
import os
import random
import re
import shutil
import signal
import sys

import psutil
import pytest

from rekindle.data.manifest import open_shards
from rekindle.data.order import SampleOrder
from rekindle.launch import heartbeats
from rekindle.launch.process import is_running
from rekindle.records import TrainingSummary
from rekindle.spec.model import LayoutSpec, TrainSpec
from rekindle.train.checkpoint import broken, newest
from rekindle.train.history import read_history
from tests.support.ledger import read_ledger
from tests.support.train_resume import (
    DISTILBERT,
    EVERY,
    GPT2,
    LM_EVERY,
    LM_STEPS,
    LM_TRAIN,
    STEPS,
    TRAIN,
    Gang,
    written,
)


@pytest.fixture
def gang(tmp_path, shards):
    return Gang(tmp_path, shards)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, shards):
    return Gang(tmp_path_factory.mktemp("whole"), shards).start().finish()


def same(gang, uninterrupted):
    assert gang.losses == uninterrupted.losses
    assert gang.weights == uninterrupted.weights


def test_an_uninterrupted_run_learns_and_says_so(uninterrupted):
    summary = TrainingSummary.read(uninterrupted.folder / "training-1" / "training.json")
    assert (summary.steps, summary.world_size) == (STEPS, 2)
    assert (summary.layout, summary.device) == ("dp 2", "cpu")
    assert [step for step, *_ in uninterrupted.losses] == list(range(1, STEPS + 1))
    assert uninterrupted.losses[-1][1] < 0.5 * uninterrupted.losses[0][1]
    assert newest(uninterrupted.checkpoints, "key").step == STEPS


@pytest.mark.slow
def test_a_killed_worker_restarts_the_gang_and_changes_no_bit(gang, uninterrupted):
    gang.start().until_step(25)
    gang.workers()[1].send_signal(signal.SIGKILL)
    gang.finish()
    assert "restarting all ranks (1 of 3)" in gang.said
    assert re.search(r"resumed from the checkpoint of step (10|20) of 60 on 2 ranks", gang.said)
    same(gang, uninterrupted)


@pytest.mark.slow
def test_ranks_that_cannot_be_forks_are_executed_and_no_bit_differs(gang, uninterrupted):
    """As with a GPU; here because a thread runs in every Python."""
    thread = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    (gang.folder / "sitecustomize.py").write_text(thread)
    gang.environment["PYTHONPATH"] = os.pathsep.join([str(gang.folder), *sys.path])
    gang.start().until_step(25)
    workers = gang.workers()
    assert all("rekindle.train.worker" in worker.cmdline() for worker in workers)
    workers[1].send_signal(signal.SIGKILL)
    gang.finish()
    assert "restarting all ranks (1 of 3)" in gang.said
    same(gang, uninterrupted)


@pytest.mark.slow
def test_a_killed_tree_resumes_and_changes_no_bit(gang, uninterrupted):
    gang.start().until_step(35)
    workers = gang.workers()
    gang.process.kill()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive, "workers outlived their supervisor"
    gang.process.wait()
    gang.start().finish()
    # the kill comes some steps after the one that was waited for, on a busy machine many
    assert re.search(r"resumed from the checkpoint of step [2-5]0 of 60", gang.said)
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_one_rank_gives_the_same_curve_as_two_up_to_rounding(gang, uninterrupted):
    gang.ranks = 1
    gang.start().finish()
    for (step, loss, lr, _), (other_step, other_loss, other_lr, _) in zip(
        gang.losses, uninterrupted.losses, strict=True
    ):
        assert (step, lr) == (other_step, other_lr)
        assert loss == pytest.approx(other_loss, rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_auto_goes_on_in_the_precision_that_the_training_began_in(gang):
    """As when a machine with GPUs is replaced by one without bf16: a run never mixes two."""
    half = TRAIN.model_copy(update={"precision": "bf16", "deterministic": True})
    gang.train = half
    gang.environment["REKINDLE_PRELOADED"] = ""  # /proc shows the environment of who was executed
    gang.start().until_committed()
    environment = gang.workers()[0].environ()
    assert environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert environment["NCCL_ALGO"] == "Ring"
    gang.process.send_signal(signal.SIGTERM)
    gang.finish(code=75)
    gang.train = half.model_copy(update={"precision": "auto"})
    gang.start().finish()
    assert re.search(r"resumed from the checkpoint of step \d+ of 60 on 2 ranks, bf16", gang.said)
    summary = TrainingSummary.read(gang.folder / "training-2" / "training.json")
    assert (summary.precision, summary.deterministic) == ("bf16", True)


@pytest.mark.slow
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


def killed_at(gang, step):
    """Start it, and kill everything at once when it has reached the step; returns the step of the newest checkpoint."""
    gang.start().until_step(step)
    workers = gang.workers()
    gang.process.kill()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive
    gang.process.wait()
    return newest(gang.checkpoints, "key").step


@pytest.mark.slow
def test_a_killed_tree_with_sharded_weights_resumes_to_the_same_bits(tmp_path, shards):
    train = TRAIN.model_copy(update={"layout": LayoutSpec(shard=2)})
    whole = Gang(tmp_path / "whole", shards, train=train).start().finish()
    killed = Gang(tmp_path / "killed", shards, train=train)
    step = killed_at(killed, 25)
    killed.start().finish()
    assert f"resumed from the checkpoint of step {step} of 60" in killed.said
    same(killed, whole)


POINTS = {
    "while the ranks start": lambda gang: gang.until_phase("start"),
    "in the first step": lambda gang: gang.until_phase("step"),
    "in a step, before there is a checkpoint": lambda gang: gang.until_step(4),
    "when a save has opened its first file": lambda gang: gang.until_saved("*"),
    "when a save has come to its metadata": lambda gang: gang.until_saved(".metadata"),
    "when a save is about to commit": lambda gang: gang.until_saved("manifest.json.draft"),
    "right after a commit": lambda gang: gang.until_saved("manifest.json"),
    "in evaluation": lambda gang: gang.until_phase("validation"),
    "in a step, later": lambda gang: gang.until_step(37),
    "while it finishes": lambda gang: gang.until_phase("finish"),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_ten_points_it_goes_on_from_a_whole_checkpoint_and_changes_no_bit(
    gang, tmp_path, shards
):
    # a row at a time and twice the steps: else all are done before a busy machine has come to each point
    update = {"micro_batch_size": 1, "max_restarts": len(POINTS), "steps": 2 * STEPS}
    slow = TRAIN.model_copy(update=update)
    uninterrupted = Gang(tmp_path / "whole", shards, train=slow).start().finish()
    gang.train = slow
    gang.start()
    steps, torn = [], []
    for point, reach in POINTS.items():
        reach(gang)
        gang.kill_ranks()
        folders = gang.checkpoints.glob("step-*")
        torn += [point for folder in folders if not (folder / "manifest.json").exists()]
        found = newest(gang.checkpoints, "key")
        steps.append(found.step if found else 0)
        began = f"restarting all ranks ({len(steps)} of {len(POINTS)})"
        gang.until(lambda began=began: began in gang.said, f"{point}: {began}")
        gang.until(
            lambda: (
                not any(gang.status.glob("rank-*.signs"))
                or any(is_running(s.pid) for s in heartbeats.read(gang.status))
            ),
            "a new gang",
        )
    gang.finish()
    assert any("a save" in point for point in torn), "no kill fell into a save"
    assert steps == sorted(steps)
    resumed = [
        int(s) for s in re.findall(r"resumed from the checkpoint of step (\d+) of 120", gang.said)
    ]
    assert set(resumed) <= set(steps), (
        "it went on from a checkpoint that was not whole when it died"
    )
    assert steps[-1] >= 110
    same(gang, uninterrupted)


class Texts:
    """A GPT-2 on documents, in one layout or another; an uninterrupted run of each is made once."""

    def __init__(self, folder):
        self.folder, self.made = folder, {}
        self.shards = written(folder, "causal_lm", GPT2)

    def gang(self, folder, ranks, layout):
        train = LM_TRAIN.model_copy(update={"layout": TrainSpec(layout=layout).layout})
        return Gang(folder, self.shards, ranks, train, "causal_lm", GPT2)

    def whole(self, ranks, layout):
        key = f"{ranks} {layout}"
        if key not in self.made:
            folder = self.folder / f"whole-{len(self.made)}"
            self.made[key] = self.gang(folder, ranks, layout).start().finish()
        return self.made[key]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return Texts(tmp_path_factory.mktemp("texts"))


LAYOUTS = {
    "two replicas": (2, "auto"),
    "four replicas": (4, "auto"),
    "two shards": (2, {"shard": 2}),
    "four shards": (4, {"shard": 4}),
    "matrices divided by two": (2, {"tp": 2}),
    "matrices divided by four": (4, {"tp": 4}),
    "a pipeline": (2, {"pp": 2}),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_in_a_step_and_in_a_save_it_ends_with_the_same_bits_in_this_layout(
    tmp_path, texts, layout
):
    ranks, degrees = LAYOUTS[layout]
    whole = texts.whole(ranks, degrees)
    killed = texts.gang(tmp_path / "killed", ranks, degrees).start()
    killed.until_step(random.Random(layout).randrange(LM_EVERY + 1, 3 * LM_EVERY))
    killed.until_committed().kill_ranks()
    killed.until(lambda: "restarting all ranks (1 of 3)" in killed.said, "a restart")
    killed.until_saved("*").kill_ranks()
    killed.finish()
    resumed = re.findall(r"resumed from the checkpoint of step (\d+)", killed.said)
    assert len(resumed) == 2
    same(killed, whole)


MOVES = {
    "4 shards to 2": ((4, {"shard": 4}), (2, {"shard": 2})),
    "4 shards to replicas of divided matrices": ((4, {"shard": 4}), (4, {"tp": 2})),
    "replicas of divided matrices to one rank": ((4, {"tp": 2}), (1, "auto")),
    "shards to divided matrices": ((2, {"shard": 2}), (2, {"tp": 2})),
    "shards of divided matrices to a pipeline": ((4, {"tp": 2, "shard": 2}), (2, {"pp": 2})),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("move", MOVES)
def test_another_layout_goes_on_where_the_first_stopped(tmp_path, texts, move):
    before, after = MOVES[move]
    whole = texts.whole(*before)
    moved = texts.gang(tmp_path / "moved", *after)
    shutil.copytree(whole.checkpoints, moved.checkpoints)
    step = 2 * LM_EVERY
    for folder in moved.checkpoints.glob("step-*"):  # as if it had died then
        if int(folder.name[5:14]) > step:
            shutil.rmtree(folder)
    moved.start().finish()
    assert (
        f"resumed from the checkpoint of step {step} of {LM_STEPS} on {after[0]} ranks"
        in moved.said
    )
    for (a, loss, lr, _), (b, other, other_lr, _) in zip(
        whole.losses[step : step + 5], moved.losses[step : step + 5], strict=True
    ):
        assert (a, lr) == (b, other_lr)
        assert other == pytest.approx(loss, rel=1e-6)


@pytest.mark.slow
def test_stopped_twice_the_second_time_in_a_save_nothing_is_lost_and_no_bit_changes(
    tmp_path, texts
):
    stopped = texts.gang(tmp_path / "stopped", *LAYOUTS["two shards"])
    step = 0
    for moment in (lambda: stopped.until_step(5), lambda: stopped.until_saved("*")):
        stopped.start()
        moment()
        stopped.process.send_signal(signal.SIGTERM)
        stopped.finish(75)
        if step:
            assert f"resumed from the checkpoint of step {step} of {LM_STEPS}" in stopped.said
        before, step = step, newest(stopped.checkpoints, "key").step
        assert before < step < LM_STEPS
        assert [r.step for r in read_history(stopped.checkpoints / "history.jsonl")][-1] == step
    stopped.start().finish()
    assert f"resumed from the checkpoint of step {step} of {LM_STEPS}" in stopped.said
    same(stopped, texts.whole(*LAYOUTS["two shards"]))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_blocks_and_texts_of_any_length_go_on_within_a_millionth(tmp_path):
    if shutil.which("g++") is None:
        pytest.skip("torch.compile needs g++ on a CPU")
    data = tmp_path / "data"
    data.mkdir()
    shards = written(data, "text_classification", DISTILBERT)
    train = LM_TRAIN.model_copy(update={"compile": True})
    whole, killed = (
        Gang(tmp_path / name, shards, 2, train, "text_classification", DISTILBERT)
        for name in ("whole", "killed")
    )
    whole.start().finish()
    killed.start().until_step(LM_EVERY + 3).until_committed().kill_ranks()
    killed.finish()
    assert re.search(r"resumed from the checkpoint of step \d+", killed.said)
    pairs = list(zip(whole.losses, killed.losses, strict=True))
    for (step, loss, lr, _), (other_step, other, other_lr, _) in pairs:
        assert (step, lr) == (other_step, other_lr)
        assert other == pytest.approx(loss, rel=1e-6)


@pytest.mark.slow
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
    order = SampleOrder(
        rows=[len(names)], global_batch_size=TRAIN.global_batch_size, seed=TRAIN.seed
    )
    expected = {
        step + 1: sorted(names[row] for row in order.batch(step).rows if row >= 0)
        for step in range(STEPS)
    }
    assert read_ledger(gang.checkpoints) == expected
