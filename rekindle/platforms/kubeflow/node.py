"""What a pod of a TrainJob starts: one node of a distributed step.

    python3 -m rekindle.platforms.kubeflow.node PACKED...

The arguments are a task packed by trainjob.py: what launch/shim.py takes, with the URIs
of artifacts in its ExecutorInput, `pip`, `leash` (workflow.py) and `result`, the URI
where node rank 0 leaves what the step gave, last of all. Trainer's PET_* become the
Rendezvous, and go no further: what reads them would start ranks that rekindle does not
know. Node rank 0 alone has outputs; KFP's executor is told so by CLUSTER_SPEC, as on
Vertex AI."""

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from rekindle.errors import RekindleError
from rekindle.launch import node, shim, staging
from rekindle.launch.rendezvous import Rendezvous, number
from rekindle.platforms.kubeflow import workflow
from rekindle.platforms.kubeflow.trainjob import unpacked
from rekindle.protojson import Json

log = logging.getLogger(__name__)

_FOR_GOOD = 1  # ends the job, by runtime.yaml; other codes restart all nodes
_ENDS_THE_JOB = (1, 2)
# The Job controller judges ends within a second of the first together, and an exit code of 1
# among them ends the job (trainjob-137-then-peer-1-at-once, -later, as recorded)
_HELD_BACK_SECONDS = 3.0
_LOOK_SECONDS = 20.0  # less than a pod has to end


def rendezvous(environment: Mapping[str, str], gpus: int) -> Rendezvous:
    """The node's place. Trainer's torch plugin sets PET_*, which are torchrun's own
    arguments: PET_NODE_RANK is the completion index of the pod, PET_MASTER_ADDR is
    `<job>-node-0-0.<job>`; `auto` ranks are as many as the node has GPUs, and one without
    any."""
    nodes = number(environment, "PET_NNODES")
    rank = number(environment, "PET_NODE_RANK")
    ranks = max(1, gpus)
    ranks_text = environment.get("PET_NPROC_PER_NODE", "auto")
    if ranks_text.lstrip("-").isdigit():
        ranks = int(ranks_text)  # a negative one is refused with the rest
    address = environment.get("PET_MASTER_ADDR", "")
    port = number(environment, "PET_MASTER_PORT", 29_500)
    return Rendezvous(nodes, rank, ranks, address, port).checked("PET_*")


def main(words: list[str]) -> int:
    """Run the node; the exit code says how it ended."""
    shim.end_when_told()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    task = unpacked(words)
    try:
        own_rendezvous = rendezvous(os.environ, gpus=0).keyed(os.environ)
    except RekindleError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    log.info(
        "node %d of %d, %d ranks each",
        own_rendezvous.node_rank,
        own_rendezvous.nodes,
        own_rendezvous.ranks_per_node,
    )
    code = node.installed(task["pip"])
    if code:
        sys.stderr.write(f"pip ended with {code}\n")
        return code
    with tempfile.TemporaryDirectory(prefix="rekindle-") as folder:
        return run(task, own_rendezvous, Path(folder))


def run(task: Json, place: Rendezvous, folder: Path) -> int:
    """The step on this node, from its inputs to its outputs."""
    reason = workflow.look(task["leash"], _LOOK_SECONDS)
    if reason:
        log.info("the run ends, %s: this node starts nothing", reason)
        return _FOR_GOOD
    leads = place.node_rank == 0
    executor_input = staging.localised(task["executor_input"], folder)
    arguments = node.prepared(task, executor_input, task["run"], folder, leads=leads, cwd=folder)
    for name in list(os.environ):
        if name.startswith("PET_"):
            del os.environ[name]  # the Rendezvous takes its place
    # the pools of Vertex AI, by which KFP's executor knows who writes outputs
    kind: Json = {"type": "workerpool0"}
    if not leads:
        kind = {"type": "workerpool1", "index": place.node_rank - 1}
    os.environ.update(place.environment(), CLUSTER_SPEC=json.dumps({"task": kind}))
    mark = folder / "run-is-over"
    watch = [sys.executable, "-m", "rekindle.platforms.kubeflow.workflow"]
    # the shim ends it with all the rest
    subprocess.Popen([*watch, json.dumps({**task["leash"], "mark": str(mark)})])
    code = shim.main(arguments)
    result = node.left(folder)
    if code and (mark.exists() or workflow.look(task["leash"], _LOOK_SECONDS)):
        return _FOR_GOOD
    if code in _ENDS_THE_JOB and place.nodes > 1:
        # a peer that was killed is judged first, and its loss restarts all nodes: what failed
        # for want of it would end the job for good
        time.sleep(_HELD_BACK_SECONDS)
    error = result.get("error")
    if error:
        sys.stderr.write(f"{error}\n")
    if code == 0 and leads:
        artifacts = staging.delivered(result["artifacts"], task["executor_input"])
        output = {"parameterValues": result["parameters"], "artifacts": artifacts}
        # last of all: it is how the launcher knows that all is there
        staging.write_text(task["result"], json.dumps(output, sort_keys=True))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
