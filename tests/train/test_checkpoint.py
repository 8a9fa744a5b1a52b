"""Checkpoints: any layout into any other, folders and object stores, and everything that can go wrong.

The cases are in checkpoint_cases.py, grouped by what they need: one launch of real ranks a group, a
real S3 protocol (moto), a real small file system. Each is a test of its own here.
"""

import datetime
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import psutil
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from rekindle.data.ingest import ingest
from rekindle.data.shard import shard
from rekindle.errors import CheckpointError
from rekindle.launch.rendezvous import Rendezvous
from rekindle.spec.identity import file_sha256
from rekindle.spec.model import CheckpointSpec, DataSpec, ModelSpec, TrainSpec
from rekindle.storage import ObjectStore, object_store
from rekindle.train.checkpoint import load, newest
from rekindle.train.history import read_history
from rekindle.train.job import Job
from rekindle.train.manifest import retained
from tests.support.s3 import s3_server
from tests.train import checkpoint_cases

CASES = Path(checkpoint_cases.__file__)
RANKS = {"layouts": 4, "folder": 1, "full": 1, "store": 2, "lost": 2}


def start(group, folder, root, **environment):
    """The ranks of a group, started."""
    folder.mkdir(exist_ok=True)
    return [
        subprocess.Popen(
            [sys.executable, str(CASES), group, str(folder), str(root)],
            env={
                **os.environ,
                "PYTHONPATH": str(CASES.parents[2]),
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "WORLD_SIZE": str(RANKS.get(group, 1)),
                **environment,
            },
            stdout=(folder / f"{rank}.txt").open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank in range(RANKS.get(group, 1))
    ]


def run(group, folder, root, **environment):
    """What the ranks of a group found, by rank and name."""
    gang = start(group, folder, root, **environment)
    try:
        for process in gang:
            process.wait(timeout=240)
    finally:
        for process in gang:
            process.kill()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(gang))]


def cases(group):
    """One parameter a case; the test's name tells it."""
    names = [name for name in vars(checkpoint_cases) if name.startswith(f"{group}_")]
    assert names
    return pytest.mark.parametrize("name", names, ids=[n.removeprefix(f"{group}_") for n in names])


def passed(results, name):
    assert [found.get(name, "did not run") for found in results] == [""] * len(results)


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    return run("layouts", folder, folder / "root")


