"""A compiled pipeline that KFP's own backend runs as its SDK documents it.

Read beside kubeflow/pipelines 2.17.0, backend/src/v2, which fails, or gives other values,
where a pipeline uses some of what its SDK offers. Each function here gives the pipeline
in a form that means the same and avoids one of these faults; the result is still plain
KFP. docs/kfp.md lists the faults, each with its place in that source.
`catalog/dataflow.yaml` names the features; what has no such form is refused by the
feature table.

All functions change the document that they are given."""

import copy
import json
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

from rekindle.ir import scripts
from rekindle.ir.dataflow import has_shell
from rekindle.ir.edit.rewrite import component_of, ensured, executors_of
from rekindle.ir.graph import AnyNode, FromInput, Graph, Retry
from rekindle.ir.origin import known_inputs
from rekindle.ir.placeholders import INPUT_IN_TEXT, RUN_FACTS, mapped
from rekindle.ir.scopes import absent_artifacts, absent_parameters, scopes
from rekindle.protojson import Json

_TEXT_SCRIPT = 'mkdir -p "$(dirname "$1")" && printf %s "$0" > "$1"'
_SHELL_IMAGE = "python:3.11"
_PARTS = ("command", "args")
_WRITES_SOURCE = 'printf "%s" "$0" > "$program_path/ephemeral_component.py"'
# above this many bytes a source is packed, long before it reaches the limit of Argo
_LONG_SOURCE = 32_768
_FACT = re.compile(r"\{\{\$\.(" + "|".join(RUN_FACTS) + r")\}\}")
_ASKED = re.compile(r'"IfPresent": \{"InputName": "([^"]+)"')
# what Argo, Kubernetes (`$$` and `$(NAME)`) or the database of KFP changes or refuses
_CHANGED = re.compile(r"\{\{|\$\$|\$\([\w.-]+\)|[\U00010000-\U0010ffff]")


def without_absent_inputs(spec: Json, graph: Graph, arguments: Mapping[str, Any]) -> list[str]:
    """Take out what binds an input to nothing.

    Inputs of the pipeline that nothing reads any more go, too: KFP refuses a value for one
    that is not there, and would lose one for an input that is not read. Returned are the
    names of those that are read elsewhere: a value given later would arrive only there.

    KFP's driver gives a nested pipeline null for an optional input that its task does not
    name, and fails at one that it names and that has no value. What kfp makes of a
    condition, a loop or an exit handler has no optional inputs: there, the input itself
    goes."""
    no_longer_read: set[str] = set()
    for node, scope in scopes(graph, known_inputs(graph, arguments)):
        absent = {*absent_artifacts(node, scope), *absent_parameters(node, scope)}
        if not absent:
            continue
        task = _task_of_its_own(spec, node.path)
        needed = {name for name in absent if not _is_optional(node, name)}
        component = _component_of_its_own(spec, task) if needed else {}
        for kind in ("parameters", "artifacts"):
            for name in absent & set(task["inputs"].get(kind) or ()):
                del task["inputs"][kind][name]
                if name in needed:
                    del component["inputDefinitions"][kind][name]
        if "/" not in node.path:
            no_longer_read |= _read_of_pipeline(node, absent)
    if not no_longer_read:
        return []
    read_elsewhere = no_longer_read & _inputs_read(spec["root"]["dag"])
    for name in no_longer_read - read_elsewhere:
        del spec["root"]["inputDefinitions"]["parameters"][name]
    return sorted(read_elsewhere)


def _read_of_pipeline(node: AnyNode, names: Container[str]) -> set[str]:
    """The inputs of the Dag around a node that these parameters of it are bound to."""
    bindings = [node.parameters[name] for name in node.parameters if name in names]
    return {binding.name for binding in bindings if isinstance(binding, FromInput)}


def _inputs_read(dag: Json) -> set[str]:
    """The parameters of a Dag that its tasks are bound to."""
    return {
        binding["componentInputParameter"]
        for task in dag["tasks"].values()
        for binding in ((task.get("inputs") or {}).get("parameters") or {}).values()
        if "componentInputParameter" in binding
    }


def _is_optional(node: AnyNode, name: str) -> bool:
    if name in node.inputs.artifacts:
        return node.inputs.artifacts[name].optional
    return node.inputs.parameters[name].optional


