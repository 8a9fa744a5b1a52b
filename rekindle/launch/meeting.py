"""Where ranks meet: in a file that only their user reads, or in a store of torch's on loopback.

torchrun's own ways listen on all interfaces, ask no client who it is, and some unpickle what lies
under a key: code of any host that reaches the port. Here torch listens on loopback only. Our own
ranks on one node meet in a file of the attempt's private folder; those of several nodes, and a
script of the user's, which calls `init_process_group` without arguments, in a store on loopback of
node rank 0, to which a tunnel leads from other nodes (tunnel.py). Nothing in either is unpickled.

And what ranks send each other as Python objects (`all_gather_object` and its kin, DCP's plans,
shapes of a pipeline's stages), without running what it may contain: gloo's and NCCL's connections
are not authenticated, and torch unpickles what arrives over them.
Authority: torch.distributed.elastic.rendezvous and distributed_c10d (2.10 to 2.13)."""

from __future__ import annotations

import dataclasses
import enum
import os
import pickle
import socket
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters

BACKEND, LISTENING = "loopback", "listening"
"""What `--rdzv-backend` names it by; what `--rdzv-conf` calls the descriptor of the socket at which
node rank 0's store listens."""

FILE, HOST = "REKINDLE_STORE", "127.0.0.1"
"""The environment variable that names the file; where the store of one node listens."""

_THEIRS = (
    "torch.distributed.checkpoint.",
    "torch.distributed.pipelining.",
    "rekindle.train.",
    "rekindle.errors",
)
_ALSO = {
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("torch._utils", "_rebuild_meta_tensor_no_storage"),
    ("collections", "OrderedDict"),
    ("traceback", "StackSummary"),
    ("traceback", "FrameSummary"),
}


def offer() -> None:
    """Make torchrun know `BACKEND`: its own static rendezvous, with a store of ours."""
    from torch.distributed.elastic import rendezvous
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    class Loopback(StaticTCPRendezvous):
        """Gives torchrun a store that is reached over loopback, or not at all."""

        def __init__(self, given: RendezvousParameters) -> None:
            self._given, self.run_id = given, str(given.run_id)

        def get_backend(self) -> str:
            return BACKEND

        @property
        def use_agent_store(self) -> bool:
            return True  # or rank 0 of a user's script would listen, on all interfaces

        def next_rendezvous(self) -> RendezvousInfo:
            config, port = self._given.config, int(self._given.endpoint.rpartition(":")[2])
            held, port = store(port, int(config[LISTENING]) if LISTENING in config else None)
            where = rendezvous.RendezvousStoreInfo(HOST, port)
            rank, nodes = int(config.get("rank", 0)), self._given.max_nodes
            return rendezvous.RendezvousInfo(held, rank, nodes, where)

    rendezvous.rendezvous_handler_registry.register(BACKEND, Loopback)


def store(port: int, descriptor: int | None) -> tuple[Any, int]:
    """The store of this node's ranks, and its port. Nodes that are several have a port already, at
    which node rank 0's listens by the socket `descriptor`; a single one takes a free port, or keeps
    what its ranks, which meet in a file, do not need in its memory."""
    from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

    if not port and FILE in os.environ:
        return HashStore(), 0
    if not port:
        with socket.create_server((HOST, 0)) as server:
            port, descriptor = server.getsockname()[1], server.detach()
    listens = descriptor is not None
    held = TCPStore(
        HOST,
        port,
        is_master=listens,
        wait_for_workers=False,
        multi_tenant=listens,
        master_listen_fd=descriptor,
    )
    return held, port


def join(backend: str, **more: Any) -> None:
    """`init_process_group` with the other ranks that torchrun started; arguments as there."""
    import torch.distributed as dist

    guard()
    if FILE in os.environ:
        rank, world = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
        store = dist.FileStore(os.environ[FILE], world)  # type: ignore[attr-defined]
        more |= {"store": store, "rank": rank, "world_size": world}
    dist.init_process_group(backend, **more)


class PlainUnpickler(pickle.Unpickler):
    """Makes values: exceptions, and dataclasses and enums of those who have ranks talk. Of what
    else is named it neither imports nor calls anything."""

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(sys.modules.get(module), name, None)
        if (module, name) in _ALSO or type(found).__name__ == "dtype" or _is_plain(module, found):
            return found
        if (module, name) == ("builtins", "getattr"):  # members of enums, before Python 3.11.4
            return _member
        raise pickle.UnpicklingError(f"a rank sent {module}.{name}, which none of this job does")


def _is_plain(module: str, found: Any) -> bool:
    if not isinstance(found, type):
        return False
    values = dataclasses.is_dataclass(found) or issubclass(found, enum.Enum)
    return issubclass(found, BaseException) or (values and module.startswith(_THEIRS))


def _member(kind: Any, name: str) -> enum.Enum:
    if isinstance(kind, enum.EnumMeta):
        return kind[name]
    raise pickle.UnpicklingError(f"a rank sent {name!r} of {kind!r}")


def guard() -> None:
    """Have torch read objects of other ranks so, in this process."""
    from torch.distributed import distributed_c10d

    assert hasattr(distributed_c10d, "_unpickler"), "this torch reads objects in another way"
    distributed_c10d._unpickler = PlainUnpickler
