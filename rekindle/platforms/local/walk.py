"""The order of things: which steps can begin, with which inputs, and which never will,
and why.

A `Walk` is the state of one run over a Graph, without any process or file. The scheduler
asks it to `advance`, tells it what succeeded or failed, and it opens nested Dags and the
turns of loops, decides conditions and carries values along on its own. Each turn of a
loop has steps of its own: the second of `for-loop-1/train` is called
`for-loop-1/1/train`.

Every input is bound by its type, as KFP's driver does it (ir/values.py); a node whose
inputs do not fit, or whose condition or loop cannot be decided, is refused: it has failed
without having begun.

After a failure nothing begins but nodes that run `always` (exit handlers) and what
follows them. What could begin in the moment of a refusal still does."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Literal

from rekindle.errors import StepError
from rekindle.ir import graph as ir
from rekindle.ir.condition import evaluate
from rekindle.ir.graph import Dag, FromInput, FromTask, SubDag
from rekindle.ir.placeholders import Template, filled, has_templates, lower
from rekindle.ir.values import FIT, element, parsed, received
from rekindle.launch import shim
from rekindle.platforms.local.cache import NOTHING, Given, StoredArtifact, Values, each
from rekindle.protojson import carried

Leaf = ir.Step | ir.Importer
RunFacts = Callable[[ir.AnyNode], Mapping[str, str]]
Kind = Literal["parameters", "artifacts"]
NO_TURNS = "there is nothing to loop over"
_STATES = {"succeeded": "SUCCEEDED", "failed": "FAILED"}


@dataclasses.dataclass(frozen=True)
class End:
    """How a node ended."""

    status: Literal["succeeded", "skipped", "failed", "stopped"]
    """`stopped`: it never began, because another node failed."""
    values: Values = NOTHING
    """Its outputs."""
    cause: str = ""
    """Which node failed, or why it was skipped, in words."""
    error: str = ""


@dataclasses.dataclass
class Frame:
    """A Dag that is being walked; of a loop, one turn of it. Nodes are known by name here."""

    dag: Dag
    path: str
    inputs: Values
    free: bool = False
    """Whether its nodes may begin although something in the run failed."""
    refused: End | None = None
    """How it ended without having begun, if it did: none of its nodes runs."""
    begun: set[str] = dataclasses.field(default_factory=set)
    """Nodes that have been decided on: they run, or never will."""
    freed: set[str] = dataclasses.field(default_factory=set)
    """Nodes that run `always`, and those that follow them."""
    ended: dict[str, End] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.order = self.dag.ordered()

    def at(self, name: str) -> str:
        return f"{self.path}/{name}" if self.path else name

    def done(self) -> bool:
        return self.refused is not None or len(self.ended) == len(self.dag.nodes)

    def end(self) -> End:
        """How the whole Dag ended: the first failure decides."""
        if self.refused is not None:
            return self.refused
        return dataclasses.replace(_worst(self.ended.values()), values=self.outputs())

    def outputs(self) -> Values:
        parameters = self._values_of(self.dag.parameters, "parameters")
        artifacts = self._values_of(self.dag.artifacts, "artifacts")
        return Values(parameters, artifacts)

    def _values_of(self, outputs: Mapping[str, Sequence[FromTask]], kind: Kind) -> dict[str, Any]:
        """The outputs of a kind that have a value, each from the first source that has
        one."""
        values = {}
        for name, sources in outputs.items():
            value = self.first(sources, kind)
            if value is not None:
                values[name] = value
        return values

    def read(self, source: FromInput | FromTask, kind: Kind) -> Any:
        """The parameter or artifact that a node of this Dag reads; None where it has no
        value."""
        if isinstance(source, FromTask):
            return self.first((source,), kind)
        value = getattr(self.inputs, kind).get(source.name)
        if value is None:
            return None
        return element(value, source.keys)

    def first(self, sources: Sequence[FromTask], kind: Kind) -> Any:
        """The value of the first source that has one; None where none has."""
        for source in sources:
            end = self.ended.get(source.task)
            if end is not None and source.output in getattr(end.values, kind):
                return element(getattr(end.values, kind)[source.output], source.keys)
        return None


@dataclasses.dataclass
class Opened:
    """A SubDag that has begun and not ended."""

    node: SubDag
    parent: Frame
    turns: list[Frame]
    """The turns of a loop; otherwise one frame."""
    at_once: int
    """How many turns are walked at a time; 0: all."""

    def walked(self) -> list[Frame]:
        """The frames that are walked now."""
        frames = [frame for frame in self.turns if not frame.done()]
        return frames[: self.at_once] if self.at_once else frames

    def done(self) -> bool:
        return all(frame.done() for frame in self.turns)

    def end(self) -> End:
        ends = [frame.end() for frame in self.turns]
        if self.node.loop is None:
            return ends[0]
        values = collected(self.node.dag, [end.values for end in ends])
        return dataclasses.replace(_worst(ends), values=values)


def _worst(ends: Iterable[End]) -> End:
    """The end that decides for all: the first failure, else the first that was stopped,
    else a success."""
    worst = End("succeeded")
    for end in ends:
        if end.status == "failed":
            return end
        if end.status == "stopped" and worst.status == "succeeded":
            worst = end
    return worst


def collected(dag: Dag, turns: list[Values]) -> Values:
    """The outputs of a loop: a list for each, without the turns that have no value."""
    artifacts: dict[str, Given] = {}
    for name in dag.artifacts:
        items: list[StoredArtifact] = []
        for turn in turns:
            if name in turn.artifacts:
                items += each(turn.artifacts[name])
        artifacts[name] = tuple(items)
    parameters = {}
    for name in dag.parameters:
        parameters[name] = [turn.parameters[name] for turn in turns if name in turn.parameters]
    return Values(parameters, artifacts)


@dataclasses.dataclass(frozen=True)
class Ready:
    """A step that may begin."""

    node: Leaf
    """It has the path of this run, in which turns of loops are numbered."""
    inputs: Values
    origin: str
    """Its path in the Graph."""
    free: bool = False
    """Whether it may begin although something failed."""


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A step that will not run."""

    path: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Unrolled:
    """A loop whose turns are known by now: these steps take the place of those under
    `path`."""

    path: str
    steps: tuple[Leaf, ...]


