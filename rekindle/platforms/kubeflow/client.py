"""Kubeflow Pipelines behind an API server: runs are submitted, looked at and terminated,
through KFP's own client.

The service gives ids. A run is called by its definition and the submission's token, and
looked for by that name before it is created and after a call that failed; of two that
were created at once the older one stays. Authority: kfp 2.17's client, and what its server
answered (tests/platforms/kubeflow/recorded)."""

import contextlib
import dataclasses
import io
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import yaml

from rekindle.errors import PlatformError, SpecError, UnreachableError, first_line
from rekindle.ir.edit.rewrite import asked_of, executors, launched
from rekindle.ir.read.pipeline import read
from rekindle.ir.read.raw import LOADER
from rekindle.masking import mask_value
from rekindle.outputs import PlannedStep
from rekindle.platforms.cache_diff import CacheKey, of_graph
from rekindle.platforms.kubeflow.compile import LAUNCHER
from rekindle.platforms.kubeflow.section import KubeflowSpec
from rekindle.platforms.submission import (
    BUG,
    Definition,
    RunTag,
    SubmittedRun,
    submission_name,
)
from rekindle.protojson import Json

P = ParamSpec("P")
T = TypeVar("T")
FIRST_PAUSE_SECONDS = 1.0
ANSWER_SECONDS = 60.0
_ATTEMPTS = 4
_ATTEMPTS_OF_A_REFUSAL = 2  # a database that failed once answers the second time


@dataclasses.dataclass(frozen=True)
class KfpServer:
    """KFP's client, and where what it says of runs is shown."""

    kfp: Any
    namespace: str | None

    @property
    def runs(self) -> Any:
        """What KFP's client itself asks of runs with; it has more to say than the client
        does."""
        return self.kfp._run_api

    def listed(self, pages: Callable[..., Any], kind: str, **query: Any) -> list[Any]:
        """Everything of a kind on pages of KFP's client, the oldest first."""
        items: list[Any] = []
        page_token = ""
        while True:
            page = pages(page_token=page_token, page_size=100, sort_by="created_at", **query)
            items += getattr(page, kind) or ()
            page_token = page.next_page_token
            if not page_token:
                return items

    def get(
        self,
        path: str,
        values: Mapping[str, str] | None = None,
        query: Sequence[tuple[str, str]] = (),
        *,
        patience_seconds: float = ANSWER_SECONDS,
        most_bytes: int | None = None,
    ) -> bytes:
        """The body of an answer of a path that the generated client does not know; of a
        longer one the first `most_bytes`."""
        answer = self.runs.api_client.call_api(
            path,
            "GET",
            dict(values or {}),
            list(query),
            auth_settings=["Bearer"],
            _preload_content=False,
            _return_http_data_only=True,
            _request_timeout=patience_seconds,
        )
        if most_bytes is None:
            return bytes(answer.data)
        body = bytes(answer.read(most_bytes))
        answer.close()
        return body

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of a call that may be made twice, repeated some times where it may
        yet succeed."""
        return self.created(lambda: function(*args, **kwargs), lambda: None)

    def created(self, create: Callable[[], T], find: Callable[[], T | None]) -> T:
        """What `create` made, once: where a call failed, `find` says whether it took
        effect."""
        for attempt in range(_ATTEMPTS):
            try:
                return create()
            except Exception as error:
                if not _may_succeed(error):
                    raise
                existing = self.call(find)
                if existing:
                    return existing
                most_attempts = _ATTEMPTS_OF_A_REFUSAL if _is_refusal(error) else _ATTEMPTS
                if attempt >= most_attempts - 1:
                    raise
                time.sleep(FIRST_PAUSE_SECONDS * 2**attempt)
        raise AssertionError("the last attempt returns or raises")


def submit(definition: Definition, place: KubeflowSpec, mark: RunTag) -> SubmittedRun:
    name = run_name(definition, mark.token)
    with connected(place) as server:
        experiment = experiment_of(server, definition, place)

        def runs_of_name() -> list[Any]:
            query = {"experiment_id": experiment, "filter": equals("display_name", name)}
            return server.listed(server.kfp.list_runs, "runs", **query)

        earlier_runs = server.call(runs_of_name)
        if earlier_runs:
            id = earlier_runs[0].run_id
            return SubmittedRun(id, page(place, id), anew=False)
        body = _run(definition, experiment, name, mark, place)
        created_run = server.created(
            lambda: server.runs.run_service_create_run(run=body),
            lambda: next(iter(runs_of_name()), None),
        )
        # Another process may have submitted it, too. `created_at` has whole seconds, and of
        # one second the order is by chance: only when it is over both see the same order.
        time.sleep(FIRST_PAUSE_SECONDS)
        oldest_run = next(iter(server.call(runs_of_name)), None)
        if oldest_run is None:
            raise no_answer("run, or the run is gone already", place)
        is_ours = oldest_run.run_id == created_run.run_id
        if not is_ours:
            server.call(server.kfp.terminate_run, created_run.run_id)
        return SubmittedRun(oldest_run.run_id, page(place, oldest_run.run_id), is_ours)


def run_name(definition: Definition, token: str) -> str:
    return submission_name(definition.entry.removesuffix(".yaml"), definition, token)


def where(place: KubeflowSpec) -> str:
    return f"{place.host}, namespace {place.namespace}"


def page(place: KubeflowSpec, id: str) -> str:
    return f"{place.host.rstrip('/')}/#/runs/details/{id}"


@contextlib.contextmanager
def connected(place: KubeflowSpec) -> Iterator[KfpServer]:
    """KFP's client; what it raises becomes a PlatformError, what it prints is dropped."""
    place.refuse_if_incomplete()
    import warnings

    import kfp
    from kfp_server_api import OpenApiException, V2beta1GetHealthzResponse
    from urllib3.exceptions import HTTPError

    class Client(kfp.Client):  # type: ignore[misc, unused-ignore]
        """Without a question that only a pod needs answered, and that takes 25 s to
        fail."""

        def get_kfp_healthz(self, sleep_duration: int = 0) -> Any:
            return V2beta1GetHealthzResponse(multi_user=False)

    token = token_of(place)
    # KFP for one user runs everything in its own namespace, and refuses to be given one
    namespace = place.namespace if place.namespace != "kubeflow" else None
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore", FutureWarning)  # that it needs KFP 2
        try:
            client = Client(place.host, existing_token=token, namespace=place.namespace)
            _watch_requests(client._run_api.api_client.rest_client.pool_manager)
            yield KfpServer(client, namespace)
        except (OpenApiException, HTTPError) as error:
            raise _explained(error, place) from error


