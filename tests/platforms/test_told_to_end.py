"""A container's first process is told to end before its step runs, or between two attempts.

The kernel keeps a signal without a handler from process 1 of a PID namespace, so a node that waits
for a package index or for its next attempt would stay until the platform kills it: two minutes on
SageMaker, paid for."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from rekindle.platforms.kubeflow.trainjob import packed
from tests.quick import first
from tests.servers.aws.container import Host, start
from tests.support.moto import can_mount

ROOT = Path(__file__).parents[2]
Container = Callable[[Sequence[str], Mapping[str, str]], Host]
TERMINATED = 128 + signal.SIGTERM
PIP = {"needed": ["a-package"], "runtime": [], "options": ["--retries", "0"]}
BUNDLED = {
    "name": "step",
    "pipeline_parameters": {},
    "results": {},
    "guards": [],
    "parameters": {},
    "artifacts": {},
    "outputs": {"parameters": {}, "artifacts": {}},
    "source": "",
    "env": {},
    "args": [],
    "pip": PIP,
    "retry": {"count": 1, "pause_seconds": 600, "factor": 1, "cap_seconds": 600},
}

pytestmark = pytest.mark.skipif(not can_mount(), reason="needs root and unshare")


@pytest.fixture
def index() -> Iterator[socket.socket]:
    """A package index that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(60)
        yield listening


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Container]:
    """Starts words with an environment as a container's first process; it is gone afterwards."""
    hosts: list[Host] = []

    def run(words: Sequence[str], environment: Mapping[str, str]) -> Host:
        environment = {"PYTHONPATH": str(ROOT), **environment}
        hosts.append(start(tmp_path / "opt", "one", ["one"], words, environment))
        return hosts[-1]

    yield run
    for host in hosts:
        host.process.kill()
        host.process.wait()


@pytest.mark.parametrize("platform", first(2, ["azureml", "vertex", "sagemaker", "kubeflow"]))
def test_a_node_that_still_installs_ends_when_told(
    platform: str, index: socket.socket, container: Container, tmp_path: Path
) -> None:
    words, environment = entry_of(platform, tmp_path)
    address = f"http://127.0.0.1:{index.getsockname()[1]}/simple"
    host = container(words, {**environment, "PIP_INDEX_URL": address})
    with index.accept()[0]:
        host.send(signal.SIGTERM)
        assert host.process.wait(60) == TERMINATED, host.log


@pytest.mark.parametrize("platform", ["sagemaker", "azureml"])
def test_a_step_between_two_attempts_ends_when_told(
    platform: str, container: Container, tmp_path: Path
) -> None:
    say = (
        "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1]))); sys.exit(3)"
    )
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(60)
        command = ["python3", "-c", say, str(listening.getsockname()[1])]
        words, environment = entry_of(
            platform, tmp_path, command=command, pip={**PIP, "needed": []}
        )
        host = container(words, environment)
        listening.accept()[0].close()
        while "the next one begins in 600 s" not in host.log:
            assert host.process.poll() is None, host.log
        host.send(signal.SIGTERM)
        assert host.process.wait(60) == TERMINATED, host.log


@pytest.mark.parametrize(
    ("hears", "code"), [("", TERMINATED), ("signal.signal(15, lambda *_: sys.exit(1));", 1)]
)
def test_a_step_that_was_ended_is_not_tried_again(
    hears: str, code: int, container: Container, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(60)
        say = f"import signal, socket, sys, time; {hears} "
        say += "s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))"
        command = ["python3", "-c", f"{say}; time.sleep(600)", str(listening.getsockname()[1])]
        words, environment = entry_of(
            "sagemaker", tmp_path, command=command, pip={**PIP, "needed": []}
        )
        host = container(words, environment)
        with listening.accept()[0]:
            host.send(signal.SIGTERM)
            assert host.process.wait(60) == code, host.log
    assert "attempt" not in host.log


def entry_of(
    platform: str, folder: Path, *, command: Sequence[str] = (), pip: Mapping[str, object] = PIP
) -> tuple[list[str], dict[str, str]]:
    """What the platform starts in a container, and its environment."""
    if platform == "kubeflow":
        words = packed({"pip": pip})
        return ["python3", "-m", "rekindle.platforms.kubeflow.node", *words], {
            "PET_NNODES": "1",
            "PET_NODE_RANK": "0",
            "PET_NPROC_PER_NODE": "1",
        }
    if platform == "vertex":
        task = {"gpus": 0, "region": "us-central1", "secrets": {}, "secret": "", "pip": pip}
        (folder / "task.json").write_text(json.dumps(task))
        pools = {"workerpool0": ["one:2222"], "workerpool1": ["two:2222"]}
        spec = {"cluster": pools, "task": {"type": "workerpool1", "index": 0}}
        called = "import sys; from pathlib import Path; from rekindle.platforms.vertex import node"
        return [
            "python3",
            "-c",
            f"{called}; sys.exit(node.main(Path(sys.argv[1])))",
            str(folder),
        ], {"CLUSTER_SPEC": json.dumps(spec)}
    bundle = folder / "opt" / "input" / "data" / "bundle"
    bundle.mkdir(parents=True)
    (bundle / "entry.py").write_bytes(
        (ROOT / "rekindle" / "platforms" / platform / "entry.py").read_bytes()
    )
    (bundle / "task.json").write_text(json.dumps({**BUNDLED, "command": list(command), "pip": pip}))
    words = ["python3", "/opt/ml/input/data/bundle/entry.py"]
    return words + (
        ["--output", "rekindle-result=/opt/ml/result"] if platform == "azureml" else []
    ), {}
