"""What Slurm, or torchrun itself, tells the nodes of a job -> `Rendezvous`, for machines that are
no platform of their own.

Slurm: one task a node (`srun --ntasks-per-node=1`); SLURM_JOB_NODELIST is a hostlist such as
`gpu[01-03,07]`, whose first host is node rank 0. torchrun: one process a node
(`--nproc-per-node=1`), GROUP_RANK of GROUP_WORLD_SIZE."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rekindle.errors import RequestError
from rekindle.launch.rendezvous import Rendezvous, number

_FIRST = re.compile(r"([^,\[\]]*)(?:\[(\d+)[^\]]*\]([^,\[\]]*))?")
_PORTS = range(20_000, 30_000)


def from_slurm(environment: Mapping[str, str], gpus: int) -> Rendezvous:
    """The node's place; the port follows from the job's number, so that two jobs on one machine do
    not meet."""
    if number(environment, "SLURM_NTASKS_PER_NODE", 1) != 1:
        raise RequestError(
            "Slurm starts several tasks a node, but ranks are started by torchrun",
            where="SLURM_NTASKS_PER_NODE",
            fix="srun --ntasks-per-node=1",
        )
    return (
        Rendezvous(
            nodes=number(environment, "SLURM_NNODES"),
            node_rank=number(environment, "SLURM_NODEID"),
            ranks_per_node=max(1, gpus),
            address=_first_host(environment.get("SLURM_JOB_NODELIST", "")),
            port=_PORTS[number(environment, "SLURM_JOB_ID") % len(_PORTS)],
        )
        .checked("SLURM_*")
        .keyed(dict(environment), f"slurm-{environment['SLURM_JOB_ID']}")
    )


def from_torchrun(environment: Mapping[str, str], gpus: int) -> Rendezvous:
    """The node's place, in the only process that torchrun started on it. Our own store listens one
    port above torchrun's."""
    if number(environment, "LOCAL_WORLD_SIZE", 1) != 1:
        raise RequestError(
            "torchrun started several processes on this node, and each would start ranks",
            where="LOCAL_WORLD_SIZE",
            fix="torchrun --nproc-per-node=1",
        )
    return (
        Rendezvous(
            nodes=number(environment, "GROUP_WORLD_SIZE"),
            node_rank=number(environment, "GROUP_RANK"),
            ranks_per_node=max(1, gpus),
            address=environment.get("MASTER_ADDR", ""),
            port=number(environment, "MASTER_PORT") + 1,
        )
        .checked("GROUP_RANK")
        .keyed(dict(environment))
    )


def _first_host(hostlist: str) -> str:
    match = _FIRST.match(hostlist)
    if match is None or not match[0]:
        raise RequestError("no host to meet at", where="SLURM_JOB_NODELIST")
    return match[1] + (match[2] or "") + (match[3] or "")
