"""Kubeflow Pipelines behind an API server: runs are submitted, looked at and terminated, through
KFP's own client.

The service gives ids. A run is called by its definition and the submission's token, and looked for
by that name before it is created and after a call that failed; of two that were created at once the
older one stays. Authority: kfp 2.17's client. Untested against a real cluster."""

import contextlib
import dataclasses
import io
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml

from rekindle.errors import PlatformError, SpecError, UnreachableError, first_line
from rekindle.ir.edit.rewrite import asked_of, executors, launched
from rekindle.ir.read.pipeline import read
from rekindle.ir.read.raw import LOADER
from rekindle.outputs import PlannedStep
from rekindle.platforms import submission
from rekindle.platforms.cache_diff import CacheKey, of_graph
from rekindle.platforms.kubeflow.compile import LAUNCHER
from rekindle.platforms.submission import BUG, Definition, RunTag, SubmittedRun, digest_of
from rekindle.spec.platforms import KubeflowSpec

FIRST_PAUSE_SECONDS, ANSWER_SECONDS = 1.0, 60.0
_ATTEMPTS = 4
_problem = submission.problems_in(__file__)


@dataclasses.dataclass(frozen=True)
class Server:
    """KFP's client, and where what it says of runs is shown."""

    kfp: Any
    namespace: str | None

    @property
    def runs(self) -> Any:
        """What KFP's client itself asks of runs with; it has more to say than the client does."""
        return self.kfp._run_api

    def listed(self, pages: Callable[..., Any], kind: str, **query: Any) -> list[Any]:
        """Everything of a kind on pages of KFP's client, the oldest first."""
        found, page_token = list[Any](), ""
        while True:
            page = pages(page_token=page_token, page_size=100, sort_by="created_at", **query)
            found += getattr(page, kind) or ()
            if not (page_token := page.next_page_token):
                return found

    def call(self, function: Callable[..., Any], *words: Any, **more: Any) -> Any:
        """A call that may be made twice, repeated some times where it may yet succeed."""
        return self.created(lambda: function(*words, **more), lambda: None)

    def created(self, create: Callable[[], Any], find: Callable[[], Any]) -> Any:
        """What `create` made, once: where a call failed, `find` says whether it took effect."""
        for attempt in range(_ATTEMPTS):
            try:
                return create()
            except Exception as error:
                if not _may_succeed(error):
                    raise
                if found := self.call(find):
                    return found
                if attempt == _ATTEMPTS - 1:
                    raise
                time.sleep(FIRST_PAUSE_SECONDS * 2**attempt)
        raise AssertionError("the last attempt returns or raises")


def submit(definition: Definition, place: KubeflowSpec, mark: RunTag) -> SubmittedRun:
    name = run_name(definition, mark.token)
    with connected(place) as server:
        experiment = experiment_of(server, definition)

        def named() -> list[Any]:
            query = {"experiment_id": experiment, "filter": equals("display_name", name)}
            return server.listed(server.kfp.list_runs, "runs", **query)

        if found := server.call(named):
            return SubmittedRun(found[0].run_id, page(place, found[0].run_id), anew=False)
        body = _run(definition, experiment, name, mark, place)
        made = server.created(
            lambda: server.runs.run_service_create_run(run=body), lambda: next(iter(named()), None)
        )
        first = server.call(named)[0]  # another process may have submitted it too
        if first.run_id != made.run_id:
            server.call(server.kfp.terminate_run, made.run_id)
        return SubmittedRun(first.run_id, page(place, first.run_id), first.run_id == made.run_id)


def run_name(definition: Definition, token: str) -> str:
    return f"{definition.entry.removesuffix('.yaml')}-{digest_of(definition.files, token)}"


def where(place: KubeflowSpec) -> str:
    return f"{place.host}, namespace {place.namespace}"


def page(place: KubeflowSpec, id: str) -> str:
    return f"{place.host.rstrip('/')}/#/runs/details/{id}"


@contextlib.contextmanager
def connected(place: KubeflowSpec) -> Iterator[Server]:
    """KFP's client; what it raises becomes a PlatformError, what it prints is dropped."""
    place.refuse_if_incomplete()
    import warnings

    import kfp
    from kfp_server_api import OpenApiException, V2beta1GetHealthzResponse
    from urllib3.exceptions import HTTPError

    class Client(kfp.Client):  # type: ignore[misc, unused-ignore]
        """Without a question that only a pod needs answered, and that takes 25 s to fail."""

        def get_kfp_healthz(self, sleep_duration: int = 0) -> Any:
            return V2beta1GetHealthzResponse(multi_user=False)

    token = token_of(place)
    namespace = place.namespace if place.namespace != "kubeflow" else None
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore", FutureWarning)  # that it needs KFP 2
        try:
            found = Client(place.host, existing_token=token, namespace=place.namespace)
            _with_an_end(found._run_api.api_client.rest_client.pool_manager)
            yield Server(found, namespace)
        except (OpenApiException, HTTPError) as error:
            raise _explained(error, place) from error


