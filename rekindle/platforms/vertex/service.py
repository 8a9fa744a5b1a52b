"""The few calls of Vertex AI and Cloud Logging that a launcher makes, in its own terms."""

import datetime
import logging
from collections.abc import Mapping
from typing import Any

from rekindle.http import HttpError
from rekindle.platforms.launcher import ENDED_RUN, Job
from rekindle.platforms.vertex.rest import Google

log = logging.getLogger(__name__)

TASK_LABEL = "rekindle-task"
# The states in which a run, or a task of it, wants its jobs gone
_RUN_ENDS = ("CANCELLING", "CANCELLED", "FAILED", "SUCCEEDED")
_TASK_ENDS = ("CANCEL_PENDING", "CANCELLING", "CANCELLED")


def job_of(raw: dict[str, Any]) -> Job:
    """A CustomJob from the JSON of the API."""
    container = raw["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]
    state = raw.get("state", "JOB_STATE_UNSPECIFIED").removeprefix("JOB_STATE_")
    # an expired job may lack the time of its end
    end = raw.get("endTime") or (raw.get("updateTime") if state in ENDED_RUN else None)
    started, ended = (_seconds(time) if time else None for time in (raw.get("startTime"), end))
    error, command = raw.get("error", {}).get("message", ""), tuple(container.get("command", ()))
    return Job(raw["name"], state, _seconds(raw["createTime"]), started, ended, error, command)


class Service:
    """CustomJobs of one step of one run: those that bear `label`."""

    def __init__(self, google: Google, project: str, region: str, label: str) -> None:
        self.google, self.project, self.region, self.label = google, project, region, label
        self.jobs_path = f"/v1/projects/{project}/locations/{region}/customJobs"
        self.made: set[str] = set()

    def jobs(self, patience: float = 300) -> list[Job]:
        """All of them, those just created included, whether or not they are listed yet."""
        query = {"filter": f"labels.{TASK_LABEL}={self.label}", "pageSize": "100"}
        found: dict[str, Job] = {}
        while True:
            page = self.google.get("aiplatform", self.jobs_path, query, patience)
            found |= {raw["name"]: job_of(raw) for raw in page.get("customJobs", [])}
            if not page.get("nextPageToken"):
                break
            query["pageToken"] = page["nextPageToken"]
        for name in self.made - found.keys():
            found[name] = job_of(self.google.get("aiplatform", f"/v1/{name}", None, patience))
        return list(found.values())

    def create(self, body: dict[str, Any]) -> Job:
        """One more; a transient HttpError leaves open whether it is there."""
        job = job_of(self.google.create("aiplatform", self.jobs_path, body))
        self.made.add(job.name)
        return job

    def cancel(self, job: Job, patience: float = 60) -> None:
        """Ask for its end. One that is over already stays as it is."""
        try:
            self.google.post("aiplatform", f"/v1/{job.name}:cancel", {}, patience)
        except HttpError as error:
            if error.transient or error.status == 403:
                raise
            log.info("%s is not cancelled: %s", job.number, error)

    def ending(self, run: str, task: str, patience: float) -> str:
        """Why the run, or this task of it, is at its end: its state, or that it was deleted; ""
        while it goes on."""
        try:
            told = self.google.get("aiplatform", f"/v1/{run}", None, patience)
        except HttpError as error:
            if error.status != 404:
                raise
            return "it was deleted"
        state = str(told.get("state", "")).removeprefix("PIPELINE_STATE_")
        tasks = told.get("jobDetail", {}).get("taskDetails", [])
        own = {one.get("state") for one in tasks if one.get("taskName") == task}
        if own and own <= set(_TASK_ENDS):
            return f"this task of it is {', '.join(sorted(own)).lower()}"
        return f"it is {state.lower()}" if state in _RUN_ENDS else ""

    def page(self, job: Job) -> str:
        """The job in the console, and its logs there."""
        at = "https://console.cloud.google.com"
        return (
            f"{at}/vertex-ai/locations/{self.region}/training/{job.number}/cpu"
            f"?project={self.project}\n{at}/logs/query;query=resource.labels.job_id%3D%22"
            f"{job.number}%22?project={self.project}"
        )


class NodeLog:
    """What node rank 0 printed, from Cloud Logging, as far as this account may read it."""

    def __init__(self, service: Service) -> None:
        self.service, self.readable = service, True
        self.since, self.told = "", set[str]()

    def news(self, job: Job) -> list[str]:
        """Lines that were not told yet. Never fails: a job goes on without being watched."""
        if not self.readable:
            return []
        try:
            one = f'resource.labels.job_id="{job.number}"'
            machine = 'resource.labels.task_name="workerpool0-0"'
            body = log_query(self.service.project, self.since, one, machine)
            told = self.service.google.post("logging", "/v2/entries:list", body, patience=0)
            entries = told.get("entries", [])
        except HttpError as error:
            self.readable = error.transient
            if not self.readable:
                log.info("node 0's log is not shown here: %s", error)
            return []
        fresh = [entry for entry in entries if entry["insertId"] not in self.told]
        if fresh:
            self.since = fresh[-1]["timestamp"]
            self.told = {e["insertId"] for e in entries if e["timestamp"] == self.since}
        return [text_of(entry).rstrip() for entry in fresh]


def log_query(project: str, since: str, *wanted: str) -> dict[str, Any]:
    """The body of `entries.list` for what machines of jobs printed `since` ("": from the start)."""
    times = [f'timestamp>="{since}"'] if since else []
    return {
        "resourceNames": [f"projects/{project}"], "orderBy": "timestamp asc", "pageSize": 1_000,
        "filter": " AND ".join(['resource.type="ml_job"', *wanted, *times]),
    }  # fmt: skip


def text_of(entry: Mapping[str, Any]) -> str:
    """What an entry of the log says."""
    return str(entry.get("textPayload") or entry.get("jsonPayload", {}).get("message", ""))


def _seconds(text: str) -> float:
    return datetime.datetime.fromisoformat(text).timestamp()
