"""`distribute()`: run a step of any KFP pipeline on several nodes.

It writes `task.platform_config["rekindle"]`, which KFP carries into the second document
of the compiled pipeline (`platforms.rekindle`); `ir/read/settings.py` reads it back, and
each platform's compiler lowers and strips it. The body of the component then runs once on
every node, with a `Rendezvous` in its environment. Node rank 0 alone writes the
outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rekindle.errors import Problem, RequestError

if TYPE_CHECKING:
    from kfp.dsl import PipelineTask

PLATFORM = "rekindle"
MOST_NODES = 4_096
MOST_GPUS = 64  # of a node


@dataclasses.dataclass(frozen=True)
class Distribution:
    """How a step is spread: `nodes` machines with `gpus_per_node` GPUs each (0: CPU
    only).

    `accelerator` is the GPU's name in the catalog, such as `H100`; `machine` the
    platform's own name of a machine, which decides where it is given. `spot` machines may
    be taken away at any time: `checkpoint` names the input of the component that says
    where it saves and resumes. `max_run_hours` ends the step."""

    nodes: int
    gpus_per_node: int = 0
    accelerator: str = ""
    machine: str = ""
    spot: bool = False
    checkpoint: str = ""
    max_run_hours: float | None = None

    def problems(self, inputs: frozenset[str], where: str) -> list[Problem]:
        """What is wrong with it for a component with these inputs."""
        problems = []
        if not 1 <= self.nodes <= MOST_NODES:
            message = f"`nodes` is {self.nodes}; a step runs on 1 to {MOST_NODES:,} nodes"
            problems.append(Problem(message, where, "give the number of machines"))
        if not 0 <= self.gpus_per_node <= MOST_GPUS:
            message = f"`gpus_per_node` is {self.gpus_per_node}; a node has 0 to {MOST_GPUS} GPUs"
            problems.append(Problem(message, where, "give the GPUs of one machine"))
        if self.accelerator and not self.gpus_per_node:
            message = (
                f"`accelerator` is {self.accelerator}, but there are no GPUs to be of that kind"
            )
            problems.append(Problem(message, where, "set gpus_per_node, too"))
        if self.spot and not self.checkpoint:
            message = "a spot machine may be taken away at any time, and the step saves nothing"
            fix = "save where an input says, and name that input: checkpoint='NAME'; or spot=False"
            problems.append(Problem(message, where, fix))
        if self.checkpoint and self.checkpoint not in inputs:
            message = f"`checkpoint` names the input `{self.checkpoint}`, which the component lacks"
            names = ", ".join(sorted(inputs)) or "none"
            problems.append(Problem(message, where, f"name one of its inputs: {names}"))
        # so written, a NaN is refused, too
        if self.max_run_hours is not None and not self.max_run_hours > 0:
            message = f"`max_run_hours` is {self.max_run_hours:g}; a step needs some time"
            problems.append(Problem(message, where, "give hours, or leave it out"))
        return problems


def distribute(
    task: PipelineTask,
    *,
    nodes: int,
    gpus_per_node: int = 0,
    accelerator: str = "",
    machine: str = "",
    spot: bool = False,
    checkpoint: str = "",
    max_run_hours: float | None = None,
) -> PipelineTask:
    """Run `task` on `nodes` machines at once; see `Distribution` for the other arguments.

    Returns the task, so that calls chain as KFP's do. Raises RequestError for a task that
    has no container (a nested pipeline, an importer), and for numbers that make no sense.

        trained = rekindle.distribute(train(data=made.output, save_to=root),
                                      nodes=4, gpus_per_node=8, spot=True, checkpoint="save_to")"""
    name = str(getattr(task, "name", task))
    where = f"distribute({name})"
    implementation = getattr(getattr(task, "component_spec", None), "implementation", None)
    if getattr(implementation, "container", None) is None:
        kind = "an importer" if getattr(implementation, "importer", None) else "a pipeline"
        message = f"`{name}` is {kind}, and only a step with a container runs on several nodes"
        raise RequestError(message, where=where, fix="distribute the step inside it that trains")
    distribution = Distribution(
        nodes, gpus_per_node, accelerator, machine, spot, checkpoint, max_run_hours
    )
    inputs = frozenset(task.component_spec.inputs or {})
    if problems := distribution.problems(inputs, where):
        raise RequestError(problems)
    settings = {}
    for field in dataclasses.fields(distribution):
        value = getattr(distribution, field.name)
        if value != field.default:
            settings[field.name] = value
    task.platform_config[PLATFORM] = settings
    return task


def from_settings(raw: Mapping[str, Any], where: str) -> Distribution:
    """A Distribution from the second document; RequestError for a field of the wrong kind."""
    kinds = {field.name: str(field.type) for field in dataclasses.fields(Distribution)}
    values: dict[str, Any] = {}
    for name, value in raw.items():
        if name not in kinds:
            message = f"distribute() has no `{name}`"
            raise RequestError(message, where=where, fix=f"it has {', '.join(kinds)}")
        kind = kinds[name]
        # in Python a bool is an int
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # the second document has every number as a double
        if kind == "int" and is_number and int(value) == value:
            values[name] = int(value)
        elif kind.startswith("float") and is_number:
            values[name] = float(value)
        elif kind in ("str", "bool") and type(value).__name__ == kind:
            values[name] = value
        else:
            message = f"`{name}` is {value!r}, which is no {kind}"
            raise RequestError(message, where=f"{where}.{name}")
    if "nodes" not in values:
        raise RequestError("a distributed step has a number of `nodes`", where=where)
    return Distribution(**values)