def with_steps_for_texts(spec: Json, settings: Sequence[Json]) -> None:
    """Have a step of its own make each f-string that goes to a nested pipeline.

    `settings` are the documents behind the pipeline.

    KFP fills the placeholders in it where a container starts, and nowhere before: the
    nested pipeline would compare and hand on the placeholders."""
    texts = 0
    for dag in _dags(spec):
        for task_name, task in list(dag["tasks"].items()):
            component = spec["components"][task["componentRef"]["name"]]
            if "dag" not in component:
                continue
            for name, binding in _constants(task):
                text = binding["runtimeValue"]["constant"]
                if not isinstance(text, str) or "{{$" not in text or _FACT.fullmatch(text):
                    continue
                texts += 1
                text = text.replace("{{$.pipeline_task_name}}", task_name)
                maker = _free_name(f"text-for-{task_name}", dag["tasks"])
                component_name = f"rekindle-text-{texts}"
                label = _label_with_a_shell(spec)
                image = executors_of(spec)[label]["container"]["image"] if label else _SHELL_IMAGE
                dag["tasks"][maker] = _text_maker(spec, task, text, component_name, maker, image)
                _share_pull_secrets(settings, label, f"exec-{component_name}")
                task["inputs"]["parameters"][name] = {
                    "taskOutputParameter": {"producerTask": maker, "outputParameterKey": "Output"}
                }
                task["dependentTasks"] = sorted({*(task.get("dependentTasks") or ()), maker})


def _text_maker(spec: Json, task: Json, text: str, component: str, name: str, image: str) -> Json:
    """The task that makes `text`, and its component and executor in the pipeline."""
    bindings = task["inputs"]["parameters"]
    read_inputs = dict.fromkeys(INPUT_IN_TEXT.findall(text))
    inputs = {read: copy.deepcopy(bindings[read]) for read in read_inputs}
    # the text of a value is what an input of type STRING receives
    kinds = {read: {"parameterType": "STRING"} for read in inputs}
    spec["components"][f"comp-{component}"] = {
        "executorLabel": f"exec-{component}",
        "inputDefinitions": {"parameters": kinds},
        "outputDefinitions": {"parameters": {"Output": {"parameterType": "STRING"}}},
    }
    executors_of(spec)[f"exec-{component}"] = {
        "container": {
            "image": image,
            "command": ["sh", "-ec", _TEXT_SCRIPT],
            "args": [text, "{{$.outputs.parameters['Output'].output_file}}"],
        }
    }
    producers = [_producer(binding) for binding in inputs.values()]
    maker: Json = {
        "cachingOptions": {"enableCache": True},
        "componentRef": {"name": f"comp-{component}"},
        "inputs": {"parameters": inputs},
        "taskInfo": {"name": name},
    }
    waits_for = sorted({producer for producer in producers if producer})
    if waits_for:
        maker["dependentTasks"] = waits_for
    return maker


def _producer(binding: Json) -> str:
    return str((binding.get("taskOutputParameter") or {}).get("producerTask") or "")


def _label_with_a_shell(spec: Json) -> str:
    """The executor of a step of the pipeline whose image is known to have a shell; ""
    where there is none."""
    for label, container in _containers(spec):
        if (container.get("command") or [""])[0] == "sh" and "{{$" not in container["image"]:
            return label
    return ""


def _share_pull_secrets(settings: Sequence[Json], label: str, new_label: str) -> None:
    """Let an executor pull the image of another one, which may be in a private registry."""
    for by_label in settings_by_label(settings):
        secrets = (by_label.get(label) or {}).get("imagePullSecret") or []
        # the name of a secret may be an input that is not there for the other step
        named = [secret for secret in secrets if not _reads_inputs(secret)]
        if named:
            by_label[new_label] = {"imagePullSecret": copy.deepcopy(named)}


def _reads_inputs(secret: Json) -> bool:
    name = secret.get("secretNameParameter") or {}
    return any(name.get(key) for key in ("componentInputParameter", "taskOutputParameter"))


def with_names_of_importers(spec: Json) -> None:
    """Call each importer as its task: KFP records it under its display name, and does not
    find it where another step reads its artifact."""
    for dag in _dags(spec):
        for name, task in dag["tasks"].items():
            label = spec["components"][task["componentRef"]["name"]].get("executorLabel")
            if (executors_of(spec).get(label) or {}).get("importer"):
                ensured(task, "taskInfo")["name"] = name


