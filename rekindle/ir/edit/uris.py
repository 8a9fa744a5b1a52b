"""Artifacts as strings: where an artifact lies, as a parameter, for steps that must not
get its files.

KFP copies every input artifact of a task into its pod before the container starts
(downloadArtifacts in kubeflow/pipelines, backend/src/v2/component/launcher_v2.go), and
has no way to pass its URI. So a component that is not to get the files gets a STRING
parameter `rekindle-place-NAME` in place of each input artifact. The component that makes
the artifact gets one more output parameter of that name, written after its own command by
a few lines of `sh` (which the image needs, and `sed`); an importer's URI is passed on as
it is. The parameter takes the artifact's route through nested pipelines and branches.
What has no single place (OneOf, what a loop collects, lists) is refused."""

import copy
import json
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from rekindle.errors import UnsupportedError
from rekindle.protojson import Json

PREFIX = "rekindle-place-"
Binding: TypeAlias = Json
"""What an input is bound to, or an output of a Dag comes from."""
Task: TypeAlias = Json

# KFP gives no placeholder for the file that an executor reports in, but ExecutorInput
# ends with it. `told` is that report as it stands, because the image may have nothing to
# read JSON with.
_TELL = Path(__file__).with_name("tell.sh").read_text(encoding="utf-8")


def with_places(spec: Mapping[str, Any], labels: Container[str]) -> Json:
    """The pipeline with strings in place of the input artifacts of the executors in
    `labels`; UnsupportedError for an artifact that has no single place."""
    routes = _Routes(copy.deepcopy(dict(spec)), labels)
    for name, component in routes.components.items():
        if component.get("executorLabel") in labels:
            routes.replace_artifacts(name, component)
    return routes.spec


def read_place(text: str) -> tuple[str, Json]:
    """URI and metadata of an artifact from its place: a URI, or JSON that its producer wrote."""
    if not text.startswith("{"):
        return text, {}
    told_place = json.loads(text)
    reports = told_place.get("told", {}).get("artifacts", {})
    reported = reports.get(told_place.get("name"), {})
    artifact = (reported.get("artifacts") or [{}])[0]
    metadata = {**told_place.get("metadata", {}), **(artifact.get("metadata") or {})}
    return str(artifact.get("uri") or told_place["uri"]), metadata


def as_place(uri: str, metadata: Mapping[str, Any]) -> str:
    """What `read_place` reads."""
    return json.dumps({"uri": uri, "metadata": dict(metadata)}, sort_keys=True)


