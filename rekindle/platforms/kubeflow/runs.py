"""A run of Kubeflow Pipelines: its steps, what they print and leave, stopping it, and trying again
what failed.

The API server shows Argo's nodes, flat: a task is a node of its name; its pod is a child that is
called `executor`, or one a try where Argo tries again. Children are named by Argo's ids and nodes
by their pods, which end alike. The turns of a loop are one step. Where several nested pipelines
have a task of one name, what began before it tells which it is.

Artifacts lie under the pipeline's root, in the folder of run and task; who made them from the cache
did so in another run, so nothing is known of those. A root in the cluster's own store cannot be
read from outside.

Authority: backend/src/apiserver (server/api_converter.go, main.go), backend/src/common/util/
workflow.go and backend/src/v2/metadata of kubeflow/pipelines. No cluster has been asked."""

import contextlib
import datetime
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rekindle import records
from rekindle.errors import PlatformError, UnreachableError
from rekindle.ir.edit.rewrite import executors
from rekindle.platforms.kubeflow.client import Server, connected, page, where
from rekindle.platforms.snapshot import Log, RunSnapshot, states_of, step_times
from rekindle.platforms.submission import Definition, RunTag, SubmittedRun, check_resumable
from rekindle.records import ArtifactRecord, StepRecord
from rekindle.spec.platforms import KubeflowSpec

_RUNS, _STEPS, _ = states_of(__file__)
_NOT_REACHED = "a step before it failed, or a condition chose otherwise"
_EXECUTOR = re.compile(r"executor(\(\d+\))?")
_READABLE = ("s3://", "gs://", "abfs://", "file://", "/")
_LARGEST_RECORD_BYTES = 4 << 20
_EPOCH = datetime.datetime(1971, 1, 1, tzinfo=datetime.UTC)  # Go's zero time is before it


def describe(place: KubeflowSpec, id: str) -> RunSnapshot:
    with connected(place) as server:
        run = server.call(server.kfp.get_run, id)
    status = _RUNS.get(str(run.state), "running")
    now = datetime.datetime.now(datetime.UTC)
    ended = _moment(run.finished_at) if status != "running" else None
    return RunSnapshot(status, tuple(_steps(run, now)), _message(run.error), ended)


def read_log(place: KubeflowSpec, id: str, step: StepRecord, cursor: str) -> Log:
    """What the step's pod printed since; the server only gives all of it."""
    from kfp_server_api import ApiException

    with connected(place) as server:
        try:
            text = server.call(_pod_log, server, id, step.log)
        except ApiException as error:
            if error.status != 404:
                raise
            return Log("", cursor)  # the pod has not begun, or is gone with its log
    begin = int(cursor or 0)
    return Log(text[begin:] if len(text) >= begin else text, str(len(text)))


def cancel(place: KubeflowSpec, id: str) -> None:
    with connected(place) as server:
        if str(server.call(server.kfp.get_run, id).state) not in _RUNS:
            server.call(server.kfp.terminate_run, id)


def resume(definition: Definition, place: KubeflowSpec, id: str, mark: RunTag) -> SubmittedRun:
    """The same run, trying again what failed or was stopped; PlatformError if it did not end so."""
    with connected(place) as server:
        state = str(server.call(server.kfp.get_run, id).state)
        if state not in _RUNS:  # tried again by the same call, whose answer was lost
            return SubmittedRun(id, page(place, id), anew=False)
        check_resumable(_RUNS[state], f"the run is {state}", where(place))
        server.created(
            lambda: server.runs.run_service_retry_run(id) or True,
            lambda: str(server.kfp.get_run(id).state) not in _RUNS,
        )
        return SubmittedRun(id, page(place, id))


def artifacts(place: KubeflowSpec, id: str, step: StepRecord) -> Mapping[str, ArtifactRecord]:
    """The step's artifacts that hold records, as their files show: KFP keeps no metadata."""
    with connected(place) as server:
        run = server.call(server.kfp.get_run, id)
    spec = _spec(run)
    root = run.runtime_config and run.runtime_config.pipeline_root
    root = root or spec.get("defaultPipelineRoot", "")
    if step.cached or not root.startswith(_READABLE):
        return {}
    folder = f"{root.rstrip('/')}/{spec['pipelineInfo']['name']}/{id}/{_last(step.name)}"
    kinds = {file: kind for kind, file in records.RECORD_FILES.items()}
    found = dict[str, ArtifactRecord]()
    for path, size in _files(folder).items():
        attempt, name, *inside = path.split("/")
        uri = f"{folder}/{attempt}/{name}"
        if len(inside) == 1:
            kind = kinds.get(inside[0], "")
        else:
            may_be_one = not inside and size <= _LARGEST_RECORD_BYTES
            kind = records.kind_of(read(place, uri)) if may_be_one else ""
        if kind:
            found[name] = ArtifactRecord(uri=uri, metadata={"record": kind})
    return found


def read(place: KubeflowSpec, uri: str) -> bytes:
    with _store_of(uri) as (store, path):
        return bytes(store.cat_file(path))


