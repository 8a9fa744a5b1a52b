"""What a launcher step runs: creates the TrainJob of a distributed step, follows it to its end, and
brings back what it gave.

    python3 -m rekindle.platforms.kubeflow.launcher DEFINITION EXECUTOR_INPUT

It may be killed at any time: the name of the job follows from the run and the step, so the next
launcher finds it. A job that runs or succeeded is adopted; after a failed one comes the next
attempt, as often and after as long a pause as the step's retry policy says, and once for a person
who retries the run. Argo restarts a launcher that failed for whatever reason, so one that finds
the last attempt failed ends at once. Asked to end, it deletes the job if the run is ending, and
leaves it alone if only its own pod is (a node drain); it also looks after the run between, because
KFP's own launcher does not wait for us. The job belongs to the Workflow and goes with it. Argo, KFP
and Trainer have not run this yet."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rekindle.errors import RekindleError, StepError
from rekindle.ir.graph import Retry, Setting
from rekindle.ir.uris import PREFIX, as_place, read_place
from rekindle.launch import staging
from rekindle.platforms.kubeflow import trainjob
from rekindle.platforms.kubeflow.cluster import (
    ACCOUNT,
    IN_CLUSTER,
    Cluster,
    Conflict,
    Stopped,
)
from rekindle.platforms.kubeflow.compile import RESULT_OUTPUT
from rekindle.platforms.kubeflow.job import (
    Follower,
    attempts,
    failure,
    is_for,
    jobs_path,
    state_of,
)
from rekindle.platforms.kubeflow.pieces import Clash, Misfit
from rekindle.platforms.kubeflow.pods import Late
from rekindle.platforms.kubeflow.settings import INPUT
from rekindle.platforms.kubeflow.workflow import Run, ending, own_run, utc_now

log = logging.getLogger(__name__)

TERMINATED = 128 + signal.SIGTERM
_LAST_LOG_SECONDS = 10.0
_FAREWELL_SECONDS = 20.0


class RunEnds(Exception):
    """The run is ending."""


def main(words: list[str]) -> int:
    """Launch and follow; the exit code says how it ended."""
    options = _options(words)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    signal.signal(signal.SIGINT, lambda *_: stopping.set())
    cluster = Cluster.around(
        options.account, options.server, stopping=stopping, patience_seconds=options.patience
    )
    try:
        namespace = (options.account / "namespace").read_text().strip()
        run = own_run(cluster, namespace, options.pod)
        launch = Launch(cluster, run, options)
    except Stopped:
        return TERMINATED  # nothing was begun
    except RekindleError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return launch.run_to_end()


def _options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="launcher")
    parser.add_argument("--server", default=IN_CLUSTER)
    parser.add_argument("--account", type=Path, default=ACCOUNT)
    pod = os.environ.get("KFP_POD_NAME") or os.environ.get("HOSTNAME", "")
    parser.add_argument("--pod", default=pod)
    parser.add_argument("--poll", type=float, default=5.0, help="seconds between two looks")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds without an answer")
    parser.add_argument("definition")
    parser.add_argument("executor_input")
    return parser.parse_args(words)


class Launch:
    """One launcher at work on one step of a run."""

    def __init__(self, cluster: Cluster, run: Run, options: argparse.Namespace) -> None:
        self.cluster, self.run = cluster, run
        self.account, self.poll_seconds = options.account, options.poll
        self.definition: dict[str, Any] = json.loads(options.definition)
        self.executor_input: dict[str, Any] = json.loads(options.executor_input)
        self.retry = Retry(**self.definition["retry"])
        self.follower: Follower | None = None

    def run_to_end(self) -> int:
        """Claim a job, follow it, bring back the result; the exit code."""
        try:
            self.look_after_run()
            self.bring_back(self.completed())
        except (Stopped, RunEnds):
            return self.farewell()
        except RekindleError as error:
            sys.stderr.write(f"{error}\n")
            return error.exit_code
        return 0

    # Which job

    def completed(self) -> dict[str, Any]:
        """The job that completed, after as many attempts as there may be; StepError if the last one
        failed."""
        by_hand = self.run.retry == 0  # not Argo's retry: one attempt in any case
        while True:
            job, heard = self.follow(self.claim(by_hand))
            if state_of(job) != "failed":
                return job
            attempt = int(job["metadata"]["labels"][trainjob.ATTEMPT]) + 1
            error = failure(self.cluster, self.run.namespace, job, heard)
            if not self.may_begin(attempt):
                raise error
            by_hand, pause = False, self.retry.pause_before(attempt)
            log.info("%s\nthe next attempt begins in %g s", error, pause)
            self.pause(pause)

    def claim(self, by_hand: bool) -> dict[str, Any]:
        """The job to follow: one that runs or succeeded, or a new one."""
        while True:
            jobs = attempts(self.cluster, self.run.namespace, self.run.identity)
            last = max(jobs, default=0)
            state = state_of(jobs[last]) if jobs else "failed"
            if state == "going":
                self.wait()
            elif state != "failed":
                log.info("TrainJob %s is there already (%s)", _name(jobs[last]), state)
                self.give_secret(jobs[last])
                return jobs[last]
            elif jobs and not by_hand and not self.may_begin(last + 1):
                raise failure(self.cluster, self.run.namespace, jobs[last], "")
            elif job := self.created(last + 1):
                return job

    def may_begin(self, attempt: int) -> bool:
        """Whether the step's retries allow an attempt of this number."""
        return attempt <= 1 + self.retry.count

    def created(self, attempt: int) -> dict[str, Any] | None:
        """The new job; None if another launcher was faster.

        StepError if the name is taken by a job for something else."""
        name = trainjob.job_name(self.definition["task"]["name"], self.run.identity, attempt)
        result = f"{self.result_place()}/{name}.json"
        wanted = trainjob.manifest(
            self.whole_job(),
            name=name,
            identity=self.run.identity,
            attempt=attempt,
            owner=self.run.workflow,
            service_account=self.definition["account"],
            result=result,
            payload=trainjob.packed(self.task(name, result)),
            # another name than that of a job before, whose Secret may not be collected yet
            secret=f"{name}-{secrets.token_hex(4)}",
        )
        try:
            job = self.cluster.create(jobs_path(self.run.namespace), wanted)
        except Conflict:
            other = self.cluster.get(jobs_path(self.run.namespace, name))
            if other is not None and not is_for(other, self.run.identity):
                raise StepError(
                    f"there is a TrainJob {name} that is not ours",
                    where=f"trainjob {self.run.namespace}/{name}",
                    fix="delete it, or give the step another name",
                ) from None
            return None
        log.info("TrainJob %s created", name)
        self.give_secret(job)
        return job

    def give_secret(self, job: Mapping[str, Any]) -> None:
        """Make the Secret that the job's nodes wait for, unless it is there."""
        wanted = trainjob.secret_of(job, secrets.token_hex(32))
        if wanted and state_of(job) == "active":
            with contextlib.suppress(Conflict):
                path = f"/api/v1/namespaces/{self.run.namespace}/secrets"
                self.cluster.create(path, wanted)

    def whole_job(self) -> Mapping[str, Any]:
        """The TrainJob of the definition, with the settings that had to wait for values; StepError
        if these do not fit."""
        job: Mapping[str, Any] = self.definition["job"]
        late = Late(tuple(Setting(**one) for one in self.definition.get("late", ())))
        try:
            for piece in late.pieces(self.given(), job["spec"]["trainer"]["image"]):
                job = trainjob.with_pod(job, piece)
        except (Misfit, Clash) as error:
            raise StepError(
                f"a setting of the nodes came out wrong at run time: {error}",
                where=", ".join(setting.where for setting in late.settings),
                fix="give the pipeline's parameter another value",
            ) from error
        return job

    # What it is to do

    def given(self) -> dict[str, Any]:
        """The values of the launcher's own inputs."""
        return dict(self.executor_input.get("inputs", {}).get("parameterValues", {}))

    def result_place(self) -> str:
        outputs = self.executor_input["outputs"]["artifacts"]
        return str(outputs[RESULT_OUTPUT]["artifacts"][0]["uri"]).rstrip("/")

    def task(self, name: str, result: str) -> dict[str, Any]:
        """What the nodes run."""
        task = self.definition["task"]
        values = {n: v for n, v in self.given().items() if not n.startswith(INPUT)}
        places = {n: values.pop(PREFIX + n, None) for n in self.definition["inputs"]}
        artifacts = {
            n: _artifact(n, self.definition["inputs"][n], *read_place(text))
            for n, text in places.items()
            if text
        }
        outputs = self.executor_input["outputs"]
        given = {
            "inputs": {"parameterValues": values, "artifacts": artifacts},
            "outputs": {
                "parameters": {n: outputs["parameters"][n] for n in task["outputs"]["parameters"]},
                "artifacts": {n: outputs["artifacts"][n] for n in task["outputs"]["artifacts"]},
            },
        }
        facts = {
            "pipeline_job_name": str(self.run.workflow["name"]),
            "pipeline_job_uuid": self.run.run_id,
            "pipeline_job_resource_name": str(self.run.workflow["name"]),
            "pipeline_task_name": task["name"],
            "pipeline_task_uuid": name,
        }
        leash = {
            "server": self.cluster.server,
            "account": str(self.account),
            "workflow": self.run.path,
            "workflow_uid": self.run.workflow["uid"],
            "every_seconds": 12 * self.poll_seconds,
        }
        return {**task, "executor_input": given, "run": facts, "result": result, "leash": leash}

    # Until it ends

    def follow(self, job: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """The job once it is complete or failed, and what node rank 0 said last."""
        name = _name(job)
        self.follower = Follower(self.cluster, self.run.namespace, name, self.poll_seconds)
        while state_of(job) in ("active", "going"):
            self.wait()
            self.look_after_run()
            now = self.cluster.get(jobs_path(self.run.namespace, name))
            if now is None:
                where = f"trainjob {self.run.namespace}/{name}"
                raise StepError(f"TrainJob {name} was deleted while it ran", where=where)
            job = now
        return job, self.follower.finish(_LAST_LOG_SECONDS)

    def wait(self) -> None:
        if self.cluster.stopping.wait(self.poll_seconds):
            raise Stopped

    def pause(self, seconds: float) -> None:
        """Wait as long as the run goes on."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.wait()
            self.look_after_run()

    def look_after_run(self) -> None:
        """Raise RunEnds if the run is ending."""
        workflow = self.cluster.get(self.run.path)
        if ending(workflow, str(self.run.workflow["uid"]), utc_now()):
            raise RunEnds

    def farewell(self) -> int:
        """The exit code where we end before the job does: with it if the run ends, without it if
        only this pod does."""
        cluster = Cluster.around(
            self.account, self.cluster.server, patience_seconds=_FAREWELL_SECONDS
        )
        try:
            workflow = cluster.get(self.run.path)
            reason = ending(workflow, str(self.run.workflow["uid"]), utc_now())
            if reason:
                self.cleared(cluster, reason)
            else:
                log.info("told to end while the run goes on: the TrainJob is left to the next pod")
        except RekindleError as error:  # when in doubt, a healthy job lives; its leash knows better
            sys.stderr.write(f"{error}\n")
        return TERMINATED

    def cleared(self, cluster: Cluster, reason: str) -> None:
        """Delete what has not ended."""
        for job in attempts(cluster, self.run.namespace, self.run.identity).values():
            if state_of(job) == "active":
                path = jobs_path(self.run.namespace, _name(job))
                cluster.delete(path, job["metadata"]["uid"])
                log.info("the run ends, %s: TrainJob %s is deleted", reason, _name(job))

    # What it gave

    def bring_back(self, job: Mapping[str, Any]) -> None:
        """Write KFP's executor output: what node rank 0 left, which says where artifacts are."""
        uri = job["metadata"]["annotations"][trainjob.RESULT]
        try:
            left = json.loads(staging.read_text(uri))
        except FileNotFoundError:
            what = f"TrainJob {_name(job)} is complete, but left no result"
            raise StepError(what, where=uri, fix="look at the log of node 0") from None
        for name, group in left["artifacts"].items():
            if PREFIX + name in self.executor_input["outputs"].get("parameters", {}):
                artifact = group["artifacts"][0]
                place = as_place(artifact["uri"], artifact["metadata"])
                left["parameterValues"][PREFIX + name] = place
        file = Path(self.executor_input["outputs"]["outputFile"])
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_name(file.name + ".draft")
        draft.write_text(json.dumps(left, sort_keys=True), encoding="utf-8")
        draft.replace(file)


def _name(job: Mapping[str, Any]) -> str:
    return str(job["metadata"]["name"])


def _artifact(
    name: str, kind: Mapping[str, str], uri: str, metadata: Mapping[str, Any]
) -> dict[str, Any]:
    schema = {"schemaTitle": kind["schema_title"], "schemaVersion": kind["schema_version"]}
    return {"artifacts": [{"name": name, "type": schema, "uri": uri, "metadata": dict(metadata)}]}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
