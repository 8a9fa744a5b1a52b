"""A live run of three nodes: what listens, what strangers can do there, and that it ends right all the same (H4)."""

import datetime
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from rekindle.launch.rendezvous import Rendezvous
from tests.ports import free_port
from tests.security.strangers import NOISE, Wire, send, with_another_secret
from tests.support.launch_torchrun import until

ROOT = Path(__file__).parents[2]
SUPERVISE = ROOT / "tests/launch/supervise.py"
SECRET = "7" * 64


def outer_address():
    """An address of this machine beyond loopback; loopback where there is no other."""
    found = [
        a.address
        for all_of in psutil.net_if_addrs().values()
        for a in all_of
        if a.family == socket.AF_INET
    ]
    return next((a for a in found if not ipaddress.ip_address(a).is_loopback), "127.0.0.1")


class ThreeNodes:
    """One rank on each of three nodes, which have met and wait."""

    def __init__(self, folder):
        self.folder, self.address = folder, outer_address()
        self.port = free_port(self.address)
        self.wire, self.heard, self.met = Wire((self.address, self.port)), [], threading.Event()
        self.nodes = [self.start(node, self.port) for node in (0, 1)]
        until(self.listens, _First(self))
        self.nodes.append(self.start(2, self.wire.port, "127.0.0.1"))
        self.heard = self.wire.hand_on(
            lambda: len(list(folder.glob("ready-*"))) == 3 or self.process
        )
        assert self.process is None, self.said
        self.ranks = [json.loads((folder / f"ready-{node}").read_text()) for node in range(3)]

    def start(self, node, port, address=""):
        place = Rendezvous(3, node, 1, address or self.address, port, 60.0, SECRET)
        own = self.folder if node == 0 else self.folder / f"node-{node}"
        own.mkdir(exist_ok=True)
        words = ["-m", "tests.security.meeting_rank", str(self.folder)]
        return subprocess.Popen(
            [sys.executable, str(SUPERVISE), str(own), '{"max_restarts": 2}', *words],
            stdout=(self.folder / f"log-{node}").open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # agents that are executed, and so descendants of their supervisor
            env={
                **os.environ,
                **place.environment(),
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "REKINDLE_PRELOADED": "",
            },
        )

    def listens(self):
        return self.port in {port for _, port in listening([psutil.Process(self.nodes[0].pid)])}

    @property
    def process(self):
        """One that has ended."""
        return next((node for node in self.nodes if node.poll() is not None), None)

    @property
    def said(self):
        return "".join(path.read_text() for path in sorted(self.folder.glob("log-*")))

    def family(self, node):
        return psutil.Process(self.nodes[node].pid).children(recursive=True)


class _First:
    """Node rank 0, for `until`."""

    def __init__(self, run):
        self.process, self.run = run.nodes[0], run

    @property
    def said(self):
        return self.run.said


def listening(processes):
    """Where these processes listen, as the kernel has it (/proc/net/tcp and tcp6)."""
    return {
        (ipaddress.ip_address(connection.laddr.ip), connection.laddr.port)
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


def beyond_loopback(processes):
    return {(ip, port) for ip, port in listening(processes) if not ip.is_loopback}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    made = ThreeNodes(tmp_path_factory.mktemp("nodes"))
    yield made
    for node in made.nodes:
        if node.poll() is None:
            os.killpg(node.pid, signal.SIGKILL)


@pytest.mark.slow
def test_supervisors_and_agents_listen_beyond_loopback_at_the_two_authenticated_ports_only(run):
    supervisors = [psutil.Process(node.pid) for node in run.nodes]
    found = [beyond_loopback([process]) for process in supervisors]
    if run.address != "127.0.0.1":
        assert len(found[0]) == 2
        assert run.port in {port for _, port in found[0]}
    assert found[1:] == [set(), set()]
    for node in range(3):
        agent, *_ = run.family(node)
        assert "rekindle.launch.agent" in " ".join(agent.cmdline())
        assert beyond_loopback([agent]) == set()
        assert int(run.ranks[node]["MASTER_PORT"]) in {
            port for _, port in listening([agent, supervisors[node]])
        }


@pytest.mark.slow
def test_no_process_carries_the_secret_in_its_words_or_its_log(run):
    for node in range(3):
        for process in (psutil.Process(run.nodes[node].pid), *run.family(node)):
            assert SECRET not in " ".join(process.cmdline())
    assert SECRET not in run.said


@pytest.mark.slow
def test_the_run_ends_right_whatever_strangers_sent(run):
    supervisor = psutil.Process(run.nodes[0].pid)
    ports = {port for ip, port in listening([supervisor]) if not ip.is_loopback} or {run.port}
    for port in sorted(ports):
        for noise in NOISE.values():
            assert send((run.address, port), noise)
        with pytest.raises(dist.DistError):
            dist.TCPStore(run.address, port, timeout=datetime.timedelta(seconds=1))
    assert len(run.heard) > 100
    assert send((run.address, run.port), run.heard)
    assert with_another_secret((run.address, run.port))
    crowd = [socket.create_connection((run.address, port)) for port in ports for _ in range(100)]
    assert run.process is None, run.said
    (run.folder / "go").touch()
    for end in run.wire.ends:
        end.setblocking(True)
    relays = [
        threading.Thread(target=copied, args=way) for way in (run.wire.ends, run.wire.ends[::-1])
    ]
    for relay in relays:
        relay.daemon = True
        relay.start()
    assert [node.wait(60) for node in run.nodes] == [0, 0, 0], run.said
    assert "restarting" not in run.said
    assert [rank["sum"] for rank in run.ranks] == [9.0] * 3
    for stranger in crowd:
        stranger.close()


def copied(source, target):
    while content := source.recv(1 << 16):
        target.sendall(content)
