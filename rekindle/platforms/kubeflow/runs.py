"""A run of Kubeflow Pipelines: its steps, what they print and leave, stopping it, and
trying again what failed.

The API server shows Argo's nodes, flat: a task is a node of its name; its pod is a child
that is called `executor`, or one a try where Argo tries again. Children are named by
Argo's ids and nodes by their pods, which end alike. The turns of a loop are one step.
Where several nested pipelines have a task of one name, what began before it tells which
it is.

Artifacts lie under the pipeline's root, in the folder of run and task; who made them from
the cache did so in another run, so nothing is known of those. A root in the cluster's own
store cannot be read from outside.

Authority: backend/src/apiserver (server/api_converter.go, main.go),
backend/src/common/util/ workflow.go and backend/src/v2/metadata of kubeflow/pipelines. No
cluster has been asked."""

import contextlib
import datetime
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from rekindle import records
from rekindle.errors import PlatformError, UnreachableError
from rekindle.ir.edit.rewrite import executors
from rekindle.platforms.kubeflow.client import KfpServer, connected, page, where
from rekindle.platforms.kubeflow.section import KubeflowSpec
from rekindle.platforms.logs import LogPiece
from rekindle.platforms.snapshot import RunSnapshot, step_times
from rekindle.platforms.submission import Definition, RunTag, SubmittedRun, check_resumable
from rekindle.protojson import Json
from rekindle.records import ArtifactRecord, RunStatus, StepRecord, StepStatus

_RUN_STATES: Mapping[str, RunStatus] = {
    "SUCCEEDED": "succeeded",
    "SKIPPED": "succeeded",
    "FAILED": "failed",
    "CANCELED": "cancelled",
}
# states of Argo's nodes from the worst on: of the turns of a step the worst counts
_NODE_STATES: Mapping[str, StepStatus] = {
    "FAILED": "failed",
    "CANCELED": "cancelled",
    "RUNNING": "running",
    "PAUSED": "running",
    "CANCELING": "running",
    "PENDING": "pending",
    "SUCCEEDED": "succeeded",
    "SKIPPED": "skipped",
}
_NOT_REACHED = "a step before it failed, or a condition chose otherwise"
_EXECUTOR = re.compile(r"executor(\(\d+\))?")
# `minio://` is the cluster's own store, which is not reached from outside
_READABLE = ("s3://", "gs://", "abfs://", "file://", "/")
_LARGEST_RECORD_BYTES = 4 << 20  # what is larger is not fetched to see what it is
_EPOCH = datetime.datetime(1971, 1, 1, tzinfo=datetime.UTC)  # Go's zero time is before it


class ApiStatus(Protocol):
    """An error, as kfp_server_api has it (which comes without types, as all it
    returns)."""

    message: str | None


class Child(Protocol):
    pod_name: str


class WorkflowNode(Protocol):
    """A node of Argo: a V2beta1PipelineTaskDetail."""

    display_name: str
    pod_name: str
    state: object
    start_time: datetime.datetime | None
    end_time: datetime.datetime | None
    error: ApiStatus | None
    child_tasks: Sequence[Child] | None


class RunDetails(Protocol):
    task_details: Sequence[WorkflowNode] | None


class KfpRun(Protocol):
    """A V2beta1Run."""

    state: object
    run_details: RunDetails | None
    pipeline_spec: Json | None


def describe(place: KubeflowSpec, id: str) -> RunSnapshot:
    with connected(place) as server:
        run = server.call(server.kfp.get_run, id)
    status = _RUN_STATES.get(str(run.state), "running")
    now = datetime.datetime.now(datetime.UTC)
    ended = _moment(run.finished_at) if status != "running" else None
    return RunSnapshot(status, tuple(_steps(run, now)), _message(run.error), ended)


def read_log(place: KubeflowSpec, id: str, step: StepRecord, cursor: str) -> LogPiece:
    """What the step's pod printed since; the server only gives all of it."""
    from kfp_server_api import ApiException

    with connected(place) as server:
        try:
            text = server.call(_pod_log, server, id, step.log)
        except ApiException as error:
            if error.status != 404:
                raise
            return LogPiece("", cursor)  # the pod has not begun, or is gone with its log
    begin = int(cursor or 0)
    if len(text) < begin:  # shorter than before: another pod's
        begin = 0
    return LogPiece(text[begin:], str(len(text)))


