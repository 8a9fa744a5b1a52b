"""What a launcher step runs: creates the TrainJob of a distributed step, follows it to its end, and
brings back what it gave.

    python3 -m rekindle.platforms.kubeflow.launcher DEFINITION EXECUTOR_INPUT

The name of a job follows from the run, the step and the number of the attempt. After a failed one
comes the next, as often and after as long a pause as the step's retry policy says, and once for a
person who retries the run. Argo restarts a launcher that failed for whatever reason, so one that
finds the last attempt failed ends at once. The job belongs to the Workflow and goes with it. Argo,
KFP and Trainer have not run this yet."""

import argparse
import contextlib
import json
import logging
import math
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
from rekindle.http import Stopped
from rekindle.ir.edit.uris import PREFIX, as_place, read_place
from rekindle.ir.graph import Retry
from rekindle.launch import staging
from rekindle.platforms import launcher as shared
from rekindle.platforms import mounted
from rekindle.platforms.kubeflow import trainjob
from rekindle.platforms.kubeflow.cluster import ACCOUNT, IN_CLUSTER, Cluster, Conflict
from rekindle.platforms.kubeflow.compile import RESULT_OUTPUT
from rekindle.platforms.kubeflow.job import Follower, attempts, failure, is_for, jobs_path, state_of
from rekindle.platforms.kubeflow.workflow import Run, ending, own_run
from rekindle.platforms.launcher import SUCCEEDED, TERMINATED, Cause, GiveUp, Job, Launcher, Start
from rekindle.platforms.submission import problems_in
from rekindle.records import write_atomically

log = logging.getLogger(__name__)

_LAST_LOG_SECONDS = 10.0
_FAREWELL_SECONDS = 20.0
_problem = problems_in(__file__)


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
        launcher = KubeflowLauncher(cluster, run, options)
    except Stopped:
        return TERMINATED  # nothing was begun
    except RekindleError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return launcher.run()


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


