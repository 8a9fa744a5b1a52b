"""A pipeline with a step on two nodes, compiled for Kubeflow, and KFP's part in running its
launcher: the ExecutorInput, the pod, the container."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from kfp import dsl

import rekindle
from rekindle.ir.compile import compile_function
from rekindle.ir.edit.uris import PREFIX, as_place
from rekindle.ir.read.pipeline import read
from rekindle.launch import staging
from rekindle.platforms.kubeflow.compile import RESULT_OUTPUT, compile
from rekindle.platforms.kubeflow.section import KubeflowSpec
from tests.servers.kubeflow.kubernetes import FakeCluster

ROOT = Path(__file__).parents[3]
STEP = "root.train.executor"
PLACE = KubeflowSpec(image="example.com/launcher@sha256:0", secrets={"WORD": "words/first"})


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def make(data: dsl.Output[dsl.Dataset]):
    from pathlib import Path

    Path(data.path).write_text("a b c")


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def train(
    data: dsl.Input[dsl.Dataset],
    model: dsl.Output[dsl.Model],
    gate: str = "",
    behave: str = "",
    text: str = '$(HOME) {{x}} it\'s "quoted"',
) -> bool:
    """Every node tells node 0 how long the dataset is; node 0 writes the sum into the model."""
    import os
    import signal
    import socket
    import sys
    import time
    from pathlib import Path

    from rekindle.launch.rendezvous import Rendezvous

    place = Rendezvous.current()
    print(f"node {place.node_rank} of {place.nodes} begins", flush=True)
    assert text == "$" + '(HOME) {{x}} it\'s "quoted"', text  # in two, lest both be expanded
    assert not [name for name in os.environ if name.startswith("PET_")]
    rows = len(Path(data.path).read_text().split())
    deadline = time.monotonic() + 60
    told_to_end = []
    if behave == "saves for long":
        signal.signal(signal.SIGTERM, lambda *_: told_to_end.append(True))
    while gate and not Path(gate).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    if behave == "fail" and place.node_rank == 1:
        print("the last words of node 1", file=sys.stderr, flush=True)
        raise ValueError("the data are all wrong")
    if behave == "lost" and place.node_rank == 1:
        sys.exit(75)  # as ranks do that lost those of another node
    if behave == "needs its peer" and place.node_rank == 1 and os.environ["RESTARTS"] == "0":
        raise ConnectionResetError("node 0 is gone")
    first_of_node_1 = place.node_rank == 1 and os.environ["RESTARTS"] == "0"
    if told_to_end or (behave == "preempted once" and first_of_node_1):
        sys.exit(75)
    if place.node_rank:
        while True:
            try:
                with socket.create_connection((place.address, place.port), timeout=30) as peer:
                    peer.sendall(str(rows).encode())
                return False
            except ConnectionRefusedError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
    with socket.create_server((place.address, place.port)) as server:
        server.settimeout(60)
        peer, _ = server.accept()
        total = rows + int(peer.recv(100))
    print(f"node 0 knows of {total} rows", flush=True)
    Path(model.path).mkdir(parents=True)
    Path(model.path, "weights").mkdir()
    Path(model.path, "weights", "total.txt").write_text(str(total))
    Path(model.path, "word.txt").write_text(os.environ.get("WORD", ""))
    model.metadata["rows"] = total
    return True


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def look(model: dsl.Input[dsl.Model], good: bool) -> str:
    from pathlib import Path

    assert good
    return Path(model.path, "weights", "total.txt").read_text()


@dsl.pipeline(name="two-nodes")
def pipeline(gate: str = "", behave: str = ""):
    trained = train(data=make().outputs["data"], gate=gate, behave=behave)
    rekindle.distribute(trained, nodes=2, gpus_per_node=0, max_run_hours=48)
    look(model=trained.outputs["model"], good=trained.outputs["Output"])


@dsl.pipeline(name="two-nodes-retried")
def pipeline_retried(gate: str = "", behave: str = ""):
    trained = train(data=make().outputs["data"], gate=gate, behave=behave)
    trained.set_retry(1, backoff_duration="1s")
    rekindle.distribute(trained, nodes=2)


def compiled(
    source: Any = pipeline, place: KubeflowSpec = PLACE, comment: str = ""
) -> dict[str, Any]:
    """The first document of the definition; `comment` goes behind the source of `train`."""
    text = compile_function(source)
    if comment:
        spec, *settings = yaml.safe_load_all(text)
        spec["deploymentSpec"]["executors"]["exec-train"]["container"]["command"][-1] += comment
        text = yaml.safe_dump_all([spec, *settings])
    (content,) = compile(text, read(text), {}, place).files.values()
    documents = list(yaml.safe_load_all(content))
    return documents[0]


class Step:
    """The launcher step of one run: what KFP's driver decided, which every pod of it gets."""

    def __init__(
        self,
        folder: Path,
        cluster: FakeCluster,
        source: Any = pipeline,
        component: str = "train",
        store: str = "",
        place: KubeflowSpec = PLACE,
        comment: str = "",
        **values: Any,
    ) -> None:
        self.folder, self.cluster = folder, cluster
        spec = compiled(source, place, comment)
        self.container = spec["deploymentSpec"]["executors"][f"exec-{component}"]["container"]
        made = spec["components"][f"comp-{component}"]
        defaults = made["inputDefinitions"]["parameters"]
        given = {n: d["defaultValue"] for n, d in defaults.items() if "defaultValue" in d}
        store = store or f"file://{folder}/store"
        staging.write_text(f"{store}/data", "a b c")
        given[f"{PREFIX}data"] = as_place(f"{store}/data", {"rows": 3})
        self.outputs = folder / "store" / "outputs"
        self.executor_input = {
            "inputs": {"parameterValues": {**given, **values}},
            "outputs": {
                "parameters": {
                    n: {"outputFile": str(folder / "kfp" / n)}
                    for n in made["outputDefinitions"]["parameters"]
                },
                "artifacts": {
                    n: {
                        "artifacts": [
                            {"name": n, "uri": f"{store}/outputs/{n}", "type": d["artifactType"]}
                        ]
                    }
                    for n, d in made["outputDefinitions"]["artifacts"].items()
                },
                "outputFile": str(folder / "kfp" / "output_metadata.json"),
            },
        }
        assert RESULT_OUTPUT in self.executor_input["outputs"]["artifacts"]

    def pod(
        self, run: str = "run", node: str = STEP, patience: float = 20
    ) -> subprocess.Popen[str]:
        """A pod with the launcher, as KFP starts it."""
        name = self.cluster.start_pod(run, node)
        words = [
            word.replace("{{$}}", json.dumps(self.executor_input))
            for word in (*self.container["command"], *self.container["args"])
        ]
        flags = [
            "--server",
            self.cluster.url,
            "--account",
            str(self.cluster.account),
            "--poll",
            "0.05",
            "--patience",
            str(patience),
        ]
        self.log = self.folder / f"{name}.log"
        with self.log.open("w") as log:
            return subprocess.Popen(
                [sys.executable, *words[1:3], *flags, *words[3:]],
                env={**os.environ, "KFP_POD_NAME": name, "PYTHONPATH": str(ROOT)},
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def said(self) -> str:
        return self.log.read_text()

    def output(self) -> dict[str, Any]:
        """What KFP's launcher reads when the container is done."""
        file = Path(self.executor_input["outputs"]["outputFile"])
        return dict(json.loads(file.read_text()))


def until(true: Any, what: str, seconds: float = 60) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.01)


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