def with_facts_as_inputs(spec: Json) -> None:
    """Make each fact of the run that stands inside a text an input of its own.

    KFP fills a fact where it is the whole value of an input, and nowhere else."""
    for label, container in _containers(spec):
        facts = [fact for word in _words(container) for fact in _FACT.findall(word)]
        _change_words(container, _facts_as_inputs)
        with_facts_of(spec, label, facts)
    for dag in _dags(spec):
        for task in dag["tasks"].values():
            if "dag" not in spec["components"][task["componentRef"]["name"]]:
                _read_facts_in_constants(task)


def with_facts_of(spec: Json, label: str, facts: Sequence[str]) -> None:
    """Make facts of the run inputs of an executor, by the names that `input_of_fact` gives."""
    unique_facts = dict.fromkeys(facts)
    for component in _components_with(spec, label):
        _declare(component, [input_of_fact(fact) for fact in unique_facts])
    for task in list(_tasks_with(spec, label)):
        _bind_facts(task, unique_facts)


def _read_facts_in_constants(task: Json) -> None:
    for _, binding in list(_constants(task)):
        runtime_value = binding["runtimeValue"]
        value = runtime_value["constant"]
        if isinstance(value, str) and _FACT.fullmatch(value):
            continue
        facts = _facts_in(value)
        runtime_value["constant"] = _mapped_texts(value, _facts_as_inputs)
        _bind_facts(task, facts)


def with_root(spec: Json, root: str) -> None:
    """Write the place of artifacts, which KFP never fills in, wherever it is asked for."""
    if not root:
        return

    def filled(text: str) -> str:
        return text.replace("{{$.pipeline_root}}", root)

    for dag in _dags(spec):
        for task in dag["tasks"].values():
            for _, binding in _constants(task):
                value = binding["runtimeValue"]["constant"]
                binding["runtimeValue"]["constant"] = _mapped_texts(value, filled)
    for _, container in _containers(spec):
        _change_words(container, filled)


def _facts_in(value: Any) -> dict[str, None]:
    facts = dict[str, None]()

    def note(text: str) -> str:
        facts.update(dict.fromkeys(_FACT.findall(text)))
        return text

    _mapped_texts(value, note)
    return facts


def _facts_as_inputs(text: str) -> str:
    return _FACT.sub(_reading_input, text)


def _mapped_texts(value: Any, change: Callable[[str], str]) -> Any:
    return mapped(value, lambda leaf: change(leaf) if isinstance(leaf, str) else leaf)


def input_of_fact(fact: str) -> str:
    """The input that a fact of the run becomes."""
    return f"rekindle-{fact.replace('_', '-')}"


def _reading_input(match: re.Match[str]) -> str:
    return "{{$.inputs.parameters['" + input_of_fact(match[1]) + "']}}"


def _bind_facts(task: Json, facts: Mapping[str, None]) -> None:
    for fact in facts:
        parameters = ensured(ensured(task, "inputs"), "parameters")
        parameters[input_of_fact(fact)] = {"runtimeValue": {"constant": f"{{{{$.{fact}}}}}"}}


def _declare(component: Json, names: Sequence[str]) -> None:
    """Give a component more inputs, of type STRING."""
    for name in names:
        inputs = ensured(ensured(component, "inputDefinitions"), "parameters")
        inputs[name] = {"parameterType": "STRING", "isOptional": True}


def with_joined_texts(spec: Json) -> None:
    """Join what a ConcatPlaceholder joins: KFP hands the JSON of it to the program."""
    for _, container in _containers(spec):
        _change_words(container, _joined_argument)


def _joined_argument(word: str) -> str:
    if not word.startswith(('{"Concat": ', '{"IfPresent": ')):
        return word
    joined = _joined(json.loads(word))
    return joined if isinstance(joined, str) else json.dumps(joined)


def _joined(node: Any) -> Any:
    """A node of an argument's JSON with texts in place of each Concat."""
    match node:
        case {"Concat": list(items)}:
            return "".join(str(_joined(item)) for item in items)
        case {"IfPresent": condition}:
            branches = {name: _joined(branch) for name, branch in condition.items()}
            return {"IfPresent": branches}
        case list():
            return [_joined(item) for item in node]
        case _:
            return node


