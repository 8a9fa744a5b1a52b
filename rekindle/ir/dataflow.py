"""Features in how values go from node to node: f-strings, placeholders, loops in loops,
inputs without a value, outputs of what may not have run.

The SDK defines what each means, and a run here keeps to it; KFP's own backend does some
otherwise, or fails at it (platforms/kubeflow/features.yaml says which, with its source).
Their rows are in `catalog/dataflow.yaml`. features.py finds what a node is, this module
what is done with its values, and scopes.py what they stand in."""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rekindle.ir import graph as ir
from rekindle.ir.origin import Origin, known_values
from rekindle.ir.placeholders import (
    INPUT_IN_TEXT,
    RUN_FACTS,
    Argument,
    Concat,
    IfPresent,
    Template,
    references,
    templates,
)
from rekindle.ir.scopes import (
    Scope,
    absent_artifacts,
    absent_parameters,
    is_chosen,
    is_watched,
)

ARGO_TAG = re.compile(
    r"\{\{\s*(=|(item|retries)\s*\}\}|(item|steps|inputs|outputs|pod|workflow|tasks|lastRetry|node)\.)"
)
"""What Argo fills in wherever it stands in a Workflow, or takes no Workflow with: an
expression, or a name that it knows (common.go: GlobalVarValidWorkflowVariablePrefix, and
operator.go: processNodeRetries in argo-workflows 4.0.5)."""
_IN_BRACKETS = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")
# the shells that a command may start with, so that something can stand in front of it
_SHELLS = ("sh", "bash")
_PARAMETERS = ("inputs", "parameters")
_TIMES = ("pipeline_job_create_time_utc", "pipeline_job_schedule_time_utc")
_WRITTEN_INTO_JSON = ("STRING", "LIST", "STRUCT")


def features_of_values(
    node: ir.AnyNode, scope: Scope, loops: Mapping[str, Origin]
) -> Iterator[tuple[str, str]]:
    """The features of a node's values, with their places; `loops` is `loop_origins`."""
    yield from _features_of_facts(node)
    if _is_changed_by_kubernetes(node, scope):
        yield "dollars", node.where
    if any(ARGO_TAG.search(text) for text in _texts_given(node, scope)):
        yield "tags_of_argo", node.where
    if any(True for _ in absent_artifacts(node, scope)):
        yield "absent_inputs", f"{node.where}.inputs"
    if node.always and not is_exit_task(node):
        yield from _features_behind_failures(node, scope)
    yield from _features_of_status(node, scope)
    match node:
        case ir.Step():
            yield from _features_of_required_inputs(node, scope)
            yield from _features_of_texts(node, scope)
            yield from _features_of_arguments(node, scope)
            yield from _features_of_machines(node, scope)
        case ir.Importer():
            yield from _features_of_metadata(node)
            if _is_made_in_run(node):
                yield "uris_of_runs", node.where
        case ir.SubDag():
            yield from _features_of_nested_inputs(node, scope)
            yield from _features_of_choices(node)
            if node.loop is not None:
                yield from _features_of_loop(node, scope, loops)


def _features_of_required_inputs(step: ir.Step, scope: Scope) -> Iterator[tuple[str, str]]:
    """Inputs that a component needs, bound to an optional one that has no value."""
    if scope.is_conditional or step.condition is not None:
        return
    for name, binding in step.parameters.items():
        port = step.inputs.parameters.get(name)
        if port is None or not port.required or not isinstance(binding, ir.FromInput):
            continue
        outer = scope.inputs.parameters.get(binding.name)
        is_absent = binding.name in scope.known and scope.known[binding.name] is None
        if is_absent and not binding.keys and outer is not None and not outer.required:
            yield "required_without_value", f"{step.where}.inputs.parameters.{name}"


def is_exit_task(node: ir.Node) -> bool:
    """Whether a node that runs in any case is the exit task of an ExitHandler.

    The IR has one trigger for that and for `ignore_upstream_failure`. An exit task waits
    for the Dag that kfp calls so."""
    return any(name.startswith("exit-handler-") for name in node.upstream)


# facts of the run


