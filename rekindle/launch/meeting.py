"""Where ranks meet: in a file that only their user reads, or in a store of torch's on
loopback.

torchrun's own ways listen on all interfaces, ask no client who it is, and some unpickle
what lies under a key: code of any host that reaches the port. Here torch listens on
loopback only. Our own ranks on one node meet in a file of the attempt's private folder;
those of several nodes, and a script of the user's, which calls `init_process_group`
without arguments, in a store on loopback of node rank 0, to which a tunnel leads from
other nodes (tunnel.py). Nothing in either is unpickled.

And what ranks send each other as Python objects (`all_gather_object` and its kin, DCP's
plans, shapes of a pipeline's stages), without running what it may contain: gloo's and
NCCL's connections are not authenticated, and torch unpickles what arrives over them.
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

BACKEND = "loopback"
"""What `--rdzv-backend` names it by."""

LISTENING = "listening"
"""What `--rdzv-conf` calls the descriptor of the socket at which node rank 0's store
listens."""

FILE = "REKINDLE_STORE"
"""The environment variable that names the file."""

HOST = "127.0.0.1"
"""Where the store of one node listens."""

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

        def __init__(self, parameters: RendezvousParameters) -> None:
            self._rendezvous_parameters = parameters
            self.run_id = str(parameters.run_id)

        def get_backend(self) -> str:
            return BACKEND

        @property
        def use_agent_store(self) -> bool:
            return True  # or rank 0 of a user's script would listen, on all interfaces

        def next_rendezvous(self) -> RendezvousInfo:
            config = self._rendezvous_parameters.config
            descriptor = None
            if LISTENING in config:
                descriptor = int(config[LISTENING])
            endpoint_port = int(self._rendezvous_parameters.endpoint.rpartition(":")[2])
            node_store, port = store(endpoint_port, descriptor)
            where = rendezvous.RendezvousStoreInfo(HOST, port)
            rank = int(config.get("rank", 0))
            nodes = self._rendezvous_parameters.max_nodes
            return rendezvous.RendezvousInfo(node_store, rank, nodes, where)

    rendezvous.rendezvous_handler_registry.register(BACKEND, Loopback)


def store(port: int, descriptor: int | None) -> tuple[Any, int]:
    """The store of this node's ranks, and its port. Nodes that are several have a port
    already, at which node rank 0's listens by the socket `descriptor`; a single one takes
    a free port, or keeps what its ranks, which meet in a file, do not need in its
    memory."""
    from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

    if not port and FILE in os.environ:
        return HashStore(), 0
    if not port:
        with socket.create_server((HOST, 0)) as server:
            port = server.getsockname()[1]
            descriptor = server.detach()
    is_master = descriptor is not None
    store = TCPStore(
        HOST,
        port,
        is_master=is_master,
        wait_for_workers=False,
        multi_tenant=is_master,
        master_listen_fd=descriptor,
    )
    return store, port


def join(backend: str, **options: Any) -> None:
    """`init_process_group` with the other ranks that torchrun started; options as
    there."""
    import torch.distributed as dist

    guard()
    if FILE in os.environ:
        rank = int(os.environ["RANK"])
        world_size = int(os.environ["WORLD_SIZE"])
        store = dist.FileStore(os.environ[FILE], world_size)  # type: ignore[attr-defined]
        options |= {"store": store, "rank": rank, "world_size": world_size}
    dist.init_process_group(backend, **options)


class PlainUnpickler(pickle.Unpickler):
    """Makes values: exceptions, and dataclasses and enums of those who have ranks talk.
    Of what else is named it neither imports nor calls anything."""

    def find_class(self, module: str, name: str) -> Any:
        value = getattr(sys.modules.get(module), name, None)
        if (module, name) in _ALSO or type(value).__name__ == "dtype" or _is_plain(module, value):
            return value
        if (module, name) == ("builtins", "getattr"):  # members of enums, before Python 3.11.4
            return _member
        raise pickle.UnpicklingError(f"a rank sent {module}.{name}, which none of this job does")


def _is_plain(module: str, value: object) -> bool:
    """Whether making one of these runs no code that could do harm."""
    if not isinstance(value, type):
        return False
    if issubclass(value, BaseException):
        return True
    holds_values = dataclasses.is_dataclass(value) or issubclass(value, enum.Enum)
    return holds_values and module.startswith(_THEIRS)


def _member(kind: object, name: str) -> enum.Enum:
    if isinstance(kind, enum.EnumMeta):
        return kind[name]
    raise pickle.UnpicklingError(f"a rank sent {name!r} of {kind!r}")


def guard() -> None:
    """Have torch read objects of other ranks with `PlainUnpickler`, in this process."""
    from torch.distributed import distributed_c10d

    assert hasattr(distributed_c10d, "_unpickler"), "this torch reads objects in another way"
    distributed_c10d._unpickler = PlainUnpickler
