"""Faults in real trainings: two ranks on gloo, digits, as users run them. What is at fault is the last thing printed; the
rehearsal; a store that goes away; a killed launcher; a stop in data preparation."""

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

from rekindle.cli.run import rehearsal_text
from rekindle.launch.rendezvous import Rendezvous
from rekindle.records import RehearsalRecord
from rekindle.spec.model import ModelSpec, TrainSpec
from rekindle.train.history import read_history
from rekindle.train.job import Job
from tests.processes import name_of, ranks_of
from tests.quick import first
from tests.support.s3 import s3_server

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "digits.yaml"


def rekindle(home, *words, timeout=280):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "rekindle.cli.main",
            "run",
            str(CONFIG),
            "--home",
            str(home),
            "--json",
            "--set",
            "train.epochs=2",
            "--set",
            "train.checkpoint.every=10",
            *words,
        ],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=home,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    return done.returncode, done.stdout, done.stderr


FAULTY = """
import os
import resource
import time
import torch
from pathlib import Path
from rekindle.tasks.image_classification import ImageClassification

class Faulty(ImageClassification):
    def logits(self, network, inputs):
        if os.environ["RANK"] == "1" and network.training:
            self.seen = getattr(self, "seen", 0) + 1
            if self.seen == 6:
                getattr(self, os.environ["TEST_FAULT"])()
        return super().logits(network, inputs)

    def raises(self):
        raise ValueError("pixel 7 is out of range")

    def lacks_memory(self):
        now = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (now + (256 << 20), resource.RLIM_INFINITY))
        torch.ones(1 << 28)

    def hangs_in_a_lock(self):
        time.sleep(600)

    def is_killed(self):
        os.kill(os.getpid(), 9)

    def fills_the_disk(self):
        with (Path(os.environ["REKINDLE_JOB"]).parent / "filler").open("wb", buffering=0) as file:
            size = 1 << 20
            while size:
                try:
                    file.write(bytes(size))
                except OSError:
                    size //= 2
"""
ENDINGS = {
    # fault: settings, the last thing printed
    "raises": (
        (),
        [
            r"error: step `finetune` failed: rank 1 failed in step 6: ValueError: pixel 7 is out of range",
            r"      fix:   see the step's log for the traceback.*",
        ],
    ),
    "lacks_memory": (
        (),
        [
            r"error: step `finetune` failed: rank 1 failed in step 6: out of memory for logits \(RuntimeError\): .*DefaultCPUAllocator.*; this rank holds parameters 0\.\d MiB, optimizer 0\.\d MiB",
            r"      fix:   lower train.micro_batch_size, .*",
        ],
    ),
    "hangs_in_a_lock": (
        ("--set", "train.hang_seconds=8", "--set", "train.max_restarts=0"),
        [
            r"error: step `finetune` failed: rank 1 hangs in step 6: no heartbeat for \d+ s; after 0 restarts",
            r"      where: .*faulty.py:\d+ in hangs_in_a_lock < logits < .*",
            r"      fix:   all stacks are in .*stacks-0.txt; .*train.hang_seconds.*",
        ],
    ),
    "is_killed": (
        ("--set", "train.max_restarts=1"),
        [
            r"error: step `finetune` failed: rank 1 was killed by SIGKILL in step 6; after 1 restarts",
            r"      fix:   a process outside killed it, .*; the same command resumes from the last checkpoint. .*",
        ],
    ),
}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """A folder with a task that fails, whose home keeps the data steps."""
    folder = tmp_path_factory.mktemp("faulty")
    (folder / "faulty.py").write_text(FAULTY)
    return folder


def started(folder, fault, *words):
    """`rekindle run` with a fault, its output in `out.txt`."""
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "rekindle.cli.main",
            "run",
            str(CONFIG),
            "--home",
            str(folder / "home"),
            "--set",
            f"task={folder / 'faulty.py'}:Faulty",
            "--set",
            "train.epochs=2",
            *words,
        ],
        stdout=(folder / "out.txt").open("w"),
        stderr=subprocess.STDOUT,
        cwd=folder,
        start_new_session=True,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TEST_FAULT": fault,
            "COLUMNS": "300",
        },
    )