def _watch_requests(pool: Any) -> None:
    """Give each request a timeout, since KFP's client sets none, and refuse pages: of one
    the client makes an answer without any field, and a call seems to have succeeded.

    All parts of the client share this pool."""
    request = pool.request

    def watched_request(method: str, url: str, *args: Any, **kwargs: Any) -> Any:
        kwargs["timeout"] = kwargs.get("timeout") or ANSWER_SECONDS
        response = request(method, url, *args, **kwargs)
        if "text/html" in str(response.headers.get("Content-Type", "")) and response.status < 400:
            raise PlatformError(
                "a page of HTML came in place of an answer: something before KFP wants a login",
                where=url.partition("?")[0],
                fix="set platforms.kubeflow.token, or a host behind the login (a port-forward)",
            )
        return response

    pool.request = watched_request


def token_of(place: KubeflowSpec) -> str | None:
    """The token that the config refers to, as it is now: those of service accounts rotate."""
    kind, _, name = (place.token or "").partition(":")
    if kind == "file":
        return _token_in(Path(name))
    if kind != "env":
        return None
    if not os.environ.get(name):
        raise SpecError(
            f"the environment has no `{name}`",
            where="platforms.kubeflow.token",
            fix=f"export {name}=...",
        )
    return os.environ[name]


def _token_in(file: Path) -> str:
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(
            f"the token cannot be read: {first_line(error)}",
            where="platforms.kubeflow.token",
            fix="name the file that Kubeflow mounts in notebooks and pods of a profile, "
            "file:/var/run/secrets/kubeflow/pipelines/token",
        ) from None
    if not token:
        raise SpecError(f"{file} is empty", where="platforms.kubeflow.token", fix="log in again")
    mask_value(token)
    return token


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


def experiment_of(server: KfpServer, definition: Definition, place: KubeflowSpec) -> str:
    """The experiment of the pipeline's runs, looked for and else made."""
    from kfp_server_api import ApiException

    pipeline = definition.entry.removesuffix(".yaml")
    try:
        # the client looks for one of that name first
        experiment = server.call(server.kfp.create_experiment, pipeline)
    except ApiException as error:
        if error.status != 409:
            raise
        # another process made it after that look
        experiment = server.call(server.kfp.create_experiment, pipeline)
    if not getattr(experiment, "experiment_id", None):
        raise no_answer("experiment", place)
    return str(experiment.experiment_id)


