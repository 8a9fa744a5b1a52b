"""The cpu image, as containers/build.sh makes it: what it holds, how it ends, how two of it train, what it serves.

Against a real daemon, where one answers and has the image; `make test-containers` sees to both."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rekindle.data.ingest import ingest
from rekindle.data.shard import shard
from rekindle.errors import RequestError
from rekindle.launch.rendezvous import Rendezvous
from rekindle.platforms.docker import Docker, find
from rekindle.records import Evidence, TrainingSummary
from rekindle.spec.model import DataSpec, ModelSpec, TrainSpec
from rekindle.train.history import read_history
from rekindle.train.job import Job

ROOT = Path(__file__).parents[2]
IMAGE, LABEL, USER = "rekindle-cpu", "rekindle.test", "10001"
TENSORFLOW = "rekindle-cpu-tensorflow"
HARDENED = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges")
NETWORKLESS = (*HARDENED, "--network=none")
SECONDS = 120


@pytest.fixture(scope="module")
def docker() -> Docker:
    """A daemon that has the image, of the sources as they are now."""
    path = f"/usr/bin:{os.environ['PATH']}"  # Debian's client is as old as its daemon
    try:
        found = find({**os.environ, "PATH": path})
    except RequestError as error:
        pytest.skip(f"{error.problems[0].what}; `make test-containers` starts it")
    if not found.image_id(IMAGE):
        pytest.skip(f"there is no image {IMAGE}; `make images` builds it")
    subprocess.run([ROOT / "containers" / "build.sh", "cpu"], check=True)
    return found


class Containers:
    """Those of one test, which all see one folder."""

    def __init__(self, docker: Docker, folder: Path, shards: Path) -> None:
        self.docker, self.folder, self.shards = docker, folder, shards
        self.image = IMAGE
        self.label = f"--label={LABEL}={uuid.uuid4().hex}"

    def words(self, *words: str) -> str:
        done = subprocess.run(
            self.docker.words(*words), capture_output=True, text=True, timeout=SECONDS
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def start(self, *words: str, run: tuple[str, ...] = NETWORKLESS) -> str:
        """The id of a container of the image that runs a command."""
        mounts = (
            f"--volume={self.folder}:/shared",
            f"--volume={self.shards}:/shards:ro",
            f"--volume={Path(__file__).parent}:/tests:ro",
            f"--volume={ROOT / 'configs' / 'engines'}:/scripts:ro",
        )
        return self.words("run", "--detach", self.label, *run, *mounts, self.image, *words)

    def train(self, job: str, run: tuple[str, ...] = NETWORKLESS, **changes: Any) -> str:
        """The id of a container that trains digits."""
        train = TrainSpec(**{"steps": 40, "checkpoint": {"every": 10}, "lr": 1e-3} | changes)
        job_of = Job.of(
            artifact_root="/shared",
            run_key="key",
            task="image_classification",
            shards="/shards",
            output=f"/shared/{job}/model",
            history=f"/shared/{job}/training",
            init="",
            init_from="base",
            train=train,
            model=ModelSpec(source={"channels": [8, 16], "hidden": 32}),
        )
        job_of.write(self.folder / f"{job}.json")
        return self.start("python3", "/tests/train.py", f"/shared/{job}.json", run=run)

    def wait(self, container: str) -> int:
        """Its exit code."""
        return int(self.words("wait", container))

    def log(self, container: str) -> str:
        done = subprocess.run(self.docker.words("logs", container), capture_output=True, text=True)
        return done.stdout + done.stderr

    def steps(self) -> int:
        """How far the training has come."""
        rows = list(read_history(self.folder / "checkpoints" / "key" / "history.jsonl"))
        return rows[-1].step if rows else 0

    def until_step(self, step: int, container: str) -> None:
        deadline = time.monotonic() + SECONDS
        while self.steps() < step:
            assert time.monotonic() < deadline, self.log(container)
            assert self.words("inspect", "--format={{.State.Running}}", container) == "true", (
                self.log(container)
            )
            time.sleep(0.02)

    def clear(self) -> None:
        ids = self.words("ps", "--all", "--quiet", f"--filter={self.label[2:]}").split()
        if ids:
            self.words("rm", "--force", "--volumes", *ids)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    data = DataSpec(source="sklearn:digits")
    ingest(data, "image", "", folder / "examples")
    shard(folder / "examples", data, ModelSpec(), "image_classification", folder / "shards")
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)  # the image's user reads it
    return folder / "shards"


@pytest.fixture
def containers(docker: Docker, tmp_path: Path, shards: Path) -> Iterator[Containers]:
    tmp_path.chmod(0o777)
    made = Containers(docker, tmp_path, shards)
    yield made
    made.clear()


def test_the_self_test_passes_without_rights_a_network_or_a_disk(containers: Containers) -> None:
    container = containers.start("python3", "/opt/rekindle/selftest/selftest.py", "--json")
    assert containers.wait(container) == 0, containers.log(container)
    said = json.loads(containers.words("logs", container))
    found = {check["name"]: check["what"] for check in said["checks"]}
    assert found["user"] == USER
    assert found["ranks"] == "two met and agreed on a sum"
    assert said["image"]["image"] == "cpu"
    labels = json.loads(
        containers.words("image", "inspect", "--format={{json .Config.Labels}}", IMAGE)
    )
    assert labels["org.opencontainers.image.version"] == said["image"]["version"]
    assert labels["org.opencontainers.image.revision"] == said["image"]["commit"]


def test_nothing_that_builds_is_left_in_it(containers: Containers) -> None:
    look = "for name in gcc cc make git pip pip3; do command -v $name; done; id -u"
    container = containers.start("sh", "-c", look)
    containers.wait(container)
    assert containers.log(container).split() == [USER]


def test_docker_stop_has_the_ranks_save_and_the_same_command_resumes(
    containers: Containers,
) -> None:
    # as process 1, which gets no signal that it does not ask for
    container = containers.train("job", steps=20_000, checkpoint={"every": 100_000})
    containers.until_step(3, container)
    containers.words("stop", "--time=60", container)
    assert containers.wait(container) == 75, containers.log(container)
    assert "stopped from outside after a save" in containers.log(container)
    containers.words("start", container)
    deadline = time.monotonic() + SECONDS
    while "resumed from the checkpoint of step" not in containers.log(container):
        assert time.monotonic() < deadline, containers.log(container)
        time.sleep(0.1)


def test_deepspeed_and_mpirun_train_two_ranks_in_it(containers: Containers) -> None:
    place = Rendezvous(ranks_per_node=2).environment()
    run = (*NETWORKLESS, *(f"--env={name}={value}" for name, value in place.items()))
    zero = {"engine": "deepspeed", "engine_config": {"zero_optimization": {"stage": 2}}}
    container = containers.train("job", run, launcher="mpirun", **zero)
    assert containers.wait(container) == 0, containers.log(container)
    summary = TrainingSummary.read(containers.folder / "job" / "training" / "training.json")
    assert (summary.world_size, summary.engine, summary.in_effect["ZeRO stage"]) == (
        2,
        "deepspeed",
        "2",
    )


def test_keras_trains_in_the_image_with_tensorflow(containers: Containers) -> None:
    if not containers.docker.image_id(TENSORFLOW):
        pytest.skip(
            f"there is no image {TENSORFLOW}; `make images IMAGES=cpu-tensorflow` builds it"
        )
    containers.image = TENSORFLOW
    found = containers.start("python3", "/opt/rekindle/selftest/selftest.py")
    assert containers.wait(found) == 0, containers.log(found)
    assert re.search(r"^ok +tensorflow +works$", containers.log(found), re.MULTILINE)
    container = containers.train("job", entrypoint="/scripts/own_keras.py")
    assert containers.wait(container) == 0, containers.log(container)
    assert "MirroredStrategy on 2 devices" in containers.log(container)
    assert (containers.folder / "job" / "model" / "model.keras").is_file()


def test_two_containers_on_a_network_train_together(containers: Containers) -> None:
    network = f"rekindle-{uuid.uuid4().hex[:8]}"
    containers.words("network", "create", "--internal", network)
    try:
        nodes = [_node(containers, node, network) for node in range(2)]
        ends = [containers.wait(node) for node in nodes]
        logs = "\n".join(map(containers.log, nodes))
        assert ends == [0, 0], logs
        containers.clear()
    finally:
        containers.clear()
        containers.words("network", "rm", network)
    summary = TrainingSummary.read(containers.folder / "node-0" / "training" / "training.json")
    assert (summary.world_size, summary.steps) == (2, 40)
    assert "40 steps from the start on 2 ranks" in logs
    assert not (containers.folder / "node-1").exists(), "only the first node writes outputs"


def _node(containers: Containers, node: int, network: str) -> str:
    """A container that is one node of two."""
    place = Rendezvous(2, node, 1, f"{network}-0", 29400, 60.0, "5" * 64)
    (entry,) = (f"{name}={value}" for name, value in place.environment().items())
    run = (*HARDENED, f"--network={network}", f"--name={network}-{node}", f"--env={entry}")
    return containers.train(f"node-{node}", run)


# where a platform puts the model and what it sets; what is asked, and where
PLATFORMS: dict[str, tuple[str, dict[str, str], str, str, str]] = {
    "SageMaker": ("/opt/ml/model", {}, "8080", "/ping", "/invocations"),
    "Vertex AI": (
        "/staged",
        {
            "AIP_STORAGE_URI": "/staged",
            "AIP_HTTP_PORT": "8085",
            "AIP_HEALTH_ROUTE": "/health",
            "AIP_PREDICT_ROUTE": "/v1/endpoints/7:predict",
        },
        "8085",
        "/health",
        "/v1/endpoints/7:predict",
    ),
    "Azure ML": (
        "/var/azureml-app/azureml-models/tickets/1/v3",
        {"AZUREML_MODEL_DIR": "/var/azureml-app/azureml-models/tickets/1", "REKINDLE_SERVE": "1"},
        "8080",
        "/health/ready",
        "/predict",
    ),
    "KServe": ("/mnt/models", {}, "8080", "/v2/health/ready", "/v2/models/tickets/infer"),
}


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Versions as a deployment stages them, readable by the image's user: a classifier of images, the same with a
    file changed, and a language model."""
    from rekindle.serve.staging import stage
    from tests.serve import models

    root = tmp_path_factory.mktemp("staged")
    found = {
        kind: Path(stage(models.made(root / f"{kind}-made", kind), str(root / kind)))
        for kind in ("image", "text-lm")
    }
    found["changed"] = shutil.copytree(found["image"], root / "changed")
    weights = next(found["changed"].rglob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    for path in [root, *root.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return found


def test_it_serves_where_each_platform_puts_the_model_and_drains_on_sigterm(
    containers: Containers, staged: dict[str, Path]
) -> None:
    """Read-only, on a network that leads nowhere else."""
    network = f"rekindle-{uuid.uuid4().hex[:8]}"
    containers.words("network", "create", "--internal", network)
    hardened = (*HARDENED, f"--network={network}")
    try:
        nodes = {
            name: containers.start(
                *(() if "REKINDLE_SERVE" in environment else ("serve",)),
                run=(
                    *hardened,
                    f"--volume={staged['text-lm' if name == 'KServe' else 'image']}:{place}:ro",
                    *(f"--env={key}={value}" for key, value in environment.items()),
                ),
            )
            for name, (place, environment, *_) in PLATFORMS.items()
        }
        changed = containers.start(
            "serve", run=(*hardened, f"--volume={staged['changed']}:/opt/ml/model:ro")
        )
        inspect = f'--format={{{{(index .NetworkSettings.Networks "{network}").IPAddress}}}}'
        for name, node in nodes.items():
            _ask(containers, node, containers.words("inspect", inspect, node), name, staged)
        assert containers.wait(changed) == 2
        assert "are not those that were judged" in containers.log(changed)
    finally:
        containers.clear()
        containers.words("network", "rm", network)


def _ask(
    containers: Containers, node: str, address: str, name: str, staged: dict[str, Path]
) -> None:
    """Wait for the container of a platform, ask it as the platform does, and stop it."""
    _, _, port, health, route = PLATFORMS[name]
    deadline, url = time.monotonic() + SECONDS, f"http://{address}:{port}"
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if client.get(health).status_code == 200:
                    break
            assert time.monotonic() < deadline, containers.log(node)
            time.sleep(0.1)
        log = containers.log(node)
        assert re.search("tickets version 3 at .*, proven by [68] rows of its test split", log), log
        if name != "KServe":
            rows = Evidence.read(staged["image"] / "evidence.json").smoke.rows
            body: dict[str, Any] = {"instances": [{"image": row.content} for row in rows]}
            answers = client.post(route, json=body).json()["predictions"]
            assert [one["label"] for one in answers] == [row.answer["label"] for row in rows]
            containers.words("stop", "--time=60", node)
        else:
            tensor = {
                "name": "body",
                "shape": [48],
                "datatype": "BYTES",
                "data": ["the parcel"] * 48,
            }
            body = {"inputs": [tensor], "parameters": {"max_new_tokens": 100}}
            with concurrent.futures.ThreadPoolExecutor() as pool:  # accepted before, answered after
                answer = pool.submit(client.post, route, json=body)
                while "rekindle_batch_instances_count 2.0" not in client.get("/metrics").text:
                    assert not answer.done(), answer.result().text
                    time.sleep(0.02)
                containers.words("kill", "--signal=TERM", node)
                assert not answer.done()
                found = answer.result()
            (texts,) = [one for one in found.json()["outputs"] if one["name"] == "text"]
            assert (found.status_code, len(texts["data"])) == (200, 48)
    assert containers.wait(node) == 0, containers.log(node)
