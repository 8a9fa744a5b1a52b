"""The launcher step: has one CustomJob run a distributed step, follows it, and hands its
results to the pipeline.

    python3 -m rekindle.platforms.vertex.launcher PAYLOAD EXECUTOR_INPUT [FACT VALUE]...

compile.py writes PAYLOAD; the service fills in EXECUTOR_INPUT and the facts. The jobs of
a step have a label, by which every launcher finds them: a hash of the run, the task, its
inputs and the payload. Turns of a loop with equal inputs have the same label, and share a
job. The exit code is 143 after SIGTERM and when the run ends, 75 when the step gave up
because its machines were taken away, 1 when it failed. No account has run any of it yet;
see docs/vertex.md."""

import contextlib
import copy
import datetime
import hashlib
import json
import logging
import os
import secrets
import signal
import sys
import threading
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from rekindle.http import HttpError
from rekindle.platforms.launcher import (
    ENDED_RUN,
    Allowed,
    Attempt,
    Cause,
    GiveUp,
    Launcher,
    Start,
)
from rekindle.platforms.vertex import node
from rekindle.platforms.vertex.compile import RUN, TASK
from rekindle.platforms.vertex.node import RESULT, ended_file, mounted
from rekindle.platforms.vertex.rest import Google, places
from rekindle.protojson import Json

log = logging.getLogger(__name__)

POLL_SECONDS = 15.0
PATIENCE_SECONDS = 900.0  # for reads, before this launcher fails and the next one goes on
# for each request after SIGTERM, which SIGKILL follows half a minute later
LAST_WORDS_SECONDS = 8.0
# attempts to create a job, one after the other, that got no answer or met a limit of calls
CREATIONS = 6
PREEMPTED = 75
TOLD_TO_END = 143  # the service ends the nodes beside one that ended, also before they can save
# node rank 0 asks whether the run goes on once in so many polls of a launcher
_WATCH_POLLS = 8
TASK_LABEL = "rekindle-task"
# The states in which a run, or a task of it, wants its jobs gone
_RUN_ENDS = ("CANCELLING", "CANCELLED", "FAILED", "SUCCEEDED")
_TASK_ENDS = ("CANCEL_PENDING", "CANCELLING", "CANCELLED")
# what to do about the end of a job, by its cause
_FIXES: Mapping[Cause, str] = {
    "expired": ": no machines in time; raise platforms.vertex.max_wait_hours or max_run_hours, "
    "or name another region",
    "preempted": ": raise platforms.vertex.max_preemptions, or set provisioning: standard",
}