def _features_of_facts(node: ir.AnyNode) -> Iterator[tuple[str, str]]:
    for name, binding in node.parameters.items():
        if not isinstance(binding, ir.Formatted):
            continue
        where = f"{node.where}.inputs.parameters.{name}"
        is_whole = isinstance(binding.value, Template) and len(binding.value.parts) == 1
        for fact in _facts_in(templates(binding.value)):
            yield from _features_of_fact(fact, where, is_whole)
    if isinstance(node, ir.Step):
        for fact in _facts_in(_arguments_of(node.container)):
            yield from _features_of_fact(fact, node.where, False)
        if any(True for value in node.container.env.values() for _ in references(value)):
            yield "placeholders_in_variables", node.where
    if isinstance(node, ir.SubDag) and node.loop is not None:
        items = [] if isinstance(node.loop.items, str) else list(node.loop.items)
        if any(True for _ in _facts_in(templates(items))):
            yield "facts_in_items", node.where


def _features_of_fact(fact: str, where: str, is_whole: bool) -> Iterator[tuple[str, str]]:
    if fact == "pipeline_root":
        yield "root_facts", where
    elif not is_whole:
        yield "facts_in_texts", where
    if fact in _TIMES:
        yield "time_facts", where


def facts_of(container: ir.Container) -> tuple[str, ...]:
    """The facts of the run that a container's command, arguments and variables name."""
    return tuple(dict.fromkeys(_facts_in(_arguments_of(container))))


def _facts_in(arguments: Iterator[Template] | Iterator[Argument]) -> Iterator[str]:
    for argument in arguments:
        for path in references(argument):
            if path[0] == "run" and path[1] in RUN_FACTS:
                yield path[1]


def _arguments_of(container: ir.Container) -> Iterator[Argument]:
    yield from container.command
    yield from container.args
    yield from container.env.values()


def _is_changed_by_kubernetes(node: ir.AnyNode, scope: Scope) -> bool:
    """Whether Kubernetes changes a text that a node is given.

    KFP hands it on in arguments of pods, in which Kubernetes makes one dollar sign of two,
    and fills in `$(NAME)` of the pod's variables."""
    names = {"KFP_POD_NAME", "KFP_POD_UID"}  # of every pod (argocompiler/common.go)
    if isinstance(node, ir.Step):
        names |= node.container.env.keys()
    for text in _texts_given(node, scope):
        if "$$" in text or names & set(_IN_BRACKETS.findall(text)):
            return True
    return False


def _texts_given(node: ir.AnyNode, scope: Scope) -> Iterator[str]:
    """The texts that a node is given before a run: values of its inputs, as far as they are
    known, items of its loop, and what its container says itself."""
    values: list[Any] = []
    for name, port in node.inputs.parameters.items():
        if name not in node.parameters:
            values.append(port.default)
    for binding in node.parameters.values():
        match binding:
            case ir.Constant(value) | ir.Formatted(value):
                values.append(value)
            case ir.FromInput(name, ()):
                values.append(scope.known.get(name))
    if isinstance(node, ir.SubDag) and node.loop is not None:
        values.append(node.loop.items)
    # the source of a Python component is packed; what a launcher gets is escaped
    if isinstance(node, ir.Step) and node.distribution is None:
        values += node.container.env.values()
        if not node.container.source:
            values += [*node.container.command, *node.container.args]
    yield from _texts_in(values)


def _texts_in(value: Any) -> Iterator[str]:
    """The texts in a value or an argument, at any depth."""
    match value:
        case str():
            yield value
        case Template(parts):
            yield from (part for part in parts if isinstance(part, str))
        case Concat(items):
            yield from _texts_in(items)
        case IfPresent(_, then, otherwise):
            yield from _texts_in((*then, *otherwise))
        case list() | tuple():
            for item in value:
                yield from _texts_in(item)
        case dict():
            for pair in value.items():
                yield from _texts_in(pair)


# what may have failed


def _features_behind_failures(node: ir.Node, scope: Scope) -> Iterator[tuple[str, str]]:
    """Of a node with `ignore_upstream_failure`."""
    bindings = [*node.parameters.values(), *node.artifacts.values()]
    if any(isinstance(binding, ir.FromTask) for binding in bindings):
        yield "outputs_of_failures", f"{node.where}.inputs"
    if len(node.upstream) > 1:
        yield "failures_of_several", node.where
    for follower in scope.dag.nodes.values():
        if node.name in follower.upstream:
            yield "steps_behind_ignored_failures", follower.where
    results = [*scope.dag.parameters.values(), *scope.dag.artifacts.values()]
    if any(source.task == node.name for sources in results for source in sources):
        yield "steps_behind_ignored_failures", node.where


# texts


