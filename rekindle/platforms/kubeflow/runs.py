"""A run of Kubeflow Pipelines: its steps, what they print and leave, stopping it, and
trying again what failed.

The steps are Argo's nodes (argo.py): of a step its pods, one a try; the turns of a loop
are one step. The API of version 2 has the run's state, the older one its Workflow.

Artifacts lie under the pipeline's root, in the folder of run and task; who made them from
the cache did so in another run, so nothing is known of those. A root in the cluster's own
store cannot be read from outside.

Authority: backend/src/apiserver of kubeflow/pipelines 2.17 (server/api_converter.go,
server/run_log_server.go, storage/run_store.go, resource/resource_manager.go, main.go).
What it answered stands in tests/platforms/kubeflow/recorded."""

import contextlib
import datetime
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from rekindle import records
from rekindle.errors import PlatformError, UnreachableError
from rekindle.ir.edit.rewrite import executors
from rekindle.platforms.kubeflow import store, ui
from rekindle.platforms.kubeflow.argo import ArgoNode, ArgoNodes
from rekindle.platforms.kubeflow.client import (
    KfpServer,
    connected,
    no_answer,
    page,
    where,
)
from rekindle.platforms.kubeflow.compile import LAUNCHER
from rekindle.platforms.kubeflow.obstacles import waits_for
from rekindle.platforms.kubeflow.section import KubeflowSpec
from rekindle.platforms.logs import LogPiece
from rekindle.platforms.snapshot import RunSnapshot, step_times
from rekindle.platforms.submission import Definition, RunTag, SubmittedRun, check_resumable
from rekindle.protojson import Json
from rekindle.records import WAITING, ArtifactRecord, RunStatus, StepRecord, StepStatus

log = logging.getLogger(__name__)

_RUN_STATES: Mapping[str, RunStatus] = {
    "SUCCEEDED": "succeeded",
    "SKIPPED": "succeeded",
    "FAILED": "failed",
    "CANCELED": "cancelled",
}
_CANCELING = "CANCELING"
# of a V2beta1RuntimeState; without one a run has not been reported on
_ALL_STATES = (
    *_RUN_STATES,
    _CANCELING,
    "PENDING",
    "RUNNING",
    "PAUSED",
    "RUNTIME_STATE_UNSPECIFIED",
    "None",
)
# pods have two minutes to end; a Workflow that was deleted is never reported to have ended
_LONGEST_END = datetime.timedelta(hours=1)
# phases of Argo's nodes from the worst on: of the turns of a step the worst counts
_PHASES: Mapping[str, StepStatus] = {
    "Failed": "failed",
    "Error": "failed",
    "Running": "running",
    "Pending": "pending",
    "Succeeded": "succeeded",
    "Skipped": "skipped",
    "Omitted": "skipped",
}
# reasons of kubelets for a container that is about to start
_ABOUT_TO_START = ("ContainerCreating", "PodInitializing")
# for a log that is only read to say more of a step: `status` does not wait longer for it
_PATIENCE_WITH_LOGS_SECONDS = 10.0
_LONG_LOG_BYTES = 1 << 20  # far more than a launcher prints before its nodes run
# a path beside the API proper (main.go), which the generated client does not know
_LOG = "/apis/v1alpha1/runs/{run_id}/nodes/{node_id}/log"
_NOT_REACHED = "a step before it failed, or a condition chose otherwise"
# `minio://` is the cluster's own store, of which KFP's UI hands out files
_READABLE = ("s3://", "gs://", "abfs://", "file://", "/")
# what the server answers in place of the log of a pod that is gone
_REFUSAL = '{"error_message"'
_REFUSAL_KEYS = {"error_message", "error_details"}
_LARGEST_RECORD_BYTES = 4 << 20  # what is larger is not fetched to see what it is
_EPOCH = datetime.datetime(1971, 1, 1, tzinfo=datetime.UTC)  # Go's zero time is before it


class ApiStatus(Protocol):
    """An error, as kfp_server_api has it (which comes without types, as all it
    returns)."""

    message: str | None


class StateChange(Protocol):
    """A state of a run's past: a V2beta1RuntimeStatus."""

    state: object
    update_time: datetime.datetime | None


class KfpRun(Protocol):
    """A V2beta1Run."""

    state: object
    state_history: Sequence[StateChange] | None
    pipeline_spec: Json | None


