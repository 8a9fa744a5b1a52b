"""No socket of a run on one node is reached from beyond loopback, and none hands out what is unpickled."""

import datetime
import ipaddress
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from rekindle.launch.rendezvous import Rendezvous
from tests.support.launch_torchrun import until

ROOT = Path(__file__).parents[2]
SUPERVISE = ROOT / "tests/launch/supervise.py"
OURS = ("-m", "tests.security.meeting_rank")
SCRIPT = (str(ROOT / "tests/security/meeting_rank.py"),)


class Run:
    """Two ranks that have met, and wait."""

    def __init__(self, folder, words, train):
        self.folder, self.log = folder, folder / "log.txt"
        self.process = subprocess.Popen(
            [sys.executable, str(SUPERVISE), str(folder), json.dumps(train), *words, str(folder)],
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={
                **os.environ,
                **Rendezvous(ranks_per_node=2).environment(),
                "PYTHONPATH": str(ROOT),
                "REKINDLE_PRELOADED": "",
            },
        )
        until(lambda: len(list(folder.glob("ready-*"))) == 2, self)
        self.rank = json.loads((folder / "ready-0").read_text())

    @property
    def said(self):
        return self.log.read_text()

    def listening(self):
        """Addresses at which its processes listen, as the kernel has them."""
        processes = [psutil.Process(self.process.pid)]
        processes += processes[0].children(recursive=True)
        assert len(processes) > 3, "supervisor, agent and ranks"
        return {
            connection.laddr
            for process in processes
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }

    def ends(self):
        (self.folder / "go").touch()
        assert self.process.wait(60) == 0, self.said


@pytest.fixture
def run(tmp_path):
    made = []

    def start(words, train):
        made.append(Run(tmp_path, words, train))
        return made[0]

    yield start
    if made and made[0].process.poll() is None:
        os.killpg(made[0].process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_our_ranks_listen_on_loopback_only_and_meet_in_a_private_file(run):
    met = run(OURS, {})
    listening = met.listening()
    assert listening, "gloo's own sockets"
    assert all(ipaddress.ip_address(place.ip).is_loopback for place in listening)
    assert met.rank["sum"] == 4.0
    assert met.rank["MASTER_PORT"] == "0", "there is no store to connect to"
    store = Path(met.rank["REKINDLE_STORE"])
    assert stat.S_IMODE(store.parent.stat().st_mode) == 0o700
    met.ends()
    assert not store.exists()


@pytest.mark.slow
def test_a_script_of_the_users_has_its_store_on_loopback_and_nothing_in_it_is_unpickled(run):
    met = run(SCRIPT, {"entrypoint": "x.py"})
    listening, port = met.listening(), int(met.rank["MASTER_PORT"])
    assert port in {place.port for place in listening}
    assert all(ipaddress.ip_address(place.ip).is_loopback for place in listening)
    store = dist.TCPStore("127.0.0.1", port, timeout=datetime.timedelta(seconds=10))
    assert store.check(["nothing"]) is False
    keys = store.list_keys() if hasattr(store, "list_keys") else []
    assert not [key for key in keys if "torch.rendezvous" in key]
    met.ends()
