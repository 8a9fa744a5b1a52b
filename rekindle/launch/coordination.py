"""Several nodes as one worker group: they start together, end together, and agree on what
happened.

Decides the protocol. The supervisor of node rank 0 listens; every supervisor, that one
included, connects and speaks JSON, a message in each frame that the job's secret makes
authentic (tunnel.py):

    join {nodes, node, restart}     a node is ready; `restart` is what it believes comes next
    wait {missing}                  the others are not there yet
    go {restart, port}              all are: start ranks; `port` leads to torch's store (tunnel.py)
    report {...}                    how this node's ranks ended
    halt {stacks}                   another node's did: end yours
    verdict {...}                   what it all came to, the same for every node

A closed connection is a lost node, and so is one that does not answer for about 25 s. A
node that loses the coordinator ends its ranks and looks for a new one in the same place,
so that a node that was killed, rank 0's included, may be started again and joins the next
restart.

A peer that does not know the secret is dropped after 10 s, or when 64 newer ones wait,
and changes nothing. What authentic nodes may ask for is bounded, too: a node rank that the
job has, and the next restart."""

import contextlib
import dataclasses
import json
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from rekindle.errors import PreemptedError
from rekindle.launch import heartbeats, tunnel
from rekindle.launch.heartbeats import Cause
from rekindle.launch.rendezvous import Rendezvous
from rekindle.launch.tunnel import NotAuthenticError, Seal
from rekindle.launch.worker_group import POLL_SECONDS, GroupStart, Halt, Report

log = logging.getLogger(__name__)

Message: TypeAlias = dict[str, Any]

SETTLE_SECONDS = 60.0  # from the end of the first node's ranks to that of all others'
_PURPOSE = "nodes"
_LOST_SECONDS = 25  # without an answer to probes or data, until the kernel gives up
_ANSWER_SECONDS = 5.0
_MOST_WARNINGS = 20  # peers outside of the job must not be able to fill the log


class Disconnected(Exception):
    """The other end is gone."""


class Connection:
    """Messages over one connection, made here or accepted; Disconnected where no answer
    comes."""

    def __init__(self, connection: socket.socket, secret: str, accepts: bool) -> None:
        self.socket = connection
        self._has_ended = False
        self.seal = Seal(secret, _PURPOSE, accepts)
        self.since = time.monotonic()
        # a machine that is gone closes no connection: the kernel notices by probes, and by
        # data that stay unanswered
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _LOST_SECONDS // 5 - 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LOST_SECONDS * 1000)
        connection.settimeout(_ANSWER_SECONDS)
        connection.sendall(self.seal.nonce)
        if not accepts:
            nonce = connection.recv(len(self.seal.nonce), socket.MSG_WAITALL)
            if len(nonce) < len(self.seal.nonce):
                raise Disconnected
            self.seal.opened(nonce)
        connection.setblocking(False)

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message; raises Disconnected.

        The socket does not block, and messages are small enough for the kernel's buffer."""
        content = json.dumps({"kind": kind, **fields}).encode()
        if len(content) > tunnel.LONGEST_FRAME:
            raise Disconnected
        try:
            self.socket.sendall(self.seal.sealed(content))
        except OSError as error:
            raise Disconnected from error

    def receive(self) -> list[Message]:
        """The messages that have arrived, without waiting for more.

        Raises Disconnected once the other end is gone and its last messages have been
        returned; NotAuthenticError for what the job's secret did not make."""
        if self._has_ended:
            raise Disconnected
        contents: list[bytes] = []
        try:
            while content := self.socket.recv(1 << 16):
                contents += self.seal.opened(content)
            self._has_ended = True
        except BlockingIOError:  # no more for now
            pass
        except OSError:  # messages from before it count: the next call raises Disconnected
            self._has_ended = True
        try:
            return [{"kind": "", **json.loads(content)} for content in contents]
        except (ValueError, TypeError, RecursionError) as error:
            raise NotAuthenticError("a frame that holds no message") from error

    def close(self) -> None:
        self.socket.close()


