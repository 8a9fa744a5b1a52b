"""The typed Graph: what a pipeline is, once its IR has been read.

Every platform works from these frozen values; none walks raw IR. A `Graph` holds a `Dag`,
a `Dag` holds nodes, and a node is a `Step`, an `Importer` or a `SubDag`, with two
addresses: `path`, by which people and records call it (`condition-1/promote`), and
`where`, its place in the IR, for errors.

A node's inputs are bound to constants, to inputs of the Dag around it, to outputs of a
sibling, or to how a sibling ended. Follows pipeline_spec.proto, schema 2.1.0, and
kubernetes_executor_config.proto of kfp-kubernetes."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

from rekindle.errors import did_you_mean
from rekindle.ir.condition import Expression
from rekindle.ir.distribution import Distribution
from rekindle.ir.placeholders import Argument, Template

ParameterType = Literal[
    "STRING",
    "NUMBER_INTEGER",
    "NUMBER_DOUBLE",
    "BOOLEAN",
    "LIST",
    "STRUCT",
    "TASK_FINAL_STATUS",
    "TASK_CONFIG",
]


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A value passed by content; a default of None is none, text with placeholders a `Template`."""

    name: str
    type: ParameterType
    optional: bool = False
    default: Any = None
    literals: tuple[Any, ...] = ()

    @property
    def required(self) -> bool:
        return not self.optional and self.default is None


@dataclasses.dataclass(frozen=True)
class Artifact:
    """A value passed by place: files under a URI, and metadata. `schema_title` is KFP's
    type (`system.Model`); `is_list` is any number of them in one order."""

    name: str
    schema_title: str
    schema_version: str
    optional: bool = False
    is_list: bool = False


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
    """A constant with placeholders in it, at any depth: text is a `Template` here."""

    value: Any


@dataclasses.dataclass(frozen=True)
class FromInput:
    """An input of the Dag around the node; `keys` lead into a struct, outermost first."""

    name: str
    keys: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class FromTask:
    """An output of a sibling node; `keys` lead into a struct, outermost first."""

    task: str
    output: str
    keys: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class FinalStatus:
    """How a sibling ended: KFP's PipelineTaskFinalStatus."""

    task: str


Binding = Constant | Formatted | FromInput | FromTask | FinalStatus


@dataclasses.dataclass(frozen=True)
class Condition:
    """Run only if `expression` holds over the node's own inputs; `text` is what the IR says."""

    text: str
    expression: Expression


