"""A Graph as a flat list of steps, for platforms without nested pipelines or loops.

Nested Dags are opened, loops over constants and arguments unrolled, and every input is
traced to where its value comes from in the end: a constant, a parameter of the pipeline,
an output of a step, or a list of such. The conditions around a step become its guards;
where a loop has a limit, a turn waits for an earlier one. Steps keep the paths that a run
here gives them (`for-loop-1/0/train`). What cannot be flattened (loops over what a step
gives, exit handlers) is for the feature table to refuse before.

Every input is bound by its type, as KFP's driver does it (ir/values.py): constants here,
other values when the step runs. A constant that does not fit is refused here, unless a
condition may skip the step that would get it."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rekindle.errors import UnsupportedError
from rekindle.ir import graph as ir
from rekindle.ir.condition import Expression
from rekindle.ir.origin import looped_over
from rekindle.ir.placeholders import Template, has_templates
from rekindle.ir.values import FIT, parsed, received
from rekindle.ir.values import element as element_of


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
    """The values of all turns of a loop, without those that have none."""

    items: "tuple[Source, ...]"


@dataclasses.dataclass(frozen=True)
class FirstOf:
    """The value of the first one that ran (KFP's OneOf)."""

    items: "tuple[Source, ...]"


@dataclasses.dataclass(frozen=True)
class TemplatedConstant:
    """A constant with Templates in it, which read the other inputs of its own node: `values`."""

    value: Any
    values: "Mapping[str, Source]"


@dataclasses.dataclass(frozen=True)
class Typed:
    """The value of `source`, converted when the step runs to the IR type `kind` of the input
    that receives it."""

    source: "Source"
    kind: str


Source = ir.Constant | Given | Output | Listed | FirstOf | TemplatedConstant | Typed


@dataclasses.dataclass(frozen=True)
class Guard:
    """A condition around a step."""

    path: str
    """The node that carries it."""
    text: str
    expression: Expression
    """The text, parsed."""
    values: Mapping[str, Source]
    """What the parameters that it may refer to stand for."""


@dataclasses.dataclass(frozen=True)
class Flat:
    """A step of the flat list; a step in a loop is there once for each turn."""

    step: ir.Step | ir.Importer
    path: str
    """Its path in a run: `for-loop-1/0/train`."""
    parameters: Mapping[str, Source]
    artifacts: Mapping[str, Source]
    guards: tuple[Guard, ...] = ()
    """The conditions around it, from the outermost to the innermost."""
    after: tuple[str, ...] = ()
    """Paths of steps that it waits for without reading them."""


def flatten(graph: ir.Graph, values: Mapping[str, Any]) -> tuple[Flat, ...]:
    """Every step in topological order; UnsupportedError for what has no flat form.

    `values` are the arguments. Those that loops go over become constants, because they say
    how many steps there are; others stay parameters, which each run sets."""
    looped = looped_over(graph)
    types = {}
    parameters: dict[str, Source] = {}
    for name, parameter in graph.inputs.parameters.items():
        types[name] = parameter.type
        if name in looped and name in values:
            parameters[name] = ir.Constant(values[name])
        else:
            parameters[name] = Given(name)
    flattening = _Flattening(types)
    flattening.add_dag(graph.dag, "", _Scope(parameters, {}), ())
    return tuple(flattening.steps)


def read_by(flat: Flat) -> Iterator[Given | Output]:
    """Everything that the step and its guards read."""
    guarding = [source for guard in flat.guards for source in guard.values.values()]
    for source in (*flat.parameters.values(), *flat.artifacts.values(), *guarding):
        yield from sources(source)


def sources(source: Source) -> Iterator[Given | Output]:
    """Everything that is read in a source, at any depth."""
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
    """What the inputs of a Dag, or the outputs of its nodes, stand for."""

    parameters: Mapping[str, Source]
    artifacts: Mapping[str, Source]


class _Flattening:
    """One pass over a Graph: the steps so far, and the IR types of what later ones may read,
    the pipeline's parameters by name and outputs by step and name."""

    def __init__(self, types: Mapping[str, str]) -> None:
        self.types = types
        self.output_types: dict[tuple[str, str], str] = {}
        self.steps: list[Flat] = []

    def add_dag(self, dag: ir.Dag, path: str, scope: _Scope, guards: tuple[Guard, ...]) -> _Scope:
        """Flatten one Dag; returns what its outputs stand for."""
        ended: dict[str, _Scope] = {}
        paths_of: dict[str, tuple[str, ...]] = {}  # by node, of the steps that it became
        for node in dag.ordered():
            node_path = f"{path}/{node.name}" if path else node.name
            inputs = self.inputs(node, node_path, scope, ended, guarded=bool(guards))
            node_guards = guards
            if (condition := node.condition) is not None:
                guard = Guard(node_path, condition.text, condition.expression, inputs.parameters)
                node_guards = (*guards, guard)
            after = tuple(itertools.chain.from_iterable(paths_of[name] for name in node.after))
            first = len(self.steps)
            ended[node.name] = self.add_node(node, node_path, inputs, node_guards, after)
            paths_of[node.name] = tuple(step.path for step in self.steps[first:])
        return _Scope(
            parameters=_dag_outputs(ended, dag.parameters, "parameters"),
            artifacts=_dag_outputs(ended, dag.artifacts, "artifacts"),
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
        """Have the steps at these places of `steps` wait for those of the paths `after`."""
        for place in places:
            step = self.steps[place]
            every_path = tuple(dict.fromkeys([*step.after, *after]))
            self.steps[place] = dataclasses.replace(step, after=every_path)

    def add_sub_dag(
        self, node: ir.SubDag, path: str, inputs: _Scope, guards: tuple[Guard, ...]
    ) -> _Scope:
        """Flatten what is inside of a node, once for each turn where it is a loop."""
        loop = node.loop
        if loop is None:
            return self.add_dag(node.dag, path, inputs, guards)
        turns = []
        places_of_turns = []
        for number, item in enumerate(self.items(loop, node, path, inputs)):
            turn_path = f"{path}/{number}"
            item_source = self.as_received(node, turn_path, loop.item, ir.Constant(item), guards)
            parameters = {**inputs.parameters, loop.item: item_source}
            first = len(self.steps)
            scope = _Scope(parameters, inputs.artifacts)
            turns.append(self.add_dag(node.dag, turn_path, scope, guards))
            places_of_turns.append(range(first, len(self.steps)))
        if loop.at_once:
            self.limit(places_of_turns, loop.at_once)
        parameters_of_turns = [turn.parameters for turn in turns]
        artifacts_of_turns = [turn.artifacts for turn in turns]
        return _Scope(
            parameters=_listed(node.dag.parameters, parameters_of_turns),
            artifacts=_listed(node.dag.artifacts, artifacts_of_turns),
        )

    def items(self, loop: ir.Loop, node: ir.SubDag, path: str, inputs: _Scope) -> Sequence[Any]:
        """The items of a loop, where they are known before a run."""
        items: Any = loop.items
        if isinstance(items, str):  # the name of the input that holds them
            source = None if loop.artifacts else inputs.parameters.get(items)
            items = source.value if isinstance(source, ir.Constant) else None
            if isinstance(items, str):
                items = parsed(items)
        if items is None or has_templates(items):
            message = f"`{path}` loops over what is known at run time only"
            fix = "loop over a list that is written in the pipeline, or an argument"
            raise UnsupportedError(message, where=node.where, fix=fix)
        if not isinstance(items, list | tuple):
            message = f"`{path}` loops over {items!r}, which is not a list"
            raise UnsupportedError(message, where=node.where, fix="give it a list")
        return items

    def limit(self, turns: Sequence[range], at_once: int) -> None:
        """Have each turn wait for the one `at_once` before it, so that at most so many run
        side by side.

        It is enough that the first steps of a turn wait for the last ones of the earlier."""
        for earlier, turn in zip(turns, turns[at_once:], strict=False):
            own_paths = {self.steps[place].path for place in turn}
            first_places = [
                place for place in turn if own_paths.isdisjoint(_upstream(self.steps[place]))
            ]
            # a step that another one of its turn waits for ends before that one does
            waited_for = set[str]()
            for place in earlier:
                waited_for |= _upstream(self.steps[place])
            paths = [self.steps[place].path for place in earlier]
            self.wait(first_places, [path for path in paths if path not in waited_for])

    def inputs(
        self,
        node: ir.AnyNode,
        path: str,
        scope: _Scope,
        ended: Mapping[str, _Scope],
        *,
        guarded: bool,
    ) -> _Scope:
        """What the node's inputs stand for; one without a value or default is left out.

        `ended` has the outputs of the nodes before it, `guarded` says whether a condition
        may skip it."""
        parameters: dict[str, Source] = {}
        for name, parameter in node.inputs.parameters.items():
            if parameter.default is not None:
                parameters[name] = ir.Constant(parameter.default)
        bound = set[str]()  # inputs that have a value of their node
        for name, binding in node.parameters.items():
            source = self.bound_source(node, binding, scope, ended)
            if source is not None:
                parameters[name] = source
                bound.add(name)
        texts = _texts(node, parameters)
        for name, source in parameters.items():
            # the default of a component's input is set by its own code, so it is not converted
            is_own_default = name not in bound and not isinstance(node, ir.SubDag)
            if name not in texts and not is_own_default:
                parameters[name] = self.as_received(node, path, name, source, guarded)
        plain = {name: source for name, source in parameters.items() if name not in texts}
        for name, value in texts.items():
            parameters[name] = TemplatedConstant(value, plain)
        return _Scope(parameters, _artifacts(node, scope, ended))

    def as_received(
        self, node: ir.AnyNode, path: str, name: str, source: Source, guarded: object
    ) -> Source:
        """What the input `name` of the node at `path` receives. A constant that does not
        fit raises UnsupportedError, or is left to the run where the node is `guarded`."""
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
        """The IR type of a source's value; None where only the run knows it."""
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
        self, node: ir.AnyNode, binding: ir.Binding, scope: _Scope, ended: Mapping[str, _Scope]
    ) -> Source | None:
        """What a binding stands for; None for no value, and for text with Templates, which
        `_texts` handles."""
        match binding:
            case ir.Constant(value):
                return binding if value is not None else None
            case ir.FromInput(name, keys):
                source = scope.parameters.get(name)
                return None if source is None else _element(source, keys, node.where)
            case ir.FromTask():
                return _element(_output(ended, binding, "parameters"), binding.keys, node.where)
            case ir.FinalStatus(task):
                message = f"`{node.path}` reads how `{task}` ended"
                fix = "run it where exit handlers run"
                raise UnsupportedError(message, where=node.where, fix=fix)
        return None


def _artifacts(node: ir.AnyNode, scope: _Scope, ended: Mapping[str, _Scope]) -> dict[str, Source]:
    """What the node's input artifacts stand for; an optional one without a source is left out."""
    artifacts = {}
    for name, binding in node.artifacts.items():
        if isinstance(binding, ir.FromTask):
            artifacts[name] = _output(ended, binding, "artifacts")
        elif binding.name in scope.artifacts:
            artifacts[name] = scope.artifacts[binding.name]
    return artifacts


def _texts(node: ir.AnyNode, parameters: Mapping[str, Source]) -> dict[str, Any]:
    """The values of the node's inputs that have Templates in them."""
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
    """Each output of a loop: the list of its values in all turns."""
    return {name: Listed(tuple(outputs[name] for outputs in turns)) for name in names}


def _dag_outputs(
    ended: Mapping[str, _Scope], outputs: Mapping[str, tuple[ir.FromTask, ...]], kind: str
) -> dict[str, Source]:
    """What the outputs of a Dag stand for. One with several tasks (KFP's OneOf) is that of
    the first task that ran."""
    sources_by_name: dict[str, Source] = {}
    for name, tasks in outputs.items():
        several = tuple(_output(ended, task, kind) for task in tasks)
        sources_by_name[name] = several[0] if len(several) == 1 else FirstOf(several)
    return sources_by_name


def _upstream(flat: Flat) -> set[str]:
    """The steps that end before this one begins."""
    read_steps = {source.path for source in read_by(flat) if isinstance(source, Output)}
    return read_steps.union(flat.after)


def _output(ended: Mapping[str, _Scope], source: ir.FromTask, kind: str) -> Source:
    """What an output of a task stands for; `kind` is `parameters` or `artifacts`."""
    outputs: Mapping[str, Source] = getattr(ended[source.task], kind)
    return outputs[source.output]


def element(value: Any, keys: tuple[str, ...], where: str) -> Any:
    """What `keys` lead to in a struct whose value is known."""
    try:
        return element_of(value, keys)
    except ValueError as error:
        raise UnsupportedError(str(error), where=where) from error


def _element(source: Source, keys: tuple[str, ...], where: str) -> Source:
    """The source of what `keys` lead to in a struct: a constant if the struct is one."""
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