@dataclasses.dataclass(frozen=True)
class Refused:
    """A node that has failed without having begun: a step, or a Dag with all that is in
    it."""

    path: str
    error: StepError


# what `advance` reports
News = Ready | Skipped | Unrolled | Refused


class Walk:
    """One pass over `graph` with its parameters bound to `arguments`."""

    def __init__(self, graph: ir.Graph, arguments: Mapping[str, Any], run_facts: RunFacts) -> None:
        self.run_facts = run_facts
        self.root = Frame(graph.dag, "", Values(arguments))
        self.open: list[Opened] = []
        self.home: dict[str, tuple[Frame, str]] = {}  # by path, the frame of a node and its name
        self.stopped_by = ""  # the failure after which nothing begins, in words
        self.refused: list[End] = []

    @property
    def finished(self) -> bool:
        return self.root.done()

    def succeeded(self, path: str, outputs: Values) -> None:
        """The step at `path` ended with `outputs`."""
        self._end(path, End("succeeded", outputs))

    def failed(self, path: str, error: str) -> None:
        """The step at `path` failed: from now on nothing begins but what runs always."""
        cause = f"`{path}` failed"
        self.stopped_by = self.stopped_by or cause
        self._end(path, End("failed", cause=cause, error=error))

    def withdrawn(self, path: str) -> str:
        """Why a step that was ready will not begin: something failed meanwhile."""
        reason = f"the run stopped when {self.stopped_by}"
        self._end(path, End("stopped", cause=reason))
        return reason

    def _end(self, path: str, end: End) -> None:
        frame, name = self.home[path]
        frame.ended[name] = end

    def advance(self) -> Iterator[News]:
        """What can be decided now: steps that may begin, and nodes that never will."""
        refused_before = len(self.refused)
        moved = True
        while moved:
            moved = False
            for frame in self._walked_frames():
                for node in frame.order:
                    if node.name in frame.begun or not frame.ended.keys() >= set(node.upstream):
                        continue
                    frame.begun.add(node.name)
                    self.home[frame.at(node.name)] = (frame, node.name)
                    moved = True
                    yield from self._begin(frame, node)
            for opened in [opened for opened in self.open if opened.done()]:
                opened.parent.ended[opened.node.name] = opened.end()
                self.open.remove(opened)
                moved = True  # what follows the Dag may begin now
        # not before: what could begin in the moment of a refusal still does
        for end in self.refused[refused_before:]:
            self.stopped_by = self.stopped_by or end.cause

    def _walked_frames(self) -> list[Frame]:
        """All that is open now; what opens meanwhile has its turn in the next round."""
        frames = [self.root]
        for opened in self.open:
            frames += opened.walked()
        return frames

    def _begin(self, frame: Frame, node: ir.AnyNode) -> Iterator[News]:
        path = frame.at(node.name)
        free = frame.free or node.always or not frame.freed.isdisjoint(node.upstream)
        if free:
            frame.freed.add(node.name)
        try:
            end, inputs = self._obstacle(frame, node, free)
            items = self._items(node, inputs) if end is None else []
        except StepError as error:
            frame.ended[node.name] = self._refuse(path, error)
            yield from _refusal(node, path, error)
            return
        if end is not None:
            frame.ended[node.name] = end
            yield from (Skipped(leaf.path, end.cause) for leaf in _leaves(node, path))
        elif isinstance(node, ir.SubDag):
            yield from self._enter(frame, node, path, inputs, items, free)
        else:
            yield Ready(dataclasses.replace(node, path=path), inputs, node.path, free)

    def _refuse(self, path: str, error: StepError) -> End:
        end = End("failed", cause=f"`{path}` failed", error=error.problems[0].what)
        self.refused.append(end)
        return end

    def _obstacle(self, frame: Frame, node: ir.AnyNode, free: bool) -> tuple[End | None, Values]:
        """How the node ends without having begun, None if it may begin; and its inputs."""
        if not node.always:
            # failures first: the run reports a failure as the reason, not what it skipped
            for name in node.upstream:
                end = frame.ended[name]
                if end.status in ("failed", "stopped"):
                    return End("stopped", cause=end.cause, error=end.error), NOTHING
            for name in node.upstream:
                if frame.ended[name].status == "skipped":
                    return End("skipped", cause=f"`{name}` was skipped"), NOTHING
        if self.stopped_by and not free:
            return End("stopped", cause=f"the run stopped when {self.stopped_by}"), NOTHING
        inputs, missing = self._inputs(frame, node)
        if missing:
            return End("skipped", cause=f"`{missing}` has no value"), NOTHING
        if node.condition and not _holds(node, inputs):
            reason = f"its condition is false: {node.condition.expression}"
            return End("skipped", cause=reason), NOTHING
        return None, inputs

    def _enter(
        self,
        frame: Frame,
        node: ir.SubDag,
        path: str,
        inputs: Values,
        items: Sequence[Any],
        free: bool,
    ) -> Iterator[News]:
        """Open a nested Dag, or the turns of a loop over `items`."""
        if node.loop is None:
            self.open.append(Opened(node, frame, [Frame(node.dag, path, inputs, free)], 0))
            return
        turns: list[Frame] = []
        refusals: list[News] = []
        for i, item in enumerate(items):
            turn_path = f"{path}/{i}"
            try:
                turns.append(Frame(node.dag, turn_path, _turn(node, inputs, item, turn_path), free))
            except StepError as error:
                end = self._refuse(turn_path, error)
                turns.append(Frame(node.dag, turn_path, inputs, free, end))
                refusals += _refusal(node, turn_path, error)
        self.open.append(Opened(node, frame, turns, node.loop.at_once))
        if turns:
            steps = [leaf for turn in turns for leaf in _leaves(node, turn.path)]
            yield Unrolled(path, tuple(steps))
            yield from refusals
        else:
            yield from (Skipped(leaf.path, NO_TURNS) for leaf in _leaves(node, path))

    def _items(self, node: ir.AnyNode, inputs: Values) -> Sequence[Any]:
        """What a loop goes over; nothing for another node."""
        loop = node.loop if isinstance(node, SubDag) else None
        if loop is None:
            return []
        if loop.artifacts:
            return each(inputs.artifacts.get(str(loop.items), ()))
        items: Any = loop.items
        if isinstance(items, str):
            items = inputs.parameters.get(items)
            if isinstance(items, str):  # JSON, as KFP passes lists between tasks
                items = parsed(items)
        else:
            items = self._format(node, items, inputs.parameters)
        if not isinstance(items, list):
            message = f"`{node.path}` loops over {str(items)[:60]!r}, which is not a list"
            raise StepError(message, where=node.where)
        return items

    def _inputs(self, frame: Frame, node: ir.AnyNode) -> tuple[Values, str]:
        """The node's inputs, and the name of one that an upstream step did not give, if
        any."""
        path = frame.at(node.name)
        values: dict[str, Any] = {}
        for name, binding in node.parameters.items():
            with _at_input(node, name, path):
                values[name] = self._parameter(frame, node, binding)
        artifacts: dict[str, Given | None] = {}
        for name, binding in node.artifacts.items():
            artifacts[name] = frame.read(binding, "artifacts")
        all_values = {**values, **artifacts}
        for name, source in (*node.parameters.items(), *node.artifacts.items()):
            if not isinstance(source, ir.FromTask) or all_values[name] is not None:
                continue
            if not (node.always and _is_optional(node, name)):
                return NOTHING, f"{source.task}.{source.output}"
        given_values = {name: value for name, value in values.items() if value is not None}
        given_artifacts = {name: given for name, given in artifacts.items() if given is not None}
        return Values(self._bound(node, path, given_values), given_artifacts), ""

    def _bound(self, node: ir.AnyNode, path: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """The node's parameters, with defaults and texts filled in, each of its type."""
        defaults = {}
        for name, parameter in node.inputs.parameters.items():
            if name not in given and parameter.default is not None:
                defaults[name] = parameter.default
        texts: dict[str, Any] = {}  # with placeholders, which take the other parameters
        for name, binding in node.parameters.items():
            if isinstance(binding, ir.Formatted):
                texts[name] = binding.value
        parameters: dict[str, Any] = {}
        for name, value in {**defaults, **given}.items():
            if name in texts:
                continue
            if has_templates(value):
                texts[name] = value
            elif name in defaults and not isinstance(node, SubDag):
                # a component has its defaults in its own code, of which the IR knows the
                # kind only
                parameters[name] = value
            else:
                parameters[name] = _received(node, name, value, path)
        for name, value in texts.items():
            formatted = self._format(node, value, parameters)
            parameters[name] = _received(node, name, formatted, path)
        return parameters

    def _parameter(self, frame: Frame, node: ir.AnyNode, binding: ir.Binding) -> Any:
        match binding:
            case ir.Constant(value):
                return value
            case FromInput() | FromTask():
                return frame.read(binding, "parameters")
            case ir.FinalStatus(task):
                return self._status(frame, node, task)
        return None

    def _status(self, frame: Frame, node: ir.AnyNode, task: str) -> dict[str, Any]:
        """KFP's PipelineTaskFinalStatus of a sibling, as its executor reads it."""
        end = frame.ended[task]
        return {
            "state": _STATES.get(end.status, "CANCELLED"),
            "pipelineJobResourceName": self.run_facts(node)["pipeline_job_resource_name"],
            "pipelineTaskName": task,
            "error": {"message": end.error or end.cause} if end.cause else {},
        }

    def _format(self, node: ir.AnyNode, value: Any, parameters: Mapping[str, Any]) -> Any:
        """A formatted constant with its placeholders filled in from the node's other
        inputs."""
        return filled(value, lambda t: rendered(node, t, parameters, self.run_facts))


@contextlib.contextmanager
def _at_input(node: ir.AnyNode, name: str, path: str) -> Iterator[None]:
    """Turn the ValueError of a value that does not fit into a StepError with its
    place."""
    try:
        yield
    except ValueError as error:
        shown = name.removeprefix("pipelinechannel--")
        message = f"the input `{shown}` of `{path}`: {error}"
        where = f"{node.where}.inputs.parameters.{name}"
        raise StepError(message, where=where, fix=FIT) from error


def _is_optional(node: ir.AnyNode, name: str) -> bool:
    """Whether a node may begin without this input."""
    if name in node.inputs.parameters:
        return not node.inputs.parameters[name].required
    return name in node.inputs.artifacts and node.inputs.artifacts[name].optional


def _received(node: ir.AnyNode, name: str, value: Any, path: str) -> Any:
    """What the input `name` of the node at `path` receives; one that only texts read is
    untyped."""
    with _at_input(node, name, path):
        parameter = node.inputs.parameters.get(name)
        if parameter is None:
            return carried(value)
        return received(value, parameter.type, parameter.literals)


def _turn(node: ir.SubDag, inputs: Values, item: Any, path: str) -> Values:
    """The inputs of the turn of a loop over `item`."""
    assert node.loop is not None
    name = node.loop.item
    if node.loop.artifacts:
        return Values(inputs.parameters, {**inputs.artifacts, name: item})
    parameter = _received(node, name, item, path)
    return Values({**inputs.parameters, name: parameter}, inputs.artifacts)


def _refusal(node: ir.AnyNode, path: str, error: StepError) -> Iterator[News]:
    """The news of a node that was refused: what is in it never runs."""
    yield Refused(path, error)
    if isinstance(node, SubDag):
        yield from (Skipped(leaf.path, f"`{path}` failed") for leaf in _leaves(node, path))


def rendered(
    node: ir.AnyNode, template: Template, parameters: Mapping[str, Any], run_facts: RunFacts
) -> str:
    """A text of `node` with its placeholders filled in; StepError where one has no
    value."""
    inputs = {"parameterValues": dict(parameters), "artifacts": {}}
    context = {"executor_input": {"inputs": inputs}, "run": run_facts(node)}
    try:
        return "".join(shim.render(lower(template), context))
    except shim.TaskError as error:
        raise StepError(f"the inputs of `{node.path}`: {error}", where=node.where) from error


def dependents(graph: ir.Graph, path: str) -> frozenset[str]:
    """Paths of the steps that need the node at `path`, those inside it not counted."""
    reached = {path, *map(str, PurePosixPath(path).parents)}
    dependent_paths = set[str]()  # of what needs it, with all that is in a Dag that does
    for node in graph.nodes():  # which come after all that they need
        parent = node.path.rpartition("/")[0]
        siblings = {f"{parent}/{up}" if parent else up for up in node.upstream}
        if siblings & reached or parent in dependent_paths:
            dependent_paths.add(node.path)
            reached |= {node.path, *map(str, PurePosixPath(node.path).parents)}
    return frozenset(leaf.path for leaf in graph.leaves() if leaf.path in dependent_paths)


def _leaves(node: ir.AnyNode, path: str) -> Iterator[Leaf]:
    """What runs at or below `node`, under paths that begin with `path` in place of its
    own."""
    if not isinstance(node, ir.SubDag):
        yield dataclasses.replace(node, path=path)
        return
    for inner in node.dag.ordered():
        yield from _leaves(inner, f"{path}/{inner.name}")


def _holds(node: ir.AnyNode, inputs: Values) -> bool:
    assert node.condition is not None
    try:
        return evaluate(node.condition.expression, inputs.parameters)
    except StepError as error:
        raise StepError(str(error), where=f"{node.where}.triggerPolicy.condition") from error
