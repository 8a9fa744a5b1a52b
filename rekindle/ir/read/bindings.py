"""What inputs of nodes and outputs of Dags are bound to, and whether those names exist."""

import json
import re
from collections.abc import Iterable

from rekindle.errors import RequestError
from rekindle.ir import graph as ir
from rekindle.ir.placeholders import Argument, has_templates, parse_value, references, templates
from rekindle.ir.read.raw import Fields, Refusals, malformed
from rekindle.ir.values import from_ir

# What KFP writes for an element of a struct: parseJson(string_value)["a"]["b"]
_SELECTOR = re.compile(r"""parseJson\(string_value\)((?:\["(?:[^"\\]|\\.)*"\])*)""")
_KEY = re.compile(r"""\[("(?:[^"\\]|\\.)*")\]""")
_Results = dict[str, tuple[ir.FromTask, ...]]
_Artifacts = dict[str, ir.FromInput | ir.FromTask]


def read_bindings(fields: Fields, inputs: ir.Ports) -> tuple[dict[str, ir.Binding], _Artifacts]:
    """What a node's parameters and artifacts are bound to; a parameter of which nothing
    is said is left out."""
    parameters: dict[str, ir.Binding] = {}
    for name, source in fields.each("parameters"):
        binding = read_parameter(source, inputs.parameters.get(name))
        if binding is not None:
            parameters[name] = binding
    artifacts: _Artifacts = {}
    for name, source in fields.each("artifacts"):
        if source.has("componentInputArtifact"):
            artifacts[name] = ir.FromInput(source.take("componentInputArtifact", str, ""))
        else:
            producer = source.fields("taskOutputArtifact")
            artifacts[name] = _from_task(producer, "producerTask", "Artifact")
    return parameters, artifacts


def read_parameter(source: Fields, parameter: ir.Parameter | None) -> ir.Binding | None:
    """What a parameter is bound to; None if nothing is said."""
    keys = _keys(source)
    if source.has("componentInputParameter"):
        return ir.FromInput(source.take("componentInputParameter", str, ""), keys)
    if source.has("taskOutputParameter"):
        return _from_task(source.fields("taskOutputParameter"), "producerTask", "Parameter", keys)
    if source.has("taskFinalStatus"):
        return ir.FinalStatus(source.fields("taskFinalStatus").take("producerTask", str, ""))
    if "runtimeValue" in source.data:
        return _constant(source.fields("runtimeValue"), parameter)
    return None


def _keys(source: Fields) -> tuple[str, ...]:
    """The keys that lead from a struct to the element that is meant."""
    text = source.take("parameterExpressionSelector", str, "")
    if not text:
        return ()
    match = _SELECTOR.fullmatch(text)
    if match is None:
        where = source.at("parameterExpressionSelector")
        fix = "take the element in a component"
        source.refusals.add(f"the selector `{text}` is none that KFP writes", where, fix)
        return ()
    return tuple(json.loads(key) for key in _KEY.findall(match[1]))


def _constant(fields: Fields, parameter: ir.Parameter | None) -> ir.Constant | ir.Formatted:
    raw = fields.any("constant")
    where = fields.at("constant")
    fields.refuse("constantValue", "constants of schema 2.0", "compile it with kfp 2.x")
    fields.refuse("runtimeParameter", "parameters of schema 2.0", "compile it with kfp 2.x")
    value = parse_value(raw, where)
    if has_templates(value):
        return ir.Formatted(value)
    try:
        return ir.Constant(from_ir(raw, parameter.type) if parameter else raw)
    except ValueError as error:
        raise RequestError(f"the constant is of the wrong type: {error}", where=where) from error


def _from_task(fields: Fields, task: str, kind: str, keys: tuple[str, ...] = ()) -> ir.FromTask:
    name = fields.take(task, str, "")
    output = fields.take(f"output{kind}Key", str, "")
    return ir.FromTask(name, output, keys)


def read_results(outputs: Fields) -> tuple[_Results, _Results]:
    """Where the outputs of a Dag come from: parameters, then artifacts."""
    parameters: _Results = {}
    for name, fields in outputs.each("parameters"):
        selectors = list(fields.fields("valueFromOneof").list_of("parameterSelectors"))
        if fields.has("valueFromParameter"):
            selectors.append(fields.fields("valueFromParameter"))
        parameters[name] = _producers(selectors, "Parameter")
    artifacts: _Results = {}
    for name, fields in outputs.each("artifacts"):
        artifacts[name] = _producers(fields.list_of("artifactSelectors"), "Artifact")
    return parameters, artifacts


