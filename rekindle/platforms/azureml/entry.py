"""What a command of Azure ML starts: where its mounts are, and who the other nodes are.

    python3 entry.py --values FOLDER --input CHANNEL=PATH ... --output NAME=PATH ...

The working folder is the bundle. FOLDER holds a file for each of the pipeline's
parameters that the step reads. The environment holds addresses of secrets, as
REKINDLE_SECRET_NAME; of a PyTorch job MASTER_ADDR, MASTER_PORT, NODE_RANK, WORLD_SIZE and
RANK, and AZUREML_NODE_COUNT on all clusters, a Rendezvous of the nodes, the first of
which leaves the outputs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # the bundle's own rekindle

from rekindle.launch import shim  # noqa: E402
from rekindle.platforms import mounted  # noqa: E402
from rekindle.platforms.mounted import Place, Task  # noqa: E402

if TYPE_CHECKING:
    from rekindle.launch.rendezvous import Rendezvous


def main(words: list[str]) -> int:
    """Run the step of the bundle."""
    shim.end_when_told()
    parser = argparse.ArgumentParser()
    parser.add_argument("--values", type=Path, default=None)
    parser.add_argument("--input", action="append", default=[])
    parser.add_argument("--output", action="append", default=[])
    arguments = parser.parse_args(words)
    task = mounted.load_task(HERE)
    step = os.environ.get("AZUREML_RUN_ID", "")
    facts = mounted.facts(os.environ.get("AZUREML_ROOT_RUN_ID", step), step)
    values = {}
    if arguments.values:
        for path in arguments.values.iterdir():
            # the shell ended the text of each parameter with a line break
            values[path.name] = path.read_text(encoding="utf-8")[:-1]
    place = Place(_paths(arguments.input), _paths(arguments.output), values, facts)
    try:
        if task.get("secrets"):
            from rekindle.platforms.azureml import secrets

            # every secret whose address the environment has becomes a variable of the step
            os.environ.update(secrets.read(task["secrets"], os.environ))
            for name in task["secrets"]:
                del os.environ[secrets.PREFIX + name]
        if "nodes" in task:
            place = place.of_node(_meet(task))
    except Exception as error:  # noqa: BLE001 - it is the job's last word
        return mounted.record_failure(place, f"{type(error).__name__}: {error}")
    return mounted.run(task, place)


def _paths(words: list[str]) -> dict[str, Path]:
    """The paths in words such as `model=/mnt/model`, by name."""
    paths = {}
    for word in words:
        name, _, path = word.partition("=")
        paths[name] = Path(path)
    return paths


def rendezvous(environment: Mapping[str, str], gpus: int) -> Rendezvous:
    """The node's place; a job of one node may lack all of it. With
    `process_count_per_instance: 1` one process a node is started; with more RANK would be
    a process's, so NODE_RANK is read, and one that is too large is an error."""
    # only bundles of distributed steps have this module
    from rekindle.launch.rendezvous import Rendezvous, number

    nodes = number(environment, "AZUREML_NODE_COUNT", number(environment, "WORLD_SIZE", 1))
    if nodes == 1:
        return Rendezvous(ranks_per_node=max(1, gpus))
    name = "NODE_RANK" if environment.get("NODE_RANK") else "RANK"
    rank = number(environment, name)
    address = environment.get("MASTER_ADDR", "")
    port = number(environment, "MASTER_PORT")
    return Rendezvous(nodes, rank, max(1, gpus), address, port).checked(name)


def _meet(task: Task) -> int:
    """The rank of this node, once the job has as many as the task wants."""
    node = rendezvous(os.environ, task["ranks_per_node"])
    job = os.environ.get("AZUREML_RUN_ID", "")
    return mounted.export_rendezvous(node, task["nodes"], "nodes", job)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
