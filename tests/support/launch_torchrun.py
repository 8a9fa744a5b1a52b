"""What tests share with launch/test_torchrun.py."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rekindle.launch.rendezvous import Rendezvous

HERE = Path(__file__).parents[1] / "launch"


@dataclasses.dataclass
class Run:
    folder: Path
    rank: tuple[str, ...]
    process: subprocess.Popen = None
    preloaded: str = (
        ""  # where agents are forked; else they are executed, and descendants of the process
    )

    def start(self, scenario, ranks=2, prefix=(), **train):
        words = [sys.executable, str(HERE / "supervise.py"), str(self.folder), json.dumps(train)]
        env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        self.process = subprocess.Popen(
            [*prefix, *words, *self.rank, str(self.folder), scenario],
            stdout=(self.folder / "log.txt").open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={
                **env,
                **Rendezvous(ranks_per_node=ranks).environment(),
                "PYTHONPATH": str(HERE.parents[1]),
                "REKINDLE_PRELOADED": self.preloaded,
            },
        )
        return self

    def ends(self, code, within=60):
        assert self.process.wait(within) == code, self.said
        return self.said

    @property
    def said(self):
        return (self.folder / "log.txt").read_text()

    @property
    def last(self):
        """The error that ends the log."""
        lines = self.said.splitlines()
        start = next(i for i in reversed(range(len(lines))) if not lines[i].startswith("  "))
        return "\n".join(lines[start:])

    def ready(self):
        until(lambda: len(list(self.folder.glob("ready-*"))) == 2, self)
        return self

    def everybody(self):
        return psutil.Process(self.process.pid).children(recursive=True)


def until(condition, run):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, run.said
        assert run.process.poll() is None, run.said
        time.sleep(0.02)


EXECUTED, FORKED = (str(HERE / "rank.py"),), ("-m", "tests.launch.rank")


@pytest.fixture(
    params=[EXECUTED, pytest.param(FORKED, marks=pytest.mark.slow)], ids=["executed", "forked"]
)
def run(tmp_path, request):
    made = Run(tmp_path, request.param)
    yield made
    if made.process.poll() is None:
        os.killpg(made.process.pid, signal.SIGKILL)
