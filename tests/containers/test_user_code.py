"""`rekindle images build` and `push` against a real daemon and a real registry, and steps that run
one's own task in what they made."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rekindle.cli.main import invoke
from rekindle.data.ingest import ingest
from rekindle.errors import RequestError
from rekindle.platforms.docker import Docker, find
from rekindle.records import TrainingSummary
from rekindle.spec import lock
from rekindle.spec.lock import Pin
from rekindle.spec.model import DataSpec
from tests.platforms.local.images import make

HERE = Path(__file__).parent
SMALL, OURS, BUILT = "rekindle-test/below:1", "rekindle-cpu", "rekindle-code/own"
HARDENED = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--network=none")
UNTRACKED = "--env=MLFLOW_HTTP_REQUEST_MAX_RETRIES=0"  # no server answers, and training goes on


@pytest.fixture(scope="module")
def docker() -> Iterator[Docker]:
    try:
        found = find(os.environ)
    except RequestError as error:
        pytest.skip(f"{error.problems[0].what}; `make test-containers` starts it")
    yield found
    pushed = [f"--filter=reference=127.0.0.1:*/{name}" for name in ("own", "team/own")]
    listing = found.words("images", "--format={{.Repository}}:{{.Tag}}", *pushed)
    names = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split()
    words = found.words("image", "rm", "--force", BUILT, SMALL, *names)
    subprocess.run(words, capture_output=True, check=False)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Host and port of a fresh registry, which wants no password."""
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip("there is no docker-registry here; `make test-containers` installs it")
    folder = tmp_path_factory.mktemp("registry")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    config = {
        "version": 0.1,
        "http": {"addr": address},
        "storage": {"filesystem": {"rootdirectory": str(folder / "store")}},
    }
    (folder / "config.yml").write_text(yaml.safe_dump(config))
    command = [program, "serve", str(folder / "config.yml")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        for line in server.stderr:
            if "listening on" in line:
                break
        drain = subprocess.Popen(["cat"], stdin=server.stderr, stdout=subprocess.DEVNULL)
        yield address
        server.terminate()
        drain.wait()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A config with a task of its own, in a folder with other things."""
    for name in ("linear.py", "scale.py"):
        shutil.copy(HERE / name, tmp_path)
    (tmp_path / "secret.txt").write_text("mine")
    config: dict[str, Any] = {
        "name": "own",
        "task": "linear.py:Linear",
        "data": {"source": "sklearn:digits"},
        "model": {"source": {"linear": True}},
        "train": {"epochs": 2, "lr": 1e-2},
        "register": {"tracking_uri": "https://mlflow.example.com"},
        "platforms": {
            "kubeflow": {"artifact_root": "/gcs/lake/rekindle", "image": "r.example/own:1"}
        },
    }
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def say(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """What a command says as JSON; it has to succeed."""
    code = invoke([*words, "--json"])
    said = capsys.readouterr()
    assert code == 0, said
    found: dict[str, Any] = json.loads(said.out)
    return found


def test_an_image_is_built_pushed_and_from_then_on_known_by_its_digest(
    docker: Docker, registry: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(docker, SMALL)
    config, name = str(project / "own.yaml"), f"{registry}/team/own:1"
    words = (f"--set=platforms.kubeflow.image={name}", f"--set=image.base={SMALL}")
    first = say(capsys, "images", "build", config, *words)
    assert first["files"] == ["linear.py", "scale.py"]
    assert say(capsys, "images", "build", config, *words) == first, "the same files, the same image"
    pushed = say(capsys, "images", "push", config, *words)
    assert pushed["lock"] == str(project / lock.NAME)
    digest = _digest(registry, "team/own", "1")
    assert pushed["images"] == [f"{registry}/team/own@{digest}"]

    listing = ["run", "--rm", "--network=none", f"{registry}/team/own@{digest}", "/bin/ls"]
    done = subprocess.run(
        docker.words(*listing, "-nR", "/opt/rekindle/code"),
        capture_output=True,
        text=True,
        check=True,
    )
    files = re.findall(r"^-rw-r--r-- .* (\S+)$", done.stdout, re.MULTILINE)
    assert files == ["linear.py", "scale.py"]

    out = project / "out"
    compiling = ("compile", config, "--platform", "kubeflow", *words, "-o", str(out))
    say(capsys, *compiling)
    text = (out / "continuous-training.yaml").read_text()
    assert set(re.findall(r"image: (\S+)", text)) == set(pushed["images"])

    (project / "scale.py").write_text((project / "scale.py").read_text() + "# changed\n")
    assert invoke(list(compiling)) == 2
    assert "was built from other files than those here" in capsys.readouterr().err
    assert invoke(["images", "push", config, *words]) == 2
    assert f"{BUILT} was built from other files" in capsys.readouterr().err


def _digest(registry: str, repository: str, tag: str) -> str:
    """Of a manifest, as the registry itself says."""
    kind = "application/vnd.docker.distribution.manifest.v2+json"
    url = f"http://{registry}/v2/{repository}/manifests/{tag}"
    request = urllib.request.Request(url, headers={"Accept": kind})
    with urllib.request.urlopen(request) as answer:
        return str(answer.headers["Docker-Content-Digest"])


def test_a_registry_that_does_not_answer_is_an_error_with_a_way_out(
    docker: Docker, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(docker, SMALL)
    config = str(project / "own.yaml")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    words = (f"--set=platforms.kubeflow.image={address}/own:1", f"--set=image.base={SMALL}")
    say(capsys, "images", "build", config, *words)
    assert invoke(["images", "push", config, *words]) == 1
    said = capsys.readouterr().err
    assert f"{address}/own:1 cannot be pushed" in said
    assert f"fix:   docker login {address}" in said
    assert not (project / lock.NAME).exists()


def test_a_base_that_nobody_has_is_refused(
    docker: Docker, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--set=image.base=localhost:1/no-such-image:1",)
    assert invoke(["images", "build", str(project / "own.yaml"), *words]) == 2
    assert "the image localhost:1/no-such-image:1 cannot be had" in capsys.readouterr().err


def test_steps_as_kubeflow_starts_them_run_the_task_that_the_image_has(
    docker: Docker, project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not docker.image_id(OURS):
        pytest.skip(f"there is no image {OURS}; `make images` builds it")
    pipeline = _first(compiled(project, capsys) / "continuous-training.yaml")
    for file in ("linear.py", "scale.py"):  # nothing of this machine is needed any more
        (project / file).unlink()

    lake = tmp_path / "lake"
    ingest(DataSpec(source="sklearn:digits"), "image", "", lake / "examples")
    steps = Steps(docker, pipeline, lake)
    steps.run("shard", reads=["examples"], leaves=["shards"], tokenizing="")
    steps.run(
        "finetune",
        reads=["shards"],
        leaves=["network", "training"],
        run_key="k",
        init_from="base",
        init_digest="",
    )
    assert (lake / "network" / "model.safetensors").is_file()
    summary = TrainingSummary.read(lake / "training" / "training.json")
    assert summary.task == "/opt/rekindle/code/linear.py:Linear"
    assert summary.steps > 0


COMPONENT = """
from kfp import dsl

@dsl.component(base_image="rekindle/cpu", install_kfp_package=False)
def count(text: str) -> int:
    from tools.words import split
    return len(split(text))

@dsl.pipeline(name="counting")
def counting(text: str = "a b c"):
    count(text=text)
"""


PLACES = {
    "azureml": {"image": "lake.azurecr.io/own:1"},
    "kubeflow": {"image": "r.example/own:1"},
    "sagemaker": {
        "image": "123456789012.dkr.ecr.eu-central-1.amazonaws.com/own:1",
        "region": "eu-central-1",
        "role_arn": "arn:aws:iam::123456789012:role/me",
        "artifact_root": "s3://b/r",
    },
    "vertex": {
        "image": "europe-docker.pkg.dev/p/r/own:1",
        "project": "p",
        "region": "europe-west4",
        "artifact_root": "gs://b/r",
    },
}


def test_on_every_platform_a_component_imports_a_module_of_ones_own_from_the_image(
    docker: Docker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(docker, SMALL)
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "words.py").write_text("split = str.split\n")
    (tmp_path / "counting.py").write_text(COMPONENT)
    config = {
        "name": "own",
        "pipeline": "counting.py:counting",
        "image": {"base": SMALL},
        "platforms": PLACES,
    }
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(config))
    out = compiled(tmp_path, capsys)
    (tmp_path / "tools" / "words.py").unlink()
    lake = tmp_path / "lake"
    pipelines = {
        "kubeflow": _first(out / "counting.yaml"),
        "vertex": json.loads((out / "counting.vertex.json").read_text())["pipelineSpec"],
    }
    vertex = pipelines["vertex"]["root"]["inputDefinitions"]["parameters"]["text"]
    assert vertex["defaultValue"] == "a b c"
    found = {
        platform: Steps(docker, pipeline, lake).run("count", [], [])["parameterValues"]["Output"]
        for platform, pipeline in pipelines.items()
    }
    found["sagemaker"] = _processing(docker, out, lake)
    found["azureml"] = _command(docker, out, lake)
    assert found == dict.fromkeys(PLACES, 3)


def _processing(docker: Docker, out: Path, lake: Path) -> Any:
    """What the step returns in a container as SageMaker starts it."""
    job = json.loads((out / "counting.sagemaker.json").read_text())["Steps"][0]["Arguments"]
    (source,) = job["ProcessingInputs"]
    (left,) = job["ProcessingOutputConfig"]["Outputs"]
    bundle = out / source["S3Input"]["S3Uri"].removeprefix("s3://b/r/")
    result = _folder(lake / "sagemaker")
    python, *words = job["AppSpecification"]["ContainerEntrypoint"]
    _started(
        docker,
        f"--volume={bundle}:{source['S3Input']['LocalPath']}:ro",
        f"--volume={result}:{left['S3Output']['LocalPath']}",
        "--tmpfs=/opt/ml/output",
        "--env=REKINDLE_P0=a b c",
        f"--entrypoint={python}",
        BUILT,
        *words,
    )
    return json.loads((result / "result.json").read_text())["parameters"]["Output"]


def _command(docker: Docker, out: Path, lake: Path) -> Any:
    """What the step returns in a container as Azure ML starts it."""
    job = _first(out / "counting.azureml.yaml")
    component = job["jobs"]["count"]["component"]
    result = _folder(lake / "azureml")
    text = component["command"].replace("${{inputs.text}}", job["inputs"]["text"])
    text = text.replace("${{outputs.rekindle_result}}", "/result")
    _started(
        docker,
        f"--volume={out / component['code']}:/code:ro",
        f"--volume={result}:/result",
        "--workdir=/code",
        "--entrypoint=/bin/sh",
        BUILT,
        "-c",
        text,
    )
    return json.loads((result / "result.json").read_text())["parameters"]["Output"]


def _folder(path: Path) -> Path:
    """One that everybody may write to."""
    path.mkdir(parents=True)
    path.chmod(0o777)
    return path


def _first(path: Path) -> Any:
    """The first document of a YAML."""
    return yaml.safe_load(path.read_text().split("\n---\n")[0])


def _started(docker: Docker, *words: str) -> None:
    """A container that runs to its end, as a user without rights."""
    done = subprocess.run(
        docker.words("run", "--rm", *HARDENED, UNTRACKED, "--user=10001", "--tmpfs=/tmp", *words),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def compiled(project: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The folder of definitions for an image that was built and is known, though not pushed: no
    registry has to say anything here, and a push of rekindle's image takes a minute."""
    config = project / "own.yaml"
    built = say(capsys, "images", "build", str(config))
    pin = Pin(digest="sha256:" + "0" * 64, code=built["code"])
    places = yaml.safe_load(config.read_text())["platforms"]
    lock.write(project, {place["image"]: pin for place in places.values()})
    words = ("--platform", ",".join(places), "-o", str(project / "out"))
    say(capsys, "compile", str(config), *words)
    return project / "out"


class Steps:
    """Steps of a compiled pipeline in containers, as KFP's launcher starts them: artifacts under
    /gcs, the pipeline's own defaults as parameters."""

    def __init__(self, docker: Docker, pipeline: dict[str, Any], lake: Path) -> None:
        self.docker, self.pipeline, self.lake = docker, pipeline, lake
        lake.mkdir(exist_ok=True)
        lake.chmod(0o777)
        for path in lake.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)

    def run(self, step: str, reads: list[str], leaves: list[str], **parameters: str) -> Any:
        """What it returned, run to its end as a user without rights."""
        container = self.pipeline["deploymentSpec"]["executors"][f"exec-{step}"]["container"]
        given = self.pipeline["root"]["inputDefinitions"]["parameters"]
        wanted = self.pipeline["components"][f"comp-{step}"]["inputDefinitions"]["parameters"]
        values = {n: parameters[n] if n in parameters else given[n]["defaultValue"] for n in wanted}
        executor_input = json.dumps(
            {
                "inputs": {"parameterValues": values, "artifacts": dict(map(_artifact, reads))},
                "outputs": {
                    "artifacts": dict(map(_artifact, leaves)),
                    "outputFile": "/gcs/lake/result.json",
                },
            }
        )
        words = [*container["command"], *container["args"]]
        words = [executor_input if word == "{{$}}" else word for word in words]
        _started(self.docker, f"--volume={self.lake}:/gcs/lake", BUILT, *words)
        return json.loads((self.lake / "result.json").read_text())


def _artifact(name: str) -> tuple[str, dict[str, Any]]:
    kind = {"schemaTitle": "system.Artifact", "schemaVersion": "0.0.1"}
    one = {"name": name, "type": kind, "uri": f"gs://lake/{name}", "metadata": {}}
    return name, {"artifacts": [one]}