def with_defaults_of_arguments(spec: Json) -> None:
    """Bind the defaults that the arguments of a container ask for: KFP's driver, which
    fills them in, knows of no defaults."""
    for label, container in _containers(spec):
        words = _words(container)
        # an IfPresent counts a default as a value
        read = {
            name for word in words for name in (*INPUT_IN_TEXT.findall(word), *_ASKED.findall(word))
        }
        for component in _components_with(spec, label):
            declared = (component.get("inputDefinitions") or {}).get("parameters") or {}
            defaults = {
                name: port["defaultValue"]
                for name, port in declared.items()
                if name in read and port.get("defaultValue") is not None
            }
            for task in _tasks_of(spec, component):
                for name, default in defaults.items():
                    parameters = ensured(ensured(task, "inputs"), "parameters")
                    parameters.setdefault(name, {"runtimeValue": {"constant": default}})


def with_waits_for_producers(spec: Json) -> None:
    """Have each task wait for the tasks whose outputs it reads.

    KFP's SDK does not write that down where an output sizes a machine or names an image,
    and its backend starts both at once: the driver of the reader does not find the output
    (argocompiler/dag.go: depends; driver/resolve.go: resolveUpstreamParameters)."""
    for dag in _dags(spec):
        for task in dag["tasks"].values():
            bindings = ((task.get("inputs") or {}).get("parameters") or {}).values()
            producers = {_producer(binding) for binding in bindings} - {""}
            waits_for = set(task.get("dependentTasks") or ())
            # one that runs whatever became of others waits for what its author says
            if producers - waits_for and not (task.get("triggerPolicy") or {}).get("strategy"):
                task["dependentTasks"] = sorted(producers | waits_for)


def with_ends_of_dags(spec: Json) -> None:
    """Keep the steps of branches that a OneOf chooses from, and of exit handlers whose
    final status is read, out of the cache.

    KFP's launcher alone marks the end of a Dag, and does not run for what is cached;
    without that mark the OneOf finds no branch that ran, and the exit task reads RUNNING.
    A OneOf that no task reads, but the pipeline returns, is never resolved."""
    read_outputs = _read_outputs(spec)
    for component_name, dag in _named_dags(spec):
        outputs_of_dag = {output for name, output in read_outputs if name == component_name}
        for name in (*_chosen_branches(dag, outputs_of_dag), *_watched_dags(spec, dag)):
            _leave_out_of_cache(spec, dag["tasks"][name])


def _named_dags(spec: Json) -> Iterator[tuple[str, Json]]:
    """Every Dag with tasks, by the name of its component; "" is that of the root."""
    for name, component in {"": spec["root"], **(spec.get("components") or {})}.items():
        dag = component.get("dag") or {}
        if dag.get("tasks"):
            yield name, dag


def _read_outputs(spec: Json) -> set[tuple[str, str]]:
    """The outputs that some task reads: the component that has them, and their name. Also
    those inside of it that they come from."""
    waiting: list[tuple[str, str]] = []
    for dag in _dags(spec):
        for task in dag["tasks"].values():
            for producer, output in _outputs_read_by(task):
                waiting.append((_component_name(dag, producer), output))
    read = set[tuple[str, str]]()
    while waiting:
        component_name, output = waiting.pop()
        if (component_name, output) in read:
            continue
        read.add((component_name, output))
        inner_dag = spec["components"][component_name].get("dag") or {}
        for producer, inner_output in _sources_of(inner_dag, output):
            waiting.append((_component_name(inner_dag, producer), inner_output))
    return read


def _component_name(dag: Json, task_name: str) -> str:
    return str(dag["tasks"][task_name]["componentRef"]["name"])


def _outputs_read_by(task: Json) -> Iterator[tuple[str, str]]:
    """The tasks beside a task that it reads, and which output of them."""
    inputs = task.get("inputs") or {}
    for binding in (inputs.get("parameters") or {}).values():
        source = binding.get("taskOutputParameter")
        if source:
            yield source["producerTask"], source["outputParameterKey"]
    for binding in (inputs.get("artifacts") or {}).values():
        source = binding.get("taskOutputArtifact")
        if source:
            yield source["producerTask"], source["outputArtifactKey"]


