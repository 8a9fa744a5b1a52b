"""Strangers on the ports of a job of several nodes: no message of theirs is believed, and no node is lost by them (H4)."""

import dataclasses
import gc
import select
import socket
import threading
import time

import pytest

from rekindle.errors import RequestError
from rekindle.launch import tunnel
from rekindle.launch.coordination import Connection, Coordinator, Member
from rekindle.launch.heartbeats import Cause
from rekindle.launch.rendezvous import Rendezvous
from rekindle.launch.torchrun import torchrun
from rekindle.launch.tunnel import NotAuthenticError, Seal
from rekindle.launch.worker_group import Report
from rekindle.spec.model import TrainSpec
from tests.ports import free_port
from tests.quick import first
from tests.security.strangers import NOISE, Wire, hung_up_on, send, tampered, with_another_secret
from tests.support.launch_coordination import SECRET
from tests.support.launch_coordination import nodes as nodes


def are_well(nodes):
    """All are at work on the first restart, and end as they say."""
    assert all(member.poll() is None for member in nodes.members)
    assert nodes.coordinator.next_restart == 1
    done = nodes.all(*(lambda m=m: m.settle(Report("done")) for m in nodes.members))
    assert done == [Report("done")] * 3
    return True


@pytest.mark.parametrize("what", first(4, NOISE))
def test_what_a_stranger_sends_to_a_run_takes_no_nodes_place(nodes, what):
    nodes.meet()
    assert send(("127.0.0.1", nodes.places[0].port), NOISE[what])
    assert are_well(nodes)


def test_strangers_do_not_fill_the_log(nodes, caplog):
    for _ in range(40):
        assert send(("127.0.0.1", nodes.places[0].port), NOISE["a join without a MAC"])
    assert len(caplog.records) == 20


def test_a_node_of_another_job_is_hung_up_on(nodes):
    nodes.meet()
    assert with_another_secret(("127.0.0.1", nodes.places[0].port))
    assert are_well(nodes)


def test_a_join_that_was_heard_on_the_wire_is_nothing_when_it_is_sent_again(nodes):
    wire = Wire(("127.0.0.1", nodes.places[0].port))
    place = Rendezvous(3, 1, 2, "127.0.0.1", wire.port, 20.0, SECRET)
    nodes.members[1] = Member(place, lambda: False)
    heard, met = [], threading.Event()
    carrier = threading.Thread(target=lambda: heard.append(wire.hand_on(met.is_set)))
    carrier.start()
    starts = nodes.meet()
    met.set()
    carrier.join()
    assert [start.restart for start in starts] == [0, 0, 0]
    assert len(heard[0]) > 100, "a nonce and a join"
    assert send(("127.0.0.1", nodes.places[0].port), heard[0])
    assert nodes.members[0].poll() is None, "node 1 kept its place"
    for end in wire.ends:
        end.close()


def test_a_slow_stranger_is_cut_off_and_many_make_room_for_a_real_node(nodes, monkeypatch):
    where = ("127.0.0.1", nodes.places[0].port)
    crowd = [socket.create_connection(where) for _ in range(3 * tunnel.MOST_UNPROVEN)]
    assert [start.restart for start in nodes.meet()] == [0, 0, 0], "real nodes came through"
    assert len(nodes.coordinator.unproven) <= tunnel.MOST_UNPROVEN
    monkeypatch.setattr("rekindle.launch.tunnel.PROOF_SECONDS", 0.2)
    drop = socket.create_connection(where, timeout=10)
    crowd.append(drop)
    drop.recv(32)
    began = time.monotonic()
    while time.monotonic() - began < 10:  # a byte now and then does not buy time
        try:
            drop.sendall(b"\0")
            time.sleep(0.05)
        except OSError:
            break
    assert time.monotonic() - began < 5
    assert nodes.coordinator.unproven == {}
    assert are_well(nodes)
    for stranger in crowd:
        stranger.close()


@pytest.mark.parametrize(
    ("restart", "accepted"), [(2, True), (3, False), (10**6, False), (-1, False)]
)
def test_not_even_a_node_of_the_job_asks_for_more_than_the_restart_after_the_next(
    nodes, restart, accepted
):
    nodes.meet()
    line = Connection(
        socket.create_connection(("127.0.0.1", nodes.places[0].port)), SECRET, accepts=False
    )
    line.send("join", nodes=3, node=2, restart=restart)
    if accepted:
        while nodes.members[0].poll() is None:
            time.sleep(0.01)
        return
    assert hung_up_on(line)
    assert are_well(nodes)


