"""Vertex AI's API for pipeline jobs and schedules, as google-cloud-aiplatform's REST client asks it,
Cloud Logging's entries, Cloud Storage's objects, and Google's tokens for a service account.

Every body is parsed into the service's own proto: an unknown field is a 400. Ids and cron lines
have to be ones that the service takes, a job whose id is taken is a 409. Calls need the token.
`faults` are answered in place of, or after, the next call that they fit; what is refused stands in
`refused`. Tests say what the tasks of a job do (`task`), what is printed (`printed`, here in pages
of two) and what lies in buckets (`objects`).

Authority: the http rules of aiplatform_v1's protos; google.rpc.Status; LogEntry and entries.list of
cloud.google.com/logging/docs/reference/v2/rest; objects.get of cloud.google.com/storage/docs."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.cloud import aiplatform_v1 as api
from google.protobuf import json_format

from tests.servers.google.logs import fits_filter
from tests.servers.tls_hosts import Answer, Asked, Dropped
from tests.servers.troubles import Broken, Troubled

HOSTS = ("*.googleapis.com",)
PROJECT, REGION = "forge", "europe-west4"
PARENT = f"projects/{PROJECT}/locations/{REGION}"
ACCOUNT = "who-submits@forge.iam.gserviceaccount.com"
TOKEN, STEPS_TOKEN = "ya29.of-who-submits", "ya29.of-the-account"
_OTHERS = {
    "logging.googleapis.com": "entries",
    "storage.googleapis.com": "objects",
    "monitoring.googleapis.com": "timeSeries",
}
_VALUE = re.compile(r"[a-z0-9_-]{0,63}")
_CODES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ALREADY_EXISTS",
    412: "FAILED_PRECONDITION",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


_CHANGEABLE = (
    "cron",
    "max_concurrent_run_count",
    "max_concurrent_active_run_count",
    "allow_queueing",
    "create_pipeline_job_request",
)


def key_file(folder: Path) -> Path:
    """What GOOGLE_APPLICATION_CREDENTIALS names: the key of a service account."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file = folder / "account.json"
    file.write_text(
        json.dumps(
            {
                "type": "service_account",
                "project_id": PROJECT,
                "private_key_id": "1",
                "private_key": pem.decode(),
                "client_email": ACCOUNT,
                "client_id": "1",
                "token_uri": "https://oauth2.googleapis.com/token",
            }
        )
    )
    return file


class Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        self.status, self.message = status, message