def cancel(place: KubeflowSpec, id: str) -> None:
    with connected(place) as server:
        if str(server.call(server.kfp.get_run, id).state) not in _RUN_STATES:
            server.call(server.kfp.terminate_run, id)


def resume(definition: Definition, place: KubeflowSpec, id: str, mark: RunTag) -> SubmittedRun:
    """The same run, trying again what failed or was stopped; PlatformError if it did not
    end so."""
    with connected(place) as server:
        state = str(server.call(server.kfp.get_run, id).state)
        if state not in _RUN_STATES:  # tried again by the same call, whose answer was lost
            return SubmittedRun(id, page(place, id), anew=False)
        check_resumable(_RUN_STATES[state], f"the run is {state}", where(place))
        server.created(
            lambda: server.runs.run_service_retry_run(id) or True,
            lambda: str(server.kfp.get_run(id).state) not in _RUN_STATES,
        )
        return SubmittedRun(id, page(place, id))


def artifacts(place: KubeflowSpec, id: str, step: StepRecord) -> Mapping[str, ArtifactRecord]:
    """The step's artifacts that hold records, as their files show: KFP keeps no
    metadata."""
    with connected(place) as server:
        run = server.call(server.kfp.get_run, id)
    spec = _spec(run)
    root = run.runtime_config and run.runtime_config.pipeline_root
    root = root or spec.get("defaultPipelineRoot", "")
    if step.cached or not root.startswith(_READABLE):
        return {}
    folder = f"{root.rstrip('/')}/{spec['pipelineInfo']['name']}/{id}/{_last(step.name)}"
    kinds = {file: kind for kind, file in records.RECORD_FILES.items()}
    artifacts = {}
    for path, size in _files(folder).items():
        attempt, name, *path_inside = path.split("/")
        uri = f"{folder}/{attempt}/{name}"
        kind = ""
        if len(path_inside) == 1:  # the artifact is a folder: its files have fixed names
            kind = kinds.get(path_inside[0], "")
        elif not path_inside and size <= _LARGEST_RECORD_BYTES:
            kind = records.kind_of(read(place, uri))
        if kind:
            artifacts[name] = ArtifactRecord(uri=uri, metadata={"record": kind})
    return artifacts


def read(place: KubeflowSpec, uri: str) -> bytes:
    with _store_of(uri) as (store, path):
        return bytes(store.cat_file(path))


class _Nodes:
    """Argo's nodes, by what their ids end with."""

    def __init__(self, details: Iterable[WorkflowNode]) -> None:
        self.all = sorted(
            details, key=lambda node: (_moment(node.start_time) or _EPOCH, node.pod_name)
        )
        self.by_id = {_end(node.pod_name): node for node in self.all}
        self.parents: dict[str, WorkflowNode] = {}
        for node in self.all:
            for child in node.child_tasks or ():
                self.parents.setdefault(_end(child.pod_name), node)

    def of(self, path: str, all_paths: Sequence[str]) -> list[WorkflowNode]:
        """The nodes of the task at `path`; several where a loop is around it."""
        name = _last(path)
        same_name = [other for other in all_paths if _last(other) == name]
        nodes = [node for node in self.all if node.display_name == name]
        if len(same_name) == 1:
            return nodes
        # nodes do not name the pipeline that they are in; what began before them tells it
        pipelines = {_last(other.rpartition("/")[0]) for other in same_name}
        own_pipeline = _last(path.rpartition("/")[0])
        return [node for node in nodes if self._nearest(node, pipelines) == own_pipeline]

    def _nearest(self, node: WorkflowNode, names: set[str]) -> str:
        """The first of `names` among what came before; "" is the pipeline itself."""
        parent = self.parents.get(_end(node.pod_name))
        while parent is not None:
            if parent.display_name in names:
                return parent.display_name
            parent = self.parents.get(_end(parent.pod_name))
        return ""

    def executors(self, task: WorkflowNode) -> list[WorkflowNode]:
        """The pods of a task, the first try first."""
        pods = []
        for child in task.child_tasks or ():
            node = self.by_id.get(_end(child.pod_name))
            if node is None or not _EXECUTOR.fullmatch(node.display_name):
                continue
            # where Argo tries again, the tries are children of a node of that name
            pods += self.executors(node) or [node]
        return pods


