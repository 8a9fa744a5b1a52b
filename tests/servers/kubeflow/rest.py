"""The API of Kubeflow Pipelines (v2beta1) over HTTP, as far as KFP's client asks it: experiments,
runs and recurring runs.

Unknown paths, fields and filters are refused and stand in `refused`; a pipeline has to parse into
KFP's proto; cron has six fields. `faults` are answered in place of, or after, the next call that
they fit.

    python -m tests.servers.kubeflow.rest FOLDER    serves until its input ends, and says where and to whom

Authority: kfp_server_api 2.17's models."""

from __future__ import annotations

import contextlib
import copy
import datetime
import json
import re
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import kfp_server_api
from google.protobuf import json_format
from kfp.kubernetes import kubernetes_executor_config_pb2
from kfp.pipeline_spec import pipeline_spec_pb2

from tests.servers.kubeflow.argo import Workflow
from tests.servers.kubeflow.kubernetes import FakeCluster
from tests.servers.troubles import Broken, Troubled

ROOT = "/apis/v2beta1/"
TOKEN = "of-who-submits"
_OLDER_RUN = re.compile(r"/apis/v1beta1/runs/([^/]+)")
_LOG = re.compile(r"/apis/v1alpha1/runs/([^/]+)/nodes/([^/]+)/log")


class Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        self.status, self.message = status, message


