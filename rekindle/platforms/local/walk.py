"""The order of steps: which of them can begin, with which inputs, and which never will,
and why.

A `Walk` is the state of one run over a Graph, without any process or file. The scheduler
asks it to `advance` and tells it what succeeded or failed; it opens nested Dags and the
turns of loops, decides conditions and carries values along. Each turn of a loop has steps
of its own: the second of `for-loop-1/train` is called `for-loop-1/1/train`.

Every input is bound by its type, as KFP's driver does it (ir/values.py); a node whose
inputs do not fit, or whose condition or loop cannot be decided, is refused: it has failed
without having begun.

After a failure nothing begins any more but nodes that are exempt: those that run `always`
(exit handlers) and what follows them. Only a node that could begin in the same call of
`advance` as another is refused still does, whatever their order."""

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
from rekindle.platforms.local.cache import (
    NO_VALUES,
    ArtifactValue,
    StoredArtifact,
    Values,
    as_artifacts,
)
from rekindle.protojson import carried

Leaf = ir.Step | ir.Importer
RunFacts = Callable[[ir.AnyNode], Mapping[str, str]]
Kind = Literal["parameters", "artifacts"]
NO_TURNS = "there is nothing to loop over"
_STATES = {"succeeded": "SUCCEEDED", "failed": "FAILED"}


@dataclasses.dataclass(frozen=True)
class End:
    """How a node ended. One that is `stopped` never ran, since another one failed."""

    status: Literal["succeeded", "skipped", "failed", "stopped"]
    values: Values = NO_VALUES
    """Its outputs."""
    cause: str = ""
    """Why it did not succeed; of `stopped` nodes, what failed instead."""
    error: str = ""
    """The message of the failure that it goes back to."""


@dataclasses.dataclass
class Frame:
    """One Dag that is being walked; of a loop, one turn of it."""

    dag: Dag
    path: str
    inputs: Values
    exempt: bool = False
    """Whether its nodes begin although something failed."""
    refused: End | None = None
    """Why none of it runs, where it is refused."""
    begun: set[str] = dataclasses.field(default_factory=set)
    """Names of nodes that were decided: they began, or never will."""
    exempt_nodes: set[str] = dataclasses.field(default_factory=set)
    ended: dict[str, End] = dataclasses.field(default_factory=dict)
    """The end of each node that has ended, by its name."""

    def __post_init__(self) -> None:
        self.order = self.dag.ordered()

    def path_of(self, name: str) -> str:
        """The path of a node in this run."""
        return f"{self.path}/{name}" if self.path else name

    def done(self) -> bool:
        return self.refused is not None or len(self.ended) == len(self.dag.nodes)

    def end(self) -> End:
        """How the whole Dag ended, with its outputs."""
        if self.refused is not None:
            return self.refused
        return dataclasses.replace(_worst(self.ended.values()), values=self.outputs())

    def outputs(self) -> Values:
        """The outputs of the Dag that have a value."""
        parameters = self._values_of(self.dag.parameters, "parameters")
        artifacts = self._values_of(self.dag.artifacts, "artifacts")
        return Values(parameters, artifacts)

    def _values_of(self, outputs: Mapping[str, Sequence[FromTask]], kind: Kind) -> dict[str, Any]:
        """The outputs of a kind that have a value. An output with several sources is
        KFP's OneOf over branches: it gets the value of the branch that ran."""
        values = {}
        for name, sources in outputs.items():
            value = self.first_value(sources, kind)
            if value is not None:
                values[name] = value
        return values

    def value_of(self, source: FromInput | FromTask, kind: Kind) -> Any:
        """The parameter or artifact that a node of this Dag gets from `source`; None
        where it has no value."""
        if isinstance(source, FromTask):
            return self.first_value((source,), kind)
        value = getattr(self.inputs, kind).get(source.name)
        if value is None:
            return None
        return element(value, source.keys)

    def first_value(self, sources: Sequence[FromTask], kind: Kind) -> Any:
        """The value of the first source that has one; None where none has."""
        for source in sources:
            end = self.ended.get(source.task)
            if end is not None and source.output in getattr(end.values, kind):
                return element(getattr(end.values, kind)[source.output], source.keys)
        return None


@dataclasses.dataclass
class Opened:
    """A SubDag whose nodes are being walked."""

    node: SubDag
    parent: Frame
    turns: list[Frame]
    """The turns of a loop; one frame where the SubDag is none."""
    at_once: int
    """How many turns are walked at the same time; 0: all."""

    def walked(self) -> list[Frame]:
        """The turns that are not done, as many of them as are walked at the same time."""
        frames = [frame for frame in self.turns if not frame.done()]
        return frames[: self.at_once] if self.at_once else frames

    def done(self) -> bool:
        return all(frame.done() for frame in self.turns)

    def end(self) -> End:
        """How the whole SubDag ended, with its outputs."""
        ends = [frame.end() for frame in self.turns]
        if self.node.loop is None:
            return ends[0]
        values = collected(self.node.dag, [end.values for end in ends])
        return dataclasses.replace(_worst(ends), values=values)


