"""The typed Graph: what a pipeline is, once its IR has been read.

Every platform works from these frozen values; none walks raw IR. A `Graph` holds a `Dag`, a `Dag`
holds nodes, and a node is a `Step` (one container) or a `SubDag` (a nested pipeline, or the body of
an If). Each node carries two addresses: `path`, by which people and records call it
(`condition-1/promote`), and `where`, its place in the IR, for errors.

A node's inputs are bound to constants, to inputs of the Dag around it, or to outputs of a sibling.
Follows pipeline_spec.proto, schema 2.1.0; ../shared/facts/kfp.md lists what real pipelines use of
it.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from rekindle.ir.condition import Expression
from rekindle.ir.placeholders import Argument

ParameterType = Literal["STRING", "NUMBER_INTEGER", "NUMBER_DOUBLE", "BOOLEAN", "LIST", "STRUCT"]


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A value passed by content. A default of None is no default: the IR cannot say otherwise."""

    name: str
    type: ParameterType
    optional: bool = False
    default: Any = None
    literals: tuple[Any, ...] = ()
    description: str = ""

    @property
    def required(self) -> bool:
        return not self.optional and self.default is None


@dataclasses.dataclass(frozen=True)
class Artifact:
    """A value passed by place: files under a URI, and metadata. `schema_title` is KFP's type
    (`system.Model`)."""

    name: str
    schema_title: str
    schema_version: str
    optional: bool = False


@dataclasses.dataclass(frozen=True)
class Ports:
    """The inputs of a node, or its outputs."""

    parameters: Mapping[str, Parameter] = dataclasses.field(default_factory=dict)
    artifacts: Mapping[str, Artifact] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Constant:
    """A value written in the pipeline; None means that the input stays empty."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Formatted:
    """A constant with placeholders in it (an f-string, or one inside a list or dict): text is a
    `Template` here."""

    value: Any


@dataclasses.dataclass(frozen=True)
class FromInput:
    """An input of the Dag around the node."""

    name: str


@dataclasses.dataclass(frozen=True)
class FromTask:
    """An output of a sibling node."""

    task: str
    output: str


Binding = Constant | Formatted | FromInput | FromTask


@dataclasses.dataclass(frozen=True)
class Condition:
    """Run only if `expression` holds over the node's own inputs; `text` is what the IR says."""

    text: str
    expression: Expression


@dataclasses.dataclass(frozen=True)
class Retry:
    """At most `count` attempts more; the n-th pause is `pause_seconds * factor**n`, capped."""

    count: int
    pause_seconds: float = 0.0
    factor: float = 2.0
    cap_seconds: float = 3600.0

    def pause_before(self, attempt: int) -> float:
        """Seconds to wait before attempt 2, 3, ... Retry(3, 10.0).pause_before(3) is 20.0."""
        return float(min(self.pause_seconds * self.factor ** (attempt - 2), self.cap_seconds))


@dataclasses.dataclass(frozen=True)
class Resources:
    """What a cluster would grant, as Kubernetes quantities (`4`, `16G`); empty where nothing is
    asked."""

    cpu_request: str = ""
    cpu_limit: str = ""
    memory_request: str = ""
    memory_limit: str = ""
    accelerator_type: str = ""
    accelerator_count: str = ""


