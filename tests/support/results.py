"""What a pipeline returned, read from the record of its run."""

from collections.abc import Mapping
from typing import Any

from rekindle.ir.graph import Dag, Graph, SubDag
from rekindle.platforms.local.walk import NO_TURNS
from rekindle.records import RunRecord, StepRecord


def outputs(graph: Graph, record: RunRecord) -> dict[str, Any]:
    """What the pipeline itself returned, by name: values, and ArtifactRecords, in lists where a
    loop gave several. What was skipped is left out."""
    return _dag_outputs(graph.dag, "", {step.name: step for step in record.steps})


def _dag_outputs(dag: Dag, prefix: str, steps: Mapping[str, StepRecord]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, sources in (*dag.parameters.items(), *dag.artifacts.items()):
        for source in sources:
            node, path = dag.nodes[source.task], prefix + source.task
            if not isinstance(node, SubDag):
                values = {**steps[path].parameters, **steps[path].artifacts}
            elif node.loop is None:
                values = _dag_outputs(node.dag, f"{path}/", steps)
            else:
                values = _loop_outputs(node.dag, f"{path}/", steps)
            if source.output in values:
                found[name] = values[source.output]
                break
    return found


def _loop_outputs(dag: Dag, prefix: str, steps: Mapping[str, StepRecord]) -> dict[str, Any]:
    turns = {name.removeprefix(prefix).split("/")[0] for name in steps if name.startswith(prefix)}
    found = [
        _dag_outputs(dag, f"{prefix}{turn}/", steps)
        for turn in sorted(filter(str.isdigit, turns), key=int)
    ]
    if not found and not any(
        s.reason == NO_TURNS for name, s in steps.items() if name.startswith(prefix)
    ):
        return {}  # the loop itself was skipped
    values = {n: [one[n] for one in found if n in one] for n in (*dag.parameters, *dag.artifacts)}
    for name in dag.artifacts:  # of which a loop inside gives lists
        lists = [one if isinstance(one, list) else [one] for one in values[name]]
        values[name] = [artifact for several in lists for artifact in several]
    return values
