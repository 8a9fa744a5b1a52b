"""A Graph as a flat list of steps, for platforms without nested pipelines or loops.

Nested Dags are opened, loops over constants and arguments unrolled, and every input is traced to
where its value comes from in the end: a constant, a parameter of the pipeline, an output of a step,
or a list of such. The conditions around a step become its guards; where a loop has a limit, a turn
waits for an earlier one. Steps keep the paths that a run here gives them (`for-loop-1/0/train`).
What cannot be flattened (loops over what a step gives, exit handlers) is for the feature table to
refuse before.

Every input is bound by its type, as KFP's driver does it (ir/values.py): constants here, other
values when the step runs. A constant that does not fit is refused here, unless a condition may skip
the step that would get it."""

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
from rekindle.tables import problems_in

_problem = problems_in(__file__)


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
class Text:
    """A constant with Templates in it, which read the other inputs of its own node: `values`."""

    value: Any
    values: "Mapping[str, Source]"


@dataclasses.dataclass(frozen=True)
class Typed:
    """A value as an input of `kind` receives it, where it comes as another kind."""

    source: "Source"
    kind: str


Source = ir.Constant | Given | Output | Listed | FirstOf | Text | Typed


@dataclasses.dataclass(frozen=True)
class Guard:
    """A condition around a step, as text and read, and what its references stand for."""

    path: str
    text: str
    expression: Expression
    values: Mapping[str, Source]


@dataclasses.dataclass(frozen=True)
class Flat:
    """A step under its `path` in a run, with all that it reads, waits for, and is guarded by."""

    step: ir.Step | ir.Importer
    path: str
    parameters: Mapping[str, Source]
    artifacts: Mapping[str, Source]
    guards: tuple[Guard, ...] = ()
    after: tuple[str, ...] = ()