class Server(Troubled):
    """The API server, for whoever has the token."""

    def __init__(
        self,
        folder: Path | None = None,
        cluster: FakeCluster | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """With a `folder` runs really run, their launchers on `cluster`."""
        self.folder, self.cluster, self.environment = folder, cluster, environment or {}
        self.workflows: dict[str, Workflow] = {}
        self.version = "2.17.0"
        self.multi_user = False
        self.namespaces = {"team-a"}  # of several users: where the one with the token is at home
        self.token = TOKEN
        self.answers_nothing = ""  # a call that takes no effect, and that {} is answered to
        self.login_page = False  # whether a proxy before it sends a page to everyone
        self.url = ""
        self.experiments: dict[str, dict[str, Any]] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.recurring: dict[str, dict[str, Any]] = {}
        self.hold = ""  # a call that gets no answer, and takes no effect, until it is let go
        self.held, self.let_go = threading.Event(), threading.Event()
        self.in_seconds = False  # whether its clock has whole seconds only, as KFP's has
        super().__init__()

    def answer(
        self, method: str, url: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, Any]:
        """HTTP's status and the answer; ConnectionError where there shall be none."""
        path, query = urlsplit(url).path, dict(parse_qsl(urlsplit(url).query))
        if log := _LOG.fullmatch(path):
            path = f"{ROOT}log/{log[1]}:{log[2]}"
        if older := _OLDER_RUN.fullmatch(path):
            path = f"{ROOT}older/{older[1]}"
        if not path.startswith(ROOT):
            return 404, {"error": "Not Found"}
        words = re.split(r"[/:]", path.removeprefix(ROOT))
        verb = f":{words[2]}" if len(words) > 2 else ""
        name = f"{method} log" if log else f"{method} {words[0]}{verb}"
        if name == self.hold:
            self.held.set()
            self.let_go.wait(30)
            raise ConnectionError
        try:
            if headers.get("authorization") != f"Bearer {self.token}":
                raise Refused(401, "no token, or another one")
            asked = json.loads(body or b"null")
            if name == self.answers_nothing:
                return 200, {}
            return 200, self.met(name, lambda: self.done(name, words, query, asked))
        except Refused as error:
            self.refused.append(f"{name}: {error.message}")
            return error.status, {"error": error.message, "message": error.message}
        except Broken as broken:
            if broken.dropped():
                raise ConnectionError from None
            return broken.fault.status, {"error": "as the test wants it"}

    def done(self, name: str, words: list[str], query: dict[str, str], body: Any) -> Any:
        id = words[1] if len(words) > 1 else ""
        calls: dict[str, Callable[[], Any]] = {
            "GET healthz": lambda: {
                "commit_sha": "unknown",
                "tag_name": self.version,
                "multi_user": self.multi_user,
                "pipeline_store": "database",
            },
            "GET experiments": lambda: self.look(self.experiments, "experiments", id, query),
            "POST experiments": lambda: self.create_experiment(body),
            "GET runs": lambda: self.look(self.runs, "runs", id, query),
            "POST runs": lambda: self.create_run(body),
            "GET log": lambda: self.log(id, words[2]),
            "GET older": lambda: self.older(id),
            "POST runs:terminate": lambda: self.terminate(id),
            "POST runs:retry": lambda: self.retry(id),
            "GET recurringruns": lambda: self.look(self.recurring, "recurringRuns", id, query),
            "POST recurringruns": lambda: self.create_recurring(body),
            "POST recurringruns:enable": lambda: self.switch(id, "ENABLED"),
            "POST recurringruns:disable": lambda: self.switch(id, "DISABLED"),
            "DELETE recurringruns": lambda: _known(self.recurring, id) and self.delete(id, query),
        }
        if name not in calls:
            raise Refused(404, f"nobody answers {name} {id}")
        return calls[name]()

    def look(
        self, where: dict[str, dict[str, Any]], called: str, id: str, query: dict[str, str]
    ) -> Any:
        if id:
            return self.shown(_known(where, id))
        if self.multi_user:
            where = self.of_namespace(where, query)
        found, more = _listed(where, query)
        return {called: found, **more}

    def of_namespace(
        self, where: dict[str, dict[str, Any]], query: dict[str, str]
    ) -> dict[str, dict[str, Any]]:
        """For several users: what is in the namespace that is asked for, or in an experiment
        (run_server.go, listRuns; job_server.go, listJobs; experiment_server.go)."""
        namespace = query.get("namespace", "")
        if experiment := query.get("experiment_id"):
            namespace = _known(self.experiments, experiment)["namespace"]
        self.authorize(namespace)
        return {id: one for id, one in where.items() if self.namespace_of(one) == namespace}

    def namespace_of(self, one: dict[str, Any]) -> str:
        if "experiment_id" in one and "namespace" not in one:
            one = self.experiments[one["experiment_id"]]
        return str(one.get("namespace", ""))

    def authorize(self, namespace: str) -> None:
        if not namespace:
            raise Refused(400, "An experiment cannot have an empty namespace in multi-user mode")
        if namespace not in self.namespaces:
            raise Refused(403, f"Check if you have access to namespace {namespace}")

    def create_experiment(self, body: Any) -> Any:
        if self.multi_user:
            self.authorize(body.get("namespace", ""))
        else:
            body.pop("namespace", None)  # resource_manager.go, ReplaceNamespace
        alike = _listed(self.experiments, {}, body["display_name"])[0]
        if any(one.get("namespace") == body.get("namespace") for one in alike):
            raise Refused(409, "there is one of that name")
        return self.keep(self.experiments, "experiment_id", "V2beta1Experiment", body, {})

    def create_run(self, body: Any) -> Any:
        self.check(body)
        made = self.keep(self.runs, "run_id", "V2beta1Run", body, {"state": "RUNNING"})
        if self.folder:
            id, spec = made["run_id"], copy.deepcopy(body["pipeline_spec"])
            self.workflows[id] = Workflow(
                self.folder / id,
                id,
                spec.get("pipeline_spec", spec),
                body["runtime_config"].get("pipeline_root", ""),
                self.cluster,
                self.environment,
            )
        return made

    def shown(self, run: dict[str, Any]) -> Any:
        """A run as it is now."""
        if workflow := self.workflows.get(run.get("run_id", "")):
            run |= {"state": workflow.state, "run_details": {"task_details": workflow.details()}}
            run |= {"state_history": [{"state": state} for state in workflow.history]}
            run |= {"finished_at": workflow.ended or "1970-01-01T00:00:00Z"}
        return run

    def older(self, id: str) -> Any:
        """A run as /apis/v1beta1 has it: with the Workflow as text."""
        _known(self.runs, id)
        runtime = {}
        if workflow := self.workflows.get(id):
            runtime = {"workflow_manifest": json.dumps(workflow.manifest())}
        return {"run": {"id": id}, "pipeline_runtime": runtime}

    def terminate(self, id: str) -> Any:
        run = self.shown(_known(self.runs, id))
        if run["state"] not in ("PENDING", "RUNNING"):  # run_store.go, TerminateRun
            raise Refused(400, f"Failed to terminate run {id}. Row not found")
        if workflow := self.workflows.get(id):
            workflow.terminate()
        else:
            run["state"] = "FAILED"
            run["state_history"] = [{"state": "CANCELING"}, {"state": "FAILED"}]
        return {}

    def retry(self, id: str) -> Any:
        state = self.shown(_known(self.runs, id))["state"]
        if state != "FAILED":
            raise Refused(500, "Workflow must be Failed/Error to retry")
        self.workflows[id].go()
        return {}

    def log(self, run: str, pod: str) -> str:
        """What /apis/v1alpha1 has of a pod."""
        text = self.workflows[run].log(pod) if run in self.workflows else None
        if text is None:  # with 200, which was sent before it looked
            why = f'Failed to read logs for run {run}: pods "{pod}" not found'
            return json.dumps({"error_message": f"BadRequestError: {why}", "error_details": why})
        return text

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

    def delete(self, id: str, query: dict[str, str]) -> Any:
        """Runs that it started are its children, and go with it unless they are let go."""
        if query.keys() - {"propagation_policy"}:
            raise Refused(400, f"unknown {query}")
        del self.recurring[id]
        if query.get("propagation_policy") != "ORPHAN":
            started = [r for r, run in self.runs.items() if run.get("recurring_run_id") == id]
            for run in started:
                del self.runs[run]
        return {}

    def start(self, id: str) -> str:
        """What the controller does when a recurring run falls due; the run's id."""
        body = {"display_name": "due", "recurring_run_id": id, "experiment_id": "any"}
        return str(
            self.keep(self.runs, "run_id", "V2beta1Run", body, {"state": "RUNNING"})["run_id"]
        )

    def check(self, body: dict[str, Any]) -> None:
        if body["experiment_id"] not in self.experiments:
            raise Refused(400, "there is no such experiment")
        spec = body["pipeline_spec"].get("pipeline_spec", body["pipeline_spec"])
        try:
            json_format.ParseDict(spec, pipeline_spec_pb2.PipelineSpec())
        except json_format.ParseError as error:
            raise Refused(400, str(error)) from error
        self.check_settings(body["pipeline_spec"])

    def check_settings(self, document: dict[str, Any]) -> None:
        """A second document with an unknown field is left out as a whole, and nothing is said
        (template/v2_template.go, IsPlatformSpecWithKubernetesConfig); one in a step's settings
        is a server error (argocompiler/container.go)."""
        settings = document.get("platform_spec", {}).get("platforms", {}).get("kubernetes", {})
        known = pipeline_spec_pb2.SinglePlatformSpec()
        try:
            json_format.ParseDict(settings, known)
        except json_format.ParseError:
            del document["platform_spec"]
            return
        for executor in known.deployment_spec.executors.values():
            try:
                json_format.ParseDict(
                    json_format.MessageToDict(executor),
                    kubernetes_executor_config_pb2.KubernetesExecutorConfig(),
                )
            except json_format.ParseError as error:
                raise Refused(500, f"failed to unmarshal kubernetes config: {error}") from error

    def keep(
        self, where: dict[str, dict[str, Any]], id: str, kind: str, body: Any, more: dict[str, str]
    ) -> Any:
        known = getattr(kfp_server_api, kind).openapi_types
        if unknown := body.keys() - known.keys():
            raise Refused(400, f"unknown fields {sorted(unknown)}")
        if not body.get("display_name"):
            raise Refused(400, "display_name is required")
        name, now = str(uuid.uuid4()), datetime.datetime.now(datetime.UTC)
        if self.in_seconds:  # and of one second the later one is sorted before
            name, now = (
                f"{999 - len(self.calls)}-{999 - self.calls.total()}",
                now.replace(microsecond=0),
            )
        where[name] = {**body, id: name, "created_at": now.isoformat(), **more}
        return where[name]


@contextlib.contextmanager
def serving(server: Server) -> Iterator[str]:
    """The URL of what answers."""

    class Handler(BaseHTTPRequestHandler):
        disable_nagle_algorithm = True
        protocol_version = "HTTP/1.1"

        def any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            try:
                status, found = server.answer(self.command, self.path, headers, body)
            except ConnectionError:
                self.close_connection = True
                return
            if server.login_page:
                status, found = 200, "<!doctype html><html><body>Log in</body></html>"
            kind = "text/plain" if isinstance(found, str) else "application/json"
            if server.login_page:
                kind = "text/html; charset=utf-8"
            content = found.encode() if isinstance(found, str) else json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
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
    # ties are broken by the id, which is by chance (list.go, AddSortingToSelect)
    oldest_first = sorted(where.items(), key=lambda item: (item[1]["created_at"], item[0]))
    found = [one for _, one in oldest_first if not name or one["display_name"] == name]
    begin, size = int(query.get("page_token") or 0), min(2, int(query.get("page_size", 10)))
    more = {"next_page_token": str(begin + size)} if begin + size < len(found) else {}
    return found[begin : begin + size], more


def _known(where: dict[str, dict[str, Any]], id: str) -> dict[str, Any]:
    if id not in where:
        raise Refused(404, f"there is no {id}")
    return where[id]


def main(folder: str) -> None:
    """Run what is submitted, in a folder; print the URL and the token."""
    with serving(Server(Path(folder))) as url:
        sys.stdout.write(f"{url} {TOKEN}\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
