"""How much of a pipeline Argo takes.

KFP writes what a driver has to know into the arguments of its template: the component, the
task, the container and the settings of Kubernetes, each as JSON. Argo 4 moves a template
over 131,072 bytes to a ConfigMap (createWorkflowPod in argo-workflows 4.0.5,
workflow/controller/workflowpod.go), and the roles of KFP 2.17.0 do not let it: the step
fails, nine times over. So what is too large is refused when it is compiled. What steps
hand on while they run is not known here."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rekindle.errors import Problem
from rekindle.ir.edit.rewrite import executors_of
from rekindle.platforms.feature_checks import beyond
from rekindle.protojson import Json, text_of

MOST_BYTES = 131_072
# what else stands in the template of a driver: its options, variables and outputs
_FRAME_BYTES = 6_144
_FIX = "read what is large from a file or an artifact in the step, or divide it"


def problems(spec: Json, settings: Sequence[Json]) -> Iterator[Problem]:
    """What no template has room for: tasks, and the pipeline itself with its arguments."""
    size = _size_in_template(spec["root"])
    if size > MOST_BYTES:
        what = f"its tasks and arguments make {_of_size(size)}"
        yield beyond("kubeflow", "", "root", what, _FIX)
    settings_of = _settings_by_label(settings)
    containers = executors_of(spec)
    for where, task in _tasks(spec):
        component = spec["components"][task["componentRef"]["name"]]
        label = component.get("executorLabel", "")
        container = (containers.get(label) or {}).get("container") or {}
        size = _size_in_template(component, task, container, settings_of.get(label) or {})
        if size > MOST_BYTES:
            name = where.rpartition(".")[2]
            yield beyond("kubeflow", name, where, f"it makes {_of_size(size)}", _FIX)


def _tasks(spec: Json) -> Iterator[tuple[str, Json]]:
    parents = {"root": spec["root"]}
    parents |= {f"components.{name}": c for name, c in (spec.get("components") or {}).items()}
    for where, component in parents.items():
        for name, task in ((component.get("dag") or {}).get("tasks") or {}).items():
            yield f"{where}.dag.tasks.{name}", task


def _settings_by_label(settings: Sequence[Json]) -> Mapping[str, Json]:
    by_label: dict[str, Json] = {}
    for document in settings:
        kubernetes = document["platforms"].get("kubernetes") or {}
        by_label |= (kubernetes.get("deploymentSpec") or {}).get("executors") or {}
    return by_label


def _of_size(size: int) -> str:
    return f"a template of {size:,} bytes for Argo, which has room for {MOST_BYTES:,}"


def _size_in_template(*parts: Mapping[str, Any]) -> int:
    """Bytes of a driver's template with these, each JSON in a text of JSON."""
    texts = [text_of(dict(part)) for part in parts]
    return len(text_of(texts).encode()) + _FRAME_BYTES