def _sources_of(dag: Json, output: str) -> Iterator[tuple[str, str]]:
    """The tasks of a Dag that an output of it comes from, and which output of them."""
    outputs = dag.get("outputs") or {}
    parameter = (outputs.get("parameters") or {}).get(output) or {}
    selectors = list((parameter.get("valueFromOneof") or {}).get("parameterSelectors") or ())
    if parameter.get("valueFromParameter"):
        selectors.append(parameter["valueFromParameter"])
    for selector in selectors:
        yield selector["producerSubtask"], selector["outputParameterKey"]
    artifact = (outputs.get("artifacts") or {}).get(output) or {}
    for selector in artifact.get("artifactSelectors") or ():
        yield selector["producerSubtask"], selector["outputArtifactKey"]


def _watched_dags(spec: Json, dag: Json) -> Iterator[str]:
    """The tasks that are Dags, and whose final status another one reads."""
    for task in dag["tasks"].values():
        for binding in ((task.get("inputs") or {}).get("parameters") or {}).values():
            name = (binding.get("taskFinalStatus") or {}).get("producerTask")
            if name and "dag" in spec["components"][dag["tasks"][name]["componentRef"]["name"]]:
                yield name


def _chosen_branches(dag: Json, read_outputs: Container[str]) -> Iterator[str]:
    """The tasks that those outputs of a Dag that are read choose from."""
    outputs = dag.get("outputs") or {}
    for name in (*(outputs.get("parameters") or ()), *(outputs.get("artifacts") or ())):
        branches = [task_name for task_name, _ in _sources_of(dag, name)]
        if len(branches) > 1 and name in read_outputs:
            yield from branches


def _leave_out_of_cache(spec: Json, task: Json) -> None:
    component = spec["components"][task["componentRef"]["name"]]
    if "dag" in component:
        for inner in ((component["dag"] or {}).get("tasks") or {}).values():
            _leave_out_of_cache(spec, inner)
    else:
        (task.get("cachingOptions") or {}).pop("enableCache", None)


def with_final_status(spec: Json) -> None:
    """Have Python components read how others ended as the SDK documents it."""
    for label, container in _containers(spec):
        if "--executor_input" not in (container.get("args") or ()):
            continue
        for component in _components_with(spec, label):
            declared = (component.get("inputDefinitions") or {}).get("parameters") or {}
            names = [n for n, p in declared.items() if p["parameterType"] == "TASK_FINAL_STATUS"]
            if names:
                container["command"] = [*scripts.telling_status(names), *container["command"]]


def with_retries_in_pods(spec: Json, settings: Sequence[Json], graph: Graph) -> None:
    """Run a failed command again in its pod, as often as its task says.

    `settings` are the documents behind the pipeline.

    KFP 2.17.0 installs a ConfigMap of Argo under which a container that exits with an
    error is not retried, only a pod that vanishes."""
    retried: dict[str, dict[Retry, list[Json]]] = {}
    for step in graph.steps():
        if step.distribution is not None or not has_shell(step.container):
            continue
        label = component_of(spec, step)["executorLabel"]
        task = task_at(spec, step.path)
        tasks = retried.setdefault(label, {}).setdefault(step.retry, [])
        if not any(task is known for known in tasks):
            tasks.append(task)
    for label, tasks_by_retry in retried.items():
        as_written = copy.deepcopy(executors_of(spec)[label])
        for number, (retry, tasks) in enumerate(tasks_by_retry.items()):
            if number:
                _give_executor(spec, settings, tasks, as_written)
            if retry.count:
                name = tasks[0]["componentRef"]["name"]
                executor = executors_of(spec)[spec["components"][name]["executorLabel"]]
                container = executor["container"]
                container["command"] = [*scripts.retrying(retry), *container["command"]]


def _give_executor(
    spec: Json, settings: Sequence[Json], tasks: Sequence[Json], executor: Json
) -> None:
    """Give tasks an executor of their own, with the settings of the one that they had."""
    by_old_name: dict[str, str] = {}
    label = spec["components"][tasks[0]["componentRef"]["name"]]["executorLabel"]
    new_label = _free_name(label, executors_of(spec))
    executors_of(spec)[new_label] = copy.deepcopy(executor)
    for by_label in settings_by_label(settings):
        if label in by_label:
            by_label[new_label] = copy.deepcopy(by_label[label])
    for task in tasks:
        name = task["componentRef"]["name"]
        if name not in by_old_name:
            by_old_name[name] = _free_name(name, spec["components"])
            component = copy.deepcopy(spec["components"][name])
            spec["components"][by_old_name[name]] = {**component, "executorLabel": new_label}
        task["componentRef"]["name"] = by_old_name[name]


