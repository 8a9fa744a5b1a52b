"""`distribute()`: run a step of any KFP pipeline on several nodes.

It writes `task.platform_config["rekindle"]`, which KFP carries into the second document of the
compiled pipeline (`platforms.rekindle`); `ir/read/settings.py` reads it back, and each platform's
compiler lowers and strips it. The body of the component then runs once on every node, with a
`Rendezvous` in its environment. Node rank 0 alone writes the outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rekindle.errors import Problem, RequestError

if TYPE_CHECKING:
    from kfp.dsl import PipelineTask

PLATFORM = "rekindle"
MOST_NODES = 4_096


@dataclasses.dataclass(frozen=True)
class Distribution:
    """How a step is spread: `nodes` machines with `gpus_per_node` GPUs each (0: CPU only).

    `accelerator` is the GPU's name in the catalog, such as `H100`; `machine` the platform's own
    name of a machine, which decides where it is given. `spot` machines may be taken away at any
    time: `checkpoint` names the input of the component that says where it saves and resumes.
    `max_run_hours` ends the step."""

    nodes: int
    gpus_per_node: int = 0
    accelerator: str = ""
    machine: str = ""
    spot: bool = False
    checkpoint: str = ""
    max_run_hours: float | None = None

    def problems(self, inputs: frozenset[str], where: str) -> list[Problem]:
        """What is wrong with it for a component with these inputs."""
        found = []
        if not 1 <= self.nodes <= MOST_NODES:
            what = f"`nodes` is {self.nodes}; a step runs on 1 to {MOST_NODES:,} nodes"
            found.append(Problem(what, where, "give the number of machines"))
        if not 0 <= self.gpus_per_node <= 64:
            what = f"`gpus_per_node` is {self.gpus_per_node}; a node has 0 to 64 GPUs"
            found.append(Problem(what, where, "give the GPUs of one machine"))
        if self.accelerator and not self.gpus_per_node:
            what = f"`accelerator` is {self.accelerator}, but there are no GPUs to be of that kind"
            found.append(Problem(what, where, "set gpus_per_node, too"))
        if self.spot and not self.checkpoint:
            what = "a spot machine may be taken away at any time, and the step saves nothing"
            fix = "save where an input says, and name that input: checkpoint='NAME'; or spot=False"
            found.append(Problem(what, where, fix))
        if self.checkpoint and self.checkpoint not in inputs:
            known = ", ".join(sorted(inputs)) or "none"
            what = f"`checkpoint` names the input `{self.checkpoint}`, which the component lacks"
            found.append(Problem(what, where, f"name one of its inputs: {known}"))
        if self.max_run_hours is not None and not self.max_run_hours > 0:
            what = f"`max_run_hours` is {self.max_run_hours:g}; a step needs some time"
            found.append(Problem(what, where, "give hours, or leave it out"))
        return found


def distribute(
    task: PipelineTask, *, nodes: int, gpus_per_node: int = 0, accelerator: str = "",
    machine: str = "", spot: bool = False, checkpoint: str = "", max_run_hours: float | None = None,
) -> PipelineTask:  # fmt: skip
    """Run `task` on `nodes` machines at once; see `Distribution` for the other arguments.

    Returns the task, so that calls chain as KFP's do. Raises RequestError for a task that has no
    container (a nested pipeline, an importer), and for numbers that make no sense.

        trained = rekindle.distribute(train(data=made.output, save_to=root),
                                      nodes=4, gpus_per_node=8, spot=True, checkpoint="save_to")"""
    name = str(getattr(task, "name", task))
    where = f"distribute({name})"
    implementation = getattr(getattr(task, "component_spec", None), "implementation", None)
    if getattr(implementation, "container", None) is None:
        kind = "an importer" if getattr(implementation, "importer", None) else "a pipeline"
        what = f"`{name}` is {kind}, and only a step with a container runs on several nodes"
        raise RequestError(what, where=where, fix="distribute the step inside it that trains")
    wanted = Distribution(
        nodes, gpus_per_node, accelerator, machine, spot, checkpoint, max_run_hours
    )
    if problems := wanted.problems(frozenset(task.component_spec.inputs or {}), where):
        raise RequestError(problems)
    fields = ((field, getattr(wanted, field.name)) for field in dataclasses.fields(wanted))
    changed = {field.name: value for field, value in fields if value != field.default}
    task.platform_config[PLATFORM] = changed
    return task


def from_settings(raw: Mapping[str, Any], where: str) -> Distribution:
    """A Distribution from the second document; RequestError for a field of the wrong kind."""
    kinds = {field.name: str(field.type) for field in dataclasses.fields(Distribution)}
    values: dict[str, Any] = {}
    for name, value in raw.items():
        if name not in kinds:
            known = ", ".join(kinds)
            raise RequestError(f"distribute() has no `{name}`", where=where, fix=f"it has {known}")
        kind, number = kinds[name], isinstance(value, int | float) and not isinstance(value, bool)
        if kind == "int" and number and int(value) == value:
            values[name] = int(value)
        elif kind.startswith("float") and number:
            values[name] = float(value)
        elif kind in ("str", "bool") and type(value).__name__ == kind:
            values[name] = value
        else:
            what = f"`{name}` is {value!r}, which is no {kind}"
            raise RequestError(what, where=f"{where}.{name}")
    if "nodes" not in values:
        raise RequestError("a distributed step has a number of `nodes`", where=where)
    return Distribution(**values)
