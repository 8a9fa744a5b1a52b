"""The API of Kubeflow Pipelines (v2beta1) over HTTP, as far as KFP's client asks it: experiments,
runs and recurring runs.

Unknown paths, fields and filters are refused and stand in `refused`; a pipeline has to parse into
KFP's proto; cron has six fields. `faults` are answered in place of, or after, the next call that
they fit.

Authority: kfp_server_api 2.17's models; ../shared/facts/kfp.md §5."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import json
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import kfp_server_api
from google.protobuf import json_format
from kfp.pipeline_spec import pipeline_spec_pb2

ROOT = "/apis/v2beta1/"
TOKEN = "of-who-submits"


@dataclasses.dataclass
class Fault:
    """`call` is the beginning of what `Server.calls` counts; `status` 0 breaks the connection;
    `after` lets the call take effect first."""

    call: str
    status: int
    after: bool = False


class Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        self.status, self.message = status, message


class Server:
    """The API server, for whoever has the token."""

    def __init__(self) -> None:
        self.experiments: dict[str, dict[str, Any]] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.recurring: dict[str, dict[str, Any]] = {}
        self.faults: list[Fault] = []
        self.refused: list[str] = []
        self.calls: collections.Counter[str] = collections.Counter()
        self.lock = threading.Lock()

    def answer(
        self, method: str, url: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, Any]:
        """HTTP's status and the answer; ConnectionError where there shall be none."""
        path, query = urlsplit(url).path, dict(parse_qsl(urlsplit(url).query))
        if not path.startswith(ROOT):
            return 404, {"error": "Not Found"}
        words = re.split(r"[/:]", path.removeprefix(ROOT))
        verb = f":{words[2]}" if len(words) > 2 else ""
        name = f"{method} {words[0]}{verb}"
        with self.lock:
            self.calls[name] += 1
            fault = next((f for f in self.faults if name.startswith(f.call)), None)
            if fault:
                self.faults.remove(fault)
            try:
                if headers.get("authorization") != f"Bearer {TOKEN}":
                    raise Refused(401, "no token, or another one")
                if not fault or fault.after:
                    found = self.done(name, words, query, json.loads(body or b"null"))
            except Refused as error:
                self.refused.append(f"{name}: {error.message}")
                return error.status, {"error": error.message, "message": error.message}
            if not fault:
                return 200, found
            if fault.status == 0:
                raise ConnectionError
            return fault.status, {"error": "as the test wants it"}

    def done(self, name: str, words: list[str], query: dict[str, str], body: Any) -> Any:
        id = words[1] if len(words) > 1 else ""
        calls: dict[str, Callable[[], Any]] = {
            "GET healthz": lambda: {"multi_user": False},
            "GET experiments": lambda: {"experiments": _listed(self.experiments, query)[0]},
            "POST experiments": lambda: self.create_experiment(body),
            "GET runs": lambda: self.look(self.runs, "runs", id, query),
            "POST runs": lambda: self.create_run(body),
            "POST runs:terminate": lambda: _known(self.runs, id).update(state="CANCELED") or {},
            "GET recurringruns": lambda: self.look(self.recurring, "recurringRuns", id, query),
            "POST recurringruns": lambda: self.create_recurring(body),
            "POST recurringruns:enable": lambda: self.switch(id, "ENABLED"),
            "POST recurringruns:disable": lambda: self.switch(id, "DISABLED"),
            "DELETE recurringruns": lambda: _known(self.recurring, id) and self.delete(id),
        }
        if name not in calls:
            raise Refused(404, f"nobody answers {name} {id}")
        return calls[name]()

    def look(
        self, where: dict[str, dict[str, Any]], called: str, id: str, query: dict[str, str]
    ) -> Any:
        if id:
            return _known(where, id)
        found, more = _listed(where, query)
        return {called: found, **more}

    def create_experiment(self, body: Any) -> Any:
        if _listed(self.experiments, {}, body["display_name"])[0]:
            raise Refused(409, "there is one of that name")
        return self.keep(self.experiments, "experiment_id", "V2beta1Experiment", body, {})

    def create_run(self, body: Any) -> Any:
        self.check(body)
        return self.keep(self.runs, "run_id", "V2beta1Run", body, {"state": "RUNNING"})

    def create_recurring(self, body: Any) -> Any:
        self.check(body)
        cron = body["trigger"]["cron_schedule"]["cron"]
        if len(cron.split()) != 6:
            raise Refused(400, f"{cron!r} begins with seconds, or so it is read")
        more = {"status": f"{body['mode']}D"}
        return self.keep(self.recurring, "recurring_run_id", "V2beta1RecurringRun", body, more)

    def switch(self, id: str, status: str) -> Any:
        _known(self.recurring, id)["status"] = status
        return {}

    def delete(self, id: str) -> Any:
        del self.recurring[id]
        return {}

    def check(self, body: dict[str, Any]) -> None:
        if body["experiment_id"] not in self.experiments:
            raise Refused(400, "there is no such experiment")
        spec = body["pipeline_spec"].get("pipeline_spec", body["pipeline_spec"])
        try:
            json_format.ParseDict(spec, pipeline_spec_pb2.PipelineSpec())
        except json_format.ParseError as error:
            raise Refused(400, str(error)) from error

    def keep(
        self, where: dict[str, dict[str, Any]], id: str, kind: str, body: Any, more: dict[str, str]
    ) -> Any:
        known = getattr(kfp_server_api, kind).openapi_types
        if unknown := body.keys() - known.keys():
            raise Refused(400, f"unknown fields {sorted(unknown)}")
        if not body.get("display_name"):
            raise Refused(400, "display_name is required")
        name, now = str(uuid.uuid4()), datetime.datetime.now(datetime.UTC).isoformat()
        where[name] = {**body, id: name, "created_at": now, **more}
        return where[name]


@contextlib.contextmanager
def serving(server: Server) -> Iterator[str]:
    """The URL of what answers."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            try:
                status, found = server.answer(self.command, self.path, headers, body)
            except ConnectionError:
                self.close_connection = True
                return
            content = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_DELETE = any

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()


def _listed(
    where: dict[str, dict[str, Any]], query: dict[str, str], name: str = ""
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """A page of those that the filter lets through, the oldest first, and where the next begins."""
    if text := query.get("filter"):
        ((predicate,),) = json.loads(text).values()
        if (predicate["operation"], predicate["key"]) not in (
            ("EQUALS", "display_name"),
            (1, "display_name"),
        ):
            raise Refused(400, f"no filter {predicate}")
        name = predicate["stringValue"]
    if query.get("sort_by", "created_at") != "created_at":
        raise Refused(400, f"sorted by {query['sort_by']}")
    found = [one for one in where.values() if not name or one["display_name"] == name]
    begin, size = int(query.get("page_token") or 0), min(2, int(query.get("page_size", 10)))
    more = {"next_page_token": str(begin + size)} if begin + size < len(found) else {}
    return found[begin : begin + size], more


def _known(where: dict[str, dict[str, Any]], id: str) -> dict[str, Any]:
    if id not in where:
        raise Refused(404, f"there is no {id}")
    return where[id]
