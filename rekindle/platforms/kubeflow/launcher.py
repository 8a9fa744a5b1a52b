"""What a launcher step runs: creates the TrainJob of a distributed step, follows it to
its end, and brings back what it gave.

    python3 -m rekindle.platforms.kubeflow.launcher DEFINITION EXECUTOR_INPUT

The name of a job follows from the run, the step and the number of the attempt. After a
failed one comes the next, as often and after as long a pause as the step's retry policy
says, and once for a person who retries the run. Argo restarts a launcher that failed for
whatever reason, so one that finds the last attempt failed ends at once. The job belongs
to the Workflow and goes with it. Argo, KFP and Trainer have not run this yet."""

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
from pathlib import Path

from rekindle.errors import RekindleError, StepError
from rekindle.http import Stopped
from rekindle.ir.edit.backend import input_of_fact
from rekindle.ir.edit.uris import PREFIX, as_place, read_place
from rekindle.ir.graph import Retry
from rekindle.ir.placeholders import RUN_FACTS
from rekindle.ir.read.raw import MAX_BYTES
from rekindle.ir.scripts import unpacked
from rekindle.launch import staging
from rekindle.platforms import launcher as shared
from rekindle.platforms import mounted
from rekindle.platforms.kubeflow import trainjob
from rekindle.platforms.kubeflow.cluster import ACCOUNT, IN_CLUSTER, ApiServer, Conflict
from rekindle.platforms.kubeflow.compile import RESULT_OUTPUT
from rekindle.platforms.kubeflow.job import (
    Follower,
    attempts,
    failure,
    is_for,
    jobs_path,
    living_pods,
    state_of,
)
from rekindle.platforms.kubeflow.obstacles import StartWatch
from rekindle.platforms.kubeflow.workflow import WorkflowRun, ending, own_run
from rekindle.platforms.launcher import (
    SUCCEEDED,
    TERMINATED,
    Attempt,
    Cause,
    GiveUp,
    Launcher,
    Start,
)
from rekindle.protojson import Json
from rekindle.records import write_atomically

log = logging.getLogger(__name__)

_ENDING_POLLS = 60  # how long nodes of an earlier attempt may take to end: they have 120 s
_NODES_LOOK_EVERY_POLLS = 4  # 20 s: after two looks at a run that is over a node ends
_LAST_LOG_SECONDS = 10.0  # for lines that are still on their way when the job has ended
_FAREWELL_SECONDS = 20.0  # of the 30 that Kubernetes gives a pod after SIGTERM