@dataclasses.dataclass(frozen=True)
class Loop:
    """Run a Dag once for each item of a list, which becomes its input `item`. `items` is
    the list (with Templates where KFP wrote placeholders) or the name of the node's own
    input that holds it; `artifacts` says that it is a list of artifacts, `at_once` how
    many may run side by side (0: as many as there are)."""

    items: tuple[Any, ...] | str
    item: str
    artifacts: bool = False
    at_once: int = 0


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
    """What a cluster would grant, as Kubernetes quantities (`4`, `16G`) or text with a
    placeholder; empty where nothing is asked."""

    cpu_request: str = ""
    cpu_limit: str = ""
    memory_request: str = ""
    memory_limit: str = ""
    accelerator_type: str = ""
    accelerator_count: str = ""

    @property
    def at_run_time(self) -> bool:
        """Whether a placeholder stands in one of them, so that only the run knows it."""
        return any("{{$" in text for text in dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class Secret:
    """The value under `key` of a secret called `name`, in the environment variable `env`
    of a step; an `optional` one may be missing."""

    env: str
    name: Binding
    key: str
    where: str
    optional: bool = False


@dataclasses.dataclass(frozen=True)
class Setting:
    """A wish that only some platforms know, by the IR's name (`tolerations`), with its value."""

    name: str
    value: Any
    where: str


@dataclasses.dataclass(frozen=True)
class Container:
    """What a step executes. `source` holds the code of a lightweight Python component
    (its arguments are for `kfp.dsl.executor_main`) and `command` is then empty.
    `requirements` come from KFP's pip preamble, which is cut off: `runtime_requirements`
    are those that the SDK added for itself, pip options stay in `pip_options`.
    `as_written` is the command with all of that still in it, for who starts the image
    itself. A placeholder in `image` stays text."""

    image: str
    command: tuple[Argument, ...] = ()
    args: tuple[Argument, ...] = ()
    env: Mapping[str, Argument] = dataclasses.field(default_factory=dict)
    source: str = ""
    requirements: tuple[str, ...] = ()
    runtime_requirements: tuple[str, ...] = ()
    pip_options: tuple[str, ...] = ()
    as_written: tuple[Argument, ...] = ()
    resources: Resources = Resources()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Node:
    """What all nodes share. `after` are siblings to wait for that nothing is read from;
    `always` nodes run whether or not what they wait for succeeded (exit handlers, and
    KFP's `ignore_upstream_failure`)."""

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
    always: bool = False

    @property
    def upstream(self) -> tuple[str, ...]:
        """Names of the siblings that must have ended before this node can begin, each once."""
        bindings = [*self.parameters.values(), *self.artifacts.values()]
        tasks = [b.task for b in bindings if isinstance(b, FromTask | FinalStatus)]
        return tuple(dict.fromkeys([*self.after, *tasks]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step(Node):
    """One container; with a `distribution`, one a node. `cache_key` is the user's own key
    in place of a computed one ("" = none)."""

    container: Container
    cache: bool = False
    cache_key: str = ""
    retry: Retry = Retry(0)
    timeout_seconds: float | None = None
    distribution: Distribution | None = None
    secrets: tuple[Secret, ...] = ()
    settings: tuple[Setting, ...] = ()

    @property
    def spread(self) -> Distribution:
        """The distribution of a step that has one."""
        assert self.distribution is not None, self.path
        return self.distribution

    @property
    def time_limit_seconds(self) -> float | None:
        """The shorter of its timeout and its distribution's `max_run_hours`; None for neither."""
        limits = []
        if self.timeout_seconds is not None:
            limits.append(self.timeout_seconds)
        if self.distribution is not None and self.distribution.max_run_hours is not None:
            limits.append(self.distribution.max_run_hours * 3_600)
        return min(limits, default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Importer(Node):
    """An artifact from outside becomes the node's only output. `uri` and the texts in
    `metadata` may hold placeholders; `to_workspace` asks for a copy in the workspace of
    the pipeline."""

    uri: Template
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    to_workspace: bool = False


@dataclasses.dataclass(frozen=True)
class Dag:
    """Nodes by name, and where its outputs come from: the first source that ran (KFP's OneOf)."""

    nodes: "Mapping[str, AnyNode]"
    parameters: Mapping[str, tuple[FromTask, ...]] = dataclasses.field(default_factory=dict)
    artifacts: Mapping[str, tuple[FromTask, ...]] = dataclasses.field(default_factory=dict)

    def ordered(self) -> "tuple[AnyNode, ...]":
        """Nodes in topological order, ties in the order of the IR; raises ValueError on a cycle."""
        done: dict[str, AnyNode] = {}
        waiting = dict(self.nodes)
        while waiting:
            ready = [name for name, node in waiting.items() if done.keys() >= set(node.upstream)]
            if not ready:
                raise ValueError(f"these steps wait for each other: {', '.join(sorted(waiting))}")
            done[ready[0]] = waiting.pop(ready[0])  # one at a time: the order of the IR decides
        return tuple(done.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubDag(Node):
    """A nested pipeline, the branch of a condition, the body of a loop, or what an exit
    handler watches. Outputs of a loop are lists, in the order of its items (KFP's
    Collected)."""

    dag: Dag
    loop: Loop | None = None
    retry: Retry = Retry(0)


AnyNode = Step | Importer | SubDag


@dataclasses.dataclass(frozen=True)
class Graph:
    """A pipeline: `inputs` are its parameters (root artifacts can be read, but not
    given), `pipeline_root` the place that the author wished artifacts to be, `settings`
    what is asked for all of it."""

    name: str
    inputs: Ports
    outputs: Ports
    dag: Dag
    pipeline_root: str = ""
    settings: tuple[Setting, ...] = ()

    def nodes(self) -> Iterator[AnyNode]:
        """Every node at every depth, a SubDag before what it holds, in topological order."""
        pending = list(self.dag.ordered())
        while pending:
            node = pending.pop(0)
            yield node
            if isinstance(node, SubDag):
                pending = [*node.dag.ordered(), *pending]

    def steps(self) -> tuple[Step, ...]:
        """Every step at every depth in topological order; `step.path` names it."""
        return tuple(node for node in self.nodes() if isinstance(node, Step))

    def leaves(self) -> tuple[Step | Importer, ...]:
        """Everything that records know: steps and importers, in topological order."""
        return tuple(node for node in self.nodes() if not isinstance(node, SubDag))

    def find(self, name: str) -> AnyNode:
        """The node of that path, or else last segment; KeyError's text names the nearest."""
        by_path = {node.path: node for node in self.nodes()}
        if name in by_path:
            return by_path[name]
        matches = [path for path in by_path if path.rsplit("/", 1)[-1] == name]
        if len(matches) == 1:
            return by_path[matches[0]]
        if matches:
            quoted = [f"`{path}`" for path in matches]
            raise KeyError(f"`{name}` may be {' or '.join(quoted)}")
        names = [node.name for node in by_path.values()]
        hint = did_you_mean(name, [*by_path, *names]) or f"there are {', '.join(by_path)}"
        raise KeyError(f"no step `{name}`; {hint}")

    def until(self, name: str) -> Self:
        """This, with the step `name` of the pipeline itself and what it needs, and no outputs."""
        needed = set[str]()
        waiting = [name]
        while waiting:
            step_name = waiting.pop()
            needed.add(step_name)
            waiting += self.dag.nodes[step_name].upstream
        nodes = {path: node for path, node in self.dag.nodes.items() if path in needed}
        dag = dataclasses.replace(self.dag, nodes=nodes, parameters={}, artifacts={})
        return dataclasses.replace(self, dag=dag)

    def spread(self, name: str, over: Distribution) -> Self:
        """This, with the step `name` of the pipeline on the machines of `over`; KeyError."""
        step = self.dag.nodes[name]
        assert isinstance(step, Step), name
        nodes = {**self.dag.nodes, name: dataclasses.replace(step, distribution=over)}
        return dataclasses.replace(self, dag=dataclasses.replace(self.dag, nodes=nodes))