class KubeflowLauncher(Launcher):
    """A launcher of TrainJobs, by names that no two launchers ever make twice."""

    def __init__(self, cluster: Cluster, run: Run, options: argparse.Namespace) -> None:
        self.definition: dict[str, Any] = json.loads(options.definition)
        self.executor_input: dict[str, Any] = json.loads(options.executor_input)
        self.retry = Retry(**self.definition["retry"])
        failures = self.retry.count
        if run.retry == 0:  # a person's retry and not Argo's: one attempt in any case
            before = attempts(cluster, run.namespace, run.identity).values()
            failures = max(failures, sum(state_of(job) == "failed" for job in before))
        allowed = shared.Allowed(failures=failures, preemptions=0, seconds=math.inf)
        super().__init__(allowed, options.poll, cluster.stopping)
        self.cluster, self.owner, self.account = cluster, run, options.account
        self.made: dict[str, dict[str, Any]] = {}
        self.known = set[str]()  # names of jobs that were announced
        self.follower: Follower | None = None

    def ending(self) -> str:
        return ending(self.cluster.get(self.owner.path), str(self.owner.workflow["uid"]))

    def jobs(self) -> list[Job]:
        found = attempts(self.cluster, self.owner.namespace, self.owner.identity)
        self.made = {_name(job): job for job in found.values()}
        if self.follower and self.follower.job not in self.made:
            name = self.follower.job
            raise StepError([_problem("deleted", name=name, namespace=self.owner.namespace)])
        return [_attempt(number, job, number == max(found)) for number, job in found.items()]

    def cause(self, job: Job) -> Cause:
        return "failed"

    def start(self, attempt: Start) -> None:
        numbers = [int(job["metadata"]["labels"][trainjob.ATTEMPT]) for job in self.made.values()]
        number = 1 + max(numbers, default=0)
        if self.follower is not None:  # it failed before our eyes
            pause = self.retry.pause_before(number)
            log.info("%s\nthe next attempt begins in %g s", self.failure(self.follower.job), pause)
            self.follower = None
            end = time.monotonic() + pause  # as long as the run goes on
            while time.monotonic() < end and not self.ending():
                if self.stop.wait(self.poll_seconds):
                    return
        if not self.stop.is_set() and not self.ending():
            self.create(number)

    def follow(self, job: Job) -> None:
        if self.follower and self.follower.job != job.name:  # another launcher began the next one
            self.follower.finish(_LAST_LOG_SECONDS)
            self.follower = None
        if job.state not in ("RUNNING", SUCCEEDED) or self.follower is not None:
            return
        raw = self.made[job.name]
        if job.name not in self.known:
            log.info("TrainJob %s is there already (%s)", job.name, state_of(raw))
            self.give_secret(raw)
        if job.alive:
            namespace = self.owner.namespace
            self.follower = Follower(self.cluster, namespace, job.name, self.poll_seconds)

    def cancel(self, job: Job) -> None:
        uid = self.made[job.name]["metadata"]["uid"]
        self.cluster.delete(jobs_path(self.owner.namespace, job.name), uid)

    def deliver(self, job: Job) -> int:
        """Write KFP's executor output: what node rank 0 left, which says where artifacts are."""
        if self.follower:
            self.follower.finish(_LAST_LOG_SECONDS)
        uri = self.made[job.name]["metadata"]["annotations"][trainjob.RESULT]
        try:
            left = json.loads(staging.read_text(uri))
        except FileNotFoundError:
            raise StepError([_problem("no_result", where=uri, name=job.name)]) from None
        for name, group in left["artifacts"].items():
            if PREFIX + name in self.executor_input["outputs"].get("parameters", {}):
                artifact = group["artifacts"][0]
                place = as_place(artifact["uri"], artifact["metadata"])
                left["parameterValues"][PREFIX + name] = place
        file = Path(self.executor_input["outputs"]["outputFile"])
        write_atomically(file, json.dumps(left, sort_keys=True))
        return 0

    def give_up(self, end: GiveUp) -> int:
        return self.failed(self.failure(end.job.name))

    def failed(self, error: Exception) -> int:
        sys.stderr.write(f"{error}\n")
        return error.exit_code if isinstance(error, RekindleError) else 1

    def hurry(self) -> None:
        self.cluster = Cluster.around(
            self.account, self.cluster.server, patience_seconds=_FAREWELL_SECONDS
        )
        self.follower = None

    def failure(self, name: str) -> StepError:
        """Why a job failed, with what node rank 0 said last if it was followed."""
        heard = self.follower.finish(_LAST_LOG_SECONDS) if self.follower else ""
        return failure(self.cluster, self.owner.namespace, self.made[name], heard)

    def create(self, attempt: int) -> None:
        """Create an attempt's job, unless it is there; StepError if that is another's."""
        name = trainjob.job_name(self.definition["task"]["name"], self.owner.identity, attempt)
        outputs = self.executor_input["outputs"]["artifacts"]
        result = f"{outputs[RESULT_OUTPUT]['artifacts'][0]['uri'].rstrip('/')}/{name}.json"
        # another name than that of a job before, whose Secret may not be collected yet
        secret = f"{name}-{secrets.token_hex(4)}"
        wanted = trainjob.manifest(
            self.definition["job"],
            name=name,
            identity=self.owner.identity,
            attempt=attempt,
            owner=self.owner.workflow,
            service_account=self.definition["account"],
            result=result,
            payload=trainjob.packed(self.task(name, result)),
            secret=secret,
        )
        try:
            job = self.cluster.create(jobs_path(self.owner.namespace), wanted)
        except Conflict:
            other = self.cluster.get(jobs_path(self.owner.namespace, name))
            if other is not None and not is_for(other, self.owner.identity):
                about = {"name": name, "namespace": self.owner.namespace}
                raise StepError([_problem("foreign", **about)]) from None
            return
        log.info("TrainJob %s created", name)
        self.known.add(name)
        self.give_secret(job)

    def give_secret(self, job: Mapping[str, Any]) -> None:
        """Make the Secret that the job's nodes wait for, unless it is there."""
        wanted = trainjob.secret_of(job, secrets.token_hex(32))
        if wanted and state_of(job) == "active":
            with contextlib.suppress(Conflict):
                self.cluster.create(f"/api/v1/namespaces/{self.owner.namespace}/secrets", wanted)

    def task(self, name: str, result: str) -> dict[str, Any]:
        """What the nodes run."""
        task = self.definition["task"]
        values = dict(self.executor_input.get("inputs", {}).get("parameterValues", {}))
        kinds = self.definition["inputs"]
        places = {n: values.pop(PREFIX + n, None) for n in kinds}
        found = {n: read_place(text) for n, text in places.items() if text}
        made = {n: mounted.artifact_of(n, kinds[n], *place) for n, place in found.items()}
        artifacts = {n: {"artifacts": [artifact]} for n, artifact in made.items()}
        outputs = self.executor_input["outputs"]
        promised = task["outputs"].items()
        own = {kind: {n: outputs[kind][n] for n in names} for kind, names in promised}
        inputs = {"parameterValues": values, "artifacts": artifacts}
        facts = mounted.facts(str(self.owner.workflow["name"]), name)
        facts |= {"pipeline_job_uuid": self.owner.run_id, "pipeline_task_name": task["name"]}
        leash = {
            "server": self.cluster.server,
            "account": str(self.account),
            "workflow": self.owner.path,
            "workflow_uid": self.owner.workflow["uid"],
            "every_seconds": 12 * self.poll_seconds,
        }
        given = {"inputs": inputs, "outputs": own}
        return {**task, "executor_input": given, "run": facts, "result": result, "leash": leash}


def _name(job: Mapping[str, Any]) -> str:
    return str(job["metadata"]["name"])


def _attempt(number: int, job: Mapping[str, Any], last: bool) -> Job:
    """As `decide` has it: in the order of numbers, which no clock can turn around. All but the
    last one are over, also while they are being deleted."""
    known = {"complete": SUCCEEDED, "failed": "FAILED", "going": "CANCELLING"}
    state = known.get(state_of(job), "RUNNING")
    if not last and state != SUCCEEDED:
        state = "FAILED"
    ended = number + 0.5 if state in shared.ENDED_RUN else None
    return Job(name=_name(job), state=state, created=float(number), ended=ended)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