class Project(Troubled):
    """The project `forge` in one region."""

    def __init__(self) -> None:
        self.jobs: dict[str, api.PipelineJob] = {}
        self.schedules: dict[str, api.Schedule] = {}
        self.made = 0
        self.entries: list[dict[str, Any]] = []
        self.objects: dict[str, bytes] = {}
        self.custom_jobs: Callable[[], list[api.CustomJob]] = list
        self.bucket: Path | None = None  # a folder with more of them, by bucket
        self.created: Callable[[str], None] = lambda _: None  # is told of every new job
        self.more_entries: Callable[[], list[dict[str, Any]]] = list
        super().__init__()

    def answer(self, asked: Asked) -> Answer:
        if asked.host == "oauth2.googleapis.com":
            return Answer(200, {"access_token": TOKEN, "expires_in": 3600, "token_type": "Bearer"})
        if asked.host == "iamcredentials.googleapis.com":  # of google-auth: where may it go?
            return Answer(200, {"locations": [], "encodedLocations": "0x0"})
        try:
            found = self.met(self.name_of(asked), lambda: self.done(asked))
            return found if isinstance(found, Answer) else Answer(200, found)
        except (Refused, ValueError) as error:
            error = error if isinstance(error, Refused) else Refused(400, str(error))
            self.refused.append(f"{asked}: {error.message}")
            return _status(error.status, error.message)
        except Broken as broken:
            if broken.dropped():
                raise Dropped from None
            return _status(broken.fault.status, "as the test wants it")

    def name_of(self, asked: Asked) -> str:
        """`POST pipelineJobs`, `POST schedules:pause`, `GET schedules`, `POST entries`, ..."""
        if not asked.host.endswith("-aiplatform.googleapis.com"):
            return f"{asked.method} {_OTHERS.get(asked.host, asked.host)}"
        rest = asked.path.removeprefix(f"/v1/{PARENT}/")
        kind, _, id = rest.partition("/")
        verb = id.partition(":")[2]
        return f"{asked.method} {kind}{':' + verb if verb else ''}"

    def done(self, asked: Asked) -> Any:
        check_token(asked)
        if asked.host == "logging.googleapis.com":
            return self.list_entries(asked)
        if asked.host == "storage.googleapis.com":
            return self.get_object(asked)
        if asked.host != f"{REGION}-aiplatform.googleapis.com":
            raise Refused(404, f"there is no {asked.host}")
        match = re.fullmatch(rf"/v1/{PARENT}/(\w+)(?:/([\w-]+))?(?::(\w+))?", asked.path)
        if match is None:
            raise Refused(404, f"there is no {asked.path}")
        kind, id, verb = match.groups()
        call = {
            ("POST", "pipelineJobs", False, None): self.create_job,
            ("GET", "pipelineJobs", False, None): self.list_jobs,
            ("GET", "pipelineJobs", True, None): self.get_job,
            ("GET", "customJobs", False, None): self.list_custom_jobs,
            ("POST", "pipelineJobs", True, "cancel"): self.cancel_job,
            ("POST", "schedules", False, None): self.create_schedule,
            ("GET", "schedules", False, None): self.list_schedules,
            ("GET", "schedules", True, None): self.get_schedule,
            ("PATCH", "schedules", True, None): self.update_schedule,
            ("POST", "schedules", True, "pause"): self.pause,
            ("POST", "schedules", True, "resume"): self.resume,
            ("DELETE", "schedules", True, None): self.delete_schedule,
        }.get((asked.method, kind, id is not None, verb))
        if call is None:
            raise Refused(404, f"nobody answers {asked}")
        return call(asked, f"{PARENT}/{kind}/{id}")

    def create_job(self, asked: Asked, _: str) -> Any:
        id = asked.query.get("pipelineJobId", "")
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,127}", id):
            raise Refused(400, f"{id!r} is no id of a job")
        job = parsed(api.PipelineJob, asked.body)
        name = f"{PARENT}/pipelineJobs/{id}"
        if name in self.jobs:
            raise Refused(409, f"{name} exists")
        for key, value in job.labels.items():
            if not re.fullmatch(r"[a-z][a-z0-9_-]{0,62}", key) or not _VALUE.fullmatch(value):
                raise Refused(400, f"label {key}={value}")
        job.name, job.state = name, api.PipelineState.PIPELINE_STATE_RUNNING
        job.create_time = datetime.datetime.now(datetime.UTC)
        self.jobs[name] = job
        self.created(name)
        return shown_of(job)

    def get_job(self, asked: Asked, name: str) -> Any:
        return shown_of(self.job(name))

    def list_jobs(self, asked: Asked, _: str) -> Any:
        """Those of a name that have a label, the oldest first."""
        match = re.fullmatch(
            r'display_name="([^"]+)" AND labels\.([a-z0-9_-]+):\*', asked.query["filter"]
        )
        if match is None or asked.query["orderBy"] != "create_time":
            raise Refused(400, f"no filter or order: {asked.query}")
        found = [
            j for j in self.jobs.values() if j.display_name == match[1] and match[2] in j.labels
        ]
        mask = set(asked.query["readMask"].split(","))
        shown = [{k: v for k, v in shown_of(job).items() if k in mask} for job in found]
        begin = int(asked.query.get("pageToken", 0))
        more = {"nextPageToken": str(begin + 2)} if begin + 2 < len(shown) else {}
        return {"pipelineJobs": shown[begin : begin + 2], **more}

    def list_custom_jobs(self, asked: Asked, _: str) -> Any:
        """Those that have all of these labels."""
        wanted = [
            re.fullmatch(r"labels\.([a-z0-9_-]+)=([a-z0-9_-]*)", text)
            for text in asked.query["filter"].split(" AND ")
        ]
        if not all(wanted):
            raise Refused(400, f"no filter: {asked.query['filter']}")
        fits = [
            shown_of(job)
            for job in self.custom_jobs()
            if all(m and job.labels.get(m[1]) == m[2] for m in wanted)
        ]
        begin = int(asked.query.get("pageToken", 0))
        more = {"nextPageToken": str(begin + 2)} if begin + 2 < len(fits) else {}
        return {"customJobs": fits[begin : begin + 2], **more}

    def cancel_job(self, asked: Asked, name: str) -> Any:
        job = self.job(name)
        if job.state != api.PipelineState.PIPELINE_STATE_RUNNING:
            raise Refused(412, f"{name} is over")
        job.state = api.PipelineState.PIPELINE_STATE_CANCELLED
        return {}

    def create_schedule(self, asked: Asked, _: str) -> Any:
        made = parsed(api.Schedule, asked.body)
        _check_schedule(made)
        self.made += 1
        made.name = f"{PARENT}/schedules/{self.made}"
        made.state = api.Schedule.State.ACTIVE
        made.create_time = datetime.datetime.now(datetime.UTC)
        self.schedules[made.name] = made
        return shown_of(made)

    def list_schedules(self, asked: Asked, _: str) -> Any:
        names = sorted(self.schedules)
        begin = int(asked.query.get("pageToken", 0))
        page = [shown_of(self.schedules[name]) for name in names[begin : begin + 2]]
        more = {"nextPageToken": str(begin + 2)} if begin + 2 < len(names) else {}
        return {"schedules": page, **more}

    def get_schedule(self, asked: Asked, name: str) -> Any:
        return shown_of(self.schedule(name))

    def update_schedule(self, asked: Asked, name: str) -> Any:
        kept, wanted = self.schedule(name), parsed(api.Schedule, asked.body)
        for field in asked.query["updateMask"].split(","):
            plain = re.sub(r"([A-Z])", lambda m: f"_{m[1].lower()}", field)
            if plain not in _CHANGEABLE:
                raise Refused(400, f"{field} cannot be changed")
            if getattr(kept, plain) and not getattr(wanted, plain):
                raise Refused(400, f"{field} cannot be unset")
            setattr(kept, plain, getattr(wanted, plain))
        _check_schedule(kept)
        return shown_of(kept)

    def pause(self, asked: Asked, name: str) -> Any:
        self.schedule(name).state = api.Schedule.State.PAUSED
        return {}

    def resume(self, asked: Asked, name: str) -> Any:
        found = self.schedule(name)
        found.state = api.Schedule.State.ACTIVE
        found.catch_up = json.loads(asked.body or b"{}").get("catchUp", False)
        return {}

    def delete_schedule(self, asked: Asked, name: str) -> Any:
        self.schedule(name)
        del self.schedules[name]
        return {
            "name": f"{PARENT}/operations/1",
            "done": True,
            "response": {"@type": "type.googleapis.com/google.protobuf.Empty", "value": {}},
        }

    def list_entries(self, asked: Asked) -> Any:
        """What fits, by time."""
        body = json.loads(asked.body)
        given = body.keys() - {"pageToken"}
        if (asked.path, given) != (
            "/v2/entries:list",
            {"resourceNames", "filter", "orderBy", "pageSize"},
        ):
            raise Refused(400, f"{asked.path} with {sorted(given)}")
        if (body["resourceNames"], body["orderBy"]) != ([f"projects/{PROJECT}"], "timestamp asc"):
            raise Refused(400, str(body))
        fits = [
            entry
            for entry in self.entries + self.more_entries()
            if fits_filter(entry, body["filter"])
        ]
        fits.sort(key=lambda entry: datetime.datetime.fromisoformat(entry["timestamp"]))
        begin = int(body.get("pageToken", 0))
        more = {"nextPageToken": str(begin + 2)} if begin + 2 < len(fits) else {}
        return ({"entries": fits[begin : begin + 2]} if fits else {}) | more

    def get_object(self, asked: Asked) -> Answer:
        match = re.fullmatch(r"/storage/v1/b/([^/]+)/o/([^/]+)", asked.path)
        if match is None or asked.query != {"alt": "media"}:
            raise Refused(400, f"{asked.path} with {asked.query}")
        uri = f"gs://{match[1]}/{unquote(match[2])}"
        file = self.bucket / uri.removeprefix("gs://") if self.bucket else None
        if file and file.is_file():
            return Answer(200, file.read_bytes())
        if uri not in self.objects:
            return Answer(404, f"No such object: {uri}".encode())
        return Answer(200, self.objects[uri])

    # what a test has happen

    def task(
        self,
        job: str,
        name: str,
        state: str,
        around: api.PipelineTaskDetail | None = None,
        **more: Any,
    ) -> api.PipelineTaskDetail:
        """What the job says from now on of a task, within `around` or the run's own."""
        details = self.jobs[job].job_detail.task_details
        if not details:
            root = job.rpartition("/")[2]
            details.append(api.PipelineTaskDetail(task_id=1, task_name=root, state="RUNNING"))
        above = (around or details[0]).task_id
        same = (d for d in details if (d.task_name, d.parent_task_id) == (name, above))
        if (found := next(same, None)) is None:
            details.append(
                api.PipelineTaskDetail(
                    task_id=len(details) + 1,
                    parent_task_id=above,
                    task_name=name,
                    create_time=datetime.datetime.now(datetime.UTC),
                )
            )
            found = details[-1]
        found.state = api.PipelineTaskDetail.State[state]
        for field, value in more.items():
            setattr(found, field, value)
        return found

    def end(self, job: str, state: str, error: str = "") -> None:
        """Have the job end."""
        found = self.jobs[job]
        found.state = api.PipelineState[f"PIPELINE_STATE_{state}"]
        found.end_time = datetime.datetime.now(datetime.UTC)
        if error:
            found.error = {"code": 9, "message": error}

    def printed(
        self, job: str, text: str, machine: str = "workerpool0-0", ago: float = 0.0, id: str = ""
    ) -> None:
        """Have a machine of a CustomJob print a line, `ago` seconds before now."""
        when = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=ago)
        labels = {"job_id": job, "task_name": machine, "project_id": PROJECT}
        self.entries.append(
            {
                "insertId": id or f"entry-{len(self.entries)}",
                "textPayload": f"{text}\n",
                "timestamp": when.strftime("%Y-%m-%dT%H:%M:%S.%f789Z"),
                "severity": "INFO",
                "resource": {"type": "ml_job", "labels": labels},
                "logName": f"projects/{PROJECT}/logs/{machine}",
            }
        )

    def job(self, name: str) -> api.PipelineJob:
        if name not in self.jobs:
            raise Refused(404, f"there is no {name}")
        return self.jobs[name]

    def schedule(self, name: str) -> api.Schedule:
        if name not in self.schedules:
            raise Refused(404, f"there is no {name}")
        return self.schedules[name]