@pytest.mark.slow
@pytest.mark.parametrize("fault", ENDINGS)
def test_the_first_rank_at_fault_and_its_cause_are_the_last_thing_printed(fault, faulty):
    words, ending = ENDINGS[fault]
    assert started(faulty, fault, *words).wait(200) == 1
    said = (faulty / "out.txt").read_text().splitlines()
    ending = [*ending, r"  where: .*/steps/finetune/log.txt"]
    last = said[-len(ending) :]
    for pattern, line in zip(ending, last, strict=True):
        assert re.fullmatch(pattern, line), said
    assert ("restarting all ranks" in "\n".join(said)) is (fault == "is_killed")
    logs = (faulty / "home" / "runs").glob("*/steps/finetune/log.txt")
    log = max(logs, key=lambda path: path.stat().st_mtime).read_text()
    dumped = set(re.findall(r"stacks of rank (\d):", log, re.MULTILINE))
    assert dumped == ({"0", "1"} if fault == "hangs_in_a_lock" else set())


def supervisor_of(rank, family):
    """The process at the other end of the pipe at which the rank's agent waits for its end."""
    _, agent, *_ = rank.parents()
    lifeline = Path(f"/proc/{agent.pid}/fd/200").readlink()
    return next(
        p
        for p in family
        if p != agent
        and lifeline in {file.readlink() for file in Path(f"/proc/{p.pid}/fd").iterdir()}
    )


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["executed", "forked"])
@pytest.mark.parametrize("victim", ["rekindle run", "the step that supervises the ranks"])
def test_a_killed_launcher_leaves_no_process_after_five_seconds(victim, agent, faulty, monkeypatch):
    if agent == "executed":
        monkeypatch.setenv("REKINDLE_PRELOADED", "")
    else:  # from a process of the run's own
        monkeypatch.delenv("REKINDLE_PRELOADED")
    run = started(faulty, "hangs_in_a_lock")
    top = psutil.Process(run.pid)
    try:
        workers, deadline = [], time.monotonic() + 240
        while len(workers) < 2:
            assert run.poll() is None, (faulty / "out.txt").read_text()
            assert time.monotonic() < deadline
            workers = ranks_of(top.pid)
        family = top.children(recursive=True)
        above = [" ".join(p.cmdline()) for p in workers[0].parents()]
        assert any("rekindle.launch.preloaded" in words for words in above) is (agent == "forked")
        supervisor = supervisor_of(workers[0], family)
        (top if victim == "rekindle run" else supervisor).kill()
        _, alive = psutil.wait_procs(family, timeout=5)
        assert not [name_of(p) for p in alive]
        assert run.wait(20) == (-signal.SIGKILL if victim == "rekindle run" else 1)
    finally:
        run.kill()
        run.wait()


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(disk)]
    if subprocess.run(words, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small file system")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.slow
def test_on_a_full_disk_that_keeps_no_log_and_no_record_the_cause_is_the_last_thing_printed(
    small_disk, faulty
):
    words = ("--home", str(small_disk / "home"), "--set", "train.checkpoint.every=10")
    assert started(faulty, "fills_the_disk", *words).wait(200) == 1
    said = (faulty / "out.txt").read_text().splitlines()
    last = "\n".join(said).partition("\nerror: ")[2]
    # whichever rank first has something to write: a checkpoint, or the history
    ending = (
        r"step `finetune` failed: rank \d failed in step \d+: .*No space left on device.*"
        r"(\n +where: .*)?\n +fix:   (make room|free some space) .*; the same command (goes on|resumes).*"
        r"\n  where: .*/steps/finetune/log.txt"
    )
    assert re.fullmatch(ending, last), said
    assert any(re.match(r"✗ +finetune", line) for line in said), "the table knows how it ended"


@pytest.mark.slow
def test_a_store_that_goes_away_is_named_last_with_what_to_do(tmp_path, shards, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    server, reaches = s3_server()
    job = Job.of(
        artifact_root="s3://lake/run",
        run_key="key",
        task="image_classification",
        shards=str(shards),
        output=str(tmp_path / "model"),
        history=str(tmp_path / "training"),
        init="",
        init_from="base",
        train=TrainSpec(steps=4000, lr=1e-3, checkpoint={"every": 20}),
        model=ModelSpec(source={"channels": [32, 64], "hidden": 64, "dropout": 0.3}),
    )
    job.write(tmp_path / "job.json")
    log = tmp_path / "log.txt"
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("gang.py")), str(tmp_path / "job.json")],
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        env={
            **os.environ,
            **Rendezvous(ranks_per_node=2).environment(),
            **reaches,
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(tmp_path),
        },
    )
    try:
        deadline = time.monotonic() + 120
        while not any(row.step >= 30 for row in read_history(job.curve)):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        server.kill()
        assert process.wait(120) == 1, log.read_text()
    finally:
        server.kill()
        process.kill()
    what, where, fix = log.read_text().splitlines()[-3:]
    assert re.fullmatch(
        r"rank [01] failed in \S.*: the checkpoint store s3://lake/run/checkpoints/key cannot be used: .*",
        what,
    )
    assert where == "  where: s3://lake/run/checkpoints/key"
    assert fix.startswith(
        "  fix:   check that it can be reached and written from here; the same command goes on"
    )
    assert "restarting all ranks" not in log.read_text()