def _with_an_end(pool: Any) -> None:
    """Have no call wait for ever: KFP's client says so of each, and all its parts share this."""
    request = pool.request

    def ends(*words: Any, timeout: Any = None, **more: Any) -> Any:
        return request(*words, timeout=timeout or ANSWER_SECONDS, **more)

    pool.request = ends


def token_of(place: KubeflowSpec) -> str | None:
    if not place.token:
        return None
    name = place.token.removeprefix("env:")
    if not os.environ.get(name):
        raise SpecError([_problem("no_token", name=name)])
    return os.environ[name]


def _run(
    definition: Definition, experiment: str, name: str, mark: RunTag, place: KubeflowSpec
) -> Any:
    """The body of a run; the client's own has no place for a description."""
    import kfp_server_api

    documents = list(yaml.load_all(definition.text, LOADER))
    spec = documents[0]
    if len(documents) > 1:
        spec = {"pipeline_spec": documents[0], "platform_spec": documents[1]}
    root = place.pipeline_root or None
    return kfp_server_api.V2beta1Run(
        experiment_id=experiment,
        display_name=name,
        description=str(mark),
        pipeline_spec=spec,
        runtime_config=kfp_server_api.V2beta1RuntimeConfig(parameters={}, pipeline_root=root),
        service_account=place.service_account,
    )


def experiment_of(server: Server, definition: Definition) -> str:
    """The experiment of the pipeline's runs, looked for and else made."""
    from kfp_server_api import ApiException

    pipeline = definition.entry.removesuffix(".yaml")
    try:
        found = server.call(server.kfp.create_experiment, pipeline)
    except ApiException as error:
        if error.status != 409:
            raise
        found = server.call(server.kfp.create_experiment, pipeline)  # another process made it
    return str(found.experiment_id)


def equals(key: str, value: str) -> str:
    return json.dumps({"predicates": [{"operation": "EQUALS", "key": key, "stringValue": value}]})


def _may_succeed(error: Exception) -> bool:
    from kfp_server_api import ApiException
    from urllib3.exceptions import HTTPError

    if isinstance(error, ApiException):
        return error.status in (0, 408, 429) or (error.status or 0) >= 500
    return isinstance(error, HTTPError)


def _explained(error: Exception, place: KubeflowSpec) -> PlatformError:
    kind, code = PlatformError, int(getattr(error, "status", 0) or 0)
    name = str(code) if code in (401, 403, 404) else "rejected"
    if not code or (name == "rejected" and _may_succeed(error)):
        kind, name = UnreachableError, "unreachable"
    about = {"namespace": place.namespace, "bug": BUG}
    return kind([_problem(name, what=_said(error), where=where(place), **about)])


def _said(error: Exception) -> str:
    """The server's own sentence."""
    body = getattr(error, "body", None)
    with contextlib.suppress(ValueError, TypeError, KeyError):
        found = json.loads(body or "")
        return str(found.get("message") or found["error"]).splitlines()[0]
    return first_line(error, getattr(error, "reason", ""))


def steps(definition: Definition) -> tuple[PlannedStep, ...]:
    """The steps by name, those of nested pipelines too: what their pods ask for."""
    spec, found = spec_of(definition), []
    jobs = trainers(spec)
    for path, container in executors(spec):
        if path not in jobs:
            found.append(PlannedStep(path, f"pod {asked_of(container)}".rstrip()))
            continue
        limits = jobs[path]["resourcesPerNode"].get("limits", {})
        asked = ", ".join(f"{amount} {name}" for name, amount in sorted(limits.items()))
        found.append(PlannedStep(path, f"node {asked}".rstrip(), jobs[path]["numNodes"]))
    return tuple(found)


def images(definition: Definition) -> frozenset[str]:
    """Images of the steps, and of the nodes of distributed ones."""
    spec = spec_of(definition)
    nodes = {trainer.get("image", "") for trainer in trainers(spec).values()}
    return frozenset(nodes | {one.get("image", "") for _, one in executors(spec)}) - {""}


def trainers(spec: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The `trainer` of the TrainJob of each distributed step."""
    told = launched(spec, LAUNCHER).items()
    return {path: one["job"]["spec"]["trainer"] for path, one in told}


def spec_of(definition: Definition) -> dict[str, Any]:
    """The pipeline, without the settings behind it."""
    return dict(next(iter(yaml.load_all(definition.text, LOADER))))


def cache_keys(files: Mapping[str, bytes]) -> tuple[CacheKey, ...]:
    graph = read(Definition(files).text.decode())
    return of_graph(graph, {n: p.default for n, p in graph.inputs.parameters.items()})