def describe(place: KubeflowSpec, id: str) -> RunSnapshot:
    with connected(place) as server:
        run = _run_of(server, place, id)
        workflow = server.call(_workflow, server, place, id)
        nodes = ArgoNodes(workflow or {})
        now = datetime.datetime.now(datetime.UTC)
        status = _status(run, now)
        steps = list(_steps(run, status, nodes, now))
        if workflow is None and status != "running":
            steps = [_unknown(path) for path, _ in executors(_spec(run))]
        if status == "running":
            launchers = _launchers(_spec(run))
            for index, step in enumerate(steps):
                if step.name in launchers and step.status == "running":
                    steps[index] = _with_obstacle_of_nodes(server, id, step)
    ended = _moment(run.finished_at) if status != "running" else None
    return RunSnapshot(status, tuple(steps), _message(run.error), ended)


def _run_of(server: KfpServer, place: KubeflowSpec, id: str) -> Any:
    """The run; PlatformError where KFP has none of this id, or answers with something else."""
    from kfp_server_api import ApiException

    try:
        run = server.call(server.kfp.get_run, id)
    except ApiException as error:
        if error.status != 404:
            raise
        raise PlatformError(
            f"KFP has no run {id}",
            where=where(place),
            fix="it was deleted there, or platforms.kubeflow.host is another server now",
        ) from None
    # a state that it has just been given stands in no answer yet
    has_known_state = run is not None and str(getattr(run, "state", "?")) in _ALL_STATES
    if not has_known_state or not run.run_id:
        raise no_answer("run", place)
    return run


def _status(run: KfpRun, now: datetime.datetime) -> RunStatus:
    """The state of a run in our words.

    KFP stores of a run that was terminated that it failed, as Argo does: that it was to
    be cancelled stands in its history alone, before its end. A run that was retried since
    has other states there. One whose Workflow was deleted stays CANCELING."""
    status = _RUN_STATES.get(str(run.state), "running")
    history = run.state_history or ()
    states = [str(change.state) for change in history]
    if str(run.state) == _CANCELING and states[-1:] == [_CANCELING]:
        cancelled_at = _moment(history[-1].update_time)
        if cancelled_at and now - cancelled_at > _LONGEST_END:
            return "cancelled"
    before_its_end = [state for state in states if state not in _RUN_STATES]
    if status == "failed" and before_its_end[-1:] == [_CANCELING]:
        return "cancelled"
    return status


def read_log(place: KubeflowSpec, id: str, step: StepRecord, cursor: str) -> LogPiece:
    """What the step's pod printed since; the server only gives all of it."""
    if not step.log:
        return LogPiece("", cursor)  # no pod has begun
    with connected(place) as server:
        text = server.call(_pod_log, server, id, step.log)
    if not text:
        return LogPiece("", cursor)  # the pod has not begun, or is gone with its log
    begin = int(cursor or 0)
    if len(text) < begin:  # shorter than before: another pod's
        begin = 0
    return LogPiece(text[begin:], str(len(text)))


def cancel(place: KubeflowSpec, id: str) -> None:
    from kfp_server_api import ApiException

    def has_ended() -> bool:
        state = str(_run_of(server, place, id).state)
        return state in _RUN_STATES or state == _CANCELING

    with connected(place) as server:
        if has_ended():
            return
        try:
            server.call(server.kfp.terminate_run, id)
        except ApiException:
            # refused where a call whose answer was lost took effect, or the run just ended
            if not has_ended():
                raise


def resume(definition: Definition, place: KubeflowSpec, id: str, mark: RunTag) -> SubmittedRun:
    """The same run, trying again what failed or was stopped; PlatformError if it did not
    end so."""
    with connected(place) as server:
        state = str(_run_of(server, place, id).state)
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
        run = _run_of(server, place, id)
    spec = _spec(run)
    root = run.runtime_config and run.runtime_config.pipeline_root
    root = root or spec.get("defaultPipelineRoot", "")
    if step.cached:
        return {}
    if not root.startswith(_READABLE):
        return _artifacts_from_ui(place, id, step)
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


def _artifacts_from_ui(
    place: KubeflowSpec, id: str, step: StepRecord
) -> Mapping[str, ArtifactRecord]:
    """The same of a step whose artifacts lie in the cluster's own store; PlatformError where
    they cannot be read."""
    artifacts = {}
    with connected(place) as server:
        workflow = server.call(_workflow, server, place, id)
        outputs = ArgoNodes(workflow or {}).outputs(step.name)
        for name, uri in outputs.items():
            kind = _kind_in_ui(server, place, uri) if uri.startswith(store.SCHEME) else ""
            if kind:
                artifacts[name] = ArtifactRecord(uri=uri, metadata={"record": kind})
    return artifacts