def _features_of_texts(step: ir.Step, scope: Scope) -> Iterator[tuple[str, str]]:
    """F-strings whose values may hold what JSON has to escape.

    Only what reads KFP's ExecutorInput meets them in JSON."""
    reads_json = any(
        ("executor_input",) in references(argument) for argument in _arguments_of(step.container)
    )
    if not step.container.source and not reads_json:
        return
    for name, binding in step.parameters.items():
        # what the component has no input for is an image or a size, without quotation marks
        if not isinstance(binding, ir.Formatted) or name not in step.inputs.parameters:
            continue
        for template in templates(binding.value):
            inputs = [path[2] for path in references(template) if path[0] == "inputs"]
            if any(_may_need_escapes(step, inner, scope) for inner in inputs):
                yield "values_in_texts", f"{step.where}.inputs.parameters.{name}"


def _may_need_escapes(step: ir.Step, name: str, scope: Scope) -> bool:
    """Whether the text of an input may hold a quotation mark, a backslash or a line break."""
    match step.parameters.get(name):
        case ir.FromInput(outer_name, ()) if outer_name in scope.known:
            return _needs_escapes(scope.known[outer_name])
        case ir.Constant(value):
            return _needs_escapes(value)
        case ir.FromInput(outer_name, keys) if outer_name in scope.items:
            return any(_needs_escapes(_member(item, keys)) for item in scope.items[outer_name])
        case ir.FromInput(outer_name):
            port = scope.inputs.parameters.get(outer_name)
        case ir.FromTask(task, output):
            port = scope.dag.nodes[task].outputs.parameters.get(output)
        case _:
            return False
    return port is None or port.type in _WRITTEN_INTO_JSON


def _member(item: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        item = item.get(key) if isinstance(item, Mapping) else None
    return item


def _needs_escapes(value: Any) -> bool:
    if isinstance(value, Template):  # only a run knows it
        return True
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False) != f'"{value}"'
    if isinstance(value, list | dict):
        # the text of it is JSON: any text inside brings its quotation marks
        return '"' in json.dumps(value)
    return False


# arguments of containers


def _features_of_arguments(step: ir.Step, scope: Scope) -> Iterator[tuple[str, str]]:
    container = step.container
    if step.retry.count and step.distribution is None and not has_shell(container):
        yield "retries_without_a_shell", f"{step.where}.retryPolicy"
    if container.source:
        return
    if any(_is_text_of_step(step, name, scope) for name in _inputs_in(container)):
        yield "dollars_of_outputs", step.where
    if any(isinstance(binding, ir.FinalStatus) for binding in step.parameters.values()):
        yield "status_in_arguments", f"{step.where}.inputs"
    if any(_holds(argument, Concat) for argument in _arguments_of(container)):
        yield "concatenations", step.where
    if _has_nested_placeholders(container):
        yield "nested_placeholders", step.where
    if any(_has_output_in_branch(argument) for argument in _arguments_of(container)):
        yield "outputs_in_presence", step.where
    inputs = [path for argument in _arguments_of(container) for path in references(argument)]
    if any(path[1] == "any" and path[2] in step.inputs.artifacts for path in inputs if path[1:]):
        yield "presence_of_artifacts", step.where
    yield from _features_of_missing_arguments(step, scope)


def _inputs_in(container: ir.Container) -> Iterator[str]:
    """The parameters that a container's command and arguments ask for."""
    for argument in (*container.command, *container.args):
        for path in references(argument):
            if path[:2] == _PARAMETERS:
                yield path[2]


def _is_text_of_step(step: ir.Step, name: str, scope: Scope) -> bool:
    """Whether an input is the text that a step beside this one gives."""
    binding = step.parameters.get(name)
    if not isinstance(binding, ir.FromTask):
        return False
    port = scope.dag.nodes[binding.task].outputs.parameters.get(binding.output)
    return port is not None and port.type == "STRING"


def _features_of_missing_arguments(step: ir.Step, scope: Scope) -> Iterator[tuple[str, str]]:
    """Inputs that the arguments of a container ask for, and that nothing is bound to."""
    container = step.container
    written = [a for a in _arguments_of(container) if not _holds(a, IfPresent)]
    read = {path[2] for a in written for path in references(a) if path[:2] == _PARAMETERS}
    given = set(step.parameters) - set(absent_parameters(step, scope))
    for name in sorted(read - given):
        port = step.inputs.parameters.get(name)
        if port is None:
            continue
        has_default = port.default is not None
        yield "defaults_in_arguments" if has_default else "absent_arguments", step.where


def has_shell(container: ir.Container) -> bool:
    """Whether something can stand in front of the command: it runs in a shell already."""
    if container.source:
        return True
    if not container.command or not isinstance(container.command[0], Template):
        return False
    program = container.command[0].literal or ""
    return program.rpartition("/")[2] in _SHELLS


