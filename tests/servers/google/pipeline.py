"""Vertex AI Pipelines: executes the PipelineJobs of a project that is played (rest.py), each
container a process with a /gcs of its own, and distributed steps on the service beside it (vertex.py).

One task at a time, as their dependencies have it. Placeholders that stand alone, runtime parameters
and artifacts, nested DAGs, conditions on a bool, retries. What it does not know it refuses: a
definition that runs here uses nothing else. Nothing is ever taken from a cache.

Authority: KFP's pipeline_spec.proto; ExecutorInput and ExecutorOutput there."""

from __future__ import annotations

import datetime
import itertools
import json
import re
import subprocess
import threading
from collections.abc import Mapping
from typing import Any

from google.cloud import aiplatform_v1 as api

from tests.servers.google.job import MOUNT
from tests.servers.google.rest import PARENT, Project
from tests.servers.google.vertex import Vertex

_TASK = {
    "componentRef",
    "inputs",
    "dependentTasks",
    "taskInfo",
    "cachingOptions",
    "triggerPolicy",
    "retryPolicy",
}
_CONDITION = re.compile(r"inputs\.parameter_values\['([^']+)'\] == true")
_FACT = re.compile(r"\{\{\$\.(\w+)\}\}")
Values = dict[str, Any]


class Failed(Exception):
    """A task failed."""


class Pipelines:
    """Runs what is created in `project`, with `environment` in every container."""

    def __init__(
        self, project: Project, service: Vertex, environment: Mapping[str, str] | None = None
    ) -> None:
        self.project, self.service = project, service
        self.environment = dict(environment or {})
        self.numbers = itertools.count(9_000)
        self.threads: list[threading.Thread] = []
        project.created, project.more_entries = self.begin, self.printed_by_nodes
        project.bucket = service.folder
        project.custom_jobs = lambda: [job.proto for job in service.jobs.values()]

    def begin(self, name: str) -> None:
        """Have the job run from now on."""
        self.service.runs[name] = {"name": name, "state": "PIPELINE_STATE_RUNNING"}
        self.threads.append(threading.Thread(target=self.run, args=(name,), daemon=True))
        self.threads[-1].start()

    def run(self, name: str) -> None:
        """The whole job."""
        with self.project.lock:
            job = json.loads(api.PipelineJob.to_json(self.project.jobs[name]))
        spec = job["pipelineSpec"]
        given = job["runtimeConfig"]["parameterValues"]
        try:
            _Run(self, name, job).dag(spec["root"], _with_defaults(spec["root"], given), {}, None)
            state = "SUCCEEDED"
        except Failed:
            state = "FAILED"
        self.service.runs[name]["state"] = f"PIPELINE_STATE_{state}"
        with self.project.lock:
            self.project.end(name, state)

    def printed_by_nodes(self) -> list[dict[str, Any]]:
        """What the machines of distributed steps print, as Cloud Logging has it."""
        return [
            {
                "insertId": line["insertId"],
                "timestamp": line["timestamp"],
                "textPayload": line["textPayload"],
                "resource": {
                    "type": "ml_job",
                    "labels": {
                        "job_id": job.name.rpartition("/")[2],
                        "task_name": line["task"],
                    },
                },
            }
            for job in self.service.jobs.values()
            for line in [*job.lines]
        ]