@pytest.mark.slow
@cases("layouts")
def test_on_four_ranks(layouts, name):
    passed(layouts, name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folder")
    return run("folder", folder, folder / "root")


@cases("folder")
def test_in_a_folder(folder, name):
    passed(folder, name)


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    folder = tmp_path_factory.mktemp("full")
    small = folder / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=10m", "tmpfs", str(small)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        return run("full", folder, small)
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


@pytest.mark.slow
@cases("full")
def test_on_a_small_disk(full, name):
    passed(full, name)


@pytest.fixture(scope="module")
def store():
    """The environment of a fresh S3, its process and a URI in it."""
    server, environment = s3_server()
    yield environment | {"STORE_PID": str(server.pid)}
    server.kill()
    server.wait()


@pytest.fixture(scope="module")
def stored(store, tmp_path_factory):
    return run("store", tmp_path_factory.mktemp("store"), "s3://lake/checkpoints", **store)


@pytest.mark.slow
@cases("store")
def test_in_an_object_store(stored, name):
    passed(stored, name)


def trained(folder, artifact_root, shards, monkeypatch, environment, *, until=None):
    """One attempt at a run on a machine whose temporary folder is `folder`, killed after step
    `until`; returns what it said."""
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    job = Job.of(
        artifact_root=artifact_root,
        run_key="key",
        task="image_classification",
        shards=str(shards),
        output=str(folder / "model"),
        history=str(folder / "training"),
        init="",
        init_from="base",
        train=TrainSpec(steps=40, lr=1e-3, checkpoint={"every": 10}),
        model=ModelSpec(source={"channels": [32, 64], "hidden": 64, "dropout": 0.3}),
    )
    job.write(folder / "job.json")
    log = folder / "log.txt"
    process = subprocess.Popen(
        [sys.executable, str(CASES.with_name("gang.py")), str(folder / "job.json")],
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        env={
            **os.environ,
            **Rendezvous(ranks_per_node=2).environment(),
            **environment,
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(folder),
        },
    )
    try:
        deadline = time.monotonic() + 120
        while until and not any(row.step >= until for row in read_history(job.curve)):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        if until:
            tree = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            psutil.wait_procs(tree, timeout=20)
        assert process.wait(120) == (-signal.SIGKILL if until else 0), log.read_text()
    finally:
        process.kill()
    return log.read_text()


@pytest.mark.slow
def test_a_run_in_a_bucket_resumes_on_a_machine_that_never_saw_it(tmp_path, store, monkeypatch):
    shards = tmp_path / "shards"
    data = DataSpec(source="sklearn:digits")
    ingest(data, "image", "", tmp_path / "examples")
    shard(tmp_path / "examples", data, ModelSpec(), "image_classification", shards)
    root = "s3://lake/run"
    trained(tmp_path / "first", root, shards, monkeypatch, store, until=27)
    said = trained(tmp_path / "second", root, shards, monkeypatch, store)
    assert re.search(r"resumed from the checkpoint of step (10|20) of 40 on 2 ranks", said)
    trained(tmp_path / "whole", str(tmp_path / "local"), shards, monkeypatch, store)
    curves = [
        [
            (r.step, r.loss, r.grad_norm)
            for r in read_history(tmp_path / n / "training/history.jsonl")
        ]
        for n in ("second", "whole")
    ]
    assert curves[0] == curves[1]
    assert len(curves[0]) == 40
    assert file_sha256(tmp_path / "second/model/model.safetensors") == file_sha256(
        tmp_path / "whole/model/model.safetensors"
    )


@pytest.fixture(scope="module")
def lost(stored, store, tmp_path_factory):
    return run("lost", tmp_path_factory.mktemp("lost"), "s3://lake/lost", **store)


@pytest.mark.slow
@cases("lost")
def test_without_its_store(lost, name):
    passed(lost, name)


@pytest.mark.slow
def test_killed_at_any_moment_the_newest_is_whole(tmp_path):
    root = tmp_path / "root" / "endless_saves_until_it_is_killed"
    before = 0
    for point in range(10):
        folder = tmp_path / str(point)
        (process,) = start("endless", folder, tmp_path / "root")
        deadline = time.monotonic() + 60
        while not (found := list(root.glob("step-*/manifest.json"))) or all(
            int(f.parent.name[5:14]) <= before + 1 for f in found
        ):
            assert process.poll() is None, (folder / "0.txt").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(0.007 * point)  # a save takes some 70 ms: another stage of it each time
        process.send_signal(signal.SIGKILL)
        process.wait()
        last = newest(root, "key")
        into = {"w": torch.zeros(2_000_000), "v": torch.zeros(2_000_000)}
        load(last, into)
        assert last.state == {"step": last.step}
        for tensor in into.values():
            assert tensor.unique().tolist() == [last.step]
        assert last.step > before
        before = last.step


@pytest.mark.parametrize(
    ("spec", "kept"),
    [
        ({"keep": 1}, [9]),
        ({"keep": 3}, [7, 8, 9]),
        ({"keep": 1, "keep_best": True}, [4, 9]),
        ({"keep": 1, "keep_every_hours": 1}, [3, 7, 9]),
        ({"keep": 2, "keep_best": True, "keep_every_hours": 100}, [4, 8, 9]),
    ],
)
def test_what_is_kept(spec, kept):
    losses = {2: 3.0, 4: 1.0, 6: float("nan"), 8: 1.5}
    complete = {
        f"step-{step:09d}.00000000": {
            "validation_loss": losses.get(step),
            "train_seconds": step * 1000.0,
        }
        for step in range(1, 10)
    }
    names = retained(complete, CheckpointSpec(**spec))
    assert sorted(int(name[5:14]) for name in names) == kept


def test_a_job_keeps_its_state_beside_its_checkpoints_or_on_this_machine(tmp_path):
    fields = {
        "run_key": "key",
        "task": "t",
        "shards": "",
        "output": "",
        "history": "",
        "init": "",
        "init_from": "",
        "model": None,
        "train": None,
    }
    local = Job.of(artifact_root=str(tmp_path), **fields)
    assert local.checkpoints == str(tmp_path / "checkpoints" / "key")
    assert local.working == tmp_path / "checkpoints" / "key"
    assert Job.of(artifact_root=f"file://{tmp_path}", **fields).checkpoints == local.checkpoints
    remote = Job.of(artifact_root="s3://lake/a/", **fields)
    assert remote.checkpoints == "s3://lake/a/checkpoints/key"
    assert remote.working.is_absolute()
    for job in (local, remote):
        assert Path(job.status).parent == job.working / "attempts"
        assert job.curve == job.working / "history.jsonl"


def test_an_unknown_protocol_is_a_checkpoint_error():
    with pytest.raises(CheckpointError, match="cannot open nothing://x"):
        newest("nothing://x", "key")


class Naive(MemoryFileSystem):
    """A driver whose times are those of UTC, and do not say so."""

    protocol = "naive"

    def modified(self, path):
        return super().modified(path).replace(tzinfo=None)


def test_times_without_a_zone_are_those_of_utc(monkeypatch):
    fsspec.register_implementation("naive", Naive, clobber=True)
    store = ObjectStore("naive://lake/checkpoints")
    store.write("step-1/half", lambda stream: stream.write(b"half"))
    assert not store.abandoned("step-1")
    monkeypatch.setattr(object_store, "DEAD_AFTER", datetime.timedelta(0))
    assert store.abandoned("step-1")