def _holds(argument: Argument, kind: type) -> bool:
    """Whether an argument, or one inside of it, is of a kind."""
    if isinstance(argument, kind):
        return True
    match argument:
        case Concat(items):
            return any(_holds(item, kind) for item in items)
        case IfPresent(_, then, otherwise):
            return any(_holds(item, kind) for item in (*then, *otherwise))
        case _:
            return False


def _has_nested_placeholders(container: ir.Container) -> bool:
    """Whether an IfPresent stands in a Concat or in another IfPresent."""
    for argument in _arguments_of(container):
        match argument:
            case Concat(items):
                if any(_holds(item, IfPresent) for item in items):
                    return True
            case IfPresent(_, then, otherwise):
                if any(_holds(item, IfPresent) for item in (*then, *otherwise)):
                    return True
    return False


def _has_output_in_branch(argument: Argument) -> bool:
    """Whether an IfPresent asks for the place of an output: KFP's driver then skips it."""
    if not isinstance(argument, IfPresent):
        return False
    return any(path[0] == "outputs" for path in references(argument))


# machines


def _features_of_machines(step: ir.Step, scope: Scope) -> Iterator[tuple[str, str]]:
    """Images and resources that KFP's driver does not read as they are written: it takes
    the first input that it finds in the text, and only a text."""
    resources = dataclasses.astuple(step.container.resources)
    for text in (step.container.image, *resources):
        if "{{$" not in text:
            continue
        whole = INPUT_IN_TEXT.fullmatch(text)
        if whole is None:
            yield "texts_for_machines", step.where
            continue
        match step.parameters.get(whole[1]):
            case ir.FromInput(name, ()):
                port = scope.inputs.parameters.get(name)
            case ir.FromTask(task, output, ()):
                port = scope.dag.nodes[task].outputs.parameters.get(output)
                yield "machines_of_outputs", step.where
            case _:
                continue
        if port is not None and port.type != "STRING":
            yield "numbers_for_machines", step.where


# importers


def _is_made_in_run(node: ir.Importer) -> bool:
    """Whether an URI is anything but a text or an input of the Dag around the importer."""
    names = [path[2] for path in references(node.uri) if path[0] == "inputs"]
    bindings = [node.parameters[name] for name in ("uri", *names) if name in node.parameters]
    for binding in bindings:
        match binding:
            case ir.Constant() | ir.FromInput(_, ()):
                pass
            case _:
                return True
    return node.uri.literal is None and len(node.uri.parts) > 1


def _features_of_metadata(node: ir.Importer) -> Iterator[tuple[str, str]]:
    where = f"{node.where}.metadata"
    if any(True for _ in templates(dict(node.metadata))):
        yield "metadata_of_runs", where
    if any(isinstance(value, list | dict | bool) for value in node.metadata.values()):
        yield "structured_metadata", where


# nested pipelines, and loops


def _features_of_nested_inputs(node: ir.SubDag, scope: Scope) -> Iterator[tuple[str, str]]:
    for name, binding in node.parameters.items():
        where = f"{node.where}.inputs.parameters.{name}"
        if isinstance(binding, ir.Formatted) and _is_text_with_values(binding.value):
            is_text = isinstance(binding.value, Template)
            yield "texts_for_nested" if is_text else "structures_for_nested", where
            if is_text and node.always:
                yield "texts_behind_failures", where
    if any(True for _ in absent_parameters(node, scope)):
        yield "absent_inputs", f"{node.where}.inputs"


def _features_of_choices(node: ir.SubDag) -> Iterator[tuple[str, str]]:
    """Branches of a OneOf whose end KFP does not see: only a container's launcher marks
    the end of a Dag."""
    outputs = [*node.dag.parameters.values(), *node.dag.artifacts.values()]
    for sources in outputs:
        if len(sources) < 2:
            continue
        for source in sources:
            branch = node.dag.nodes[source.task]
            if not isinstance(branch, ir.SubDag):
                continue
            for last in _ends_without_launcher(branch.dag):
                is_importer = isinstance(last, ir.Importer)
                yield "choices_of_importers" if is_importer else "choices_of_conditions", last.where


def _features_of_status(node: ir.AnyNode, scope: Scope) -> Iterator[tuple[str, str]]:
    for binding in node.parameters.values():
        if not isinstance(binding, ir.FinalStatus):
            continue
        watched = scope.dag.nodes[binding.task]
        if isinstance(watched, ir.SubDag):
            for last in _ends_without_launcher(watched.dag):
                yield "status_of_conditions", last.where


