"""One training on two nodes with separate network stacks: a killed node that comes back changes no bit of the result.

Two namespaces joined by a veth pair, one rank on each, checkpoints in a folder that both see.
"""

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rekindle.launch.rendezvous import Rendezvous
from rekindle.spec.identity import file_sha256
from rekindle.spec.model import ModelSpec, TrainSpec
from rekindle.train.history import read_history
from rekindle.train.job import Job
from tests.processes import ranks_of

STEPS, PORT = 60, 29471
TASK = "image_classification"
HERE = Path(__file__).parent


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def network():
    """Names of two namespaces; node i has the address 10.77.0.(1 + i)."""
    if not shutil.which("ip"):
        pytest.skip("iproute2 is not installed")
    names = [f"rekindle-{os.getpid()}-{node}" for node in range(2)]
    links = [f"rk{os.getpid() % 10**6}-{node}" for node in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            links[0],
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            links[1],
            "netns",
            names[1],
        )
    except subprocess.CalledProcessError as error:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    for node, (name, link) in enumerate(zip(names, links, strict=True)):
        ip("-n", name, "addr", "add", f"10.77.0.{1 + node}/24", "dev", link)
        ip("-n", name, "link", "set", link, "up")
        ip("-n", name, "link", "set", "lo", "up")
    yield names
    for name in names:
        ip("netns", "del", name)


@dataclasses.dataclass
class Cluster:
    """Two nodes and the folder that they share."""

    folder: Path
    shards: Path
    network: list
    patience: float = 120.0
    launcher: str = "auto"

    def __post_init__(self):
        self.processes, self.logs = (
            [None, None],
            [self.folder / f"log-{node}.txt" for node in range(2)],
        )

    def start(self, *nodes):
        for node in nodes:
            job = Job.of(
                artifact_root=str(self.folder),
                run_key="key",
                task=TASK,
                shards=str(self.shards),
                output=str(self.folder / f"model-{node}"),
                history=str(self.folder / f"training-{node}"),
                init="",
                init_from="base",
                train=TrainSpec(
                    steps=STEPS, checkpoint={"every": 10}, lr=1e-3, launcher=self.launcher
                ),
                model=ModelSpec(source={"channels": [16, 32], "hidden": 32, "dropout": 0.3}),
            )
            file = self.folder / f"job-{node}.json"
            job.write(file)
            place = Rendezvous(2, node, 1, "10.77.0.1", PORT, self.patience, "5" * 64)
            self.processes[node] = subprocess.Popen(
                [
                    "ip",
                    "netns",
                    "exec",
                    self.network[node],
                    sys.executable,
                    str(HERE / "gang.py"),
                    str(file),
                ],
                stdout=self.logs[node].open("a"),
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={
                    **os.environ,
                    **place.environment(),
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": str(HERE.parents[1]),
                    "REKINDLE_PRELOADED": "",
                },  # a node's processes are descendants of it
            )
        return self

    def until_step(self, step):
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            rows = list(read_history(self.folder / "checkpoints" / "key" / "history.jsonl"))
            if rows and rows[-1].step >= step:
                return self
            assert all(p.poll() is None for p in self.processes), self.said
            time.sleep(0.01)
        raise AssertionError(f"step {step} was not reached\n{self.said}")

    def kill(self, node):
        """The whole node at once."""
        top = psutil.Process(self.processes[node].pid)
        family = [top, *top.children(recursive=True)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended with another one
                process.kill()
        self.processes[node].wait()
        psutil.wait_procs(family, timeout=10)

    def finish(self, code=0, nodes=(0, 1), within=200):
        for node in nodes:
            assert self.processes[node].wait(within) == code, self.said
        return self

    @property
    def said(self):
        return "\n".join(
            f"--- node {node}\n{log.read_text()}"
            for node, log in enumerate(self.logs)
            if log.exists()
        )

    @property
    def result(self):
        rows = read_history(self.folder / "training-0" / "history.jsonl")
        return file_sha256(self.folder / "model-0" / "model.safetensors"), [
            (r.step, r.loss, r.grad_norm) for r in rows
        ]

    def clear(self):
        for process in self.processes:
            if process is not None and process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, shards, network):
    cluster = Cluster(tmp_path_factory.mktemp("undisturbed"), shards, network).start(0, 1).finish()
    assert not (cluster.folder / "training-1").exists(), "only the first node writes outputs"
    return cluster


@pytest.fixture
def cluster(tmp_path, shards, network):
    made = Cluster(tmp_path, shards, network)
    yield made
    made.clear()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 0])
def test_a_killed_node_that_is_started_again_changes_no_bit(victim, cluster, undisturbed):
    cluster.start(0, 1).until_step(25).kill(victim)
    cluster.start(victim).finish()
    survivor = cluster.logs[1 - victim].read_text()
    assert f"node {victim}" in survivor
    assert "is gone" in survivor
    assert "restarting all ranks (1 of 3)" in survivor
    assert re.search(r"resumed from the checkpoint of step [1-5]0 of 60 on 2 ranks", cluster.said)
    assert cluster.result == undisturbed.result


@pytest.mark.slow
def test_a_killed_rank_on_one_node_restarts_the_gang_on_both(cluster, undisturbed):
    cluster.start(0, 1).until_step(25)
    (rank,) = ranks_of(cluster.processes[1].pid)
    rank.kill()
    cluster.finish()
    for log in cluster.logs:
        assert "rank 1 was killed by SIGKILL" in log.read_text(), "both nodes name the same cause"
    assert cluster.result == undisturbed.result


@pytest.mark.slow
def test_sigterm_on_one_node_saves_and_ends_both_with_75(cluster, undisturbed):
    cluster.start(0, 1).until_step(13)
    cluster.processes[1].send_signal(signal.SIGTERM)
    cluster.finish(75)
    cluster.start(0, 1).finish()
    assert cluster.result == undisturbed.result


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed")
def test_an_mpirun_on_each_node_trains_the_bits_of_torchrun_through_a_killed_node_and_a_stop(
    cluster, undisturbed
):
    cluster.launcher = "mpirun"
    cluster.start(0, 1).until_step(13).kill(1)
    cluster.start(1).until_step(35)
    family = psutil.Process(cluster.processes[0].pid).children(recursive=True)
    assert "mpirun" in {process.name() for process in family}
    cluster.processes[1].send_signal(signal.SIGTERM)
    cluster.finish(75)
    cluster.start(0, 1).finish()
    assert "restarting all ranks (1 of 3)" in cluster.said
    assert cluster.result == undisturbed.result


@pytest.mark.slow
def test_a_node_that_stays_away_ends_the_others_with_75(cluster):
    cluster.patience = 10.0
    cluster.start(0, 1).until_step(13).kill(0)
    cluster.finish(75, nodes=[1], within=60)
    assert "node 1 of 2 gave up after 10 s of waiting for node 0" in cluster.said
    assert "the same command resumes from the last checkpoint" in cluster.said