def flatten(graph: ir.Graph, values: Mapping[str, Any]) -> tuple[Flat, ...]:
    """Every step in topological order; UnsupportedError for what has no flat form.

    `values` are the arguments: those that loops go over are constants from here on, others stay
    what a run gives."""
    types = {name: parameter.type for name, parameter in graph.inputs.parameters.items()}
    flattening = _Flattening(types)
    settled = {name: ir.Constant(values[name]) for name in looped_over(graph) if name in values}
    scope = _Scope({name: settled.get(name, Given(name)) for name in graph.inputs.parameters}, {})
    flattening.dag(graph.dag, "", scope, ())
    return tuple(flattening.found)


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
        case Text(_, values):
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
    """One pass: the steps found so far, and the types of what they read: of the pipeline's
    parameters by name, of outputs by path and name."""

    def __init__(self, types: Mapping[str, str]) -> None:
        self.types = types
        self.output_types: dict[tuple[str, str], str] = {}
        self.found: list[Flat] = []

    def dag(self, dag: ir.Dag, path: str, scope: _Scope, guards: tuple[Guard, ...]) -> _Scope:
        """Flatten one Dag; what its outputs stand for."""
        ended: dict[str, _Scope] = {}
        inside: dict[str, tuple[str, ...]] = {}
        for node in dag.ordered():
            at = f"{path}/{node.name}" if path else node.name
            first = len(self.found)
            given = self.inputs(node, at, scope, ended, guarded=bool(guards))
            inner = guards
            if (condition := node.condition) is not None:
                inner = (*guards, Guard(at, condition.text, condition.expression, given.parameters))
            after = tuple(leaf for name in node.after for leaf in inside[name])
            ended[node.name] = self.node(node, at, given, inner, after)
            inside[node.name] = tuple(flat.path for flat in self.found[first:])
        results: dict[str, dict[str, Source]] = {"parameters": {}, "artifacts": {}}
        for kind, of_kind in results.items():
            for name, several in getattr(dag, kind).items():
                found = tuple(_output(ended, source, kind) for source in several)
                of_kind[name] = found[0] if len(found) == 1 else FirstOf(found)
        return _Scope(**results)

    def node(
        self,
        node: ir.AnyNode,
        path: str,
        given: _Scope,
        guards: tuple[Guard, ...],
        after: tuple[str, ...],
    ) -> _Scope:
        if not isinstance(node, ir.SubDag):
            self.found.append(Flat(node, path, given.parameters, given.artifacts, guards, after))
            for name, parameter in node.outputs.parameters.items():
                self.output_types[path, name] = parameter.type
            kinds = (node.outputs.parameters, node.outputs.artifacts)
            return _Scope(*({name: Output(path, name) for name in names} for names in kinds))
        first = len(self.found)
        result = self.sub_dag(node, path, given, guards)
        self.wait(range(first, len(self.found)), after)
        return result

    def wait(self, steps: Iterable[int], after: Iterable[str]) -> None:
        """Have the steps at these places wait for others."""
        for i in steps:
            flat = self.found[i]
            both = tuple(dict.fromkeys([*flat.after, *after]))
            self.found[i] = dataclasses.replace(flat, after=both)

    def sub_dag(
        self, node: ir.SubDag, path: str, given: _Scope, guards: tuple[Guard, ...]
    ) -> _Scope:
        if node.loop is None:
            return self.dag(node.dag, path, given, guards)
        turns, bounds = [], [len(self.found)]
        for i, item in enumerate(self.items(node.loop, node, path, given)):
            turn_path = f"{path}/{i}"
            item_source = self.as_received(
                node, turn_path, node.loop.item, ir.Constant(item), guards
            )
            inputs = {**given.parameters, node.loop.item: item_source}
            turns.append(self.dag(node.dag, turn_path, _Scope(inputs, given.artifacts), guards))
            bounds.append(len(self.found))
        if node.loop.at_once:
            self.limit([range(*pair) for pair in itertools.pairwise(bounds)], node.loop.at_once)
        return _Scope(
            {n: Listed(tuple(turn.parameters[n] for turn in turns)) for n in node.dag.parameters},
            {n: Listed(tuple(turn.artifacts[n] for turn in turns)) for n in node.dag.artifacts},
        )

    def items(self, loop: ir.Loop, node: ir.SubDag, path: str, given: _Scope) -> Sequence[Any]:
        items: Any = loop.items
        if isinstance(items, str):
            known = None if loop.artifacts else given.parameters.get(items)
            items = known.value if isinstance(known, ir.Constant) else None
            items = parsed(items) if isinstance(items, str) else items
        if items is None or has_templates(items):
            raise UnsupportedError([_problem("loop_at_run_time", where=node.where, path=path)])
        if not isinstance(items, list | tuple):
            raise UnsupportedError([_problem("no_list", where=node.where, path=path, items=items)])
        return items

    def limit(self, turns: Sequence[range], at_once: int) -> None:
        """At most `at_once` turns side by side: each waits for the one so many before it."""
        for before, turn in zip(turns, turns[at_once:], strict=False):
            mine = {self.found[i].path for i in turn}
            first = [i for i in turn if not mine & _upstream(self.found[i])]
            passed = {path for i in before for path in _upstream(self.found[i])}
            self.wait(first, [p for i in before if (p := self.found[i].path) not in passed])

    def inputs(
        self,
        node: ir.AnyNode,
        path: str,
        scope: _Scope,
        ended: Mapping[str, _Scope],
        *,
        guarded: bool,
    ) -> _Scope:
        """What the node's inputs stand for; one without a value or default is left out."""
        defaults = {n: ir.Constant(p.default) for n, p in node.inputs.parameters.items()}
        parameters: dict[str, Source] = {n: c for n, c in defaults.items() if c.value is not None}
        bound = set[str]()
        for name, binding in node.parameters.items():
            if (source := self.parameter(node, binding, scope, ended)) is not None:
                parameters[name] = source
                bound.add(name)
        texts = {n: b.value for n, b in node.parameters.items() if isinstance(b, ir.Formatted)}
        constants = ((n, s.value) for n, s in parameters.items() if isinstance(s, ir.Constant))
        texts |= {n: value for n, value in constants if n not in texts and has_templates(value)}
        for name, source in parameters.items():
            # a component has its defaults in its own code, of which the IR knows the kind only
            is_own_default = name not in bound and not isinstance(node, ir.SubDag)
            if name not in texts and not is_own_default:
                parameters[name] = self.as_received(node, path, name, source, guarded)
        for name, value in texts.items():
            others = {n: s for n, s in parameters.items() if n != name and n not in texts}
            parameters[name] = Text(value, others)
        artifacts = {}
        for name, place in node.artifacts.items():
            if isinstance(place, ir.FromTask):
                artifacts[name] = _output(ended, place, "artifacts")
            elif place.name in scope.artifacts:
                artifacts[name] = scope.artifacts[place.name]
        return _Scope(parameters, artifacts)

    def as_received(
        self, node: ir.AnyNode, path: str, name: str, source: Source, guarded: object
    ) -> Source:
        """What the input `name` of the node at `path` receives. A constant that does not fit raises
        UnsupportedError, or is left to the run where the node is `guarded`."""
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
            shown = name.removeprefix("pipelinechannel--")
            what = f"the input `{shown}` of `{path}`: {error}"
            fix = FIT
            where = f"{node.where}.inputs.parameters.{name}"
            raise UnsupportedError(what, where=where, fix=fix) from error

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
            case Text(value, _):
                return "STRING" if isinstance(value, Template) else None
            case Typed(_, kind):
                return kind
        return None

    def parameter(
        self, node: ir.AnyNode, binding: ir.Binding, scope: _Scope, ended: Mapping[str, _Scope]
    ) -> Source | None:
        match binding:
            case ir.Constant(value):
                return binding if value is not None else None
            case ir.FromInput(name, keys):
                found = scope.parameters.get(name)
                return None if found is None else _element(found, keys, node.where)
            case ir.FromTask():
                return _element(_output(ended, binding, "parameters"), binding.keys, node.where)
            case ir.FinalStatus(task):
                wrong = _problem("final_status", where=node.where, path=node.path, task=task)
                raise UnsupportedError([wrong])
        return None


def _upstream(flat: Flat) -> set[str]:
    """The steps that end before this one begins."""
    return {*flat.after, *(s.path for s in read_by(flat) if isinstance(s, Output))}


def _output(ended: Mapping[str, _Scope], source: ir.FromTask, kind: str) -> Source:
    found: Source = getattr(ended[source.task], kind)[source.output]
    return found


def element(value: Any, keys: tuple[str, ...], where: str) -> Any:
    """What `keys` lead to in a struct whose value is known."""
    try:
        return element_of(value, keys)
    except ValueError as error:
        raise UnsupportedError(str(error), where=where) from error


def _element(source: Source, keys: tuple[str, ...], where: str) -> Source:
    """What `keys` lead to, at once where the value is known."""
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