def job_of(raw: Json) -> Attempt:
    """The attempt that a CustomJob is, from the JSON of the API."""
    container = raw["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]
    state = raw.get("state", "JOB_STATE_UNSPECIFIED").removeprefix("JOB_STATE_")
    started = raw.get("startTime")
    ended = raw.get("endTime")
    if not ended and state in ENDED_RUN:
        ended = raw.get("updateTime")  # an expired job may lack the time of its end
    return Attempt(
        name=raw["name"],
        state=state,
        created=_seconds(raw["createTime"]),
        started=_seconds(started) if started else None,
        ended=_seconds(ended) if ended else None,
        error=raw.get("error", {}).get("message", ""),
        command=tuple(container.get("command", ())),
    )


def _seconds(text: str) -> float:
    """A time of the API in seconds since 1970."""
    return datetime.datetime.fromisoformat(text).timestamp()


class VertexLauncher(Launcher):
    """A launcher of CustomJobs: `payload` and `executor_input` as in the arguments."""

    def __init__(
        self,
        payload: Json,
        executor_input: Json,
        facts: Mapping[str, str],
        environment: Mapping[str, str],
    ) -> None:
        self.payload = payload
        self.facts = dict(facts)
        self.executor_input = _complete(executor_input)
        allowed = Allowed(payload["failures"], payload["preemptions"], payload["limit_seconds"])
        poll_seconds = float(environment.get("REKINDLE_POLL_SECONDS", POLL_SECONDS))
        super().__init__(allowed, poll_seconds, threading.Event())
        self.run_labels = json.loads(environment.get("VERTEX_AI_PIPELINES_RUN_LABELS") or "{}")
        self.google = Google(places(payload["region"], environment), self.stop)
        self.project = payload["project"]
        self.region = payload["region"]
        # what identifies the step in the run: launchers with the same parts want the same job
        parts = [
            self.facts[RUN],
            self.facts[TASK],
            self.executor_input["inputs"],
            payload,
        ]
        self.label = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:40]
        self.jobs_path = f"/v1/projects/{self.project}/locations/{self.region}/customJobs"
        self.created: set[str] = set()  # names of jobs that may not be listed yet
        self.logged = ""  # the job and state that were logged last
        self.patience = PATIENCE_SECONDS
        self.creations = 0  # failed attempts to create a job, since the last that succeeded

    def ending(self) -> str:
        try:
            run = self.google.get("aiplatform", f"/v1/{self.facts[RUN]}", None, self.patience)
        except HttpError as error:
            if error.status != 404:
                raise
            return "it was deleted"
        state = str(run.get("state", "")).removeprefix("PIPELINE_STATE_")
        # turns of a loop have this name, too, and may share the job: all of them have to end
        own_states = set()
        for task in run.get("jobDetail", {}).get("taskDetails", []):
            if task.get("taskName") == self.facts[TASK]:
                own_states.add(task.get("state"))
        if own_states and own_states <= set(_TASK_ENDS):
            return f"this task of it is {', '.join(sorted(own_states)).lower()}"
        return f"it is {state.lower()}" if state in _RUN_ENDS else ""

    def jobs(self) -> list[Attempt]:
        """All jobs with the label. A new job may not be listed yet, so those that this
        launcher created are asked for by name."""
        query = {"filter": f"labels.{TASK_LABEL}={self.label}", "pageSize": "100"}
        jobs: dict[str, Attempt] = {}
        while True:
            page = self.google.get("aiplatform", self.jobs_path, query, self.patience)
            jobs |= {raw["name"]: job_of(raw) for raw in page.get("customJobs", [])}
            if not page.get("nextPageToken"):
                break
            query["pageToken"] = page["nextPageToken"]
        for name in self.created - jobs.keys():
            jobs[name] = job_of(self.google.get("aiplatform", f"/v1/{name}", None, self.patience))
        return list(jobs.values())

    def cancel(self, job: Attempt) -> None:
        """Ask for the job's end; a job that is over already stays as it is."""
        try:
            self.google.post("aiplatform", f"/v1/{job.name}:cancel", {}, min(self.patience, 60.0))
        except HttpError as error:
            if error.transient or error.status == 403:
                raise
            log.info("%s is not cancelled: %s", job.number, error)

    def failed(self, error: Exception) -> int:
        advice = ""
        if isinstance(error, HttpError) and _quota(error):
            advice = ": ask for more of this quota in the console, or take other machines"
        elif isinstance(error, HttpError) and error.status == 403:
            advice = ": `rekindle doctor --platform vertex` prints the permissions that are needed"
        log.error("%s%s", error, advice)
        return 1

    def hurry(self) -> None:
        # a client without `stop`, which is set by now and would end the waits between its retries
        self.google = Google(self.google.where)
        self.patience = LAST_WORDS_SECONDS

    def start(self, attempt: Start) -> None:
        """Create one more job, in a folder of its own."""
        token = uuid.uuid4().hex[:12]
        folder = f"{self.payload['jobs']}/{self.label}/{token}"
        task = {
            **self.payload["task"],
            "executor_input": _with_own_places(self.executor_input, token),
            "facts": self.facts,
            "run": self.facts[RUN],
            "region": self.payload["region"],
            "watch_seconds": self.poll_seconds * _WATCH_POLLS,
            # by which the job's nodes know each other: only they may read the folder
            "secret": secrets.token_hex(32),
        }
        command = node.write(Path(mounted(folder)), task)
        try:
            raw = self.google.create("aiplatform", self.jobs_path, self.body(attempt, command))
        except HttpError as error:
            self.creations += 1
            if not error.transient or _quota(error) or self.creations >= CREATIONS:
                raise
            log.warning("attempt %d: %s; looking whether it is there", attempt.number, error)
            return
        self.creations = 0
        job = job_of(raw)
        self.created.add(job.name)
        log.info("attempt %d is %s\n%s", attempt.number, job.number, self.page(job))

    def body(self, attempt: Start, command: list[str]) -> Json:
        """The request that creates the CustomJob of an attempt."""
        job = copy.deepcopy(self.payload["job"])
        own_labels = {TASK_LABEL: self.label, "rekindle-attempt": str(attempt.number)}
        job["labels"] = {**self.run_labels, **job["labels"], **own_labels}
        for pool in job["jobSpec"]["workerPoolSpecs"]:
            pool["containerSpec"]["command"] = command
        job["jobSpec"]["scheduling"]["timeout"] = f"{int(attempt.seconds)}s"
        return dict(job)

    def follow(self, job: Attempt) -> None:
        name_and_state = f"{job.name} {job.state}"
        if name_and_state != self.logged:
            self.logged = name_and_state
            error = f": {job.error}" if job.error else ""
            log.info("%s: %s%s", job.number, job.state.lower(), error)

    def page(self, job: Attempt) -> str:
        """The addresses of the job and of its logs in the console."""
        console = "https://console.cloud.google.com"
        location = f"locations/{self.region}/training/{job.number}/cpu"
        query = f"resource.labels.job_id%3D%22{job.number}%22"
        return (
            f"{console}/vertex-ai/{location}?project={self.project}\n"
            f"{console}/logs/query;query={query}?project={self.project}"
        )

    def cause(self, job: Attempt) -> Cause:
        """Why an ended job failed. A node of a spot job that started and left no last
        words is taken for one whose machine was reclaimed."""
        if job.state == "CANCELLED":
            return "cancelled"
        if job.state == "EXPIRED":
            return "expired"
        is_spot = self.payload["spot"]
        last_words = self.last_words(job)
        codes = {word["exit_code"] for word in last_words.values()}
        if PREEMPTED in codes:
            # on machines that cannot be reclaimed, nodes also save (75) when another failed
            has_failure = bool(codes - {0, PREEMPTED, TOLD_TO_END})
            if is_spot or not has_failure:
                return "preempted"
        is_silent = len(last_words) < self.payload["nodes"] and job.started is not None
        return "preempted" if is_spot and is_silent else "failed"

    def last_words(self, job: Attempt) -> dict[int, Json]:
        """What each node wrote about its end, by its rank; missing where it wrote nothing."""
        last_words: dict[int, Json] = {}
        folder = node.folder_of(job.command)
        if folder is None:
            return last_words
        for rank in range(self.payload["nodes"]):
            # no file, or one that was written in part when the machine went
            with contextlib.suppress(OSError, ValueError):
                word = json.loads((folder / ended_file(rank)).read_text(encoding="utf-8"))
                if isinstance(word, dict) and isinstance(word.get("exit_code"), int):
                    last_words[rank] = word
        return last_words

    def deliver(self, job: Attempt) -> int:
        """Write the outputs that node rank 0 left as those of this task. Artifacts stay
        where they are; only their URIs are written."""
        folder = node.folder_of(job.command)
        if folder is None or not (folder / RESULT).exists():
            log.error("%s succeeded, but left no %s in %s", job.number, RESULT, folder)
            return 1
        result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        outputs = self.executor_input["outputs"]
        artifacts = {}
        for name, group in outputs["artifacts"].items():
            artifact = {
                "name": group["artifacts"][0].get("name", ""),
                "uri": result["artifacts"][name]["uri"],
                "metadata": result["artifacts"][name]["metadata"],
            }
            artifacts[name] = {"artifacts": [artifact]}
        executor_output = {
            "parameterValues": result["parameters"],
            "artifacts": artifacts,
        }
        file = Path(mounted(outputs["outputFile"]))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(executor_output), encoding="utf-8")
        return 0

    def give_up(self, end: GiveUp) -> int:
        for rank, word in self.last_words(end.job).items():
            log.error("node %d ended with %d. %s", rank, word["exit_code"], word["error"])
        log.error(
            "%s %s: %s%s\n%s",
            end.job.number,
            end.job.state.lower(),
            end.why,
            _FIXES.get(end.cause, ""),
            self.page(end.job),
        )
        return PREEMPTED if end.cause == "preempted" else 1