def _worst(ends: Iterable[End]) -> End:
    """The first that failed, else the first that was stopped, else a success."""
    worst = End("succeeded")
    for end in ends:
        if end.status == "failed":
            return end
        if end.status == "stopped" and worst.status == "succeeded":
            worst = end
    return worst


def collected(dag: Dag, turns: list[Values]) -> Values:
    """The outputs of a loop: of each a list of the values of its turns, without those
    turns that gave none."""
    artifacts: dict[str, ArtifactValue] = {}
    for name in dag.artifacts:
        items: list[StoredArtifact] = []
        for turn in turns:
            if name in turn.artifacts:
                items += as_artifacts(turn.artifacts[name])
        artifacts[name] = tuple(items)
    parameters = {}
    for name in dag.parameters:
        parameters[name] = [turn.parameters[name] for turn in turns if name in turn.parameters]
    return Values(parameters, artifacts)


@dataclasses.dataclass(frozen=True)
class Ready:
    """A step that can begin."""

    node: Leaf
    """With the path that it has in this run."""
    inputs: Values
    origin: str
    """Its path in the Graph, which all turns of a loop share."""
    exempt: bool = False
    """Whether it begins although something failed."""


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A step that will not run."""

    path: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Unrolled:
    """A loop whose turns are now known: these steps take the place of those under `path`."""

    path: str
    steps: tuple[Leaf, ...]


@dataclasses.dataclass(frozen=True)
class Refused:
    """A node that failed before it began: a step, or a Dag with all that is in it."""

    path: str
    error: StepError


News = Ready | Skipped | Unrolled | Refused


class Walk:
    """One pass over `graph` with its parameters bound to `arguments`."""

    stopped_by: str
    """The first failure, in words; from then on only exempt nodes begin. "" for none."""
    run_facts: RunFacts
    """What placeholders of a node say about the run."""

    def __init__(self, graph: ir.Graph, arguments: Mapping[str, Any], run_facts: RunFacts) -> None:
        self.run_facts = run_facts
        self.stopped_by = ""
        self._root = Frame(graph.dag, "", Values(arguments))
        self._open: list[Opened] = []
        self._home: dict[str, tuple[Frame, str]] = {}  # by path: its frame, and its name there
        self._refused: list[End] = []

    @property
    def finished(self) -> bool:
        return self._root.done()

    def succeeded(self, path: str, outputs: Values) -> None:
        """The step at `path` ended with `outputs`."""
        self._end(path, End("succeeded", outputs))

    def failed(self, path: str, error: str) -> None:
        """The step at `path` failed: from now on nothing begins but what runs always."""
        cause = f"`{path}` failed"
        self.stopped_by = self.stopped_by or cause
        self._end(path, End("failed", cause=cause, error=error))

    def withdrawn(self, path: str) -> str:
        """End a step that was ready and will not begin, since something failed meanwhile;
        returns why."""
        reason = f"the run stopped when {self.stopped_by}"
        self._end(path, End("stopped", cause=reason))
        return reason

    def _end(self, path: str, end: End) -> None:
        frame, name = self._home[path]
        frame.ended[name] = end

    def advance(self) -> Iterator[News]:
        """Decide about every node whose upstream nodes have ended, until none is left."""
        refused_before = len(self._refused)
        moved = True
        while moved:
            moved = False
            for frame in self._walked_frames():
                for node in frame.order:
                    if node.name in frame.begun or not frame.ended.keys() >= set(node.upstream):
                        continue
                    frame.begun.add(node.name)
                    self._home[frame.path_of(node.name)] = (frame, node.name)
                    moved = True
                    yield from self._begin(frame, node)
            for opened in [opened for opened in self._open if opened.done()]:
                opened.parent.ended[opened.node.name] = opened.end()
                self._open.remove(opened)
                moved = True  # what follows the Dag may begin now
        # last, so that what begins beside a refused node does not depend on their order
        for end in self._refused[refused_before:]:
            self.stopped_by = self.stopped_by or end.cause

    def _walked_frames(self) -> list[Frame]:
        """The frames that are open now. One that opens meanwhile comes in the next round."""
        frames = [self._root]
        for opened in self._open:
            frames += opened.walked()
        return frames

    def _begin(self, frame: Frame, node: ir.AnyNode) -> Iterator[News]:
        """Begin a node whose upstream nodes have ended, or end it at once."""
        path = frame.path_of(node.name)
        follows_exempt = not frame.exempt_nodes.isdisjoint(node.upstream)
        exempt = frame.exempt or node.always or follows_exempt
        if exempt:
            frame.exempt_nodes.add(node.name)
        try:
            end, inputs = self._end_or_inputs(frame, node, exempt)
            items = self._items(node, inputs) if end is None else []
        except StepError as error:
            frame.ended[node.name] = self._refuse(path, error)
            yield from _refusal(node, path, error)
            return
        if end is not None:
            frame.ended[node.name] = end
            yield from (Skipped(leaf.path, end.cause) for leaf in _leaves(node, path))
        elif isinstance(node, ir.SubDag):
            yield from self._enter(frame, node, path, inputs, items, exempt)
        else:
            yield Ready(dataclasses.replace(node, path=path), inputs, node.path, exempt)

    def _refuse(self, path: str, error: StepError) -> End:
        """The end of a node that is refused; it stops the run once `advance` is done."""
        end = End("failed", cause=f"`{path}` failed", error=error.problems[0].what)
        self._refused.append(end)
        return end

    def _end_or_inputs(
        self, frame: Frame, node: ir.AnyNode, exempt: bool
    ) -> tuple[End | None, Values]:
        """How the node ends if it does not begin; else None, and the inputs that it
        begins with."""
        if not node.always:
            # failures first: the run reports them rather than another node's skip
            for name in node.upstream:
                end = frame.ended[name]
                if end.status in ("failed", "stopped"):
                    return End("stopped", cause=end.cause, error=end.error), NO_VALUES
            for name in node.upstream:
                if frame.ended[name].status == "skipped":
                    return End("skipped", cause=f"`{name}` was skipped"), NO_VALUES
        if self.stopped_by and not exempt:
            return End("stopped", cause=f"the run stopped when {self.stopped_by}"), NO_VALUES
        inputs, missing = self._inputs(frame, node)
        if missing:
            return End("skipped", cause=f"`{missing}` has no value"), NO_VALUES
        if node.condition and not _holds(node, inputs):
            reason = f"its condition is false: {node.condition.expression}"
            return End("skipped", cause=reason), NO_VALUES
        return None, inputs

    def _enter(
        self,
        frame: Frame,
        node: ir.SubDag,
        path: str,
        inputs: Values,
        items: Sequence[Any],
        exempt: bool,
    ) -> Iterator[News]:
        """Open a nested Dag, or the turns of a loop over `items`."""
        if node.loop is None:
            self._open.append(Opened(node, frame, [Frame(node.dag, path, inputs, exempt)], 0))
            return
        turns: list[Frame] = []
        refusals: list[News] = []
        for i, item in enumerate(items):
            turn_path = f"{path}/{i}"
            try:
                turn_inputs = _inputs_of_turn(node, inputs, item, turn_path)
                turns.append(Frame(node.dag, turn_path, turn_inputs, exempt))
            except StepError as error:
                end = self._refuse(turn_path, error)
                turns.append(Frame(node.dag, turn_path, inputs, exempt, end))
                refusals += _refusal(node, turn_path, error)
        self._open.append(Opened(node, frame, turns, node.loop.at_once))
        if turns:
            steps = [leaf for turn in turns for leaf in _leaves(node, turn.path)]
            yield Unrolled(path, tuple(steps))
            yield from refusals
        else:
            yield from (Skipped(leaf.path, NO_TURNS) for leaf in _leaves(node, path))

    def _items(self, node: ir.AnyNode, inputs: Values) -> Sequence[Any]:
        """What a loop goes over; an empty list for a node that is not a loop."""
        loop = node.loop if isinstance(node, SubDag) else None
        if loop is None:
            return []
        if loop.artifacts:
            return as_artifacts(inputs.artifacts.get(str(loop.items), ()))
        items: Any = loop.items
        if isinstance(items, str):  # the name of the input that holds them
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
        """The node's inputs, and "". Where an upstream step did not give one that the
        node needs: no inputs, and the name of that output."""
        path = frame.path_of(node.name)
        values: dict[str, Any] = {}
        for name, binding in node.parameters.items():
            with _at_input(node, name, path):
                values[name] = self._parameter(frame, node, binding)
        artifacts: dict[str, ArtifactValue | None] = {}
        for name, binding in node.artifacts.items():
            artifacts[name] = frame.value_of(binding, "artifacts")
        all_values = {**values, **artifacts}
        for name, source in (*node.parameters.items(), *node.artifacts.items()):
            if not isinstance(source, ir.FromTask) or all_values[name] is not None:
                continue
            # an exit handler also begins without outputs of steps that failed, if it can
            if not (node.always and _is_optional(node, name)):
                return NO_VALUES, f"{source.task}.{source.output}"
        given_values = {name: value for name, value in values.items() if value is not None}
        given_artifacts = {name: given for name, given in artifacts.items() if given is not None}
        return Values(self._bound(node, path, given_values), given_artifacts), ""

    def _bound(self, node: ir.AnyNode, path: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """The node's parameters, each of its type, with defaults and with placeholders
        filled in."""
        defaults = {}
        for name, parameter in node.inputs.parameters.items():
            if name not in given and parameter.default is not None:
                defaults[name] = parameter.default
        texts: dict[str, Any] = {}  # those with placeholders, which stand for other parameters
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
                # The default of a component is what its own Python code has. The IR only
                # knows its kind, such as LIST, so there is nothing to check it against.
                parameters[name] = value
            else:
                parameters[name] = _received(node, name, value, path)
        for name, value in texts.items():
            formatted = self._format(node, value, parameters)
            parameters[name] = _received(node, name, formatted, path)
        return parameters

    def _parameter(self, frame: Frame, node: ir.AnyNode, binding: ir.Binding) -> Any:
        """The value that `binding` stands for; None for none, or for text (see `_bound`)."""
        match binding:
            case ir.Constant(value):
                return value
            case FromInput() | FromTask():
                return frame.value_of(binding, "parameters")
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
        """A value with its placeholders filled in from the node's other inputs."""
        return filled(value, lambda t: rendered(node, t, parameters, self.run_facts))