def equals(key: str, value: str) -> str:
    # a Filter of the API's protobuf, as JSON
    return json.dumps({"predicates": [{"operation": "EQUALS", "key": key, "stringValue": value}]})


def _may_succeed(error: Exception) -> bool:
    from kfp_server_api import ApiException
    from urllib3.exceptions import HTTPError

    if isinstance(error, ApiException):
        return error.status in (0, 408, 429) or (error.status or 0) >= 500
    return isinstance(error, HTTPError)


def _is_refusal(error: Exception) -> bool:
    """Whether an internal error of the server has a sentence of KFP's own.

    KFP answers so where it cannot make a Workflow of a pipeline, or Argo takes none of it
    (resource_manager.go); it does where its database fails, too, which may pass."""
    return getattr(error, "status", 0) == 500 and bool(_sentence_of(error))


def _explained(error: Exception, place: KubeflowSpec) -> PlatformError:
    fixes = {
        401: "name a token that is good, and retry the command (runs go on without it): "
        "platforms.kubeflow.token: env:KFP_TOKEN, or file:PATH where it rotates",
        403: f"ask for the rights to run pipelines in the namespace {place.namespace}",
        404: "see whether platforms.kubeflow.host is the API of Kubeflow Pipelines, and what "
        "is there",
    }
    status = int(getattr(error, "status", 0) or 0)
    message = _message(error)
    if status in fixes:
        return PlatformError(message, where=where(place), fix=fixes[status])
    if _is_refusal(error):
        fix = "the server refuses it for the reason above; its own log says more"
        return PlatformError(message, where=where(place), fix=fix)
    if not status or _may_succeed(error):
        fix = (
            "see whether platforms.kubeflow.host answers; retry the command: "
            "submitting is idempotent"
        )
        return UnreachableError(message, where=where(place), fix=fix)
    fix = f"the service rejected the request; {BUG}"
    return PlatformError(message, where=where(place), fix=fix)


def no_answer(what: str, place: KubeflowSpec) -> PlatformError:
    """The error for an answer without what KFP's server puts into each of its kind."""
    return PlatformError(
        f"KFP's server answered something that is no {what}",
        where=where(place),
        fix="see whether platforms.kubeflow.host is the API of Kubeflow Pipelines, and whether "
        "something stands before it",
    )


def _message(error: Exception) -> str:
    """The server's own sentence, or what the error says."""
    return _sentence_of(error) or first_line(error, getattr(error, "reason", ""))


def _sentence_of(error: Exception) -> str:
    """The server's own sentence; "" where it answered something else."""
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        answer = json.loads(getattr(error, "body", None) or "")
        return str(answer.get("message") or answer["error"]).splitlines()[0]
    return ""


def steps(definition: Definition) -> tuple[PlannedStep, ...]:
    """The steps by name, those of nested pipelines too: what their pods ask for."""
    spec = spec_of(definition)
    jobs = trainers(spec)
    steps = []
    for path, container in executors(spec):
        if path not in jobs:
            steps.append(PlannedStep(path, f"pod {asked_of(container)}".rstrip()))
            continue
        limits = jobs[path]["resourcesPerNode"].get("limits", {})
        amounts = ", ".join(f"{amount} {name}" for name, amount in sorted(limits.items()))
        steps.append(PlannedStep(path, f"node {amounts}".rstrip(), jobs[path]["numNodes"]))
    return tuple(steps)


def images(definition: Definition) -> frozenset[str]:
    """Images of the steps, and of the nodes of distributed ones."""
    spec = spec_of(definition)
    of_nodes = {trainer.get("image", "") for trainer in trainers(spec).values()}
    of_steps = {container.get("image", "") for _, container in executors(spec)}
    return frozenset(of_nodes | of_steps) - {""}


def trainers(spec: Json) -> dict[str, Json]:
    """The `trainer` of the TrainJob of each distributed step."""
    definitions = launched(spec, LAUNCHER)  # what compile.launcher wrote down
    return {path: parts["job"]["spec"]["trainer"] for path, parts in definitions.items()}


def spec_of(definition: Definition) -> Json:
    """The pipeline, without the settings behind it."""
    return dict(next(iter(yaml.load_all(definition.text, LOADER))))


def cache_keys(files: Mapping[str, bytes]) -> tuple[CacheKey, ...]:
    graph = read(Definition(files).text.decode())
    parameters = graph.inputs.parameters
    return of_graph(graph, {name: parameter.default for name, parameter in parameters.items()})
