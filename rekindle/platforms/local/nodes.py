"""A distributed step on this machine: each node is a shim of its own, with a Rendezvous in its
environment.

They live and die together: when one fails the others are told to end, and the step ends as the
first one that failed. Only node rank 0 has the step's outputs; what the others write goes into
their own scratch folders, and KFP's executor is told so by CLUSTER_SPEC, as on Vertex AI."""

from __future__ import annotations

import json
import secrets
import socket
import threading
from collections.abc import Callable

from rekindle.launch.rendezvous import Rendezvous
from rekindle.platforms.local.process import Control, Ended


class Together(Control):
    """Stops when the run does, or when `failed` says that a peer failed."""

    def __init__(self, run: Control) -> None:
        super().__init__()
        self.run = run
        self.failed: int | None = None

    def stopped(self) -> bool:
        return self.run.stopped() or self.failed is not None

    def killed(self) -> bool:
        return self.run.killed()

    def ended(self, node: int, ended: Ended) -> None:
        """Note how a node ended; the first failure is what counts."""
        if ended.exit_code and not ended.stopped and self.failed is None:
            self.failed = node


def on_nodes(
    count: int, control: Control, run_node: Callable[[int, Control], Ended]
) -> tuple[int, Ended]:
    """Run all nodes side by side; the rank of the node whose end decides, and how it ended."""
    together = Together(control)
    ends: dict[int, Ended] = {}
    errors: list[BaseException] = []

    def work(node: int) -> None:
        try:
            ends[node] = run_node(node, together)
            together.ended(node, ends[node])
        except BaseException as error:  # noqa: BLE001 - raised again by the waiting thread
            errors.append(error)
            together.failed = together.failed if together.failed is not None else node

    threads = [threading.Thread(target=work, args=(node,), daemon=True) for node in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    decides = together.failed or 0
    return decides, ends[decides]


def environments(count: int) -> list[dict[str, str]]:
    """What each node finds in its environment; one rank a node, for they share this machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    found, secret = [], secrets.token_hex(32)
    for rank in range(count):
        place = Rendezvous(count, rank, 1, "127.0.0.1", port, secret=secret)
        kind = {"type": "workerpool1", "index": rank - 1} if rank else {"type": "workerpool0"}
        found.append({**place.environment(), "CLUSTER_SPEC": json.dumps({"task": kind})})
    return found
