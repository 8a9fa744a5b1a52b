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
from rekindle.tables import problems_in

if TYPE_CHECKING:
    from kfp.dsl import PipelineTask

PLATFORM = "rekindle"
MOST_NODES = 4_096
_problem = problems_in(__file__)


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
        is_wrong = {
            "nodes": not 1 <= self.nodes <= MOST_NODES,
            "gpus": not 0 <= self.gpus_per_node <= 64,
            "accelerator": self.accelerator and not self.gpus_per_node,
            "unsaved": self.spot and not self.checkpoint,
            "checkpoint": self.checkpoint and self.checkpoint not in inputs,
            "hours": self.max_run_hours is not None and not self.max_run_hours > 0,
        }
        known = {"asked": self, "most": MOST_NODES, "known": ", ".join(sorted(inputs)) or "none"}
        return [_problem(name, where=where, **known) for name, wrong in is_wrong.items() if wrong]


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

    Returns the task, so that calls chain as KFP's do. Raises RequestError for a task that has no
    container (a nested pipeline, an importer), and for numbers that make no sense.

        trained = rekindle.distribute(train(data=made.output, save_to=root),
                                      nodes=4, gpus_per_node=8, spot=True, checkpoint="save_to")"""
    name = str(getattr(task, "name", task))
    where = f"distribute({name})"
    implementation = getattr(getattr(task, "component_spec", None), "implementation", None)
    if getattr(implementation, "container", None) is None:
        kind = "an importer" if getattr(implementation, "importer", None) else "a pipeline"
        raise RequestError([_problem("no_container", where=where, name=name, kind=kind)])
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
            unknown = _problem("unknown", where=where, name=name, known=", ".join(kinds))
            raise RequestError([unknown])
        kind, number = kinds[name], isinstance(value, int | float) and not isinstance(value, bool)
        if kind == "int" and number and int(value) == value:
            values[name] = int(value)
        elif kind.startswith("float") and number:
            values[name] = float(value)
        elif kind in ("str", "bool") and type(value).__name__ == kind:
            values[name] = value
        else:
            wrong = _problem("kind", where=f"{where}.{name}", name=name, value=value, kind=kind)
            raise RequestError([wrong])
    if "nodes" not in values:
        raise RequestError([_problem("uncounted", where=where)])
    return Distribution(**values)