CAUSE = dataclasses.asdict(Cause("raised", 2, 0.0, "no"))
NO_MESSAGES = {
    "nested deeply": b"[" * 100_000 + b"]" * 100_000,
    "no JSON": b"\xff",
    "a list": b"[[1]]",
    "no kind": b"{}",
    "an endless node": b'{"kind": "join", "nodes": 3, "node": 1e999, "restart": 1}',
    "an endless restart": b'{"kind": "join", "nodes": 3, "node": 2, "restart": 1e999}',
    "a node by name": b'{"kind": "join", "nodes": 3, "node": [2], "restart": 1}',
    "a report of none": b'{"kind": "report"}',
}
NO_REPORTS = {
    "an unknown ending": {"ending": "merry"},
    "an ending that is a list": {"ending": []},
    "an unknown field": {"more": 1},
    "a cause by name": {"cause": "me"},
    "an unknown kind": {"cause": {**CAUSE, "kind": "whim"}},
    "a kind that is a list": {"cause": {**CAUSE, "kind": []}},
    "a time that is a text": {"cause": {**CAUSE, "time": "now"}},
    "a text that is a list": {"cause": {**CAUSE, "what": ["no"]}},
}


@pytest.mark.parametrize("what", first(4, NO_MESSAGES))
def test_what_is_no_message_ends_only_its_own_connection_even_with_the_secret(nodes, what):
    nodes.meet()
    line = Connection(
        socket.create_connection(("127.0.0.1", nodes.places[0].port)), SECRET, accepts=False
    )
    line.send("hello")
    line.socket.setblocking(True)
    line.socket.sendall(line.seal.sealed(NO_MESSAGES[what]))
    if what not in ("no kind", "a report of none"):  # ignored: no node's place was asked for
        line.socket.setblocking(False)
        assert hung_up_on(line)
    assert are_well(nodes)


@pytest.mark.parametrize("what", first(4, NO_REPORTS))
def test_a_report_that_is_none_is_the_loss_of_its_node(nodes, what):
    nodes.meet()
    nodes.members[2].line.send(
        "report", report={**dataclasses.asdict(Report("done", Cause(**CAUSE))), **NO_REPORTS[what]}
    )
    ends = nodes.all(*(lambda m=m: m.settle(Report("quiet")) for m in nodes.members[:2]))
    assert [end.ending for end in ends] == ["lost"] * 2
    assert "node 2 is gone" in ends[0].cause.what


def test_a_new_coordinator_takes_up_where_its_nodes_are_but_not_beyond_what_the_config_allows():
    place = Rendezvous(3, 0, 2, "127.0.0.1", free_port(), 20.0, SECRET)
    coordinator = Coordinator(place, most_restarts=8)
    for restart, refused in ((8, False), (9, True)):
        message = {"kind": "join", "nodes": 3, "node": 1, "restart": restart}
        if refused:
            coordinator.next_restart = 0
            with pytest.raises(ValueError, match="asks for restart 9"):
                coordinator._join(None, message)
    coordinator.selector.close()
    coordinator.server.close()


def test_an_impostor_in_node_zeros_place_cannot_halt_or_start_the_others():
    with socket.create_server(("127.0.0.1", 0)) as server:
        member = Member(Rendezvous(3, 1, 2, *server.getsockname(), 20.0, SECRET), lambda: False)
        threading.Thread(target=member._join, args=(0,)).start()
        impostor, _ = server.accept()
        impostor.sendall(b"\7" * 32 + b"\0\0\0\x10" + b"\0" * 32 + b'{"kind": "halt"}')
        while member.line is None:
            time.sleep(0.01)
        deadline = time.monotonic() + 10
        while member.line is not None and time.monotonic() < deadline:
            assert member._receive() == []
        assert member.line is None
        impostor.close()


def test_several_nodes_without_a_secret_do_not_start(tmp_path):
    place = Rendezvous(2, 0, 1, "127.0.0.1", free_port())
    with pytest.raises(RequestError, match="share no secret") as caught:
        torchrun(["nothing.py"], TrainSpec(), status=tmp_path, rendezvous=place)
    assert "openssl rand -hex 32" in str(caught.value)


# the frames themselves


def pair(purposes=("p", "p"), secrets=(SECRET, SECRET)):
    ends = [
        Seal(s, p, accepts) for s, p, accepts in zip(secrets, purposes, (False, True), strict=True)
    ]
    for one, other in (ends, ends[::-1]):
        assert one.opened(other.nonce) == []
    return ends


def test_a_frame_is_opened_once_at_its_place_by_the_end_that_it_is_for():
    here, there = pair()
    first, second = here.sealed(b"first"), here.sealed(b"second")
    assert there.opened(first[:9]) == []
    assert there.opened(first[9:] + second) == [b"first", b"second"]
    assert here.opened(there.sealed(b"back")) == [b"back"]
    with pytest.raises(NotAuthenticError):
        there.opened(second)


FORGED = {
    "sent again": lambda here, there: [here.sealed(b"a")] * 2,
    "out of order": lambda here, there: [here.sealed(b"a"), here.sealed(b"b")][::-1],
    "changed": lambda here, there: [tampered(here, b"a")],
    "sent back": lambda here, there: [there.sealed(b"a")],
}


@pytest.mark.parametrize("how", FORGED)
def test_a_frame_that_is_not_as_it_was_sent_is_refused(how):
    here, there = pair()
    frames = b"".join(FORGED[how](here, there))
    with pytest.raises(NotAuthenticError):
        there.opened(frames)


