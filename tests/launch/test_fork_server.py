"""Steps that are forked from one process: as if each had been started, only sooner. Forked ranks: see test_torchrun.py."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from rekindle.launch.fork_server import fork_server_for
from rekindle.launch.process import is_running
from tests.support.launch_shim import task

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="Linux only")

STEP = """
def step() -> str:
    import json, os, random, sys, numpy
    ours = {n: v for n, v in os.environ.items() if n.startswith("TEST_")}
    return json.dumps({
        "env": ours, "cwd": os.getcwd(), "argv": sys.argv[1:3], "path": sys.path[-1], "parent": os.getppid(),
        "group": os.getpgrp() == os.getpid(), "open": sorted(os.listdir("/proc/self/fd")),
        "draws": [random.random(), numpy.random.random()], "imported": "colorsys" in sys.modules,
        "stdin": os.readlink("/proc/self/fd/0"),
    })
"""
FAILING = """
def step() -> str:
    raise ValueError("as it should")
"""
WAITING = """
def step() -> str:
    import time
    print("waits", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def env():
    return {**os.environ, "TEST_WHO": "parent"}


@pytest.fixture
def fork_server(env):
    # something that nobody else imports
    with fork_server_for(env, ["colorsys", "numpy.random"]) as made:
        yield made


def executor(folder, fork_server, source=STEP, **changes):
    folder.mkdir()
    file = task(
        folder,
        [],
        source=source,
        kinds={"Output": "STRING"},
        parent=fork_server.pid,
        args=["--executor_input", {"ref": ["executor_input"]}, "--function_to_execute", "step"],
        **changes,
    )
    content = json.loads(file.read_text())
    content["executor_input"]["outputs"]["artifacts"] = content["outputs"]["artifacts"] = {}
    file.write_text(json.dumps(content))
    return file


def adopted(fork_server, file, env):
    return fork_server.adopt({"task": str(file), "env": env})


def ended(folder, step):
    said = step.stdout.read().decode()
    code = step.wait(60)
    result = json.loads((folder / "result.json").read_text())
    assert result["exit_code"] == code
    return code, said, result["parameters"].get("Output")


def test_a_step_finds_what_it_would_find_in_a_process_of_its_own(tmp_path, fork_server, env):
    steps = {n: adopted(fork_server, executor(tmp_path / n, fork_server), env) for n in ("a", "b")}
    found = {}
    for name, step in steps.items():
        code, said, output = ended(tmp_path / name, step)
        assert code == 0, said
        found[name] = json.loads(output)
        assert found[name].pop("parent") == step.pid
    draws = [one.pop("draws") for one in found.values()]
    assert draws[0][0] != draws[1][0]
    assert draws[0][1] != draws[1][1]
    for name, one in found.items():
        folder = str(tmp_path / name)
        assert one["cwd"] == one["path"] == folder
        assert one["argv"][0] == "--component_module_path"
        # 3: the listing itself
        assert one["open"] == ["0", "1", "2", "3"]
        assert (one["env"], one["group"], one["imported"]) == ({"TEST_WHO": "parent"}, True, True)
        assert one["stdin"] == os.devnull


def test_a_step_with_an_environment_of_its_own_imports_for_itself(tmp_path, fork_server, env):
    step = adopted(
        fork_server, executor(tmp_path / "own", fork_server, env={"TEST_WHO": "step"}), env
    )
    code, said, output = ended(tmp_path / "own", step)
    assert code == 0, said
    found = json.loads(output)
    assert (found["env"], found["imported"]) == ({"TEST_WHO": "step"}, False)


def test_any_other_command_is_executed(tmp_path, fork_server, env):
    step = adopted(
        fork_server, task(tmp_path, ["sh", "-c", "echo words; exit 3"], parent=fork_server.pid), env
    )
    code, said, _ = ended(tmp_path, step)
    assert (code, said) == (3, "words\n")


def test_an_exception_ends_with_its_traceback_and_exit_code(tmp_path, fork_server, env):
    step = adopted(fork_server, executor(tmp_path / "bad", fork_server, FAILING), env)
    code, said, _ = ended(tmp_path / "bad", step)
    assert code == 1
    assert said.rstrip().endswith("ValueError: as it should")


def test_a_signal_ends_the_step_and_what_it_ends_with_is_known(tmp_path, fork_server, env):
    step = adopted(fork_server, executor(tmp_path / "long", fork_server, WAITING), env)
    assert any(b"waits" in line for line in iter(step.stdout.readline, b""))
    assert step.poll() is None
    step.send_signal(signal.SIGTERM)
    assert step.wait(60) == 128 + signal.SIGTERM
    step.send_signal(signal.SIGTERM)  # there is nobody any more


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_a_nursery_that_ends_takes_its_steps_along(tmp_path, env, how):
    with fork_server_for(env, []) as fork_server:
        step = adopted(fork_server, executor(tmp_path / "long", fork_server, WAITING), env)
        assert any(b"waits" in line for line in iter(step.stdout.readline, b""))
        (child,) = map(int, Path(f"/proc/{step.pid}/task/{step.pid}/children").read_text().split())
        if how == "killed":
            os.kill(fork_server.pid, signal.SIGKILL)
    assert step.wait(60) == -signal.SIGKILL
    step.stdout.read()  # ends when nobody is left who could print
    assert not is_running(child)
    assert adopted(fork_server, executor(tmp_path / "late", fork_server), env) is None


def test_one_who_breaks_off_harms_nobody_else(tmp_path, fork_server, env):
    step = adopted(fork_server, executor(tmp_path / "long", fork_server, WAITING), env)
    assert any(b"waits" in line for line in iter(step.stdout.readline, b""))
    mine, theirs = socket.socketpair()
    with mine, theirs, Path(os.devnull).open("wb") as nowhere:
        socket.send_fds(
            fork_server.link, [b"."], [nowhere.fileno(), nowhere.fileno(), theirs.fileno()]
        )
        mine.sendall(b'{"task": ')
        mine.shutdown(socket.SHUT_WR)
        theirs.close()
        assert mine.recv(1) == b"", "closed without an answer"
    assert step.poll() is None
    code, said, _ = ended(
        tmp_path / "after", adopted(fork_server, executor(tmp_path / "after", fork_server), env)
    )
    assert code == 0, said


def test_where_an_import_starts_a_thread_nobody_is_forked(tmp_path, env):
    (tmp_path / "threads.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    with fork_server_for({**env, **path}, ["threads"]) as fork_server:
        assert adopted(fork_server, executor(tmp_path / "none", fork_server), env) is None