def _quota(error: HttpError) -> bool:
    """Whether a request was refused for a quota, which no retry helps."""
    return error.status == 429 and "quota" in str(error).lower()


def _complete(executor_input: Json) -> Json:
    """The input with all its members: the JSON of a proto leaves out empty ones."""
    inputs = {"parameterValues": {}, "artifacts": {}, **executor_input.get("inputs", {})}
    outputs = {"parameters": {}, "artifacts": {}, **executor_input.get("outputs", {})}
    return {**executor_input, "inputs": inputs, "outputs": outputs}


def _with_own_places(executor_input: Json, token: str) -> Json:
    """The input with each output artifact in a folder of this job, `.../TOKEN/model`, so
    that a job that is given up cannot write into the outputs of the next."""
    outputs = executor_input["outputs"]
    artifacts = {}
    for name, group in outputs["artifacts"].items():
        moved = []
        for artifact in group["artifacts"]:
            parent, _, last = artifact["uri"].rpartition("/")
            moved.append({**artifact, "uri": f"{parent}/{token}/{last}"})
        artifacts[name] = {"artifacts": moved}
    return {**executor_input, "outputs": {**outputs, "artifacts": artifacts}}


def main(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a launcher with these arguments of its process; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    facts = dict(zip(argv[3::2], argv[4::2], strict=True))
    launcher = VertexLauncher(json.loads(argv[1]), json.loads(argv[2]), facts, environment)
    signal.signal(signal.SIGTERM, lambda *_: launcher.stop.set())
    return launcher.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv, os.environ))