def main(words: list[str]) -> int:
    """Launch and follow; the exit code says how it ended."""
    options = _options(words)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    signal.signal(signal.SIGINT, lambda *_: stopping.set())
    cluster = ApiServer.in_cluster(
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

    def __init__(self, cluster: ApiServer, run: WorkflowRun, options: argparse.Namespace) -> None:
        self.definition: Json = json.loads(options.definition)
        if isinstance(self.definition["task"], str):  # a long one
            self.definition["task"] = json.loads(unpacked(self.definition["task"], MAX_BYTES))
        self.executor_input: Json = json.loads(options.executor_input)
        self.retry = Retry(**self.definition["retry"])
        failures = self.retry.count
        if run.retry == 0:  # a person's retry and not Argo's: one attempt in any case
            earlier_jobs = attempts(cluster, run.namespace, run.identity).values()
            failed_jobs = [job for job in earlier_jobs if state_of(job) == "failed"]
            failures = max(failures, len(failed_jobs))
        allowed = shared.Allowed(failures=failures, preemptions=0, seconds=math.inf)
        super().__init__(allowed, options.poll, cluster.stopping)
        self.cluster = cluster
        self.owner = run
        self.account: Path = options.account
        self.raw_jobs: dict[str, Json] = {}  # by name, as of the last look
        self.announced = set[str]()  # names of jobs
        self.follower: Follower | None = None
        self.starting = StartWatch(cluster, run.namespace, options.poll)

    def ending(self) -> str:
        return ending(self.cluster.get(self.owner.path), str(self.owner.workflow["uid"]))

    def jobs(self) -> list[Attempt]:
        by_number = attempts(self.cluster, self.owner.namespace, self.owner.identity)
        self.raw_jobs = {_name(job): job for job in by_number.values()}
        if self.follower and self.follower.job not in self.raw_jobs:
            name = self.follower.job
            raise StepError(
                f"TrainJob {name} was deleted while it ran",
                where=f"trainjob {self.owner.namespace}/{name}",
            )
        last_number = max(by_number, default=0)
        return [
            _attempt(number, job, is_last=number == last_number)
            for number, job in by_number.items()
        ]

    def cause(self, job: Attempt) -> Cause:
        return "failed"

    def start(self, attempt: Start) -> None:
        jobs = self.raw_jobs.values()
        numbers = [int(job["metadata"]["labels"][trainjob.ATTEMPT]) for job in jobs]
        number = 1 + max(numbers, default=0)
        if self.follower is not None:  # it failed before our eyes
            pause = self.retry.pause_before(number)
            log.info("%s\nthe next attempt begins in %g s", self.failure(self.follower.job), pause)
            self.follower = None
            end = time.monotonic() + pause  # as long as the run goes on
            while time.monotonic() < end and not self.ending():
                if self.stop.wait(self.poll_seconds):
                    return
        if self.pods_are_gone(number):
            self.create(number)

    def pods_are_gone(self, number: int) -> bool:
        """Wait until no node of an earlier attempt still runs, nor of a deleted job of the
        same name: they might save beside the new ones. False where the run ends before.

        StepError where one cannot be ended."""
        task_name = self.definition["task"]["name"]
        names = [trainjob.job_name(task_name, self.owner.identity, n) for n in range(1, number + 1)]
        same_name = self.cluster.get(jobs_path(self.owner.namespace, names[-1]))
        if same_name is not None and state_of(same_name) != "going":
            return True  # `create` finds out whose it is
        end = time.monotonic() + _ENDING_POLLS * self.poll_seconds
        while not self.stop.is_set() and not self.ending():
            alive = living_pods(self.cluster, self.owner.namespace, names)
            if not alive:
                return True
            if time.monotonic() > end:
                raise _not_ended(alive[0], self.owner.namespace)
            self.stop.wait(self.poll_seconds)
        return False

    def follow(self, job: Attempt) -> None:
        if self.follower and self.follower.job != job.name:  # another launcher began the next one
            self.follower.finish(_LAST_LOG_SECONDS)
            self.follower = None
        if job.state == "RUNNING":
            self.look_at_nodes(job)
        if job.state not in ("RUNNING", SUCCEEDED) or self.follower is not None:
            return
        raw = self.raw_jobs[job.name]
        if job.name not in self.announced:
            log.info("TrainJob %s is there already (%s)", job.name, state_of(raw))
            self.give_secret(raw)
        if job.alive:
            namespace = self.owner.namespace
            self.follower = Follower(self.cluster, namespace, job.name, self.poll_seconds)

    def look_at_nodes(self, job: Attempt) -> None:
        """Say what keeps the nodes of a job from starting; StepError where they never will,
        and the job is deleted."""
        try:
            self.starting.look(self.raw_jobs[job.name])
        except StepError:
            self.cancel(job)
            raise

    def cancel(self, job: Attempt) -> None:
        uid = self.raw_jobs[job.name]["metadata"]["uid"]
        self.cluster.delete(jobs_path(self.owner.namespace, job.name), uid)

    def deliver(self, job: Attempt) -> int:
        """Write KFP's executor output: what node rank 0 left, which says where artifacts
        are."""
        if self.follower:
            self.follower.finish(_LAST_LOG_SECONDS)
        uri = self.raw_jobs[job.name]["metadata"]["annotations"][trainjob.RESULT]
        try:
            output = json.loads(staging.read_text(uri))
        except FileNotFoundError:
            message = f"TrainJob {job.name} is complete, but left no result"
            raise StepError(message, where=uri, fix="look at the log of node 0") from None
        # a distributed step that reads one of these artifacts gets its place as a
        # parameter
        for name, group in output["artifacts"].items():
            if PREFIX + name in self.executor_input["outputs"].get("parameters", {}):
                artifact = group["artifacts"][0]
                artifact_place = as_place(artifact["uri"], artifact["metadata"])
                output["parameterValues"][PREFIX + name] = artifact_place
        file = Path(self.executor_input["outputs"]["outputFile"])
        write_atomically(file, json.dumps(output, sort_keys=True))
        return 0

    def give_up(self, end: GiveUp) -> int:
        return self.failed(self.failure(end.job.name))

    def failed(self, error: Exception) -> int:
        sys.stderr.write(f"{error}\n")
        return error.exit_code if isinstance(error, RekindleError) else 1

    def hurry(self) -> None:
        self.cluster = ApiServer.in_cluster(
            self.account, self.cluster.server, patience_seconds=_FAREWELL_SECONDS
        )
        self.follower = None

    def failure(self, name: str) -> StepError:
        """Why a job failed, with what node rank 0 said last if it was followed."""
        last_lines = self.follower.finish(_LAST_LOG_SECONDS) if self.follower else ""
        return failure(self.cluster, self.owner.namespace, self.raw_jobs[name], last_lines)

    def create(self, attempt: int) -> None:
        """Create an attempt's job, unless it is there; StepError if that is another's."""
        name = trainjob.job_name(self.definition["task"]["name"], self.owner.identity, attempt)
        outputs = self.executor_input["outputs"]["artifacts"]
        result = f"{outputs[RESULT_OUTPUT]['artifacts'][0]['uri'].rstrip('/')}/{name}.json"
        # another name than that of a job before, whose Secret may not be collected yet
        secret = f"{name}-{secrets.token_hex(4)}"
        manifest = trainjob.manifest(
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
            job = self.cluster.create(jobs_path(self.owner.namespace), manifest)
        except Conflict:
            other = self.cluster.get(jobs_path(self.owner.namespace, name))
            if other is not None and not is_for(other, self.owner.identity):
                raise StepError(
                    f"there is a TrainJob {name} that is not ours",
                    where=f"trainjob {self.owner.namespace}/{name}",
                    fix="delete it, or give the step another name",
                ) from None
            return
        log.info("TrainJob %s created", name)
        self.announced.add(name)
        self.give_secret(job)

    def give_secret(self, job: Json) -> None:
        """Create the Secret that the job's nodes wait for, unless it is there."""
        secret = trainjob.secret_of(job, secrets.token_hex(32))
        if secret and state_of(job) == "active":
            with contextlib.suppress(Conflict):
                self.cluster.create(f"/api/v1/namespaces/{self.owner.namespace}/secrets", secret)

    def task(self, name: str, result: str) -> Json:
        """The task that the nodes of the job `name` run."""
        task = self.definition["task"]
        values = dict(self.executor_input.get("inputs", {}).get("parameterValues", {}))
        artifacts = {}
        for input_name, kind in self.definition["inputs"].items():
            text = values.pop(PREFIX + input_name, None)
            if text:  # an optional artifact may be missing
                artifact = mounted.artifact_of(input_name, kind, *read_place(text))
                artifacts[input_name] = {"artifacts": [artifact]}
        inputs = {"parameterValues": values, "artifacts": artifacts}
        # without the launcher's own: RESULT_OUTPUT and the places of artifacts
        outputs = {}
        for group, names in task["outputs"].items():
            promised = self.executor_input["outputs"][group]
            outputs[group] = {name: promised[name] for name in names}
        facts = mounted.facts(str(self.owner.workflow["name"]), name)
        facts |= {"pipeline_job_uuid": self.owner.run_id, "pipeline_task_name": task["name"]}
        facts["pipeline_root"] = self.definition["root"]
        # those that KFP's driver filled in, such as the name that people gave the run
        for fact in RUN_FACTS:
            if input_of_fact(fact) in values:
                facts[fact] = str(values.pop(input_of_fact(fact)))
        leash = {
            "server": self.cluster.server,
            "account": str(self.account),
            "workflow": self.owner.path,
            "workflow_uid": self.owner.workflow["uid"],
            "every_seconds": _NODES_LOOK_EVERY_POLLS * self.poll_seconds,
        }
        return {
            **task,
            "executor_input": {"inputs": inputs, "outputs": outputs},
            "run": facts,
            "result": result,
            "leash": leash,
        }


def _not_ended(pod: Json, namespace: str) -> StepError:
    """The error for a node of an earlier attempt that outlives its time."""
    name = pod["metadata"]["name"]
    machine = (pod.get("spec") or {}).get("nodeName", "its machine")
    return StepError(
        f"the node {name} of an earlier attempt does not end, so no new one was started",
        where=f"pod {namespace}/{name}",
        fix=f"if {machine} is gone, kubectl delete node {machine}; then rekindle resume RUN",
    )


def _name(job: Json) -> str:
    return str(job["metadata"]["name"])


def _attempt(number: int, job: Json, *, is_last: bool) -> Attempt:
    """A job as `decide` takes it: in the order of numbers, which no clock can turn
    around. All but the last one are over, also while they are being deleted."""
    states = {"complete": SUCCEEDED, "failed": "FAILED", "going": "CANCELLING"}
    state = states.get(state_of(job), "RUNNING")
    if not is_last and state != SUCCEEDED:
        state = "FAILED"
    ended = number + 0.5 if state in shared.ENDED_RUN else None
    return Attempt(name=_name(job), state=state, created=float(number), ended=ended)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
