"""IR text -> Graph. The IR is walked by its known keys only; anything else is refused by
name, all refusals at once.

Understood is all that KFP 2 writes; which platform can do which of it is not decided
here. Refused: custom jobs, resolvers, schema 2.0, and whatever is unknown. Authority:
pipeline_spec.proto 2.1.0 and the output of the KFP compiler."""

import contextlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any, cast, get_args

import yaml

from rekindle.errors import RequestError, UnsupportedError
from rekindle.ir import condition as conditions
from rekindle.ir import graph as ir
from rekindle.ir.placeholders import parse_value
from rekindle.ir.read.bindings import check_dag, check_references, read_bindings, read_results
from rekindle.ir.read.containers import read_executor
from rekindle.ir.read.raw import NAME, Fields, Refusals, documents, malformed
from rekindle.ir.read.settings import Wishes, read_platforms
from rekindle.ir.values import from_ir
from rekindle.protojson import carried

_TYPES = get_args(ir.ParameterType)
_ALWAYS = "ALL_UPSTREAM_TASKS_COMPLETED"
_MAX_TASKS = 10_000


def read(text: str) -> ir.Graph:
    """The pipeline in `text`, YAML or JSON, with its document of platform settings if it
    has one. UnsupportedError lists all refusals by IR path; RequestError if this is not a
    KFP pipeline."""
    try:
        in_text = documents(text)
    except yaml.YAMLError as error:
        raise RequestError(f"this is neither YAML nor JSON: {error}") from error
    if not 1 <= len(in_text) <= 2:
        raise RequestError(f"a compiled pipeline has one document or two; here are {len(in_text)}")
    spec = in_text[0]
    platform = in_text[1] if len(in_text) == 2 else {}
    refusals = Refusals()
    try:
        wishes, settings = read_platforms(platform, refusals)
        graph = _Reader(spec, wishes, refusals).graph(settings)
    except UnsupportedError as error:
        raise UnsupportedError([*refusals.problems, *error.problems]) from error
    refusals.raise_if_any()
    return graph