class _Nodes:
    """Argo's nodes, by what their ids end with."""

    def __init__(self, details: Iterable[Any]) -> None:
        self.all = sorted(
            details, key=lambda one: (_moment(one.start_time) or _EPOCH, one.pod_name)
        )
        self.by_id = {_end(one.pod_name): one for one in self.all}
        self.before: dict[str, Any] = {}
        for one in self.all:
            for child in one.child_tasks or ():
                self.before.setdefault(_end(child.pod_name), one)

    def of(self, path: str, known: Iterable[str]) -> list[Any]:
        """The nodes of the task at `path`; several where a loop is around it."""
        name = _last(path)
        alike = [other for other in known if _last(other) == name]
        named = [one for one in self.all if one.display_name == name]
        if len(alike) == 1:
            return named
        around = {_last(other.rpartition("/")[0]) for other in alike}
        mine = _last(path.rpartition("/")[0])
        return [one for one in named if self.inside(one, around) == mine]

    def inside(self, node: Any, names: set[str]) -> str:
        """The first of `names` among what came before; "" is the pipeline itself."""
        while (node := self.before.get(_end(node.pod_name))) is not None:
            if node.display_name in names:
                return str(node.display_name)
        return ""

    def executors(self, task: Any) -> list[Any]:
        """The pods of a task, the first try first."""
        children = map(self.by_id.get, (_end(child.pod_name) for child in task.child_tasks or ()))
        found = [one for one in children if one and _EXECUTOR.fullmatch(one.display_name)]
        return [pod for one in found for pod in (self.executors(one) or [one])]


def _steps(run: Any, now: datetime.datetime) -> Iterator[StepRecord]:
    """The steps of the run's pipeline that have begun, in its order."""
    nodes = _Nodes((run.run_details and run.run_details.task_details) or ())
    spec = _spec(run)
    known = [path for path, _ in executors(spec)] if spec else []
    for path in known:
        if turns := nodes.of(path, known):
            step = _step(path, turns, nodes, now)
            # Argo says of a pod that it stopped that it failed
            if step.status == "failed" and str(run.state) == "CANCELED":
                step = step.model_copy(update={"status": "cancelled"})
            # and skips what is behind one that failed as it does what a condition leaves out
            if step.status == "skipped" and _RUNS.get(str(run.state)) == "failed":
                step = step.model_copy(update={"reason": _NOT_REACHED})
            yield step


def _step(path: str, turns: list[Any], nodes: _Nodes, now: datetime.datetime) -> StepRecord:
    states = [_STEPS.get(str(turn.state), "running") for turn in turns]
    status = next(state for state in _STEPS.values() if state in states)
    pods = [pod for turn in turns for pod in nodes.executors(turn)]
    skipped = bool(pods) and all(str(pod.state) == "SKIPPED" for pod in pods)
    cached = status == "succeeded" and skipped
    shown = [pod for pod in pods if str(pod.state) not in ("SKIPPED", "PENDING")]
    failed = [pod for pod in shown if str(pod.state) == "FAILED"]
    begun = [moment for turn in turns if (moment := _moment(turn.start_time))]
    ended = [_moment(turn.end_time) for turn in turns]
    last = None if None in ended else max(moment for moment in ended if moment)
    reason = "taken from the cache" if cached else ""
    if status == "skipped":
        reason = "a condition chose otherwise"
    elif len(turns) > 1:
        reason = f"{len(turns)} turns"
    return StepRecord(
        name=path,
        status=status,
        cached=cached,
        reason=reason,
        attempts=max(1, len(shown) - len(turns) + 1) if shown else 0,
        log=(failed or shown)[-1].pod_name if shown else "",
        error=next((said for node in (*failed, *turns) if (said := _message(node.error))), ""),
        **step_times(min(begun, default=None), last, now),
    )


def _pod_log(server: Server, run: str, pod: str) -> str:
    answer = server.runs.api_client.call_api(
        "/apis/v1alpha1/runs/{run_id}/nodes/{node_id}/log",
        "GET",
        {"run_id": run, "node_id": pod},
        auth_settings=["Bearer"],
        _preload_content=False,
        _return_http_data_only=True,
    )
    return str(answer.data.decode("utf-8", errors="replace"))


def _spec(run: Any) -> Mapping[str, Any]:
    """The pipeline, with or without its second document."""
    spec = run.pipeline_spec or {}
    return dict(spec.get("pipeline_spec", spec))


def _files(folder: str) -> dict[str, int]:
    """Sizes of the artifacts' files in the folder of a task, by `ATTEMPT/ARTIFACT[/FILE]`."""
    with _store_of(folder) as (store, base):
        found = store.find(base, detail=True) if store.exists(base) else {}
    sizes = {path[len(base) :].strip("/"): told["size"] for path, told in found.items()}
    return {path: size for path, size in sizes.items() if "/" in path}


@contextlib.contextmanager
def _store_of(uri: str) -> Iterator[tuple[Any, str]]:
    """The store that a URI names, and the place in it."""
    import fsspec

    try:
        yield fsspec.core.url_to_fs(uri)
    except FileNotFoundError:
        raise
    except ImportError as error:
        raise PlatformError(str(error), where=uri, fix=f"pip install {error.name}") from None
    except OSError as error:
        fix = "see whether the store can be read from here"
        raise UnreachableError(str(error), where=uri, fix=fix) from error


def _message(error: Any) -> str:
    return str(error.message or "") if error else ""


def _moment(time: datetime.datetime | None) -> datetime.datetime | None:
    return time if time and time > _EPOCH else None


def _last(path: str) -> str:
    return path.rpartition("/")[2]


def _end(id: str) -> str:
    """What a node's id and its pod's name have in common."""
    number = re.search(r"-(\d+)$", id or "")
    return number[1] if number else id
