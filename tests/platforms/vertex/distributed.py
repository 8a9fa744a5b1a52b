"""A step on two nodes, and how Vertex AI would start its launcher."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rekindle.ir.compile import compile_pipeline
from rekindle.ir.read.pipeline import read
from rekindle.platforms.vertex.compile import compile
from rekindle.platforms.vertex.section import VertexSpec

if TYPE_CHECKING:
    from tests.servers.google.job import Job
    from tests.servers.google.vertex import Vertex

RUN = "projects/12/locations/europe-west4/pipelineJobs/fits-1"
PLACE: dict[str, Any] = {
    "project": "my-project",
    "region": "europe-west4",
    "artifact_root": "gs://bucket/rekindle/",
    "service_account": "me@my-project.iam.gserviceaccount.com",
    "labels": {"team": "search"},
    "network": "projects/12/global/networks/net",
    "image": "europe-docker.pkg.dev/p/r/train@sha256:" + "0" * 64,
    "kms_key": "projects/p/locations/europe-west4/keyRings/r/cryptoKeys/k",
}
FIT = Path(__file__).with_name("fit.py")


@functools.cache
def ir(target: str = f"{FIT}:fits") -> str:
    """The IR of a pipeline, that of fit.py unless said otherwise."""
    return compile_pipeline(target)


def container(label: str = "exec-fit", text: str = "", **place: Any) -> dict[str, Any]:
    """The compiled container of a step of the pipeline `text`, of fit.py unless said otherwise."""
    text, samples = text or ir(), {"folder": ""}
    definition = compile(text, read(text), samples, VertexSpec(**{**PLACE, **place}))
    ((_, content),) = definition.files.items()
    executors = json.loads(content)["pipelineSpec"]["deploymentSpec"]["executors"]
    found: dict[str, Any] = executors[label]["container"]
    return found


@dataclasses.dataclass
class Task:
    """A task of a run: `folder` is where components leave notes, `behave` what they do in each
    attempt."""

    service: Vertex
    folder: Path
    behave: str = "ok"
    item: str = "a"
    label: str = "exec-fit"
    place: dict[str, Any] = dataclasses.field(default_factory=dict)
    text: str = ""

    def outputs(self, attempt: str = "1") -> dict[str, Any]:
        at = f"bucket/pipeline/12/fits-1/fit_{attempt}"
        returned = "done" if self.label == "exec-shell" else "Output"
        model = {
            "name": f"projects/12/artifacts/{attempt}",
            "uri": f"gs://{at}/model",
            "type": {"schemaTitle": "system.Model", "schemaVersion": "0.0.1"},
        }
        return {
            "parameters": {returned: {"outputFile": f"/gcs/{at}/{returned}"}},
            "artifacts": {"model": {"artifacts": [model]}},
            "outputFile": f"/gcs/{at}/executor_output.json",
        }

    def executor_input(self, attempt: str = "1") -> dict[str, Any]:
        data = self.service.folder / "bucket" / "data.csv"
        data.parent.mkdir(exist_ok=True)
        if not data.exists():  # an earlier attempt's node may be reading it
            data.write_text("1\n2\n3\n")
        dataset = {
            "name": "projects/12/artifacts/d",
            "uri": "gs://bucket/data.csv",
            "metadata": {},
            "type": {"schemaTitle": "system.Dataset", "schemaVersion": "0.0.1"},
        }
        values = {"folder": str(self.folder), "behave": self.behave, "item": self.item}
        inputs: dict[str, Any] = {"parameterValues": values}  # what is empty is not there
        if not self.text:
            inputs["artifacts"] = {"data": {"artifacts": [dataset]}}
        return {"inputs": inputs, "outputs": self.outputs(attempt)}

    def launcher(self, attempt: str = "1", poll: float = 0.1) -> subprocess.Popen[str]:
        """What the service starts for this attempt of the task."""
        from tests.servers.google.job import MOUNT

        made = container(self.label, self.text, **self.place)
        filled = {
            "{{$}}": json.dumps(self.executor_input(attempt)),
            "{{$.pipeline_job_resource_name}}": RUN,
            "{{$.pipeline_task_name}}": "fit",
            "{{$.pipeline_job_name}}": "fits-1",
        }
        words = [filled.get(word, word) for word in [*made["command"], *made["args"]]]
        assert not re.search(r"\{\{\$", " ".join(w for w in words if w not in filled.values()))
        environment = {
            **self.service.environment(),
            "REKINDLE_POLL_SECONDS": str(poll),
            "VERTEX_AI_PIPELINES_RUN_LABELS": '{"vertex-ai-pipelines-run-billing-id": "77"}',
        }
        words[0] = sys.executable
        return subprocess.Popen(
            [*MOUNT, str(self.service.folder), *words],
            env=environment,
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def left(self, attempt: str = "1") -> dict[str, Any]:
        """What the task gave to the pipeline."""
        file = self.outputs(attempt)["outputFile"].removeprefix("/gcs/")
        found: dict[str, Any] = json.loads((self.service.folder / file).read_text())
        return found


def ended(launcher: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and what it said."""
    _, told = launcher.communicate(timeout=60)
    return launcher.returncode, told


def until(holds: Callable[[], object]) -> None:
    """Wait until it holds; a minute at most."""
    for _ in range(6_000):
        if holds():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it never held")


def only(service: Vertex) -> Job:
    (job,) = service.jobs.values()
    return job


def running(task: Task, rank: int = 0, attempt: int = 1) -> bool:
    return (task.folder / f"attempt-{attempt}-node-{rank}").exists()


def check_result(task: Task, attempt: str = "1", made_by: str = "1") -> None:
    """The model of the one job, as the output of this attempt of the task."""
    left = task.left(attempt)
    uri = left["artifacts"]["model"]["artifacts"][0]["uri"]
    assert re.fullmatch(rf"gs://bucket/pipeline/12/fits-1/fit_{made_by}/[0-9a-f]{{12}}/model", uri)
    model = {"name": f"projects/12/artifacts/{attempt}", "uri": uri, "metadata": {"nodes": 2}}
    assert left == {
        "parameterValues": {"Output": True},
        "artifacts": {"model": {"artifacts": [model]}},
    }
    content = (task.service.folder / uri.removeprefix("gs://")).read_text()
    assert content == "3 rows, heard of [1]", content