FAULTS = {
    # fault: attempts, what is said of it
    "kill": (1, "rank 1 was killed by SIGKILL in step 16; restarting all ranks (1 of 3)"),
    "hang": (1, "rank 1 hangs in step 16: no heartbeat for"),
    "term": (2, "saved and gave way"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_rehearsed_fault_changes_no_bit_and_leaves_only_its_record(fault, tmp_path):
    attempts, said = FAULTS[fault]
    code, out, err = rekindle(
        tmp_path, "--rehearse-preemption", f"{fault}@step=16", "--set", "train.hang_seconds=15"
    )
    assert code == 0, err + out
    assert said in err
    record = RehearsalRecord.model_validate_json(out)
    found = record.rehearsal
    assert (found.fault, found.step, record.ranks, record.attempts) == (fault, 16, 2, attempts)
    assert (found.losses_equal, found.weights_equal) == (True, True)
    if fault == "term":  # saved after the step in work, or the one after it
        assert found.resumed_from_step >= 16
        assert found.samples_lost == 0
    else:  # from the last save in the background that was complete
        assert found.resumed_from_step in (0, 10, 20)
        assert found.samples_lost >= (15 - found.resumed_from_step) * 64
    if fault in ("kill", "hang"):
        assert found.samples_lost == (15 - found.resumed_from_step) * 64
    assert [path.name for path in tmp_path.iterdir()] == ["rehearsals"]
    (kept,) = (tmp_path / "rehearsals").iterdir()
    assert RehearsalRecord.read(kept) == record


UNSTEADY = """
import os
import numpy as np
import torch
from rekindle.tasks.image_classification import ImageClassification

class Unsteady(ImageClassification):
    def collate(self, table, settings):
        inputs = super().collate(table, settings)
        noise = np.random.default_rng(int.from_bytes(os.urandom(8), "big")).normal(size=inputs["pixels"].shape)
        return {"pixels": inputs["pixels"] + 1e-3 * torch.from_numpy(noise.astype("f4"))}
"""


@pytest.mark.slow
def test_a_rehearsal_of_a_training_that_differs_each_time_says_so_and_fails(tmp_path):
    task = tmp_path / "unsteady.py"
    task.write_text(UNSTEADY)
    home = tmp_path / "home"
    home.mkdir()
    code, out, err = rekindle(
        home, "--rehearse-preemption", "kill@step=4", "--set", f"task={task}:Unsteady"
    )
    assert code == 1, err + out
    found = RehearsalRecord.model_validate_json(out).rehearsal
    assert (found.losses_equal, found.weights_equal) == (False, False)
    assert (found.resumed_from_step, found.samples_lost) == (0, 3 * 64)


@pytest.mark.parametrize(
    ("words", "says"),
    first(
        1,
        [
            (("--rehearse-preemption", "melt@step=3"), "one of kill, term, hang, then"),
            (
                (
                    "--rehearse-preemption",
                    "kill@step=3",
                    "--set",
                    f"train.entrypoint={Path(__file__)}",
                ),
                "needs rekindle's own training loop",
            ),
            (
                ("--rehearse-preemption", "kill@step=3", "--set", "pipeline=nothing.py:none"),
                "nothing.py",
            ),
        ],
    ),
)
def test_what_cannot_be_rehearsed_is_refused_before_anything_is_written(words, says, tmp_path):
    code, out, err = rekindle(tmp_path, *words)
    assert code == 2
    assert says in json.dumps(json.loads(out)["errors"])
    early = "step 3 comes before any checkpoint (the first is due after step 10)" in err
    assert early == words[1].startswith("kill")
    assert list(tmp_path.iterdir()) == []


def test_a_rehearsal_that_resumed_from_nothing_says_so():
    found = {
        "fault": "kill",
        "step": 3,
        "samples_lost": 128,
        "losses_equal": True,
        "weights_equal": True,
    }
    fields = {
        "rehearsal_id": "r",
        "config": "c.yaml",
        "started_at": "",
        "seconds": 9.0,
        "ranks": 2,
        "attempts": 1,
    }
    for step, said in (
        (0, "from the start: no checkpoint was complete, so no resume"),
        (10, "from step 10, 128 samples"),
    ):
        record = RehearsalRecord(**fields, rehearsal={**found, "resumed_from_step": step})
        assert f"2 ranks, 1 attempt\nresumed  {said}" in rehearsal_text(record)


PREPARE = """
import sys
from pathlib import Path
from rekindle.data.ingest import ingest
from rekindle.data.shard import shard
from rekindle.spec.model import DataSpec, ModelSpec
data = DataSpec(source=sys.argv[1], columns={"text": "text", "label": "label"})
examples, shards = Path(sys.argv[2]) / "examples", Path(sys.argv[2]) / "shards"
print("ingest", flush=True)
ingest(data, "text", "", examples)
print("shard", flush=True)
shard(examples, data, ModelSpec(), "text_classification", shards)
print("done", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("step", ["ingest", "shard"])
def test_sigterm_in_data_preparation_ends_it_at_once_with_143_and_leaves_nothing_to_trust(
    step, tmp_path
):
    with (tmp_path / "reviews.csv").open("w") as file:
        file.write("text,label\n")
        for row in range(60_000):
            file.write(
                f"a review of thing number {row} that is neither long nor short,{'good' if row % 3 else 'bad'}\n"
            )
    task = {
        "source": "",
        "command": ["python3", "-c", PREPARE, str(tmp_path / "reviews.csv"), str(tmp_path)],
        "args": [],
        "env": {},
        "executor_input": {
            "inputs": {"parameterValues": {}, "artifacts": {}},
            "outputs": {
                "parameters": {},
                "artifacts": {},
                "outputFile": str(tmp_path / "out.json"),
            },
        },
        "run": {},
        "outputs": {"parameters": {}, "artifacts": {}},
        "work": str(tmp_path),
        "cwd": str(tmp_path),
        "result": str(tmp_path / "result.json"),
        "parent": None,
    }
    (tmp_path / "task.json").write_text(json.dumps(task))
    shim = subprocess.Popen(
        [sys.executable, "-m", "rekindle.launch.shim", str(tmp_path / "task.json")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    while shim.stdout.readline().strip() != step:
        assert shim.poll() is None
    folder, mark = {"ingest": ("examples", "summary.json"), "shard": ("shards", "manifest.json")}[
        step
    ]
    while not any((tmp_path / folder).rglob("*.*")):
        assert shim.poll() is None
        time.sleep(0.005)
    family = psutil.Process(shim.pid).children(recursive=True)
    shim.send_signal(signal.SIGTERM)
    assert shim.wait(10) == 143
    assert "done" not in shim.stdout.read()
    assert not [p for p in family if p.is_running()]
    assert not (tmp_path / folder / mark).exists()
    assert re.search(r'"exit_code": 143', (tmp_path / "result.json").read_text())