class _Reader:
    """One reading: components and executors by name, and the components being expanded."""

    def __init__(self, spec: Any, wishes: Mapping[str, Wishes], refusals: Refusals) -> None:
        self.top = Fields(spec, "", refusals)
        self.refusals = refusals
        self.wishes = wishes
        self.components = dict(self.top.each("components"))
        deployment = self.top.fields("deploymentSpec")
        self.executors = dict(deployment.each("executors"))
        deployment.close()
        self.contents: dict[str, ir.Container | dict[str, Any] | None] = {}
        self.expanding: list[str] = []
        self.tasks = 0

    def graph(self, settings: tuple[ir.Setting, ...]) -> ir.Graph:
        version = self.top.take("schemaVersion", str, "")
        if not version.startswith("2."):
            raise malformed(version, "schema version 2.x", "schemaVersion")
        self.top.take("sdkVersion", str, "")
        info = self.top.fields("pipelineInfo")
        name = info.take("name", str, "")
        display_name = info.take("displayName", str, "")
        info.take("description", str, "")
        if not self.top.has("root"):
            raise malformed(None, "a mapping", "root")
        root = self.top.fields("root")
        inputs, outputs = self.ports(root, at_root=True)
        # files and folders are called so, too
        if name and not NAME.fullmatch(name):
            raise malformed(name, "a plain name", info.at("name"))
        if not name:
            name = re.sub(r"[^\w.()-]+", "-", display_name).strip("-.") or "pipeline"
        graph = ir.Graph(
            name=name,
            inputs=inputs,
            outputs=outputs,
            dag=self.dag(root.fields("dag"), "", inputs, outputs, cache=True),
            pipeline_root=self.top.take("defaultPipelineRoot", str, ""),
            settings=settings,
        )
        self.top.close()
        return graph

    def ports(self, component: Fields, at_root: bool = False) -> tuple[ir.Ports, ir.Ports]:
        """Inputs and outputs of a component; `at_root` of the pipeline itself, whose
        defaults are arguments of a run."""
        ports = []
        for side in ("inputDefinitions", "outputDefinitions"):
            definitions = component.fields(side)
            parameters = {}
            for name, fields in definitions.each("parameters"):
                parameter = _parameter(name, fields, at_root)
                if parameter is not None:
                    parameters[name] = parameter
            artifacts = {n: _artifact(n, f) for n, f in definitions.each("artifacts")}
            ports.append(ir.Ports(parameters, artifacts))
        component.any("taskConfigPassthroughs")  # a setting of the step
        component.refuse("singlePlatformSpecs", "platform settings inside a component")
        return ports[0], ports[1]

    def dag(
        self, fields: Fields, path: str, inputs: ir.Ports, outputs: ir.Ports, cache: bool
    ) -> ir.Dag:
        """The Dag at `path`; `cache` says whether all that is around it allows caching."""
        nodes: dict[str, ir.AnyNode] = {}
        for name, task in fields.each("tasks"):
            node_path = f"{path}/{name}" if path else name
            node = self.node(name, task, node_path, cache)
            if node is not None:
                nodes[name] = node
        dag = ir.Dag(nodes, *read_results(fields.fields("outputs")))
        fields.close()
        if not self.refusals.problems:
            check_dag(dag, fields.where, inputs, outputs)
        return dag

    def node(self, name: str, task: Fields, path: str, cache: bool) -> ir.AnyNode | None:
        """One task; None if it is refused as a whole."""
        self.tasks += 1
        if self.tasks > _MAX_TASKS:
            message = f"the pipelines inside of this one make more than {_MAX_TASKS:,} tasks"
            raise RequestError(message, where=path, fix="use loops, or several pipelines")
        task.fields("taskInfo").take("name", str, "")
        reference = task.fields("componentRef")
        component_name = reference.take("name", str, "")
        if component_name not in self.components or component_name in self.expanding:
            raise malformed(component_name, "the name of a component", reference.at("name"))
        component = self.components[component_name]
        inputs, outputs = self.ports(component)
        condition, always = _trigger(task, inputs)
        shared: dict[str, Any] = {
            "name": name,
            "path": path,
            "where": task.where,
            "inputs": inputs,
            "outputs": outputs,
            "component": component_name.removeprefix("comp-"),
            "condition": condition,
            "after": tuple(map(str, task.take("dependentTasks", list, []))),
            "always": always,
        }
        shared["parameters"], shared["artifacts"] = read_bindings(task.fields("inputs"), inputs)
        self.expanding.append(component_name)
        try:
            if component.has("dag"):
                return self.sub_dag(task, component, shared, cache)
            return self.step(task, component, shared, cache)
        finally:
            self.expanding.pop()
            component.close()
            task.close()

    def sub_dag(self, task: Fields, component: Fields, shared: Any, cache: bool) -> ir.SubDag:
        if "cachingOptions" in task.data:  # absent from the Dag of a condition
            cache = _caching(task)[0] and cache
        content = component.fields("dag")
        dag = self.dag(content, shared["path"], shared["inputs"], shared["outputs"], cache)
        loop = _loop(task)
        retry = _retry(task.fields("retryPolicy"))
        return ir.SubDag(dag=dag, loop=loop, retry=retry, **shared)

    def step(
        self, task: Fields, component: Fields, shared: Any, cache: bool
    ) -> ir.Step | ir.Importer | None:
        label = component.take("executorLabel", str, "")
        if label not in self.executors:
            raise malformed(label, "the name of an executor", component.at("executorLabel"))
        for key in ("parameterIterator", "artifactIterator", "iteratorPolicy"):
            task.refuse(key, "a loop over a single component, which KFP never writes")
        enabled, key = _caching(task)
        retry = _retry(task.fields("retryPolicy"))
        if label not in self.contents:
            self.contents[label] = read_executor(self.executors[label])
        content = self.contents[label]
        if content is None:
            return None
        for name, artifact in shared["outputs"].artifacts.items():
            if artifact.is_list:
                message = f"a component that writes a list of artifacts (`{name}`)"
                where = component.at(f"outputDefinitions.artifacts.{name}")
                fix = "write each in a turn of a loop, and collect them"
                self.refusals.add(message, where, fix)
        node: ir.Step | ir.Importer
        if isinstance(content, dict):
            node = ir.Importer(**content, **shared)
        else:
            wishes = dict(self.wishes.get(label, {}))
            container = self.executors[label].fields("container")
            wishes["settings"] = (
                *wishes.get("settings", ()),
                *_setting(component, "taskConfigPassthroughs"),
                *_setting(container, "lifecycle"),
            )
            node = ir.Step(
                container=content,
                cache=enabled and cache,
                cache_key=key,
                retry=retry,
                **wishes,
                **shared,
            )
        check_references(node, self.executors[label].where, self.refusals)
        if isinstance(node, ir.Step) and node.distribution is not None:
            names = frozenset([*node.inputs.parameters, *node.inputs.artifacts])
            if problems := node.distribution.problems(names, node.where):
                raise RequestError(problems)
        return node


