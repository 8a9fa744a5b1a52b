"""Where the ranks of one node meet: in a file that only their user reads, or on loopback.

torchrun's own `--standalone` listens on all interfaces, asks nobody who they are, and unpickles
what lies under its key: whoever reached the port ran code as the user. Here nothing listens beyond
loopback. Our own ranks meet in a file of the attempt's private folder; a script of the user's,
which calls `init_process_group` without arguments, in a store of torch's on loopback.
Authority: torch.distributed.elastic.rendezvous (2.10 to 2.13)."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters

BACKEND = "loopback"
"""What `--rdzv-backend` names it by."""

FILE = "REKINDLE_STORE"
"""The environment variable that names the file."""

_HOST = "127.0.0.1"


def offer() -> None:
    """Make torchrun know `BACKEND`."""
    from torch.distributed.elastic.rendezvous import (
        RendezvousHandler,
        RendezvousInfo,
        RendezvousStoreInfo,
        rendezvous_handler_registry,
    )

    class OneNode(RendezvousHandler):
        """Hands torchrun a store that nobody else reaches."""

        def __init__(self, given: RendezvousParameters) -> None:
            self._id = given.run_id

        def get_backend(self) -> str:
            return BACKEND

        @property
        def use_agent_store(self) -> bool:
            return True  # or rank 0 of a user's script would listen, on all interfaces

        def next_rendezvous(self) -> RendezvousInfo:
            store, port = _store()
            return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(_HOST, port))

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            pass

        def num_nodes_waiting(self) -> int:
            return 0

        def get_run_id(self) -> str:
            return self._id

        def shutdown(self) -> bool:
            return True

    rendezvous_handler_registry.register(BACKEND, OneNode)


def _store() -> tuple[Any, int]:
    """The agent's store and its port: in its memory where the ranks meet in a file."""
    from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

    if FILE in os.environ:
        return HashStore(), 0
    with socket.create_server((_HOST, 0)) as server:
        port = server.getsockname()[1]
        store = TCPStore(
            _HOST, port, is_master=True, wait_for_workers=False, multi_tenant=True,
            master_listen_fd=server.detach(),
        )  # fmt: skip
    return store, port


def join(backend: str, **more: Any) -> None:
    """`init_process_group` with the other ranks that torchrun started; arguments as there."""
    import torch.distributed as dist

    if FILE in os.environ:
        rank, world = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
        store = dist.FileStore(os.environ[FILE], world)  # type: ignore[attr-defined]
        more |= {"store": store, "rank": rank, "world_size": world}
    dist.init_process_group(backend, **more)
