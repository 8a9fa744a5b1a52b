"""Dags under way: what came out of each node that ended, and how a whole Dag, or all turns of a
loop, ended."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, Literal

from rekindle.errors import StepError
from rekindle.ir.graph import Dag, FromTask, SubDag
from rekindle.platforms.local.cache import NOTHING, Given, Values, each


@dataclasses.dataclass(frozen=True)
class End:
    """How a node ended; `stopped` ones never ran since something else, the `cause`, failed."""

    status: Literal["succeeded", "skipped", "failed", "stopped"]
    values: Values = NOTHING
    cause: str = ""
    error: str = ""


@dataclasses.dataclass
class Frame:
    """One Dag being walked, of one turn if it is a loop's."""

    dag: Dag
    path: str
    inputs: Values
    free: bool = False
    begun: set[str] = dataclasses.field(default_factory=set)
    freed: set[str] = dataclasses.field(default_factory=set)
    ended: dict[str, End] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.order = self.dag.ordered()

    def at(self, name: str) -> str:
        return f"{self.path}/{name}" if self.path else name

    def done(self) -> bool:
        return len(self.ended) == len(self.dag.nodes)

    def end(self) -> End:
        """How the whole Dag ended: the first failure decides."""
        for status in ("failed", "stopped"):
            for end in self.ended.values():
                if end.status == status:
                    return dataclasses.replace(end, values=self.outputs())
        return End("succeeded", self.outputs())

    def outputs(self) -> Values:
        parameters = {n: self.first(s, "parameters") for n, s in self.dag.parameters.items()}
        artifacts = {n: self.first(s, "artifacts") for n, s in self.dag.artifacts.items()}
        return Values(
            {n: v for n, v in parameters.items() if v is not None},
            {n: v for n, v in artifacts.items() if v is not None},
        )

    def first(self, sources: Sequence[FromTask], kind: str) -> Any:
        """The value of the first source that has one."""
        for source in sources:
            end = self.ended.get(source.task)
            if end is not None and source.output in getattr(end.values, kind):
                return element(getattr(end.values, kind)[source.output], source.keys)
        return None


@dataclasses.dataclass
class Opened:
    """A SubDag under way: one frame, or a loop's turns, of which `at_once` are walked at a time."""

    node: SubDag
    parent: Frame
    turns: list[Frame]
    at_once: int

    def walked(self) -> list[Frame]:
        """The frames that are walked now."""
        return [frame for frame in self.turns if not frame.done()][: self.at_once or None]

    def done(self) -> bool:
        return all(frame.done() for frame in self.turns)

    def end(self) -> End:
        ends = [frame.end() for frame in self.turns]
        if self.node.loop is None:
            return ends[0]
        worst = [e for status in ("failed", "stopped") for e in ends if e.status == status]
        values = collected(self.node.dag, [end.values for end in ends])
        return dataclasses.replace(worst[0], values=values) if worst else End("succeeded", values)


def collected(dag: Dag, turns: list[Values]) -> Values:
    """What a loop gives: a list an output, without the turns that have no value."""
    artifacts: dict[str, Given] = {}
    for name in dag.artifacts:
        found = [turn.artifacts[name] for turn in turns if name in turn.artifacts]
        artifacts[name] = tuple(artifact for given in found for artifact in each(given))
    parameters = {
        name: [turn.parameters[name] for turn in turns if name in turn.parameters]
        for name in dag.parameters
    }
    return Values(parameters, artifacts)


def element(value: Any, keys: tuple[str, ...]) -> Any:
    """What `keys` lead to in a struct, which may come as JSON text."""
    for key in keys:
        value = parsed(value) if isinstance(value, str) else value
        if not isinstance(value, dict) or key not in value:
            raise StepError(f"there is no `{key}` in {str(value)[:60]!r}")
        value = value[key]
    return value


def parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