def judge(reports: Mapping[int, Report]) -> Report:
    """The one report that the reports of all nodes, by node rank, amount to."""
    endings = {report.ending for report in reports.values()}
    expired = any(report.expired for report in reports.values())
    asked = any(report.asked for report in reports.values())
    # rank 0 reports "done" once everything is written: however other ranks ended after
    # that, nothing is lost. A script that writes no status ends "quiet" on every node
    if "done" in endings or endings == {"quiet"}:
        return Report("done")
    if "preempted" in endings:
        return Report("preempted", expired=expired, asked=asked)
    causes = [report.cause for report in reports.values() if report.cause]
    return Report("lost", heartbeats.first_cause(causes), expired, asked)


class Coordinator(threading.Thread):
    """The listening side, in a thread of node rank 0's supervisor.

    Nodes are in `joined` while they wait for a restart, and in `at_work` while their ranks
    run. A restart begins when no node is at work and all have joined."""

    def __init__(self, place: Rendezvous, most_restarts: int) -> None:
        super().__init__(name="coordinator", daemon=True)
        self.place = place
        self.most_restarts = most_restarts
        self.selector = selectors.DefaultSelector()
        self.host = place.address if place.address in ("127.0.0.1", "localhost") else ""
        self.server = socket.create_server((self.host, place.port), reuse_port=False)
        self.server.setblocking(False)
        self.selector.register(self.server, selectors.EVENT_READ)
        self.store: socket.socket  # at which torch's store listens on loopback, in this restart
        self.way = contextlib.ExitStack()  # closes that socket, and the tunnel to it
        self.unproven: dict[Connection, None] = {}  # no authentic message yet; the oldest first
        self.refused = 0
        self.joined: dict[int, Connection] = {}  # by node rank
        self.at_work: dict[int, Connection] = {}  # by node rank
        self.reports: dict[int, Report] = {}  # of this restart, by node rank
        self.next_restart = 0
        self.halt_at: float | None = None  # when nodes that have not reported are halted
        self.ended = False

    def run(self) -> None:
        while not self.ended:
            for key, _ in self.selector.select(POLL_SECONDS):
                if key.data is None:
                    self._welcome()
                else:
                    self._read(key.data)
            if self.halt_at is not None and time.monotonic() > self.halt_at:
                self._halt(Halt())
            accepted_since = time.monotonic() - tunnel.PROOF_SECONDS
            for line in list(self.unproven):
                if line.since < accepted_since:
                    self._drop(line)
        for key in self.selector.get_map().values():
            (key.data or self.server).close()
        self.way.close()
        self.selector.close()

    def end(self) -> None:
        self.ended = True
        self.join()

    def _welcome(self) -> None:
        with contextlib.suppress(OSError):
            line = Connection(self.server.accept()[0], self.place.secret, accepts=True)
            self.unproven[line] = None
            self.selector.register(line.socket, selectors.EVENT_READ, line)
            if len(self.unproven) > tunnel.MOST_UNPROVEN:
                self._drop(next(iter(self.unproven)))

    def _read(self, line: Connection) -> None:
        if line.socket.fileno() < 0:
            return  # it was dropped, to make room for a newer one, after `select` returned
        try:
            for message in line.receive():
                self.unproven.pop(line, None)
                node = _node_of(self.at_work, line)
                if message["kind"] == "join":
                    self._join(line, message)
                elif message["kind"] == "report" and node is not None:
                    self._take_report(node, Report.of(message["report"]))
        except Disconnected:
            self._drop(line)
        except (NotAuthenticError, ValueError, KeyError, TypeError) as error:
            self.refused += 1
            if self.refused <= _MOST_WARNINGS:
                log.warning("closed a connection of a peer that is not of this job: %r", error)
            self._drop(line)

    def _join(self, line: Connection, message: Message) -> None:
        node = message["node"]
        restart = message["restart"]
        if not isinstance(node, int) or not isinstance(restart, int):
            raise TypeError(f"node {node!r} asks for restart {restart!r}")
        if message["nodes"] != self.place.nodes or not 0 <= node < self.place.nodes:
            raise ValueError(f"node {node} of {message['nodes']}; here are {self.place.nodes}")
        # nodes are ahead of a coordinator only if that was started again, alone, and has
        # started nothing yet; it takes any restart that the job may reach
        last_restart = self.most_restarts
        if self.next_restart:
            last_restart = self.next_restart + 1
        if not 0 <= restart <= last_restart:
            raise ValueError(
                f"node {node} asks for restart {restart}; at most {last_restart} can be next"
            )
        for lines in (self.joined, self.at_work):
            if node in lines and lines[node] is not line:
                self._drop(lines[node])  # the node was started again before its end was noticed
        self.joined[node] = line
        self.next_restart = max(self.next_restart, restart)
        self._start_if_complete()

    def _start_if_complete(self) -> None:
        if self.at_work:
            return
        missing = [node for node in range(self.place.nodes) if node not in self.joined]
        if missing:
            self._tell(self.joined, "wait", missing=missing)
            return
        self.at_work = self.joined
        self.joined = {}
        self.reports = {}
        port = self._open_way(self.next_restart)
        self._tell(self.at_work, "go", restart=self.next_restart, port=port)
        self.next_restart += 1

    def _open_way(self, restart: int) -> int:
        """Open the socket of a restart's store and the tunnel to it, and close those of the
        restart before; returns the port of the tunnel."""
        self.way.close()
        self.store = socket.create_server(("127.0.0.1", 0), backlog=tunnel.BACKLOG)
        self.way.enter_context(self.store)
        port = self.store.getsockname()[1]
        end = tunnel.exit_of(self.place.secret, f"store {restart}", self.host, port)
        self.way.callback(end.close)
        return end.port

    def _take_report(self, node: int, report: Report) -> None:
        self.reports[node] = report
        # ranks elsewhere may wait for the lost ones for ever, while after another end they
        # get the time to end, too
        if report.ending == "lost":
            self._halt(Halt(stacks=report.hung))
        elif self.halt_at is None:
            self.halt_at = time.monotonic() + SETTLE_SECONDS
        if len(self.reports) == self.place.nodes:
            lines = self.at_work
            self.at_work = {}
            self.halt_at = None
            self._tell(lines, "verdict", verdict=dataclasses.asdict(judge(self.reports)))
            self._start_if_complete()

    def _halt(self, halt: Halt) -> None:
        """Tell the nodes that have not reported yet to end their ranks."""
        self.halt_at = None
        lines = {node: line for node, line in self.at_work.items() if node not in self.reports}
        self._tell(lines, "halt", stacks=halt.stacks)

    def _tell(self, lines: Mapping[int, Connection], kind: str, **fields: Any) -> None:
        for line in list(lines.values()):
            try:
                line.send(kind, **fields)
            except Disconnected:
                self._drop(line)

    def _drop(self, line: Connection) -> None:
        """Close a connection; a node at work that has not reported is lost with it."""
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(line.socket)
        line.close()
        self.unproven.pop(line, None)
        node = _node_of(self.joined, line)
        if node is not None:
            del self.joined[node]
        node = _node_of(self.at_work, line)
        if node is not None and node not in self.reports:
            self._take_report(node, Report("lost", _node_gone(self.place, node)))


