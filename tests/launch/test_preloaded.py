"""Agents are forked from a process that has imported torch, if they would be the same; else they are executed."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from rekindle.launch.preloaded import SOCKET, Preloaded, fork_agent
from rekindle.launch.process import MARK, end_marked, moved

# what stands in for the agent: it tells what it is, then waits for its lifeline to close
TOLD = """
import json, os, sys
print("imported", os.getpid(), file=open(os.environ["IMPORTED"], "a"))
def main():
    lifeline, report, *words = sys.argv[1:]
    told = {"pid": os.getpid(), "words": words, "value": os.environ.get("REKINDLE_VALUE"), "cwd": os.getcwd(), "session": os.getsid(0)}
    print("told", json.dumps(told), flush=True)
    os.read(int(lifeline), 1)
    sys.exit(int(words[0]))
"""


class Served:
    """A server that has imported `told`, and what forks of it print."""

    def __init__(self, folder):
        self.folder, self.mark = folder, uuid.uuid4().hex
        (folder / "told.py").write_text(TOLD)
        self.server = Preloaded(["told"])
        self.env = {
            **os.environ,
            **self.server.environment,
            "PYTHONPATH": f"{folder}:{os.pathsep.join(sys.path)}",
            "IMPORTED": str(folder / "imported"),
        }
        self.server.start(self.env)
        asked = {
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONSAFEPATH": "1",
            "JE_ARROW_MALLOC_CONF": "background_thread:false",
        }
        self.env |= {**asked, MARK: self.mark, "REKINDLE_VALUE": "a value"}

    def fork(self, code="0", **more):
        """The fork, the end of its lifeline, and what it told."""
        reading, lifeline = os.pipe()
        handle = moved(reading)
        output = (self.folder / "output").open("w")
        before = os.dup(1)
        os.dup2(output.fileno(), 1)
        try:
            forked = fork_agent(
                ["told", str(handle), "report", code], {**self.env, **more}, [handle]
            )
        finally:
            os.dup2(before, 1)
            for one in (before, handle):
                os.close(one)
            output.close()
        if forked is None:
            os.close(lifeline)
            return None
        until(lambda: re.search(r"told .*\n", (self.folder / "output").read_text()))
        return (
            forked,
            lifeline,
            json.loads((self.folder / "output").read_text().partition("told ")[2]),
        )


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def served(tmp_path):
    served = Served(tmp_path)
    yield served
    end_marked(served.mark)
    served.server.close()


def test_a_fork_is_what_the_command_would_be_without_its_imports(served):
    forks = [served.fork(code) for code in ("0", "7")]
    for (forked, lifeline, told), code in zip(forks, ("0", "7"), strict=True):
        assert told == {
            "pid": forked.pid,
            "words": [code],
            "value": "a value",
            "cwd": str(Path.cwd()),
            "session": forked.pid,
        }
        assert forked.poll() is None
        os.close(lifeline)
        assert forked.wait(20) == int(code)
    assert (served.folder / "imported").read_text().split() == [
        "imported",
        str(served.server.process.pid),
    ]


def test_a_fork_is_found_and_ended_by_its_mark_and_others_go_on(served):
    forked, lifeline, _ = served.fork()
    assert f"{MARK}={served.mark}" in Path(f"/proc/{forked.pid}/environ").read_text().split("\0")
    end_marked(uuid.uuid4().hex)
    assert forked.poll() is None
    end_marked(served.mark)
    assert forked.wait(20) == -signal.SIGKILL
    assert served.server.process.poll() is None
    os.close(lifeline)


@pytest.mark.parametrize("name", ["LD_PRELOAD", "OMP_NUM_THREADS", "PYTHONPATH", "HF_HOME"])
def test_what_imports_may_read_must_be_as_it_was(served, name):
    assert served.fork(**{name: "another"}) is None


def test_another_python_is_executed(served, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    assert served.fork() is None


def test_descriptors_move_as_far_as_few_open_files_allow():
    code = (
        "import os, resource\nfrom rekindle.launch.process import moved\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\nprint(moved(os.open('/dev/null', os.O_RDONLY)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 32


def test_only_this_user_may_ask(served):
    assert stat.S_IMODE(served.server.folder.stat().st_mode) == 0o700


def test_where_nobody_serves_agents_are_executed(served, tmp_path):
    assert served.fork(**{SOCKET: ""}) is None
    assert served.fork(**{SOCKET: str(tmp_path / "none")}) is None
    served.server.process.kill()
    served.server.process.wait()
    assert served.fork() is None


def test_the_end_of_the_server_is_the_end_of_a_fork_for_who_waits(served):
    forked, lifeline, _ = served.fork()
    served.server.process.kill()
    assert forked.wait(20) == -signal.SIGKILL
    os.close(lifeline)
    until(lambda: not psutil.pid_exists(forked.pid))  # by its lifeline


def test_it_ends_with_the_process_that_started_it_and_leaves_nothing(tmp_path, served):
    served.server.close()
    assert not served.server.folder.exists()
    code = (
        "import os, sys, time\nfrom rekindle.launch.preloaded import Preloaded\n"
        "server = Preloaded(['json'])\nserver.start({**os.environ, **server.environment})\n"
        "print(server.process.pid, server.folder, flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as started:
        pid, folder = started.stdout.readline().split()
        started.kill()
    until(lambda: not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == "zombie")
    Path(folder, "agents").unlink()
    Path(folder).rmdir()