def _kind_in_ui(server: KfpServer, place: KubeflowSpec, uri: str) -> str:
    """The kind of record that an artifact is, or holds; "" for neither."""
    try:
        return records.kind_of(ui.read_file(server, place, uri))
    except FileNotFoundError:  # the step left it empty
        return ""
    except ui.IsFolderError:
        pass
    for kind, file in records.RECORD_FILES.items():
        with contextlib.suppress(FileNotFoundError, ui.IsFolderError):
            ui.read_file(server, place, f"{uri.rstrip('/')}/{file}")
            return kind
    return ""


def read(place: KubeflowSpec, uri: str) -> bytes:
    if uri.startswith(store.SCHEME):
        with connected(place) as server:
            try:
                return ui.read_file(server, place, uri)
            except ui.IsFolderError:
                raise FileNotFoundError(uri) from None
    with _store_of(uri) as (opened, path):
        return bytes(opened.cat_file(path))


def _steps(
    run: KfpRun, status: RunStatus, nodes: ArgoNodes, now: datetime.datetime
) -> Iterator[StepRecord]:
    """The steps of the run's pipeline that have begun or were left out, in its order."""
    spec = _spec(run)
    paths = [path for path, _ in executors(spec)] if spec else []
    for path in paths:
        turns = nodes.turns(path)
        if not turns:
            reason = _obstacle_of_pods(nodes.drivers(path))
            if reason and status == "running":
                yield StepRecord(name=path, reason=reason)
            continue
        step = _step(path, turns, nodes.pods(path), now)
        # Argo says of a pod that it stopped that it failed, and nothing more of one that is gone
        if step.status in ("failed", "running", "pending") and status == "cancelled":
            step = step.model_copy(update={"status": "cancelled"})
        # and leaves out what is behind one that failed as it does what a condition leaves out
        if step.status == "skipped" and status == "failed":
            step = step.model_copy(update={"reason": _NOT_REACHED})
        yield step


def _step(
    path: str, turns: Sequence[ArgoNode], pods: Sequence[ArgoNode], now: datetime.datetime
) -> StepRecord:
    """A step from the nodes of its turns (one, but in a loop), and their pods."""
    states = [_PHASES.get(turn.phase, "running") for turn in turns]
    status = next(state for state in _PHASES.values() if state in states)
    # KFP's driver skips the pods of what the cache has
    are_skipped = bool(pods) and all(pod.phase == "Skipped" for pod in pods)
    is_cached = status == "succeeded" and are_skipped
    begun_pods = [pod for pod in pods if pod.phase not in ("Skipped", "Omitted", "Pending")]
    failed_pods = [pod for pod in begun_pods if pod.phase in ("Failed", "Error")]
    obstacle = _obstacle_of_pods(pods) if status == "running" else ""
    if obstacle and not begun_pods:
        status = "pending"  # Argo's node of a step runs as soon as its pod is to start
    reason = ""
    if status == "skipped":
        reason = "a condition chose otherwise"
    elif obstacle:
        reason = obstacle
    elif len(turns) > 1:
        reason = f"{len(turns)} turns"
    elif is_cached:
        reason = "taken from the cache"
    attempts = 0
    pod_name = ""
    if begun_pods:
        attempts = max(1, len(begun_pods) - len(turns) + 1)
        pod_name = begun_pods[-1].pod
        if failed_pods and status != "running":
            pod_name = failed_pods[-1].pod
    messages = []
    if status == "failed":
        messages = [node.message for node in (*failed_pods[::-1], *turns)]
    return StepRecord(
        name=path,
        status=status,
        cached=is_cached,
        reason=reason,
        attempts=attempts,
        log=pod_name,
        error=next(filter(None, messages), ""),
        **step_times(_began_at(turns), _ended_at(turns), now),
    )