@contextlib.contextmanager
def _at_input(node: ir.AnyNode, name: str, path: str) -> Iterator[None]:
    """Turn the ValueError of a value that does not fit an input into a StepError with its
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
    """The value that the input `name` of the node at `path` receives, of the input's type."""
    with _at_input(node, name, path):
        parameter = node.inputs.parameters.get(name)
        if parameter is None:  # an input that only placeholders read has no type
            return carried(value)
        return received(value, parameter.type, parameter.literals)


def _inputs_of_turn(node: ir.SubDag, inputs: Values, item: Any, path: str) -> Values:
    """The inputs of a loop's turn: those of the loop, and `item`."""
    assert node.loop is not None
    name = node.loop.item
    if node.loop.artifacts:
        return Values(inputs.parameters, {**inputs.artifacts, name: item})
    parameter = _received(node, name, item, path)
    return Values({**inputs.parameters, name: parameter}, inputs.artifacts)


def _refusal(node: ir.AnyNode, path: str, error: StepError) -> Iterator[News]:
    """The news that a node was refused, and that what is in it never runs."""
    yield Refused(path, error)
    if isinstance(node, SubDag):
        yield from (Skipped(leaf.path, f"`{path}` failed") for leaf in _leaves(node, path))


def rendered(
    node: ir.AnyNode, template: Template, parameters: Mapping[str, Any], run_facts: RunFacts
) -> str:
    """A text of `node` with its placeholders filled in, by the shim, as in a container;
    StepError where one has no value."""
    inputs = {"parameterValues": dict(parameters), "artifacts": {}}
    context = {"executor_input": {"inputs": inputs}, "run": run_facts(node)}
    try:
        return "".join(shim.render(lower(template), context))
    except shim.TaskError as error:
        raise StepError(f"the inputs of `{node.path}`: {error}", where=node.where) from error


