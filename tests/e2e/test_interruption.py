"""Killed, interrupted, run twice at once, out of disk: the same command goes on, and nothing is lost or made twice."""

import json
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.processes import ranks_of

CONFIG = """
name: digits
task: image_classification
data: {source: "sklearn:digits"}
model: {source: {channels: [32, 64], hidden: 128, dropout: 0.2}}
train: {steps: 100, lr: 3e-3, checkpoint: {every: 20}}
evaluate: {floor: {accuracy: 0.9}}
"""


@pytest.fixture(scope="module", autouse=True)
def config(cli):
    (cli.folder / "c.yaml").write_text(CONFIG)
    return cli.folder


def until_checkpoint(process, home):
    """Wait until a checkpoint is committed while training goes on."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if list(home.glob("checkpoints/*/step-*/manifest.json")):
            return
        assert process.poll() is None, "the run ended before it could be interrupted"
        time.sleep(0.01)
    raise AssertionError("no checkpoint within two minutes")


def kill_tree(process):
    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for one in tree:
        one.kill()
    psutil.wait_procs(tree, timeout=20)
    process.wait()


def training_of(cli, result, home):
    record = json.loads((cli.folder / home / "runs" / result["run_id"] / "run.json").read_text())
    step = next(s for s in record["steps"] if s["name"] == "finetune")
    summary = json.loads((Path(step["artifacts"]["training"]["uri"]) / "training.json").read_text())
    return summary, Path(step["log"]).read_text()


@pytest.fixture(scope="module")
def whole(cli, config):
    """The weights of a run that nobody disturbed."""
    result = cli.json("run", "c.yaml", "--home", "whole")
    return training_of(cli, result, "whole")[0]["weights_sha256"]


@pytest.mark.slow
def test_a_killed_tree_resumes_with_the_same_command_and_says_so(cli, config, whole):
    process = cli.start("run", "c.yaml", "--home", "killed")
    until_checkpoint(process, config / "killed")
    kill_tree(process)
    (dead,) = cli.json("runs", "--home", "killed")["runs"]
    assert dead["status"] == "killed"
    done = cli("run", "c.yaml", "--home", "killed", "--json")
    assert "resumed from the checkpoint of step" in done.stderr
    summary, _ = training_of(cli, json.loads(done.stdout), "killed")
    assert summary["weights_sha256"] == whole


@pytest.mark.slow
def test_a_killed_worker_restarts_the_gang_by_itself(cli, config, whole):
    process = cli.start("run", "c.yaml", "--home", "worker")
    until_checkpoint(process, config / "worker")
    ranks_of(process.pid)[-1].kill()
    assert process.wait(120) == 0, (config / "out.txt").read_text()
    said = (config / "out.txt").read_text()
    assert "restarting all ranks (1 of 3)" in said
    (run,) = cli.json("runs", "--home", "worker")["runs"]
    summary, log = training_of(cli, run, "worker")
    assert "resumed from the checkpoint of step" in log
    assert summary["weights_sha256"] == whole


@pytest.mark.slow
def test_the_death_of_what_agents_are_forks_of_is_a_restart_and_changes_no_bit(
    cli, config, whole, monkeypatch
):
    monkeypatch.delenv("REKINDLE_PRELOADED")  # for the run to have its own
    process = cli.start("run", "c.yaml", "--home", "forked")
    until_checkpoint(process, config / "forked")
    (server,) = (
        p
        for p in psutil.Process(process.pid).children()
        if "rekindle.launch.preloaded" in p.cmdline()
    )
    server.kill()
    assert process.wait(120) == 0, (config / "out.txt").read_text()
    assert "restarting all ranks (1 of 3)" in (config / "out.txt").read_text()
    (run,) = cli.json("runs", "--home", "forked")["runs"]
    assert training_of(cli, run, "forked")[0]["weights_sha256"] == whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "status"),
    [(signal.SIGINT, 130, "cancelled"), (signal.SIGTERM, 75, "preempted")],
)
def test_a_request_to_stop_saves_and_the_same_command_goes_on(
    cli, config, whole, number, code, status
):
    home = status
    process = cli.start("run", "c.yaml", "--home", home)
    until_checkpoint(process, config / home)
    process.send_signal(number)
    assert process.wait(60) == code, (config / "out.txt").read_text()
    (stopped,) = cli.json("runs", "--home", home)["runs"]
    assert stopped["status"] == status
    done = cli("run", "c.yaml", "--home", home, "--json")
    assert "resumed from the checkpoint of step" in done.stderr
    assert training_of(cli, json.loads(done.stdout), home)[0]["weights_sha256"] == whole


@pytest.mark.slow
def test_two_at_once_train_once_and_make_one_version(cli, config, registry):
    first = cli.start("run", "c.yaml", "--home", "twice")
    second = json.loads(cli("run", "c.yaml", "--home", "twice", "--json").stdout)
    assert first.wait(120) == 0, (config / "out.txt").read_text()
    runs = cli.json("runs", "--home", "twice")["runs"]
    assert len(runs) == 2
    trained = [
        not next(s for s in run["steps"] if s["name"] == "finetune")["cached"] for run in runs
    ]
    assert sorted(trained) == [False, True]
    assert second["status"] == "succeeded"
    assert registry("digits", "twice") == {
        **registry("digits", "twice"),
        "versions": ["1"],
        "aliases": {"champion": "1"},
    }


@pytest.mark.slow
def test_a_full_disk_fails_clearly_and_the_same_command_goes_on(cli, config):
    small = config / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2600k", "tmpfs", str(small)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        done = cli("run", "c.yaml", "--home", "small", code=1)
        assert "No space left on device" in done.stderr or "disk is full" in done.stderr, (
            done.stderr
        )
        assert "Traceback" not in done.stderr
        subprocess.run(["mount", "-o", "remount,size=200m", str(small)], check=True)
        assert cli.json("run", "c.yaml", "--home", "small")["gate"]["promoted"] is True
    finally:
        subprocess.run(["umount", "-l", str(small)], check=False)
    assert not any(small.iterdir())