class _Routes:
    """Lays parameters along the routes of artifacts. A Dag goes by the name of its
    component, the pipeline itself by ""."""

    def __init__(self, spec: Json, labels: Container[str]) -> None:
        self.spec = spec
        self.labels = labels
        self.components: dict[str, Json] = spec["components"]
        self.executors: dict[str, Json] = spec["deploymentSpec"]["executors"]
        self.telling: set[tuple[str, str]] = set()

    def replace_artifacts(self, name: str, component: Json) -> None:
        inputs = component.get("inputDefinitions") or {}
        for artifact, definition in (inputs.get("artifacts") or {}).items():
            where = f"components.{name}.inputDefinitions.artifacts.{artifact}"
            if definition.get("isArtifactList"):
                _refuse("a step on several nodes reads a list of artifacts", where)
            self.input_of(name, artifact)
        inputs.pop("artifacts", None)
        for _, _, task in self.callers(name):
            task.get("inputs", {}).pop("artifacts", None)

    def callers(self, component: str) -> Iterator[tuple[str, str, Task]]:
        """Every task that is `component`: its Dag, its name, and the task."""
        for dag in ("", *self.components):
            for name, task in self.tasks(dag).items():
                if task["componentRef"]["name"] == component:
                    yield dag, name, task

    def tasks(self, dag: str) -> dict[str, Task]:
        component = self.components[dag] if dag else self.spec["root"]
        return dict(component.get("dag", {}).get("tasks", {}))

    def input_of(self, component: str, artifact: str) -> Binding:
        """The place of an input artifact as an input of the component, bound by every caller."""
        definitions = self.components[component]["inputDefinitions"]
        parameters = definitions.setdefault("parameters", {})
        if PREFIX + artifact not in parameters:
            parameter: Json = {"parameterType": "STRING"}
            if definitions["artifacts"][artifact].get("isOptional"):
                parameter["isOptional"] = True
            parameters[PREFIX + artifact] = parameter
            for dag, name, task in self.callers(component):
                self.bind(dag, name, task, artifact)
        return {"componentInputParameter": PREFIX + artifact}

    def bind(self, dag: str, name: str, task: Task, artifact: str) -> None:
        component = f"components.{dag}" if dag else "root"
        where = f"{component}.dag.tasks.{name}.inputs.artifacts.{artifact}"
        source = task.get("inputs", {}).get("artifacts", {}).get(artifact)
        if source is None:
            return
        if task.get("artifactIterator", {}).get("items", {}).get("inputArtifact") == artifact:
            _refuse("a step on several nodes reads one artifact of a list", where)
        output = source.get("taskOutputArtifact")
        if output:
            producer = output["producerTask"]
            binding = self.output_of(dag, producer, output["outputArtifactKey"], where)
        elif dag:
            binding = self.input_of(dag, source["componentInputArtifact"])
        else:
            return  # an optional artifact of the pipeline itself, which no run can give
        task["inputs"].setdefault("parameters", {})[PREFIX + artifact] = binding

    def output_of(self, dag: str, name: str, artifact: str, where: str) -> Binding:
        """The place of what a task of `dag` makes, as a binding for its siblings."""
        task = self.tasks(dag)[name]
        if "parameterIterator" in task or "artifactIterator" in task:
            _refuse("a step on several nodes reads what a loop collects", where)
        component = task["componentRef"]["name"]
        output = {"producerTask": name, "outputParameterKey": PREFIX + artifact}
        binding: Binding = {"taskOutputParameter": output}
        if "dag" in self.components[component]:
            return self.inside(component, task, artifact, where) or binding
        label = self.components[component]["executorLabel"]
        if "importer" in self.executors[label]:
            return self.imported(self.executors[label]["importer"], component, task, where)
        self.tell(label, artifact)
        return binding

    def inside(self, component: str, task: Task, artifact: str, where: str) -> Binding | None:
        """None if the Dag has an output that says it; else what an importer inside stands for."""
        dag = self.components[component]["dag"]
        selectors = dag["outputs"]["artifacts"][artifact]["artifactSelectors"]
        if len(selectors) != 1:
            _refuse("a step on several nodes reads one of several artifacts (OneOf)", where)
        producer = selectors[0]["producerSubtask"]
        inner = self.output_of(component, producer, selectors[0]["outputArtifactKey"], where)
        if "componentInputParameter" in inner:
            return self.from_outside(component, task, inner["componentInputParameter"])
        if "runtimeValue" in inner:
            return inner
        source = inner["taskOutputParameter"]
        self.define_output(component, artifact)
        parameters = dag["outputs"].setdefault("parameters", {})
        parameters[PREFIX + artifact] = {
            "valueFromParameter": {
                "producerSubtask": source["producerTask"],
                "outputParameterKey": source["outputParameterKey"],
            }
        }
        return None

    def from_outside(self, component: str, task: Task, parameter: str) -> Binding:
        """What a parameter of a component is bound to by a task, or its default."""
        binding = task.get("inputs", {}).get("parameters", {}).get(parameter)
        if binding is not None:
            return copy.deepcopy(dict(binding))
        definition = self.components[component]["inputDefinitions"]["parameters"][parameter]
        return {"runtimeValue": {"constant": definition.get("defaultValue", "")}}

    def imported(
        self, importer: Mapping[str, Any], component: str, task: Task, where: str
    ) -> Binding:
        uri = importer["artifactUri"]
        metadata = importer.get("metadata", {})
        if "runtimeParameter" in uri:
            if metadata:
                _refuse("an importer has metadata, and a parameter for its URI", where)
            return self.from_outside(component, task, uri["runtimeParameter"])
        text = uri["constant"]
        if metadata:
            text = as_place(text, metadata)
        if "{{$" in text:
            _refuse("an importer has placeholders in what it imports", where)
        if text.startswith("oci://"):  # KFP mounts it in pods of its own only
            _refuse("an importer brings an image (oci://)", where)
        return {"runtimeValue": {"constant": text}}

    def tell(self, label: str, artifact: str) -> None:
        """Have an executor say where it put an artifact; a launcher does so by itself."""
        if (label, artifact) in self.telling:
            return
        self.telling.add((label, artifact))
        for name, component in self.components.items():
            if component.get("executorLabel") == label:
                self.define_output(name, artifact)
        if label in self.labels:
            return
        container = self.executors[label]["container"]
        container["command"] = [
            "sh",
            "-c",
            _TELL,
            "{{$}}",
            artifact,
            f"{{{{$.outputs.artifacts['{artifact}'].uri}}}}",
            f"{{{{$.outputs.parameters['{PREFIX}{artifact}'].output_file}}}}",
            *container.get("command", []),
        ]

    def define_output(self, component: str, artifact: str) -> None:
        definitions = self.components[component]["outputDefinitions"]
        definitions.setdefault("parameters", {})[PREFIX + artifact] = {"parameterType": "STRING"}


def _refuse(what: str, where: str) -> NoReturn:
    raise UnsupportedError(
        f"{what}, whose place cannot be passed as a string",
        where=where,
        fix="read it in a step on one node, which hands on one artifact",
    )