@dataclasses.dataclass(frozen=True)
class Container:
    """What a step executes. `source` holds the code of a lightweight Python component (its
    arguments are for `kfp.dsl.executor_main`) and `command` is then empty. `requirements` come from
    KFP's pip preamble, which is cut off: `runtime_requirements` are those that the SDK added for
    itself, pip options stay in `pip_options`."""

    image: str
    command: tuple[Argument, ...] = ()
    args: tuple[Argument, ...] = ()
    env: Mapping[str, Argument] = dataclasses.field(default_factory=dict)
    source: str = ""
    requirements: tuple[str, ...] = ()
    runtime_requirements: tuple[str, ...] = ()
    pip_options: tuple[str, ...] = ()
    resources: Resources = Resources()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Node:
    """What a Step and a SubDag share. `after` are siblings to wait for that nothing is read
    from."""

    name: str
    path: str
    where: str
    component: str
    inputs: Ports
    outputs: Ports
    parameters: Mapping[str, Binding]
    artifacts: Mapping[str, FromInput | FromTask]
    after: tuple[str, ...] = ()
    condition: Condition | None = None

    @property
    def upstream(self) -> tuple[str, ...]:
        """Names of the siblings that must have ended before this node can begin, each once."""
        bindings = [*self.parameters.values(), *self.artifacts.values()]
        read = [binding.task for binding in bindings if isinstance(binding, FromTask)]
        return tuple(dict.fromkeys([*self.after, *read]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step(Node):
    """One container. `cache_key` is the user's own key in place of a computed one ("" = none)."""

    container: Container
    cache: bool = False
    cache_key: str = ""
    retry: Retry = Retry(0)
    timeout_seconds: float | None = None


@dataclasses.dataclass(frozen=True)
class Dag:
    """Nodes by name, and where the Dag's outputs come from: the first source that ran gives the
    value (more than one is KFP's OneOf)."""

    nodes: Mapping[str, Step | SubDag]
    parameters: Mapping[str, tuple[FromTask, ...]] = dataclasses.field(default_factory=dict)
    artifacts: Mapping[str, tuple[FromTask, ...]] = dataclasses.field(default_factory=dict)

    def ordered(self) -> tuple[Step | SubDag, ...]:
        """Nodes in topological order, ties in the order of the IR; raises ValueError on a cycle."""
        done: dict[str, Step | SubDag] = {}
        waiting = dict(self.nodes)
        while waiting:
            ready = [n for n, node in waiting.items() if all(up in done for up in node.upstream)]
            if not ready:
                raise ValueError(f"these steps wait for each other: {', '.join(sorted(waiting))}")
            done[ready[0]] = waiting.pop(ready[0])
        return tuple(done.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubDag(Node):
    """A nested pipeline, or the branch of a condition."""

    dag: Dag


@dataclasses.dataclass(frozen=True)
class Graph:
    """A pipeline: `inputs` are its parameters (root artifacts can be read, but not given),
    `pipeline_root` the place that the author wished artifacts to be."""

    name: str
    inputs: Ports
    outputs: Ports
    dag: Dag
    description: str = ""
    pipeline_root: str = ""

    def nodes(self) -> Iterator[Step | SubDag]:
        """Every node at every depth, a SubDag before what it holds, in topological order."""
        pending = list(self.dag.ordered())
        while pending:
            node = pending.pop(0)
            yield node
            if isinstance(node, SubDag):
                pending = [*node.dag.ordered(), *pending]

    def steps(self) -> tuple[Step, ...]:
        """Every step at every depth in topological order; `step.path` names it
        (`condition-1/promote`)."""
        return tuple(node for node in self.nodes() if isinstance(node, Step))

    def find(self, name: str) -> Step | SubDag:
        """The node whose path, or else its last segment, is `name`; raises KeyError whose text
        names the nearest."""
        by_path = {node.path: node for node in self.nodes()}
        matches = [node for path, node in by_path.items() if path.rsplit("/", 1)[-1] == name]
        if name in by_path:
            return by_path[name]
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise KeyError(f"`{name}` may be {' or '.join(f'`{node.path}`' for node in matches)}")
        near = difflib.get_close_matches(name, [*by_path, *(n.name for n in by_path.values())], n=1)
        hint = f"; did you mean `{near[0]}`?" if near else f"; there are {', '.join(by_path)}"
        raise KeyError(f"no step `{name}`{hint}")

    def drawing(self) -> Drawing:
        """The Graph as plain data for whoever draws it."""
        boxes = tuple(
            Box(
                path=node.path,
                parent=node.path.rpartition("/")[0],
                component=node.component,
                condition=str(node.condition.expression) if node.condition else "",
                is_step=isinstance(node, Step),
            )
            for node in self.nodes()
        )
        edges = tuple(
            (_sibling(node, up), node.path) for node in self.nodes() for up in node.upstream
        )
        return Drawing(boxes, edges)


@dataclasses.dataclass(frozen=True)
class Box:
    """A node to draw inside its `parent` ("" = the pipeline itself)."""

    path: str
    parent: str
    component: str
    condition: str
    is_step: bool


@dataclasses.dataclass(frozen=True)
class Drawing:
    """Boxes, and edges between the paths of siblings."""

    boxes: tuple[Box, ...]
    edges: tuple[tuple[str, str], ...]


def _sibling(node: Node, name: str) -> str:
    parent = node.path.rpartition("/")[0]
    return f"{parent}/{name}" if parent else name
