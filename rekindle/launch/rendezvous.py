"""How the processes of one distributed step find each other, the same on every platform.

A platform's `rendezvous` translates its own environment into a `Rendezvous` once, and
hands it on in one variable. Everything below reads only that."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import socket
import struct
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING

from rekindle.errors import RequestError

if TYPE_CHECKING:
    from typing import Self  # not in Python 3.10, which other images may have

VARIABLE = "REKINDLE_RENDEZVOUS"
SECRET = "REKINDLE_JOB_SECRET"  # noqa: S105 - the variable in which a platform gives it to a node
SHORTEST_SECRET = 32
_SIOCGIFADDR = 0x8915


@dataclasses.dataclass(frozen=True)
class Rendezvous:
    """`nodes` machines of `ranks_per_node` processes each; this process runs on
    `node_rank`.

    `address` and `port` are where the supervisor of node rank 0 listens for the others;
    with one node they are not used. `patience_seconds` is how long nodes wait for one
    that is missing, at the start or after it was lost: as long as the platform takes to
    replace a machine. Several nodes share a `secret` of their job, without which nothing
    that they send is believed; where the platform has none to give, they agree on one by
    the name of the `job` (staging.py)."""

    nodes: int = 1
    node_rank: int = 0
    ranks_per_node: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    patience_seconds: float = 900.0
    secret: str = dataclasses.field(default="", repr=False)
    job: str = ""

    @property
    def world_size(self) -> int:
        """Number of ranks over all nodes."""
        return self.nodes * self.ranks_per_node

    @property
    def ranks(self) -> range:
        """The ranks of this node."""
        first = self.node_rank * self.ranks_per_node
        return range(first, first + self.ranks_per_node)

    @classmethod
    def current(cls) -> Self:
        """The one handed to this process, or a single rank; RequestError if it makes no
        sense."""
        text = os.environ.get(VARIABLE)
        if not text:
            return cls()
        return cls(**json.loads(text)).checked(VARIABLE)

    def checked(self, source: str) -> Self:
        """This, if its numbers fit each other; RequestError, which names the `source`, if
        not. A global rank taken for a node's is found by being too large."""
        message = ""
        fix = ""
        if self.nodes < 1 or self.ranks_per_node < 1:
            message = f"{self.nodes} nodes of {self.ranks_per_node} ranks cannot meet"
        elif not 0 <= self.node_rank < self.nodes:
            message = f"this is node {self.node_rank} of {self.nodes}, counted from 0"
            fix = "give the rank of the node, not that of a process among all nodes"
        elif self.nodes > 1 and not (self.address and 0 < self.port < 65_536):
            message = f"nodes cannot meet at {self.address or 'no address'}:{self.port}"
        elif self.secret and len(self.secret) < SHORTEST_SECRET:
            message = f"the nodes' secret has less than {SHORTEST_SECRET} characters"
            fix = "make one with `openssl rand -hex 32`"
        if message:
            raise RequestError(message, where=source, fix=fix)
        return self

    def keyed(self, environment: MutableMapping[str, str], job: str = "") -> Self:
        """This with the secret that the environment holds, which loses it, and the job's
        name."""
        secret = environment.pop(SECRET, "")
        return dataclasses.replace(self, secret=secret, job=job).checked(SECRET)

    def environment(self) -> dict[str, str]:
        """The variable that hands it to a child process."""
        return {VARIABLE: json.dumps(dataclasses.asdict(self), sort_keys=True)}

    def network(self) -> dict[str, str]:
        """The variables that tell gloo and NCCL which interface to use: loopback for one
        node; gloo, for several and unless the user named one, that of this machine,
        because its own guess, by the machine's name, is often loopback."""
        if self.nodes == 1:
            loopback = _interface("127.0.0.1")
            names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
            return dict.fromkeys(names, loopback) if loopback else {}
        if "GLOO_SOCKET_IFNAME" in os.environ:
            return {}
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((self.address, self.port or 1))  # sends nothing
            name = _interface(str(probe.getsockname()[0]))  # by which it reaches node rank 0
        return {"GLOO_SOCKET_IFNAME": name} if name else {}


def _interface(address: str) -> str:
    """The name of this machine's interface with an address; empty if none has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # an interface without an address
            if answer[20:24] == socket.inet_aton(address):
                return name
    return ""


def number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    """A whole number of the environment; RequestError if it is not there, or none."""
    text = environment.get(name, "")
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        message = f"no `{name}` is set"
        if text:
            message = f"`{name}` is {text!r}, which is not a whole number"
        raise RequestError(message, where="the environment") from None
