"""An Argo Workflow as the API server of Kubeflow Pipelines stores it: its nodes, and which
step of the pipeline each belongs to.

KFP's v2beta1 API names neither the id nor the pod of a task, so a task cannot be told from
another of its name, and no log can be asked for. Its v1beta1 API still answers with the
whole Workflow, which has names, pods, phases and messages.

A node's name is the way to it: `wf(0).root(0).inner(0).greet(0).executor(0)`. A `(0)` is a
try: since KFP 2.17 the controller's defaults wrap each node into one that tries again. The
turns of a loop are `iteration-iterations(0:0).iteration-item`, and what runs behind an exit
handler is below `exit-handler-1.onExit`.

Authority, of kubeflow/pipelines 2.17: backend/src/apiserver/server/api_converter.go
(toApiRunDetailV1, toApiPipelineTaskDetail), backend/src/common/util/workflow.go
(RetrievePodName), backend/src/v2/compiler/argocompiler (dag.go, container.go); of
argoproj/argo-workflows 4.0.5: workflow/controller/operator.go. Recorded answers:
tests/platforms/kubeflow/recorded; loops and exit handlers are as the source has them, and not
among these."""

import base64
import dataclasses
import datetime
import functools
import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping

from rekindle.errors import PlatformError
from rekindle.protojson import Json

EXECUTOR = "executor"
"""What KFP calls the node of a step's own container."""
_TRIES = re.compile(r"(\(\d+\))+$")
_TURN = re.compile(r"iteration-iterations\(\d+:.*\)")
_TURN_ITEM = "iteration-item"
_EXIT = "onExit"
_DRIVER = "-driver"
_PATCH = "pod-spec-patch"


@dataclasses.dataclass(frozen=True)
class ArgoNode:
    """A node of a Workflow."""

    name: str
    """The way to it, with its tries."""
    kind: str
    """Argo's `type`: Pod, DAG, Retry, Skipped, ..."""
    phase: str
    """Pending, Running, Succeeded, Skipped, Failed, Error or Omitted."""
    pod: str
    """What its pod is called, if it has one."""
    message: str
    """Why it is in its phase."""
    outputs: Mapping[str, str]
    """What it gave to others, by name: of a driver what the pod of its step is to run."""
    began: datetime.datetime | None
    ended: datetime.datetime | None

    @functools.cached_property
    def path(self) -> tuple[str, ...]:
        """The names of the tasks on the way to it, from the pipeline's root on; without
        tries, and without what KFP puts around the turns of a loop and exit handlers."""
        path: list[str] = []
        for part in self.name.split(".")[2:]:
            task = _TRIES.sub("", part)
            if _TURN.fullmatch(task) or task == _TURN_ITEM:
                continue
            if task != _EXIT:
                path.append(task)
            elif path:
                path.pop()  # the handler's own name: its exit task stands beside it
        return tuple(path)

    @property
    def is_try(self) -> bool:
        """Whether a node of the same path is around it, of which it is one try."""
        return _TRIES.search(self.name) is not None