class _Run:
    """One job as it goes on."""

    def __init__(self, pipelines: Pipelines, name: str, job: Mapping[str, Any]) -> None:
        self.pipelines, self.project, self.name, self.job = pipelines, pipelines.project, name, job
        self.spec, self.id = job["pipelineSpec"], name.rpartition("/")[2]

    def dag(self, component: Values, given: Values, artifacts: Values, around: Any) -> None:
        waiting, outputs = dict(component["dag"]["tasks"]), dict[str, Values]()
        while waiting:
            name = next(n for n, t in waiting.items() if not waiting.keys() & _needs(t))
            task = waiting.pop(name)
            assert task.keys() <= _TASK, f"{name}: nobody knows {task.keys() - _TASK}"
            inner = self.spec["components"][task["componentRef"]["name"]]
            inputs = task.get("inputs", {})
            values = {n: _found(s, given, outputs) for n, s in inputs.get("parameters", {}).items()}
            values = _with_defaults(inner, values)
            read = {
                n: _found(s, artifacts, outputs) for n, s in inputs.get("artifacts", {}).items()
            }
            if not _holds(task, values):
                self.say(name, "NOT_TRIGGERED", around)
            elif "dag" in inner:
                self.dag(inner, values, read, self.say(name, "RUNNING", around))
                self.say(name, "SUCCEEDED", around, end_time=_now())
            else:
                outputs[name] = self.container(name, task, inner, values, read, around)

    def container(
        self, name: str, task: Values, inner: Values, values: Values, read: Values, around: Any
    ) -> Values:
        """What the task's container made, after as many attempts as it may have."""
        failed = list[str]()
        self.say(name, "RUNNING", around, start_time=_now())
        while True:
            number = str(next(self.pipelines.numbers))
            detail = {"main_job": f"{PARENT}/customJobs/{number}", "failed_main_jobs": failed}
            self.say(name, "RUNNING", around, executor_detail={"container_detail": detail})
            folder = f"lake/pipeline/{self.id}/{name}_{number}"
            asked = _executor_input(inner, values, read, folder)
            if (code := self.attempt(name, number, inner, asked)) == 0:
                break
            failed.append(detail["main_job"])
            if len(failed) > int(task.get("retryPolicy", {}).get("maxRetryCount", 0)):
                why = f"The replica workerpool0-0 exited with a non-zero status of {code}."
                error = {"code": 9, "message": why}
                self.say(name, "FAILED", around, end_time=_now(), error=error)
                raise Failed(name)
        made = self.left(asked, folder)
        shown = {
            key: {
                "artifacts": [
                    {
                        "uri": artifact["uri"],
                        "metadata": artifact["metadata"],
                        "schema_title": artifact["type"]["schemaTitle"],
                    }
                ]
            }
            for key, artifact in made["artifacts"].items()
        }
        self.say(name, "SUCCEEDED", around, end_time=_now(), outputs=shown)
        return {**made["parameters"], **made["artifacts"]}

    def attempt(self, name: str, number: str, inner: Values, asked: Values) -> int:
        """Run the container, line by line into the log; its exit code."""
        container = self.spec["deploymentSpec"]["executors"][inner["executorLabel"]]["container"]
        facts = {
            "pipeline_job_resource_name": self.name,
            "pipeline_job_name": self.id,
            "pipeline_task_name": name,
            "pipeline_job_uuid": "1",
            "pipeline_task_uuid": number,
        }
        words = [*container["command"], *container.get("args", [])]
        told = json.dumps(asked)
        words = [told if w == "{{$}}" else _FACT.sub(lambda m: facts[m[1]], w) for w in words]
        assert not any("{{$" in word for word in words if word is not told)
        service = self.pipelines.service
        environment = {
            **service.environment(),
            **self.pipelines.environment,
            **{one["name"]: one["value"] for one in container.get("env", [])},
            "VERTEX_AI_PIPELINES_RUN_LABELS": json.dumps(self.job["labels"]),
        }
        with subprocess.Popen(
            [*MOUNT, str(service.folder), *words],
            env=environment,
            cwd=service.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                self.project.printed(number, line.rstrip("\n"))
        return process.returncode

    def left(self, asked: Values, folder: str) -> Values:
        """What the container said that it made."""
        file = self.pipelines.service.folder / folder / "executor_output.json"
        told = json.loads(file.read_text()) if file.exists() else {}
        artifacts = {n: group["artifacts"][0] for n, group in asked["outputs"]["artifacts"].items()}
        for name, group in told.get("artifacts", {}).items():
            artifacts[name] = {**artifacts[name], **group["artifacts"][0]}
        return {"parameters": told.get("parameterValues", {}), "artifacts": artifacts}

    def say(self, name: str, state: str, around: Any, **more: Any) -> Any:
        with self.project.lock:
            return self.project.task(self.name, name, state, around, **more)


def _needs(task: Values) -> set[str]:
    return set(task.get("dependentTasks", ()))


def _with_defaults(component: Values, values: Values) -> Values:
    """The values, and the defaults of what is not given."""
    known = component.get("inputDefinitions", {}).get("parameters", {})
    defaults = {n: p["defaultValue"] for n, p in known.items() if "defaultValue" in p}
    return {**defaults, **values}


def _found(source: Values, given: Values, outputs: Mapping[str, Values]) -> Any:
    """What an input is bound to."""
    match source:
        case {"componentInputParameter": name} | {"componentInputArtifact": name}:
            return given[name]
        case {"taskOutputParameter": {"producerTask": task, "outputParameterKey": key}}:
            return outputs[task][key]
        case {"taskOutputArtifact": {"producerTask": task, "outputArtifactKey": key}}:
            return outputs[task][key]
        case {"runtimeValue": {"constant": value}}:
            return value
    raise AssertionError(f"nobody knows {source}")


def _holds(task: Values, values: Values) -> bool:
    if (text := task.get("triggerPolicy", {}).get("condition")) is None:
        return True
    match = _CONDITION.fullmatch(text)
    assert match, f"nobody knows {text}"
    return values[match[1]] is True


def _executor_input(inner: Values, values: Values, read: Values, folder: str) -> Values:
    made = inner.get("outputDefinitions", {})
    return {
        "inputs": {
            "parameterValues": values,
            "artifacts": {name: {"artifacts": [artifact]} for name, artifact in read.items()},
        },
        "outputs": {
            "parameters": {
                name: {"outputFile": f"/gcs/{folder}/{name}"} for name in made.get("parameters", {})
            },
            "artifacts": {
                name: {
                    "artifacts": [
                        {
                            "name": f"projects/1/artifacts/{folder}/{name}",
                            "metadata": {},
                            "uri": f"gs://{folder}/{name}",
                            "type": one["artifactType"],
                        }
                    ]
                }
                for name, one in made.get("artifacts", {}).items()
            },
            "outputFile": f"/gcs/{folder}/executor_output.json",
        },
    }


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