def _setting(fields: Fields, name: str) -> tuple[ir.Setting, ...]:
    if not fields.has(name):
        return ()
    return (ir.Setting(name, fields.any(name), fields.at(name)),)


def _parameter(name: str, fields: Fields, at_root: bool) -> ir.Parameter | None:
    kind = fields.take("parameterType", str, "")
    raw_default = fields.any("defaultValue")
    raw_literals = fields.take("literals", list, [])
    optional = fields.take("isOptional", bool, False)
    fields.take("description", str, "")
    fields.refuse("type", "parameters of schema 2.0", "compile it with kfp 2.x")
    if kind not in _TYPES:
        fields.refusals.add(f"parameters of type {kind or 'none'}", fields.where)
        return None
    type_ = cast("ir.ParameterType", kind)
    try:
        default = from_ir(raw_default, type_)
        literals = tuple(from_ir(value, type_) for value in raw_literals)
    except ValueError as error:
        message = f"the default of `{name}`: {error}"
        raise RequestError(message, where=fields.at("defaultValue")) from error
    if not at_root:
        default = parse_value(default, fields.at("defaultValue"))
    return ir.Parameter(name, type_, optional, default, literals)


def _artifact(name: str, fields: Fields) -> ir.Artifact:
    schema = fields.fields("artifactType")
    title = schema.take("schemaTitle", str, "") or schema.take("instanceSchema", str, "")
    version = schema.take("schemaVersion", str, "")
    fields.take("description", str, "")
    optional = fields.take("isOptional", bool, False)
    return ir.Artifact(name, title, version, optional, fields.take("isArtifactList", bool, False))


def _loop(task: Fields) -> ir.Loop | None:
    at_once = int(task.fields("iteratorPolicy").take("parallelismLimit", float, 0.0))
    inputs = {"parameterIterator": "inputParameter", "artifactIterator": "inputArtifact"}
    for key, input_key in inputs.items():
        if not task.has(key):
            continue
        iterator = task.fields(key)
        item_input = iterator.take("itemInput", str, "")
        source = iterator.fields("items")
        input_name = source.take(input_key, str, "")
        written = source.take("raw", str, "")
        items = input_name or _written_items(written, source.at("raw"))
        return ir.Loop(items, item_input, key == "artifactIterator", at_once)
    return None


def _written_items(text: str, where: str) -> tuple[Any, ...]:
    """The items of a loop over a list that is written in the pipeline."""
    values: Any = None
    with contextlib.suppress(ValueError):
        values = json.loads(text)
    if not isinstance(values, list):
        raise malformed(text, "a list in JSON", where)
    return tuple(parse_value(carried(value), where) for value in values)


def _trigger(task: Fields, inputs: ir.Ports) -> tuple[ir.Condition | None, bool]:
    """The condition, and whether the node runs although something before it failed."""
    policy = task.fields("triggerPolicy")
    strategy = policy.take("strategy", str, "")
    text = policy.take("condition", str, "")
    where = policy.at("condition")
    if strategy not in ("", _ALWAYS, "ALL_UPSTREAM_TASKS_SUCCEEDED"):
        policy.refusals.add(f"the trigger strategy {strategy}", policy.at("strategy"))
    if not text:
        return None, strategy == _ALWAYS
    expression = conditions.parse(text, where)
    types = {name: parameter.type for name, parameter in inputs.parameters.items()}
    conditions.check(expression, types, where)
    return ir.Condition(text, expression), strategy == _ALWAYS


def _caching(task: Fields) -> tuple[bool, str]:
    options = task.fields("cachingOptions")
    return options.take("enableCache", bool, False), options.take("cacheKey", str, "")


def _retry(fields: Fields) -> ir.Retry:
    return ir.Retry(
        count=int(fields.take("maxRetryCount", float, 0.0)),
        pause_seconds=_duration(fields, "backoffDuration", 0.0),
        factor=fields.take("backoffFactor", float, 2.0),
        cap_seconds=_duration(fields, "backoffMaxDuration", 3600.0),
    )


def _duration(fields: Fields, key: str, default: float) -> float:
    text = fields.take(key, str, f"{default}s")
    try:
        seconds = float(text.removesuffix("s"))
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise malformed(text, "a duration such as 60s", fields.at(key))
    return seconds