def _obstacle_of_pods(pods: Sequence[ArgoNode]) -> str:
    """Why none of these pods runs where one is to start; "" where one does, or soon will.

    Argo writes of a pod that is pending why a container of it waits (ImagePullBackOff, say),
    or that no machine has room, and of one that it could not create what the API server
    answered, as an exceeded quota (workflow/controller/operator.go: getPendingReason,
    requeueIfTransientErr)."""
    obstacle = ""
    for pod in pods:
        if pod.phase == "Running":
            return ""
        if pod.phase == "Pending" and pod.message and pod.message not in _ABOUT_TO_START:
            obstacle = f"{WAITING}{pod.message}"
    return obstacle


def _launchers(spec: Json) -> frozenset[str]:
    """The steps whose pod launches nodes."""
    if not spec:
        return frozenset()
    command = [*LAUNCHER]
    return frozenset(path for path, made in executors(spec) if made.get("command") == command)


def _with_obstacle_of_nodes(server: KfpServer, run: str, step: StepRecord) -> StepRecord:
    """A step on several nodes, with what its launcher says that they wait for.

    Where the log cannot be read the step is as it was: whatever serves the log, the machine
    of the pod among it, has no part in how the run stands. KFP serves logs from their
    beginning only, so of a long one, whose nodes have run for long, the end is not read."""
    from kfp_server_api import OpenApiException
    from urllib3.exceptions import HTTPError

    if not step.log:
        return step
    try:
        body = server.get(
            _LOG,
            {"run_id": run, "node_id": step.log},
            patience_seconds=_PATIENCE_WITH_LOGS_SECONDS,
            most_bytes=_LONG_LOG_BYTES,
        )
    except (OpenApiException, HTTPError, PlatformError) as error:
        log.info("what the nodes of %s wait for is not known: %s", step.name, error)
        return step
    obstacle = ""
    if len(body) < _LONG_LOG_BYTES:
        obstacle = waits_for(body.decode("utf-8", errors="replace"))
    if not obstacle:
        return step
    return step.model_copy(update={"reason": f"{WAITING}{obstacle}"})


def _began_at(turns: Sequence[ArgoNode]) -> datetime.datetime | None:
    return min((turn.began for turn in turns if turn.began), default=None)


def _ended_at(turns: Sequence[ArgoNode]) -> datetime.datetime | None:
    """When the last turn ended; None while one has not."""
    ends = [turn.ended for turn in turns if turn.ended]
    return max(ends) if len(ends) == len(turns) else None


def _unknown(path: str) -> StepRecord:
    """A step of a run that is over, of which no server tells what became."""
    return StepRecord(name=path, reason="what became of it is not known")


def _workflow(server: KfpServer, place: KubeflowSpec, run: str) -> Json | None:
    """The Workflow of a run, as it was last reported to the API server; {} before its first
    report, None where the server has no such API."""
    from kfp_server_api import ApiException

    # of the older API, which the generated client does not know
    try:
        body = server.get("/apis/v1beta1/runs/{run_id}", {"run_id": run})
    except ApiException as error:
        if error.status != 404:
            raise
        log.warning("this server has no API v1beta1: what the steps of the run do is not known")
        return None
    try:
        runtime = json.loads(body).get("pipeline_runtime") or {}
        workflow = json.loads(runtime.get("workflow_manifest") or "{}")
    except (ValueError, AttributeError):
        raise no_answer("Workflow", place) from None
    if not isinstance(workflow, dict):
        raise no_answer("Workflow", place)
    return workflow


def _pod_log(server: KfpServer, run: str, pod: str) -> str:
    body = server.get(_LOG, {"run_id": run, "node_id": pod})
    return _without_refusal(body.decode("utf-8", errors="replace"))


def _without_refusal(text: str) -> str:
    """A log without the refusal that the server may have put behind it, or in its place.

    It answers 200 before it looks for the pod (run_log_server.go), and writes why it
    cannot read on as JSON."""
    begin = text.rfind(_REFUSAL)
    if begin < 0:
        return text
    try:
        refusal = json.loads(text[begin:])
    except ValueError:
        return text
    is_refusal = isinstance(refusal, dict) and refusal.keys() == _REFUSAL_KEYS
    return text[:begin] if is_refusal else text


def _spec(run: KfpRun) -> Json:
    """The pipeline, with or without its second document."""
    spec = run.pipeline_spec or {}
    return dict(spec.get("pipeline_spec", spec))


def _files(folder: str) -> dict[str, int]:
    """Sizes of the artifacts' files in the folder of a task, by
    `ATTEMPT/ARTIFACT[/FILE]`."""
    with _store_of(folder) as (opened, base):
        entries = opened.find(base, detail=True) if opened.exists(base) else {}
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