def _node_gone(place: Rendezvous, node: int) -> Cause:
    """The cause where a node's connection closed before it reported."""
    first_rank = node * place.ranks_per_node
    ranks = f"{first_rank}"
    if place.ranks_per_node > 1:
        ranks = f"{first_rank} to {first_rank + place.ranks_per_node - 1}"
    message = f"node {node} is gone (rank {ranks})"
    fix = f"start it again within {place.patience_seconds:g} s and it joins"
    return Cause("node", first_rank, time.time(), message, fix=fix)


def _node_of(lines: Mapping[int, Connection], line: Connection) -> int | None:
    for node, other_line in lines.items():
        if other_line is line:
            return node
    return None


class Member:
    """This node's side of the connection to the coordinator.

    For each restart call `meet`, then `poll` while the ranks run, then `settle`."""

    def __init__(
        self, place: Rendezvous, stopped: Callable[[], bool], coordinator: Coordinator | None = None
    ) -> None:
        self.place = place
        self.stopped = stopped
        self.coordinator = coordinator
        self.way = contextlib.ExitStack()  # closes the tunnel to the store of node rank 0
        self.line: Connection | None = None  # None: the coordinator is lost, or not found yet
        self.messages: list[Message] = []  # that came since the ranks of this restart run

    def close(self) -> None:
        self._hang_up()
        self.way.close()

    def meet(self, restart: int) -> GroupStart:
        """Wait for all nodes, and return the start of the restart that they begin now.

        PreemptedError where some do not come within `patience_seconds`, or at a stop."""
        self.messages = []
        patience_seconds = self.place.patience_seconds
        deadline = time.monotonic() + patience_seconds
        missing: list[int] = [0]  # node rank 0, as long as its coordinator has not answered
        joined_line: Connection | None = None
        while time.monotonic() < deadline and not self.stopped():
            # also on a connection that replaces a lost one
            if self.line is None or joined_line is not self.line:
                joined_line = self._join(restart)
            for message in self._receive():
                if message["kind"] == "go":
                    return self._start(int(message["restart"]), int(message["port"]))
                if message["kind"] == "wait":
                    missing = message["missing"]
            time.sleep(POLL_SECONDS)
        how = f"gave up after {patience_seconds:g} s of"
        if self.stopped():
            how = "stopped from outside"
        nodes = ", ".join(map(str, missing))
        what = f"node {self.place.node_rank} of {self.place.nodes} {how} waiting for node {nodes}"
        fix = "start all nodes again: the same command resumes from the last checkpoint"
        raise PreemptedError(what, where=f"{self.place.address}:{self.place.port}", fix=fix)

    def _start(self, restart: int, port: int) -> GroupStart:
        """The start of a restart: where on loopback the ranks of this node reach torch's
        store. On other nodes than 0 a tunnel leads to `port` of node 0."""
        if self.coordinator is not None:
            store = self.coordinator.store
            return GroupStart(restart, store.getsockname()[1], store)
        self.way.close()
        where = (self.place.address, port)
        end = tunnel.entrance(self.place.secret, f"store {restart}", where)
        self.way.callback(end.close)
        return GroupStart(restart, end.port)

    def poll(self) -> Halt | None:
        """A Halt where the ranks of this node have to end because others did."""
        self.messages += self._receive()
        for message in self.messages:
            if message["kind"] == "halt":
                return Halt(stacks=message["stacks"])
        if self.line is None:  # without a coordinator no verdict could be made about them
            return Halt()
        return None

    def settle(self, report: Report) -> Report:
        """Report how the ranks of this node ended, and return the verdict of all nodes.

        Without a coordinator it is that node rank 0 was lost."""
        with contextlib.suppress(Disconnected):
            if self.line is not None:
                self.line.send("report", report=dataclasses.asdict(report))
        deadline = time.monotonic() + 2 * SETTLE_SECONDS
        while self.line is not None and time.monotonic() < deadline:
            self.messages += self._receive()
            for message in self.messages:
                if message["kind"] == "verdict":
                    return Report.of(message["verdict"])
            time.sleep(POLL_SECONDS / 4)
        self._hang_up()
        return Report("lost", _node_gone(self.place, 0), report.expired, report.asked)

    def _join(self, restart: int) -> Connection | None:
        """Tell the coordinator that this node is ready; returns the connection to it, None
        where it cannot be reached."""
        place = self.place
        try:
            if self.line is None:
                where = (place.address, place.port)
                connection = socket.create_connection(where, _ANSWER_SECONDS)
                self.line = Connection(connection, place.secret, accepts=False)
            self.line.send("join", nodes=place.nodes, node=place.node_rank, restart=restart)
        except (OSError, Disconnected):
            self._hang_up()
        return self.line

    def _hang_up(self) -> None:
        if self.line is not None:
            self.line.close()
            self.line = None

    def _receive(self) -> list[Message]:
        if self.line is None:
            return []
        try:
            return self.line.receive()
        except (Disconnected, NotAuthenticError):
            self._hang_up()
            return []
