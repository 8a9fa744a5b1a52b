"""What a pod of a TrainJob starts: one node of a distributed step.

    python3 -m rekindle.platforms.kubeflow.node PACKED...

The arguments are a task packed by trainjob.py: what launch/shim.py takes, with the URIs of
artifacts in its ExecutorInput, `pip`, `leash` (workflow.py) and `result`, the URI where node rank 0
leaves what the step gave, last of all. Trainer's PET_* become the Rendezvous, and go no further:
what reads them would start ranks that rekindle does not know. Node rank 0 alone has outputs; KFP's
executor is told so by CLUSTER_SPEC, as on Vertex AI."""

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rekindle.errors import RekindleError
from rekindle.launch import node, shim, staging
from rekindle.launch.rendezvous import Rendezvous, number
from rekindle.platforms.kubeflow.trainjob import unpacked


def rendezvous(environment: Mapping[str, str], gpus: int) -> Rendezvous:
    """The node's place. Trainer's torch plugin sets PET_*, which are torchrun's own arguments:
    PET_NODE_RANK is the completion index of the pod, PET_MASTER_ADDR is `<job>-node-0-0.<job>`;
    `auto` ranks are as many as the node has GPUs, and one without any."""
    nodes, rank = number(environment, "PET_NNODES"), number(environment, "PET_NODE_RANK")
    asked = environment.get("PET_NPROC_PER_NODE", "auto")
    ranks = int(asked) if asked.lstrip("-").isdigit() else max(1, gpus)
    address = environment.get("PET_MASTER_ADDR", "")
    port = number(environment, "PET_MASTER_PORT", 29_500)
    return Rendezvous(nodes, rank, ranks, address, port).checked("PET_*")


log = logging.getLogger(__name__)


def main(words: list[str]) -> int:
    """Run the node; the exit code says how it ended."""
    shim.end_when_told()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    task = unpacked(words)
    try:
        place = rendezvous(os.environ, gpus=0).keyed(os.environ)
    except RekindleError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    log.info("node %d of %d, %d ranks each", place.node_rank, place.nodes, place.ranks_per_node)
    if code := node.installed(task["pip"]):
        sys.stderr.write(f"pip ended with {code}\n")
        return code
    with tempfile.TemporaryDirectory(prefix="rekindle-") as folder:
        return run(task, place, Path(folder))


def run(task: Mapping[str, Any], place: Rendezvous, folder: Path) -> int:
    """The step on this node, from its inputs to its outputs."""
    leads = place.node_rank == 0
    given = staging.localised(task["executor_input"], folder)
    words = node.prepared(task, given, task["run"], folder, leads=leads, cwd=folder)
    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]  # the Rendezvous takes its place
    rank = place.node_rank
    kind = {"type": "workerpool1", "index": rank - 1} if rank else {"type": "workerpool0"}
    os.environ.update(place.environment(), CLUSTER_SPEC=json.dumps({"task": kind}))
    mark = folder / "run-is-over"
    if leads:
        held = [sys.executable, "-m", "rekindle.platforms.kubeflow.workflow"]
        # the shim ends it with all the rest
        subprocess.Popen([*held, json.dumps({**task["leash"], "mark": str(mark)})])
    code = shim.main(words)
    left = node.left(folder)
    if code and mark.exists():
        return 1  # for good: any other code would restart the nodes
    if error := left.get("error"):
        sys.stderr.write(f"{error}\n")
    if code == 0 and leads:
        artifacts = staging.delivered(left["artifacts"], task["executor_input"])
        output = {"parameterValues": left["parameters"], "artifacts": artifacts}
        staging.write_text(task["result"], json.dumps(output, sort_keys=True))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