def _producers(selectors: Iterable[Fields], kind: str) -> tuple[ir.FromTask, ...]:
    return tuple(_from_task(selector, "producerSubtask", kind) for selector in selectors)


def check_dag(dag: ir.Dag, where: str, inputs: ir.Ports, outputs: ir.Ports) -> None:
    """Raise RequestError unless every name that is read exists and no steps wait for each other."""
    for node in dag.nodes.values():
        _check_node(dag, node, inputs)
    for kind in ("parameters", "artifacts"):
        for name in getattr(outputs, kind):
            place = f"{where}.outputs.{kind}.{name}"
            sources = getattr(dag, kind).get(name)
            if not sources:
                raise malformed(None, "the output of a step", place)
            for source in sources:
                _check_source(dag, source, kind, place)
    try:
        dag.ordered()
    except ValueError as error:
        raise RequestError(str(error), where=f"{where}.tasks") from error


def _check_node(dag: ir.Dag, node: ir.Node, inputs: ir.Ports) -> None:
    for kind in ("parameters", "artifacts"):
        for name, binding in getattr(node, kind).items():
            place = f"{node.where}.inputs.{kind}.{name}"
            if isinstance(binding, ir.FromInput) and binding.name not in getattr(inputs, kind):
                raise _unknown_input(binding.name, place)
            if isinstance(binding, ir.FromTask):
                _check_source(dag, binding, kind, place)
            if isinstance(binding, ir.FinalStatus) and binding.task not in dag.nodes:
                raise malformed(binding.task, "the name of a sibling", place)
    if isinstance(node, ir.SubDag) and node.loop is not None and isinstance(node.loop.items, str):
        kind = "artifacts" if node.loop.artifacts else "parameters"
        if node.loop.items not in getattr(node, kind):
            raise malformed(node.loop.items, "an input of the loop", f"{node.where}.items")
    for name in node.after:
        if name not in dag.nodes:
            raise malformed(name, "the name of a sibling", f"{node.where}.dependentTasks")


def _unknown_input(name: str, where: str) -> RequestError:
    """The error for an input that nothing around a node has.

    KFP's compiler gives a loop one for an f-string with its item in it, and KFP's driver
    fails there."""
    if "-loop-item" not in name:
        return malformed(name, "an input of the pipeline around it", where)
    loop, _, element = name.partition("-loop-item")
    key = element.removeprefix("-subvar-")
    item = f"`{key}` of an item" if key else "an item"
    return RequestError(
        f"an f-string holds {item} of the loop over `{loop}`, and KFP's compiler loses it",
        where=where,
        fix="give the item to the component, and join the text there",
    )


def _check_source(dag: ir.Dag, source: ir.FromTask, kind: str, where: str) -> None:
    task = dag.nodes.get(source.task)
    if task is None or source.output not in getattr(task.outputs, kind):
        raise malformed(f"{source.task}.{source.output}", "the output of a sibling", where)


def check_references(step: ir.Step | ir.Importer, where: str, refusals: Refusals) -> None:
    """Refuse placeholders that name an input or output which the step does not have."""
    arguments: list[Argument]
    if isinstance(step, ir.Importer):
        arguments = [step.uri, *templates(dict(step.metadata))]
    else:
        container = step.container
        arguments = [*container.command, *container.args, *container.env.values()]
    names = {
        ("inputs", "parameters"): {*step.inputs.parameters, *step.parameters},
        ("inputs", "artifacts"): set(step.inputs.artifacts),
        ("outputs", "parameters"): set(step.outputs.parameters),
        ("outputs", "artifacts"): set(step.outputs.artifacts),
    }
    names["inputs", "any"] = names["inputs", "parameters"] | names["inputs", "artifacts"]
    for argument in arguments:
        for path in references(argument):
            # shorter paths are facts of the run
            if len(path) >= 3 and path[2] not in names[path[0], path[1]]:
                message = f"a placeholder names `{path[2]}`, which the step does not have"
                refusals.add(message, where)
