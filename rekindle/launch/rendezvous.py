"""How the processes of one distributed step find each other, the same on every platform.

A platform's `rendezvous.py` translates its own environment into a `Rendezvous` once, and hands it
on in one variable. Everything below reads only that."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Self

VARIABLE = "REKINDLE_RENDEZVOUS"


@dataclasses.dataclass(frozen=True)
class Rendezvous:
    """`nodes` machines of `ranks_per_node` processes each; this process runs on `node_rank`.

    With one node the port is free to choose (0). `address` and `port` name node rank 0 otherwise.
    """

    nodes: int = 1
    node_rank: int = 0
    ranks_per_node: int = 1
    address: str = "127.0.0.1"
    port: int = 0

    @property
    def world_size(self) -> int:
        """Number of ranks over all nodes."""
        return self.nodes * self.ranks_per_node

    @classmethod
    def current(cls) -> Self:
        """The one handed to this process; a single rank where nobody handed one over."""
        text = os.environ.get(VARIABLE)
        return cls(**json.loads(text)) if text else cls()

    def environment(self) -> dict[str, str]:
        """The variable that hands it to a child process."""
        return {VARIABLE: json.dumps(dataclasses.asdict(self), sort_keys=True)}