def check_token(asked: Asked) -> None:
    """One that was handed out here, or one that the account signed itself."""
    kind, _, token = asked.headers.get("authorization", "").partition(" ")
    if kind == "Bearer" and token in (TOKEN, STEPS_TOKEN):
        return
    if asked.host in _OTHERS:
        raise Refused(401, f"no token for {asked.host}")
    try:
        told = jwt.decode(token, options={"verify_signature": False})
    except jwt.InvalidTokenError as error:
        raise Refused(401, "no token, or another one") from error
    if told["iss"] != ACCOUNT or "aiplatform" not in told.get("aud", ""):
        raise Refused(401, f"a token of {told['iss']} for {told.get('aud')}")


def _check_schedule(schedule: api.Schedule) -> None:
    zone, _, cron = schedule.cron.partition(" ")
    if not zone.startswith("TZ=") or len(cron.split()) != 5:
        raise Refused(400, f"{schedule.cron!r} is no cron line with a time zone")
    request = schedule.create_pipeline_job_request
    if request.parent != PARENT or not request.pipeline_job.pipeline_spec:
        raise Refused(400, "a schedule needs the job that it creates")
    if schedule.max_concurrent_run_count < 1 or not schedule.display_name:
        raise Refused(400, "max_concurrent_run_count and display_name are required")


def parsed(kind: Any, body: bytes) -> Any:
    try:
        return kind(json_format.Parse(body, kind.pb(kind())))
    except json_format.ParseError as error:
        raise Refused(400, str(error)) from error


def shown_of(message: Any) -> Any:
    return json.loads(type(message).to_json(message, use_integers_for_enums=False))


def _status(code: int, message: str) -> Answer:
    return Answer(
        code, {"error": {"code": code, "message": message, "status": _CODES.get(code, "UNKNOWN")}}
    )