class ArgoNodes:
    """The nodes of one Workflow, by the steps of its pipeline."""

    def __init__(self, workflow: Json) -> None:
        """PlatformError for one that Argo did not write so, or that is damaged."""
        self._by_path: dict[tuple[str, ...], list[ArgoNode]] = {}
        try:
            nodes = list(_nodes(workflow))
        except (KeyError, TypeError, ValueError, AttributeError, EOFError, OSError, zlib.error):
            raise PlatformError(
                "the Workflow of the run, as KFP's server has it, cannot be read",
                where="workflow_manifest",
                fix="look at it in KFP's UI; what runs, runs on",
            ) from None
        for node in nodes:
            self._by_path.setdefault(node.path, []).append(node)

    def turns(self, step: str) -> list[ArgoNode]:
        """The nodes of a step (`inner/greet`) as a whole: one, or one a turn of the loops
        around it."""
        nodes = self._by_path.get(tuple(step.split("/")), [])
        # without the controller's defaults nothing is tried, and no node is a try
        whole = [node for node in nodes if not node.is_try]
        return sorted(whole, key=_begin)

    def pods(self, step: str) -> list[ArgoNode]:
        """The pods of a step, also those that its cache left out, the first try first."""
        return self._pods_of((*step.split("/"), EXECUTOR))

    def drivers(self, step: str) -> list[ArgoNode]:
        """The pods that run before those of a step, and decide what they are to run."""
        *outer, last = step.split("/")
        return self._pods_of((*outer, f"{last}{_DRIVER}"))

    def _pods_of(self, path: tuple[str, ...]) -> list[ArgoNode]:
        nodes = self._by_path.get(path, [])
        return sorted((node for node in nodes if node.kind in ("Pod", "Skipped")), key=_begin)

    def outputs(self, step: str) -> dict[str, str]:
        """The URIs of a step's artifacts by name, as KFP's driver planned them; of a step in
        a loop those of its last turn."""
        uris: dict[str, str] = {}
        for driver in self.drivers(step):
            if driver.outputs.get(_PATCH):
                uris = _planned_uris(driver.outputs[_PATCH])
        return uris


def _planned_uris(patch: str) -> dict[str, str]:
    """The URIs in the ExecutorInput of a pod; none where the patch has another form."""
    try:
        (container, *_) = json.loads(patch)["containers"]
        words = [*(container.get("command") or ()), *(container.get("args") or ())]
        executor_input = json.loads(words[words.index("--executor_input") + 1])
        groups = executor_input["outputs"].get("artifacts") or {}
        return {name: group["artifacts"][0]["uri"] for name, group in groups.items()}
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return {}


def _begin(node: ArgoNode) -> tuple[bool, datetime.datetime, str]:
    """Sorts by the time of the start, what has not begun last."""
    never = datetime.datetime.max.replace(tzinfo=datetime.UTC)
    return node.began is None, node.began or never, node.name


def _nodes(workflow: Json) -> Iterator[ArgoNode]:
    """The nodes of a Workflow's status; none before its first report."""
    if not workflow:
        return
    name = workflow["metadata"]["name"]
    annotations = workflow["metadata"].get("annotations") or {}
    pods_have_ids = annotations.get("workflows.argoproj.io/pod-name-format") == "v1"
    for id, node in _statuses(workflow.get("status") or {}).items():
        pod = id
        if not pods_have_ids and node["name"] != name:
            hashed_name = id.rpartition("-")[2]
            pod = f"{name}-{node.get('templateName', '')}-{hashed_name}"
        yield ArgoNode(
            name=node["name"],
            kind=node["type"],
            phase=node.get("phase", ""),
            pod=pod,
            message=node.get("message", ""),
            began=_moment(node.get("startedAt")),
            ended=_moment(node.get("finishedAt")),
            outputs=_output_values(node),
        )


def _output_values(node: Json) -> dict[str, str]:
    """The output parameters of a node with a value."""
    parameters = (node.get("outputs") or {}).get("parameters") or ()
    values = {}
    for parameter in parameters:
        if isinstance(parameter, Mapping) and isinstance(parameter.get("value"), str):
            values[str(parameter.get("name"))] = str(parameter["value"])
    return values


def _statuses(status: Json) -> Mapping[str, Json]:
    """Nodes by id; Argo packs them where a Workflow would grow beyond a megabyte."""
    packed = status.get("compressedNodes")
    if packed:
        unpacked: Mapping[str, Json] = json.loads(gzip.decompress(base64.b64decode(packed)))
        return unpacked
    nodes: Mapping[str, Json] = status.get("nodes") or {}
    return nodes


def _moment(text: str | None) -> datetime.datetime | None:
    """A time; None for Go's zero, which a node has that did not begin or end."""
    if not text:
        return None
    moment = datetime.datetime.fromisoformat(text)
    return moment if moment.year > 1970 else None
