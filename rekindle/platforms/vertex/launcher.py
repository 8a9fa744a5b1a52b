"""The launcher step: has one CustomJob run a distributed step, follows it, and hands its results to
the pipeline.

    python3 -m rekindle.platforms.vertex.launcher PAYLOAD EXECUTOR_INPUT [FACT VALUE]...

PAYLOAD is what compile.py wrote, EXECUTOR_INPUT and the facts are filled in by the service. The
jobs of a step bear a label, a hash of the run, the task, its inputs and the payload: turns of a
loop with equal inputs share a job. The exit code is 143 after SIGTERM and when the run ends, 75
when the step gave up because its machines were taken away, 1 when it failed. No account has run any
of it yet; see docs/vertex.md."""

import contextlib
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
from typing import Any

from rekindle.http import HttpError
from rekindle.platforms.launcher import ENDED_RUN, Allowed, Cause, GiveUp, Job, Launcher, Start
from rekindle.platforms.vertex import node
from rekindle.platforms.vertex.compile import RUN, TASK
from rekindle.platforms.vertex.node import RESULT, ended_file, mounted
from rekindle.platforms.vertex.rest import Google, places
from rekindle.tables import rows

log = logging.getLogger(__name__)

POLL_SECONDS = 15.0
PATIENCE_SECONDS = 900.0  # for reads, before this launcher fails and the next one goes on
LAST_WORDS_SECONDS = 8.0  # of the half minute between SIGTERM and SIGKILL
CREATIONS = 6  # without an answer, or against a limit of calls
PREEMPTED = 75
TOLD_TO_END = 143  # the service ends the nodes beside one that ended, also before they can save
_WATCH_POLLS = 8
TASK_LABEL = "rekindle-task"
# The states in which a run, or a task of it, wants its jobs gone
_RUN_ENDS = ("CANCELLING", "CANCELLED", "FAILED", "SUCCEEDED")
_TASK_ENDS = ("CANCEL_PENDING", "CANCELLING", "CANCELLED")
_SAYS = rows(Path(__file__).with_suffix(".yaml"))