def dependents(graph: ir.Graph, path: str) -> frozenset[str]:
    """Paths of the steps that need the node at `path`, those inside it not counted."""
    dependent_paths = set[str]()
    # A node that waits for a Dag needs what is in the Dag, hence each dependent node
    # makes the Dags around it count, too.
    waited_for = _with_parents(path)
    for node in graph.nodes():  # upstream nodes first, and a Dag before what is in it
        parent = node.path.rpartition("/")[0]
        upstream_paths = {f"{parent}/{name}" if parent else name for name in node.upstream}
        is_inside_dependent = parent in dependent_paths
        if upstream_paths & waited_for or is_inside_dependent:
            dependent_paths.add(node.path)
            waited_for |= _with_parents(node.path)
    return frozenset(leaf.path for leaf in graph.leaves() if leaf.path in dependent_paths)


def _with_parents(path: str) -> set[str]:
    """The path of a node, and those of the Dags that it is in."""
    return {path, *map(str, PurePosixPath(path).parents)}


def _leaves(node: ir.AnyNode, path: str) -> Iterator[Leaf]:
    """The steps at or below `node`, under paths that begin with `path` in place of its own."""
    if not isinstance(node, ir.SubDag):
        yield dataclasses.replace(node, path=path)
        return
    for inner in node.dag.ordered():
        yield from _leaves(inner, f"{path}/{inner.name}")


def _holds(node: ir.AnyNode, inputs: Values) -> bool:
    """Whether the node's condition is true; StepError where it cannot be decided."""
    assert node.condition is not None
    try:
        return evaluate(node.condition.expression, inputs.parameters)
    except StepError as error:
        raise StepError(str(error), where=f"{node.where}.triggerPolicy.condition") from error
