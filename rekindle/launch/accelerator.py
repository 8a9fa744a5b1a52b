"""What ranks on GPUs are started with: torch's allocator, and the processors beside their GPU.

Follows torch's notes on CUDA memory and `torchrun --numa-binding` (2.10 and later), which calls
numactl. Standard library only."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

# torch reads the first that is set; the last name is that of all accelerators
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def allocator(environment: Mapping[str, str]) -> dict[str, str]:
    """Segments that grow, because steps of texts differ in length and would leave gaps that fit no
    later step; nothing where the user has set the allocator."""
    if any(name in environment for name in _ALLOCATOR):
        return {}
    return {_ALLOCATOR[-1]: "expandable_segments:True"}


def can_bind(nodes: Path = Path("/sys/devices/system/node")) -> bool:
    """Whether this machine has memory of several NUMA nodes, and numactl to choose one."""
    return len(list(nodes.glob("node[0-9]*"))) > 1 and shutil.which("numactl") is not None