def _steps(run: KfpRun, now: datetime.datetime) -> Iterator[StepRecord]:
    """The steps of the run's pipeline that have begun, in its order."""
    details = run.run_details.task_details if run.run_details else None
    nodes = _Nodes(details or ())
    spec = _spec(run)
    paths = [path for path, _ in executors(spec)] if spec else []
    for path in paths:
        turns = nodes.of(path, paths)
        if not turns:
            continue
        step = _step(path, turns, nodes, now)
        # Argo says of a pod that it stopped that it failed
        if step.status == "failed" and str(run.state) == "CANCELED":
            step = step.model_copy(update={"status": "cancelled"})
        # and skips what is behind one that failed as it does what a condition leaves out
        if step.status == "skipped" and _RUN_STATES.get(str(run.state)) == "failed":
            step = step.model_copy(update={"reason": _NOT_REACHED})
        yield step


def _step(
    path: str, turns: Sequence[WorkflowNode], nodes: _Nodes, now: datetime.datetime
) -> StepRecord:
    """A step from the nodes of its turns (one, but in a loop)."""
    states = [_NODE_STATES.get(str(turn.state), "running") for turn in turns]
    status = next(state for state in _NODE_STATES.values() if state in states)
    pods: list[WorkflowNode] = []
    for turn in turns:
        pods += nodes.executors(turn)
    # KFP's driver skips the pods of what the cache has
    are_skipped = bool(pods) and all(str(pod.state) == "SKIPPED" for pod in pods)
    is_cached = status == "succeeded" and are_skipped
    begun_pods = [pod for pod in pods if str(pod.state) not in ("SKIPPED", "PENDING")]
    failed_pods = [pod for pod in begun_pods if str(pod.state) == "FAILED"]
    reason = ""
    if status == "skipped":
        reason = "a condition chose otherwise"
    elif len(turns) > 1:
        reason = f"{len(turns)} turns"
    elif is_cached:
        reason = "taken from the cache"
    attempts = 0
    log = ""
    if begun_pods:
        attempts = max(1, len(begun_pods) - len(turns) + 1)
        log = (failed_pods or begun_pods)[-1].pod_name
    messages = [_message(node.error) for node in (*failed_pods, *turns)]
    return StepRecord(
        name=path,
        status=status,
        cached=is_cached,
        reason=reason,
        attempts=attempts,
        log=log,
        error=next(filter(None, messages), ""),
        **step_times(_began_at(turns), _ended_at(turns), now),
    )


def _began_at(turns: Sequence[WorkflowNode]) -> datetime.datetime | None:
    moments = [_moment(turn.start_time) for turn in turns]
    return min((moment for moment in moments if moment), default=None)


def _ended_at(turns: Sequence[WorkflowNode]) -> datetime.datetime | None:
    """When the last turn ended; None while one has not."""
    last = _EPOCH
    for turn in turns:
        moment = _moment(turn.end_time)
        if moment is None:
            return None
        last = max(last, moment)
    return last


def _pod_log(server: KfpServer, run: str, pod: str) -> str:
    # a path beside the API proper (main.go), which the generated client does not know
    answer = server.runs.api_client.call_api(
        "/apis/v1alpha1/runs/{run_id}/nodes/{node_id}/log",
        "GET",
        {"run_id": run, "node_id": pod},
        auth_settings=["Bearer"],
        _preload_content=False,
        _return_http_data_only=True,
    )
    return str(answer.data.decode("utf-8", errors="replace"))


def _spec(run: KfpRun) -> Json:
    """The pipeline, with or without its second document."""
    spec = run.pipeline_spec or {}
    return dict(spec.get("pipeline_spec", spec))


def _files(folder: str) -> dict[str, int]:
    """Sizes of the artifacts' files in the folder of a task, by
    `ATTEMPT/ARTIFACT[/FILE]`."""
    with _store_of(folder) as (store, base):
        entries = store.find(base, detail=True) if store.exists(base) else {}
    sizes = {}
    for full_path, entry in entries.items():
        path = full_path[len(base) :].strip("/")
        if "/" in path:
            sizes[path] = entry["size"]
    return sizes


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


def _message(error: ApiStatus | None) -> str:
    return str(error.message or "") if error else ""


def _moment(time: datetime.datetime | None) -> datetime.datetime | None:
    return time if time and time > _EPOCH else None


def _last(path: str) -> str:
    return path.rpartition("/")[2]


def _end(id: str) -> str:
    """What a node's id and its pod's name have in common."""
    number = re.search(r"-(\d+)$", id or "")
    return number[1] if number else id
