"""What Kubeflow Trainer v2 tells the nodes of a TrainJob -> `Rendezvous`.

Its torch plugin sets PET_*, which are torchrun's own arguments: PET_NNODES, PET_NODE_RANK (the
completion index of the pod), PET_MASTER_ADDR (`<job>-node-0-0.<job>`), PET_MASTER_PORT, and
PET_NPROC_PER_NODE, a number or `auto`."""

from collections.abc import Mapping

from rekindle.launch.rendezvous import Rendezvous, number


def rendezvous(environment: Mapping[str, str], gpus: int) -> Rendezvous:
    """The node's place; `auto` ranks are as many as it has GPUs, and one without any."""
    nodes, rank = number(environment, "PET_NNODES"), number(environment, "PET_NODE_RANK")
    asked = environment.get("PET_NPROC_PER_NODE", "auto")
    ranks = int(asked) if asked.lstrip("-").isdigit() else max(1, gpus)
    address = environment.get("PET_MASTER_ADDR", "")
    port = number(environment, "PET_MASTER_PORT", 29_500)
    return Rendezvous(nodes, rank, ranks, address, port).checked("PET_*")