@pytest.mark.parametrize(
    "other", [{"purposes": ("store 0", "store 1")}, {"secrets": (SECRET, "6" * 64)}]
)
def test_a_frame_for_another_purpose_or_of_another_job_is_refused(other):
    here, there = pair(**other)
    with pytest.raises(NotAuthenticError):
        there.opened(here.sealed(b""))


@pytest.mark.parametrize(("proven", "taken"), [(False, 1 << 10), (True, 1 << 20)])
def test_a_frame_of_more_than_a_peer_may_send_is_refused_before_it_is_read(proven, taken):
    here, there = pair()
    if proven:
        there.opened(here.sealed(b""))
    assert there.opened(here.sealed(b"x" * taken)) == [b"x" * taken]
    here, there = pair()
    if proven:
        there.opened(here.sealed(b""))
    with pytest.raises(NotAuthenticError, match="a frame of"):
        there.opened(here.sealed(b"x" * (taken + 1))[:36])


# the way to the store


class Echo:
    """In place of torch's store: sends back what it is sent, and counts who came."""

    def __init__(self):
        self.server, self.came = socket.create_server(("127.0.0.1", 0)), 0
        self.port = self.server.getsockname()[1]
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        while True:
            peer, _ = self.server.accept()
            self.came += 1
            threading.Thread(target=self.answer, args=(peer,), daemon=True).start()

    def answer(self, peer):
        while content := peer.recv(1 << 16):
            peer.sendall(content)
        peer.close()


@pytest.fixture
def way():
    store = Echo()
    outer = tunnel.exit_of(SECRET, "store 0", "127.0.0.1", store.port)
    inner = tunnel.entrance(SECRET, "store 0", ("127.0.0.1", outer.port))
    yield store, outer, inner
    inner.close()
    outer.close()
    store.server.close()


def test_bytes_reach_the_store_and_come_back_whole(way):
    _, _, inner = way
    content = bytes(range(256)) * 20_000
    with socket.create_connection(("127.0.0.1", inner.port), timeout=20) as rank:
        threading.Thread(target=rank.sendall, args=(content,)).start()
        back = b""
        while len(back) < len(content):
            piece = rank.recv(1 << 16)
            assert piece, f"hung up after {len(back)} bytes"
            back += piece
    assert back == content


def test_bytes_that_wait_for_the_far_end_outlive_the_garbage_collector():
    with socket.create_server(("127.0.0.1", 0)) as far:
        inner = tunnel.entrance(SECRET, "store 0", far.getsockname())
        with socket.create_connection(("127.0.0.1", inner.port), timeout=20) as rank:
            rank.setblocking(False)
            peer, _ = far.accept()
            with peer:
                assert len(peer.recv(tunnel.NONCE_BYTES)) == tunnel.NONCE_BYTES
                while select.select([], [rank], [], 0.2)[1]:
                    rank.send(bytes(1 << 16))
                gc.collect()
                with pytest.raises(BlockingIOError):
                    rank.recv(1)
                assert select.select([peer, rank], [], [], 0.2)[0] == []
        inner.close()


@pytest.mark.parametrize("what", first(4, NOISE))
def test_what_a_stranger_sends_to_the_tunnel_reaches_no_store(way, what):
    store, outer, inner = way
    assert send(("127.0.0.1", outer.port), NOISE[what])
    assert store.came == 0
    with socket.create_connection(("127.0.0.1", inner.port), timeout=20) as rank:
        rank.sendall(b"hello")
        assert rank.recv(5) == b"hello"


def test_a_tunnel_that_closes_cuts_what_goes_through_it_and_says_nothing(way, caplog, capfd):
    _, outer, inner = way
    with socket.create_connection(("127.0.0.1", inner.port), timeout=20) as rank:
        rank.sendall(b"hello")
        assert rank.recv(5) == b"hello"
        outer.close()
        assert rank.recv(1) == b""
        inner.close()
    assert caplog.records == []
    assert capfd.readouterr().err == ""


def test_the_way_to_the_store_of_an_earlier_restart_leads_nowhere(way):
    store, outer, _ = way
    late = tunnel.entrance(SECRET, "store 1", ("127.0.0.1", outer.port))
    with socket.create_connection(("127.0.0.1", late.port), timeout=20) as rank:
        rank.sendall(b"hello")
        assert rank.recv(5) == b""
    assert store.came == 0
    late.close()


def test_many_slow_strangers_do_not_keep_a_node_from_the_store(way, monkeypatch):
    _, outer, inner = way
    crowd = [
        socket.create_connection(("127.0.0.1", outer.port)) for _ in range(3 * tunnel.MOST_UNPROVEN)
    ]
    with socket.create_connection(("127.0.0.1", inner.port), timeout=20) as rank:
        rank.sendall(b"hello")
        assert rank.recv(5) == b"hello"
    assert len(outer.unproven) <= tunnel.MOST_UNPROVEN
    monkeypatch.setattr(tunnel, "PROOF_SECONDS", 0.1)
    with socket.create_connection(("127.0.0.1", outer.port), timeout=10) as slow:
        slow.recv(32)
        assert slow.recv(1) == b"", "hung up on"
    for stranger in crowd:
        stranger.close()
