"""A Graph as a flat list of steps, for platforms without nested pipelines or loops.

Nested Dags are opened, and loops over constants and arguments are unrolled. Every input
is traced to the source of its value: a constant, a parameter of the pipeline, an output
of a step, or a list of such. The conditions around a step become its guards; where a loop
limits how many turns run at once, a turn waits for an earlier one. Steps have the same
paths as in a run on this machine (`for-loop-1/0/train`). What cannot be flattened (loops
over outputs of steps, exit handlers) is refused earlier, by the feature table.

Every input is bound by its type, as KFP's driver does it (ir/values.py): constants here,
other values when the step runs. A constant that does not fit is refused here, unless a
condition may skip the step that would get it."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rekindle.errors import UnsupportedError
from rekindle.ir import graph as ir
from rekindle.ir import values as ir_values
from rekindle.ir.condition import Expression
from rekindle.ir.origin import looped_over
from rekindle.ir.placeholders import Template, has_templates
from rekindle.ir.values import FIT, parsed, received


@dataclasses.dataclass(frozen=True)
class Given:
    """A parameter of the pipeline; `keys` lead into a struct."""

    name: str
    keys: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Output:
    """An output of the step at `path`; `keys` lead into a struct."""

    path: str
    name: str
    keys: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Listed:
    """A list of the values that the turns of a loop give; a turn that gives none is left out."""

    items: "tuple[Source, ...]"


@dataclasses.dataclass(frozen=True)
class FirstOf:
    """The value of the first of several steps that ran (KFP's OneOf)."""

    items: "tuple[Source, ...]"


@dataclasses.dataclass(frozen=True)
class TemplatedConstant:
    """A constant with Templates in it, which stand for other inputs of the same node."""

    value: Any
    values: "Mapping[str, Source]"
    """Those inputs, by name."""


@dataclasses.dataclass(frozen=True)
class Typed:
    """A value of another type, as an input of the IR type `kind` receives it (`received`)."""

    source: "Source"
    kind: str


Source = ir.Constant | Given | Output | Listed | FirstOf | TemplatedConstant | Typed


@dataclasses.dataclass(frozen=True)
class Guard:
    """A condition around a step."""

    path: str
    """Of the node that has the condition."""
    text: str
    """The condition as the IR has it."""
    expression: Expression
    """The same, parsed."""
    values: Mapping[str, Source]
    """What the names in it stand for."""


@dataclasses.dataclass(frozen=True)
class Flat:
    """A step, and what it reads and waits for."""

    step: ir.Step | ir.Importer
    path: str
    """In a run, where each turn of a loop has steps of its own."""
    parameters: Mapping[str, Source]
    artifacts: Mapping[str, Source]
    guards: tuple[Guard, ...] = ()
    """The conditions around it, all of which have to hold; the outermost first."""
    after: tuple[str, ...] = ()
    """Paths of steps that it waits for without reading from them."""


def flatten(graph: ir.Graph, arguments: Mapping[str, Any]) -> tuple[Flat, ...]:
    """All steps in topological order; UnsupportedError for what has no flat form.

    Those `arguments` of the pipeline that loops go over become constants, since the
    number of steps depends on them. The others can still be set when a run begins."""
    looped = looped_over(graph)
    types = {}
    parameters: dict[str, Source] = {}
    for name, parameter in graph.inputs.parameters.items():
        types[name] = parameter.type
        if name in looped and name in arguments:
            parameters[name] = ir.Constant(arguments[name])
        else:
            parameters[name] = Given(name)
    flattening = _Flattening(types)
    flattening.add_dag(graph.dag, "", _Scope(parameters, {}), ())
    return tuple(flattening.steps)


def read_by(flat: Flat) -> Iterator[Given | Output]:
    """The parameters of the pipeline and the outputs that the step and its guards read."""
    guarding = [source for guard in flat.guards for source in guard.values.values()]
    for source in (*flat.parameters.values(), *flat.artifacts.values(), *guarding):
        yield from sources(source)


def sources(source: Source) -> Iterator[Given | Output]:
    """The parameters of the pipeline and the outputs that a source is made of, at any depth."""
    match source:
        case Given() | Output():
            yield source
        case Listed(items) | FirstOf(items):
            for item in items:
                yield from sources(item)
        case TemplatedConstant(_, values):
            for item in values.values():
                yield from sources(item)
        case Typed(inner, _):
            yield from sources(inner)


@dataclasses.dataclass(frozen=True)
class _Scope:
    """What names stand for: those of the inputs of a Dag or node, or of its outputs."""

    parameters: Mapping[str, Source]
    artifacts: Mapping[str, Source]


class _Flattening:
    """One pass over a Graph, with the steps so far.

    `types` are the IR types of the pipeline's parameters by name."""

    output_types: dict[tuple[str, str], str]
    """The IR types of output parameters, by the path of the step and the name."""

    def __init__(self, types: Mapping[str, str]) -> None:
        self.types = types
        self.output_types = {}
        self.steps: list[Flat] = []

    def add_dag(self, dag: ir.Dag, path: str, scope: _Scope, guards: tuple[Guard, ...]) -> _Scope:
        """Flatten one Dag; returns what its outputs stand for."""
        outputs_of: dict[str, _Scope] = {}  # by the names of nodes, as the next one
        step_paths_of: dict[str, tuple[str, ...]] = {}  # of the steps that a node became
        for node in dag.ordered():
            node_path = f"{path}/{node.name}" if path else node.name
            # the node's own condition reads these inputs, so it does not guard them
            inputs = self.inputs(node, node_path, scope, outputs_of, guarded=bool(guards))
            node_guards = guards
            condition = node.condition
            if condition is not None:
                guard = Guard(node_path, condition.text, condition.expression, inputs.parameters)
                node_guards = (*guards, guard)
            after = tuple(itertools.chain.from_iterable(step_paths_of[name] for name in node.after))
            first = len(self.steps)
            outputs_of[node.name] = self.add_node(node, node_path, inputs, node_guards, after)
            step_paths_of[node.name] = tuple(step.path for step in self.steps[first:])
        return _Scope(
            parameters=_dag_outputs(outputs_of, dag.parameters, "parameters"),
            artifacts=_dag_outputs(outputs_of, dag.artifacts, "artifacts"),
        )

    def add_node(
        self,
        node: ir.AnyNode,
        path: str,
        inputs: _Scope,
        guards: tuple[Guard, ...],
        after: tuple[str, ...],
    ) -> _Scope:
        """Flatten one node; returns what its outputs stand for."""
        if isinstance(node, ir.SubDag):
            first = len(self.steps)
            outputs = self.add_sub_dag(node, path, inputs, guards)
            self.wait(range(first, len(self.steps)), after)
            return outputs
        self.steps.append(Flat(node, path, inputs.parameters, inputs.artifacts, guards, after))
        for name, parameter in node.outputs.parameters.items():
            self.output_types[path, name] = parameter.type
        return _Scope(
            parameters={name: Output(path, name) for name in node.outputs.parameters},
            artifacts={name: Output(path, name) for name in node.outputs.artifacts},
        )

    def wait(self, places: Iterable[int], after: Iterable[str]) -> None:
        """Have the steps at these places of `steps` wait for the steps with the paths `after`."""
        for place in places:
            step = self.steps[place]
            all_paths = tuple(dict.fromkeys([*step.after, *after]))  # each once, in order
            self.steps[place] = dataclasses.replace(step, after=all_paths)

    def add_sub_dag(
        self, node: ir.SubDag, path: str, inputs: _Scope, guards: tuple[Guard, ...]
    ) -> _Scope:
        """Flatten what is inside a SubDag, for each turn if it is a loop; returns what
        its outputs stand for."""
        loop = node.loop
        if loop is None:
            return self.add_dag(node.dag, path, inputs, guards)
        turns = []
        places_of_turns = []
        for number, item in enumerate(self.items(loop, node, path, inputs)):
            turn_path = f"{path}/{number}"
            item_source = self.as_received(
                node, turn_path, loop.item, ir.Constant(item), guarded=bool(guards)
            )
            parameters = {**inputs.parameters, loop.item: item_source}
            first = len(self.steps)
            scope = _Scope(parameters, inputs.artifacts)
            turns.append(self.add_dag(node.dag, turn_path, scope, guards))
            places_of_turns.append(range(first, len(self.steps)))
        if loop.at_once:
            self.limit_turns(places_of_turns, loop.at_once)
        parameters_of_turns = [turn.parameters for turn in turns]
        artifacts_of_turns = [turn.artifacts for turn in turns]
        return _Scope(
            parameters=_listed(node.dag.parameters, parameters_of_turns),
            artifacts=_listed(node.dag.artifacts, artifacts_of_turns),
        )

    def items(self, loop: ir.Loop, node: ir.SubDag, path: str, inputs: _Scope) -> Sequence[Any]:
        """What a loop goes over; UnsupportedError where that is known only in a run."""
        items: Any = loop.items
        if isinstance(items, str):  # the name of the input that holds them
            source = None if loop.artifacts else inputs.parameters.get(items)
            items = source.value if isinstance(source, ir.Constant) else None
            if isinstance(items, str):  # JSON, as KFP passes lists between tasks
                items = parsed(items)
        if items is None or has_templates(items):
            message = f"`{path}` loops over what is known at run time only"
            fix = "loop over a list that is written in the pipeline, or an argument"
            raise UnsupportedError(message, where=node.where, fix=fix)
        if not isinstance(items, list | tuple):
            message = f"`{path}` loops over {items!r}, which is not a list"
            raise UnsupportedError(message, where=node.where, fix="give it a list")
        return items

    def limit_turns(self, turns: Sequence[range], at_once: int) -> None:
        """Have each turn wait for the one `at_once` before it, so that no more than so
        many run at the same time. `turns` are the places of each turn's steps in
        `steps`."""
        for earlier_turn, turn in zip(turns, turns[at_once:], strict=False):
            # it is enough that this turn's first steps wait for the earlier one's last
            own_paths = {self.steps[place].path for place in turn}
            first_places = []
            for place in turn:
                if own_paths.isdisjoint(_upstream(self.steps[place])):
                    first_places.append(place)
            waited_for = set[str]()
            for place in earlier_turn:
                waited_for |= _upstream(self.steps[place])
            earlier_paths = [self.steps[place].path for place in earlier_turn]
            last_paths = [path for path in earlier_paths if path not in waited_for]
            self.wait(first_places, last_paths)

    def inputs(
        self,
        node: ir.AnyNode,
        path: str,
        scope: _Scope,
        outputs_of: Mapping[str, _Scope],
        *,
        guarded: bool,
    ) -> _Scope:
        """What the node's inputs stand for; an input without a value or default is left out.

        `scope` is what the inputs of the Dag around it stand for, `outputs_of` what the
        outputs of the nodes before it do."""
        parameters: dict[str, Source] = {}
        for name, parameter in node.inputs.parameters.items():
            if parameter.default is not None:
                parameters[name] = ir.Constant(parameter.default)
        bound = set[str]()
        for name, binding in node.parameters.items():
            source = self.bound_source(node, binding, scope, outputs_of)
            if source is not None:
                parameters[name] = source
                bound.add(name)
        texts = _texts(node, parameters)
        for name, source in parameters.items():
            # The default of a component is what its own Python code has. The IR only
            # knows its kind, such as LIST, so there is nothing to check it against.
            is_own_default = name not in bound and not isinstance(node, ir.SubDag)
            if name not in texts and not is_own_default:
                parameters[name] = self.as_received(node, path, name, source, guarded=guarded)
        without_texts = {name: source for name, source in parameters.items() if name not in texts}
        for name, value in texts.items():
            parameters[name] = TemplatedConstant(value, without_texts)
        return _Scope(parameters, _artifacts(node, scope, outputs_of))

    def as_received(
        self, node: ir.AnyNode, path: str, name: str, source: Source, *, guarded: bool
    ) -> Source:
        """The source as the input `name` of the node at `path` receives it.

        A constant that does not fit raises UnsupportedError. Where the node is `guarded`,
        the run decides: a condition may skip the node."""
        parameter = node.inputs.parameters.get(name)
        if parameter is None or self.kind_of(source) == parameter.type:
            return source
        if not isinstance(source, ir.Constant):
            return Typed(source, parameter.type)
        try:
            return ir.Constant(received(source.value, parameter.type, parameter.literals))
        except ValueError as error:
            if guarded:
                return Typed(source, parameter.type)
            shown_name = name.removeprefix("pipelinechannel--")
            message = f"the input `{shown_name}` of `{path}`: {error}"
            where = f"{node.where}.inputs.parameters.{name}"
            raise UnsupportedError(message, where=where, fix=FIT) from error

    def kind_of(self, source: Source) -> str | None:
        """The IR type of what a source gives; None where only the run knows it."""
        match source:
            case Given(name, ()):
                return self.types.get(name)
            case Output(path, name, ()):
                return self.output_types.get((path, name))
            case Listed():
                return "LIST"
            case FirstOf(items):
                kinds = {self.kind_of(item) for item in items}
                return kinds.pop() if len(kinds) == 1 else None
            case TemplatedConstant(value, _):
                return "STRING" if isinstance(value, Template) else None
            case Typed(_, kind):
                return kind
        return None

    def bound_source(
        self,
        node: ir.AnyNode,
        binding: ir.Binding,
        scope: _Scope,
        outputs_of: Mapping[str, _Scope],
    ) -> Source | None:
        """What a binding stands for; None where it has no value, or is text (see `_texts`)."""
        match binding:
            case ir.Constant(value):
                return binding if value is not None else None
            case ir.FromInput(name, keys):
                source = scope.parameters.get(name)
                return None if source is None else _element(source, keys, node.where)
            case ir.FromTask():
                output = _output(outputs_of, binding, "parameters")
                return _element(output, binding.keys, node.where)
            case ir.FinalStatus(task):
                message = f"`{node.path}` reads how `{task}` ended"
                fix = "run it where exit handlers run"
                raise UnsupportedError(message, where=node.where, fix=fix)
        return None


def _artifacts(
    node: ir.AnyNode, scope: _Scope, outputs_of: Mapping[str, _Scope]
) -> dict[str, Source]:
    """What the node's input artifacts stand for; an optional one without a source is left out."""
    artifacts = {}
    for name, binding in node.artifacts.items():
        if isinstance(binding, ir.FromTask):
            artifacts[name] = _output(outputs_of, binding, "artifacts")
        elif binding.name in scope.artifacts:
            artifacts[name] = scope.artifacts[binding.name]
    return artifacts


def _texts(node: ir.AnyNode, parameters: Mapping[str, Source]) -> dict[str, Any]:
    """The values of those inputs of the node that have Templates in them."""
    texts = {}
    for name, binding in node.parameters.items():
        if isinstance(binding, ir.Formatted):
            texts[name] = binding.value
    for name, source in parameters.items():
        if name in texts or not isinstance(source, ir.Constant):
            continue
        if has_templates(source.value):
            texts[name] = source.value
    return texts


def _listed(names: Iterable[str], turns: Sequence[Mapping[str, Source]]) -> dict[str, Source]:
    """What the outputs of a loop stand for: each is the list of what its turns give."""
    return {name: Listed(tuple(outputs[name] for outputs in turns)) for name in names}


def _dag_outputs(
    outputs_of: Mapping[str, _Scope], outputs: Mapping[str, tuple[ir.FromTask, ...]], kind: str
) -> dict[str, Source]:
    """What the outputs of a Dag of this kind stand for. One with several tasks is KFP's
    OneOf over branches."""
    sources_by_name: dict[str, Source] = {}
    for name, tasks in outputs.items():
        alternatives = tuple(_output(outputs_of, task, kind) for task in tasks)
        only_one = len(alternatives) == 1
        sources_by_name[name] = alternatives[0] if only_one else FirstOf(alternatives)
    return sources_by_name


def _upstream(flat: Flat) -> set[str]:
    """The paths of the steps that end before this one begins."""
    read_steps = {source.path for source in read_by(flat) if isinstance(source, Output)}
    return read_steps.union(flat.after)


def _output(outputs_of: Mapping[str, _Scope], source: ir.FromTask, kind: str) -> Source:
    """What an output of a node of the same Dag stands for; `kind`: parameters or artifacts."""
    outputs: Mapping[str, Source] = getattr(outputs_of[source.task], kind)
    return outputs[source.output]


def element(value: Any, keys: tuple[str, ...], where: str) -> Any:
    """The element that `keys` lead to in a struct, by `ir_values.element`;
    UnsupportedError where there is none."""
    try:
        return ir_values.element(value, keys)
    except ValueError as error:
        raise UnsupportedError(str(error), where=where) from error


def _element(source: Source, keys: tuple[str, ...], where: str) -> Source:
    """What the element that `keys` lead to stands for; a constant if the struct is one."""
    if not keys:
        return source
    match source:
        case ir.Constant(value):
            return ir.Constant(element(value, keys, where))
        case Given() | Output():
            return dataclasses.replace(source, keys=(*source.keys, *keys))
        case Typed(inner, "STRING" | "STRUCT"):
            return _element(inner, keys, where)
    raise UnsupportedError("an element of a list or of formatted text", where=where)