def _ends_without_launcher(dag: ir.Dag) -> Iterator[ir.AnyNode]:
    """What may end last in a Dag, or in one inside of it, and starts no launcher of KFP's
    then: that Dag and those around it are never marked as ended."""
    followed = {name for node in dag.nodes.values() for name in node.upstream}
    for node in dag.nodes.values():
        is_last = node.name not in followed
        match node:
            case ir.Importer():
                if is_last:
                    yield node
            case ir.SubDag():
                # one that waits for others may be left out after they have ended
                if is_last and node.condition is not None and node.upstream:
                    yield node
                yield from _ends_without_launcher(node.dag)


def _is_text_with_values(value: Any) -> bool:
    """Whether there is anything but a fact of the run alone, which KFP's driver fills."""
    for template in templates(value):
        if not isinstance(value, Template) or len(template.parts) > 1:
            return True
        if any(path[0] != "run" for path in references(template)):
            return True
    return False


def _features_of_loop(
    node: ir.SubDag, scope: Scope, loops: Mapping[str, Origin]
) -> Iterator[tuple[str, str]]:
    assert node.loop is not None
    if node.loop.artifacts:
        yield "loops_over_artifacts", node.where
    for name, binding in node.parameters.items():
        if isinstance(binding, ir.FromInput | ir.FromTask) and binding.keys:
            yield "elements_for_loops", f"{node.where}.inputs.parameters.{name}"
    collected = {**node.dag.parameters, **node.dag.artifacts}
    if any(_collects(node.dag, source) for s in node.dag.parameters.values() for source in s):
        yield "collected_of_loops", node.where
    sources = [source for of_output in collected.values() for source in of_output]
    if any(_is_conditional(node.dag, source) for source in sources):
        yield "collected_of_branches", node.where
    if any(_is_chosen(node.dag, source) for source in sources):
        yield "collected_of_choices", node.where
    if not _has_turns(node, scope, loops[node.path]):
        yield from _features_without_turns(node, scope)


def _features_without_turns(node: ir.SubDag, scope: Scope) -> Iterator[tuple[str, str]]:
    """Of a loop that may have no turn: no launcher of KFP's runs inside then, which alone
    would mark its end, and that of the Dags around it."""
    if node.dag.parameters or node.dag.artifacts:
        yield "collected_of_nothing", node.where
    if is_chosen(node, scope):
        yield "choices_of_loops", node.where
    if is_watched(node, scope):
        yield "status_of_loops", node.where


def _collects(dag: ir.Dag, source: ir.FromTask) -> bool:
    """Whether an output comes from a loop."""
    node = dag.nodes[source.task]
    if not isinstance(node, ir.SubDag):
        return False
    if node.loop is not None:
        return True
    return any(_collects(node.dag, s) for s in node.dag.parameters.get(source.output, ()))


def _sources_of(node: ir.SubDag, output: str) -> list[ir.FromTask]:
    """The steps inside that an output of a Dag comes from; several of a OneOf."""
    return [*node.dag.parameters.get(output, ()), *node.dag.artifacts.get(output, ())]


def _is_chosen(dag: ir.Dag, source: ir.FromTask) -> bool:
    """Whether an output comes from a OneOf."""
    node = dag.nodes[source.task]
    if not isinstance(node, ir.SubDag):
        return False
    sources = _sources_of(node, source.output)
    return len(sources) > 1 or any(_is_chosen(node.dag, inner) for inner in sources)


def _is_conditional(dag: ir.Dag, source: ir.FromTask) -> bool:
    """Whether an output comes from a step that a condition may leave out."""
    node = dag.nodes[source.task]
    if not isinstance(node, ir.SubDag):
        return node.condition is not None
    sources = _sources_of(node, source.output)
    if len(sources) > 1:  # a OneOf: one of its branches runs
        return False
    if node.condition is not None:
        return True
    return any(_is_conditional(node.dag, inner) for inner in sources)


def _has_turns(node: ir.SubDag, scope: Scope, origin: Origin) -> bool:
    """Whether a loop is known to have a turn, as far as anything is known."""
    assert node.loop is not None
    if not isinstance(node.loop.items, str):
        return bool(node.loop.items)
    if origin is None:
        return False
    values = known_values(node, {node.path.rpartition("/")[0]: scope.known})
    # nothing is known of it without arguments
    return bool(values.get(node.loop.items, True))