def with_packed_sources(spec: Json) -> None:
    """Pack the sources of Python components that KFP or Argo would not leave alone.

    Argo fills in what stands between two braces. Kubernetes reads `$$` as `$`, and fills
    in `$(NAME)`: KFP hands the source on in arguments of pods. Argo moves a template over
    131,072 bytes to a ConfigMap that KFP's roles do not allow, and KFP's database takes no
    characters of four bytes."""
    for _, container in _containers(spec):
        command = container.get("command") or []
        if len(command) < 4 or command[-4:-2] != ["sh", "-ec"] or _WRITES_SOURCE not in command[-2]:
            continue
        source = command[-1]
        if "{{$" in source:  # KFP fills it in, and is meant to
            continue
        if len(source) > _LONG_SOURCE or _CHANGED.search(source):
            container["command"] = [*command[:-2], scripts.UNPACK, scripts.packed(source)]


# finding one's way in the document


def task_at(spec: Json, path: str) -> Json:
    """The task of a node, by its path in the Graph."""
    dag = spec["root"]["dag"]
    *outer, last = path.split("/")
    for name in outer:
        dag = spec["components"][dag["tasks"][name]["componentRef"]["name"]]["dag"]
    task: Json = dag["tasks"][last]
    return task


def _task_of_its_own(spec: Json, path: str) -> Json:
    """The same, in components that no other task shares."""
    *outer, last = path.split("/")
    dag = spec["root"]["dag"]
    for name in outer:
        dag = _component_of_its_own(spec, dag["tasks"][name])["dag"]
    found: Json = dag["tasks"][last]
    return found


def _component_of_its_own(spec: Json, task: Json) -> Json:
    """The component of a task, in a copy where other tasks have it, too."""
    name = task["componentRef"]["name"]
    component: Json = spec["components"][name]
    if sum(1 for _ in _tasks_of(spec, component)) > 1:
        new_name = _free_name(name, spec["components"])
        component = copy.deepcopy(component)
        spec["components"][new_name] = component
        task["componentRef"]["name"] = new_name
    return component


def _dags(spec: Json) -> Iterator[Json]:
    """Every Dag with tasks."""
    for component in [spec["root"], *(spec.get("components") or {}).values()]:
        dag = component.get("dag") or {}
        if dag.get("tasks"):
            yield dag


def _containers(spec: Json) -> Iterator[tuple[str, Json]]:
    """Every container with the label of its executor."""
    for label, executor in list(executors_of(spec).items()):
        if executor.get("container"):
            yield label, executor["container"]


def settings_by_label(settings: Sequence[Json]) -> Iterator[dict[str, Any]]:
    """The settings of executors, for each platform that the documents have some for."""
    for document in settings:
        for platform in (document.get("platforms") or {}).values():
            by_label = ((platform or {}).get("deploymentSpec") or {}).get("executors")
            if by_label:
                yield by_label


def _words(container: Json) -> list[str]:
    """The command and its arguments; a document written by hand may have numbers in them."""
    return [str(word) for part in _PARTS for word in container.get(part) or ()]


def _change_words(container: Json, change: Callable[[str], str]) -> None:
    for part in _PARTS:
        if container.get(part):
            container[part] = [change(str(word)) for word in container[part]]


def _constants(task: Json) -> Iterator[tuple[str, Json]]:
    """The inputs of a task that are written in it."""
    for name, binding in ((task.get("inputs") or {}).get("parameters") or {}).items():
        if "constant" in (binding.get("runtimeValue") or {}):
            yield name, binding


def _components_with(spec: Json, label: str) -> list[Json]:
    components = (spec.get("components") or {}).values()
    return [component for component in components if component.get("executorLabel") == label]


def _tasks_with(spec: Json, label: str) -> Iterator[Json]:
    for component in _components_with(spec, label):
        yield from _tasks_of(spec, component)


def _tasks_of(spec: Json, component: Json) -> Iterator[Json]:
    for dag in _dags(spec):
        for task in dag["tasks"].values():
            if spec["components"][task["componentRef"]["name"]] is component:
                yield task


def _free_name(name: str, taken: Mapping[str, Any]) -> str:
    """`name`, or with the first number behind it that is free."""
    if name not in taken:
        return name
    number = 2
    while f"{name}-{number}" in taken:
        number += 1
    return f"{name}-{number}"