def job_of(raw: dict[str, Any]) -> Job:
    """A CustomJob from the JSON of the API."""
    container = raw["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]
    state = raw.get("state", "JOB_STATE_UNSPECIFIED").removeprefix("JOB_STATE_")
    # an expired job may lack the time of its end
    end = raw.get("endTime") or (raw.get("updateTime") if state in ENDED_RUN else None)
    started, ended = (_seconds(time) if time else None for time in (raw.get("startTime"), end))
    error, command = raw.get("error", {}).get("message", ""), tuple(container.get("command", ()))
    return Job(raw["name"], state, _seconds(raw["createTime"]), started, ended, error, command)


def _seconds(text: str) -> float:
    return datetime.datetime.fromisoformat(text).timestamp()


class VertexLauncher(Launcher):
    """A launcher of CustomJobs: `payload` and `executor_input` as in the arguments."""

    def __init__(
        self,
        payload: dict[str, Any],
        executor_input: dict[str, Any],
        facts: Mapping[str, str],
        environment: Mapping[str, str],
    ) -> None:
        self.payload, self.facts = payload, dict(facts)
        self.executor_input = _complete(executor_input)
        allowed = Allowed(payload["failures"], payload["preemptions"], payload["limit_seconds"])
        poll_seconds = float(environment.get("REKINDLE_POLL_SECONDS", POLL_SECONDS))
        super().__init__(allowed, poll_seconds, threading.Event())
        self.run_labels = json.loads(environment.get("VERTEX_AI_PIPELINES_RUN_LABELS") or "{}")
        self.google = Google(places(payload["region"], environment), self.stop)
        self.project, self.region = payload["project"], payload["region"]
        # what the step is to the run: launchers that compute the same want the same job
        parts = [self.facts[RUN], self.facts[TASK], self.executor_input["inputs"], payload]
        self.label = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:40]
        self.jobs_path = f"/v1/projects/{self.project}/locations/{self.region}/customJobs"
        self.made = set[str]()  # names of jobs that may not be listed yet
        self.told, self.patience = "", PATIENCE_SECONDS
        self.creations = 0

    def ending(self) -> str:
        try:
            told = self.google.get("aiplatform", f"/v1/{self.facts[RUN]}", None, self.patience)
        except HttpError as error:
            if error.status != 404:
                raise
            return "it was deleted"
        state = str(told.get("state", "")).removeprefix("PIPELINE_STATE_")
        tasks = told.get("jobDetail", {}).get("taskDetails", [])
        own = {one.get("state") for one in tasks if one.get("taskName") == self.facts[TASK]}
        if own and own <= set(_TASK_ENDS):
            return f"this task of it is {', '.join(sorted(own)).lower()}"
        return f"it is {state.lower()}" if state in _RUN_ENDS else ""

    def jobs(self) -> list[Job]:
        """All with the label, those just created included, whether or not they are listed yet."""
        query = {"filter": f"labels.{TASK_LABEL}={self.label}", "pageSize": "100"}
        found: dict[str, Job] = {}
        while True:
            page = self.google.get("aiplatform", self.jobs_path, query, self.patience)
            found |= {raw["name"]: job_of(raw) for raw in page.get("customJobs", [])}
            if not page.get("nextPageToken"):
                break
            query["pageToken"] = page["nextPageToken"]
        for name in self.made - found.keys():
            found[name] = job_of(self.google.get("aiplatform", f"/v1/{name}", None, self.patience))
        return list(found.values())

    def cancel(self, job: Job) -> None:
        """Ask for its end. One that is over already stays as it is."""
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
        self.google, self.patience = Google(self.google.where), LAST_WORDS_SECONDS

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
            "secret": secrets.token_hex(32),  # of the job's nodes: who reads the folder is one
        }
        command = node.write(Path(mounted(folder)), task)
        try:
            made = self.google.create("aiplatform", self.jobs_path, self.body(attempt, command))
        except HttpError as error:
            self.creations += 1
            if not error.transient or _quota(error) or self.creations >= CREATIONS:
                raise
            log.warning("attempt %d: %s; looking whether it is there", attempt.number, error)
            return
        job, self.creations = job_of(made), 0
        self.made.add(job.name)
        log.info("attempt %d is %s\n%s", attempt.number, job.number, self.page(job))

    def body(self, attempt: Start, command: list[str]) -> dict[str, Any]:
        """The CustomJob of an attempt."""
        job = json.loads(json.dumps(self.payload["job"]))
        own = {TASK_LABEL: self.label, "rekindle-attempt": str(attempt.number)}
        job["labels"] = {**self.run_labels, **job["labels"], **own}
        for pool in job["jobSpec"]["workerPoolSpecs"]:
            pool["containerSpec"]["command"] = command
        job["jobSpec"]["scheduling"]["timeout"] = f"{int(attempt.seconds)}s"
        return dict(job)

    def follow(self, job: Job) -> None:
        if f"{job.name} {job.state}" != self.told:
            self.told = f"{job.name} {job.state}"
            log.info("%s: %s%s", job.number, job.state.lower(), job.error and f": {job.error}")

    def page(self, job: Job) -> str:
        """The job in the console, and its logs there."""
        page: str = _SAYS["page"]
        return page.format(region=self.region, job=job.number, project=self.project)

    def cause(self, job: Job) -> Cause:
        """Why an ended job failed. On spot, a node that left no word was taken away."""
        if job.state in ("CANCELLED", "EXPIRED"):
            return "cancelled" if job.state == "CANCELLED" else "expired"
        words = self.last_words(job)
        codes = {word["exit_code"] for word in words.values()}
        if PREEMPTED in codes and (self.payload["spot"] or not codes - {0, PREEMPTED, TOLD_TO_END}):
            return "preempted"  # elsewhere nodes also save because another one failed
        silent = len(words) < self.payload["nodes"] and job.started is not None
        return "preempted" if self.payload["spot"] and silent else "failed"

    def last_words(self, job: Job) -> dict[int, dict[str, Any]]:
        """How each node ended, by its rank, as far as they could say."""
        found = dict[int, dict[str, Any]]()
        if (folder := node.folder_of(job.command)) is None:
            return found
        for rank in range(self.payload["nodes"]):
            with contextlib.suppress(OSError, ValueError):  # none, or half a word
                word = json.loads((folder / ended_file(rank)).read_text(encoding="utf-8"))
                if isinstance(word, dict) and isinstance(word.get("exit_code"), int):
                    found[rank] = word
        return found

    def deliver(self, job: Job) -> int:
        """Write what node rank 0 left as this task's output, artifacts where they are."""
        if (folder := node.folder_of(job.command)) is None or not (folder / RESULT).exists():
            log.error("%s succeeded, but left no %s in %s", job.number, RESULT, folder)
            return 1
        result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        outputs = self.executor_input["outputs"]
        told = {"parameterValues": result["parameters"], "artifacts": {}}
        for name, group in outputs["artifacts"].items():
            made = {key: result["artifacts"][name][key] for key in ("uri", "metadata")}
            artifact = {"name": group["artifacts"][0].get("name", ""), **made}
            told["artifacts"][name] = {"artifacts": [artifact]}
        file = Path(mounted(outputs["outputFile"]))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(told), encoding="utf-8")
        return 0

    def give_up(self, end: GiveUp) -> int:
        for rank, word in self.last_words(end.job).items():
            log.error("node %d ended with %d. %s", rank, word["exit_code"], word["error"])
        log.error(
            "%s %s: %s%s\n%s",
            end.job.number,
            end.job.state.lower(),
            end.why,
            _SAYS["fixes"].get(end.cause, ""),
            self.page(end.job),
        )
        return PREEMPTED if end.cause == "preempted" else 1


def _quota(error: HttpError) -> bool:
    return error.status == 429 and "quota" in str(error).lower()


def _complete(executor_input: dict[str, Any]) -> dict[str, Any]:
    """JSON of a proto leaves out what is empty; here it is not."""
    inputs = {"parameterValues": {}, "artifacts": {}, **executor_input.get("inputs", {})}
    outputs = {"parameters": {}, "artifacts": {}, **executor_input.get("outputs", {})}
    return {**executor_input, "inputs": inputs, "outputs": outputs}


def _with_own_places(executor_input: dict[str, Any], token: str) -> dict[str, Any]:
    """The same with artifacts in `.../TOKEN/model`: no other job ever writes there."""
    outputs = executor_input["outputs"]
    artifacts = {}
    for name, group in outputs["artifacts"].items():
        places = [(artifact, artifact["uri"].rpartition("/")) for artifact in group["artifacts"]]
        moved = [{**artifact, "uri": f"{at}/{token}/{last}"} for artifact, (at, _, last) in places]
        artifacts[name] = {"artifacts": moved}
    return {**executor_input, "outputs": {**outputs, "artifacts": artifacts}}


def main(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a launcher from its arguments."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    facts = dict(zip(argv[3::2], argv[4::2], strict=True))
    launcher = VertexLauncher(json.loads(argv[1]), json.loads(argv[2]), facts, environment)
    signal.signal(signal.SIGTERM, lambda *_: launcher.stop.set())
    return launcher.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv, os.environ))
