"""How much of a pipeline Argo takes.

KFP writes what a driver has to know into the arguments of its template: the component, the
task, the container and the settings of Kubernetes, each as JSON; its driver writes the
pod of a step, with its inputs and arguments, into the template of that. Argo 4 moves one
over 131,072 bytes to a ConfigMap (createWorkflowPod in argo-workflows 4.0.5,
workflow/controller/workflowpod.go), and the roles of KFP 2.17.0 do not let it: the step
fails, and all its tries fail alike. So what is too large is refused when it is compiled.
What steps hand on while they run is not known here."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rekindle.errors import Problem
from rekindle.ir.edit.backend import settings_by_label, task_at
from rekindle.ir.edit.rewrite import executors_of
from rekindle.ir.graph import Graph, Step
from rekindle.ir.origin import known_inputs, known_values
from rekindle.platforms.feature_checks import beyond
from rekindle.protojson import Json, text_of

MOST_BYTES = 131_072
# what else stands in the template of a driver: its options, variables and outputs
_FRAME_BYTES = 6_144
# the same of the template of a step
_FRAME_OF_STEP_BYTES = 4_096
_FIX = "read what is large from a file or an artifact in the step, or divide it"


def problems(
    spec: Json, settings: Sequence[Json], graph: Graph, arguments: Mapping[str, Any]
) -> Iterator[Problem]:
    """What no template has room for: tasks, and the pipeline itself with its arguments."""
    yield from _problems_of_drivers(spec, settings)
    inputs_of_dags = known_inputs(graph, arguments)
    for step in graph.steps():
        size = _size_of_pod(spec, step, known_values(step, inputs_of_dags))
        if size > MOST_BYTES:
            what = f"with its inputs it makes {_of_size(size)}"
            yield beyond("kubeflow", step.path, step.where, what, _FIX)


def _problems_of_drivers(spec: Json, settings: Sequence[Json]) -> Iterator[Problem]:
    size = _size_in_template(spec["root"])
    if size > MOST_BYTES:
        what = f"its tasks and arguments make {_of_size(size)}"
        yield beyond("kubeflow", "", "root", what, _FIX)
    settings_of: dict[str, Json] = {}
    for by_label in settings_by_label(settings):
        settings_of |= by_label
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


def _of_size(size: int) -> str:
    return f"a template of {size:,} bytes for Argo, which has room for {MOST_BYTES:,}"


def _size_in_template(*parts: Mapping[str, Any]) -> int:
    """Bytes of a driver's template with these, each JSON in a text of JSON."""
    texts = [text_of(dict(part)) for part in parts]
    return len(text_of(texts).encode()) + _FRAME_BYTES


def _size_of_pod(spec: Json, step: Step, inputs: Mapping[str, Any]) -> int:
    """Bytes of the template of a step, which has its pod as a text: the command with its
    inputs as JSON, and the arguments with the inputs in them."""
    component = spec["components"][task_at(spec, step.path)["componentRef"]["name"]]
    container = executors_of(spec)[component["executorLabel"]]["container"]
    values = {name: value for name, value in inputs.items() if value is not None}
    words = [str(word) for part in ("command", "args") for word in container.get(part) or ()]
    for name, value in values.items():
        text = value if isinstance(value, str) else text_of(value)
        placeholder = "{{$.inputs.parameters['" + name + "']}}"
        words = [word.replace(placeholder, text) for word in words]
    executor_input = _json_of_proto({"inputs": {"parameterValues": values}})
    pod = text_of([executor_input, _json_of_proto(component), *words])
    return len(text_of([pod]).encode()) + _FRAME_OF_STEP_BYTES


def _json_of_proto(value: Any) -> str:
    """JSON as protojson of Go writes it, which escapes less than `text_of`."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
