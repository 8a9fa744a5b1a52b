"""Nodes meet, end together, agree on what happened, and meet again: real sockets, no ranks."""

import socket
import time

import pytest

from rekindle.launch.coordination import Connection, Disconnected, Member, judge
from rekindle.launch.heartbeats import Cause
from rekindle.launch.worker_group import Report
from tests.support.launch_coordination import SECRET, Nodes
from tests.support.launch_coordination import nodes as nodes

KILLED = Cause("killed", 3, 100.0, "rank 3 was killed by SIGKILL in step 7")
PEER = Cause("followed", 0, 99.0, "rank 0 failed in step 7: Connection closed by peer")
RAISED = Cause("raised", 1, 101.0, "rank 1 failed in step 7: ValueError: 7")


def lost(cause, **fields):
    return Report("lost", cause, **fields)


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([Report("done"), Report("quiet")], Report("done")),
        ([Report("preempted", asked=True), Report("quiet")], Report("preempted", asked=True)),
        ([Report("preempted"), Report("quiet", expired=True)], Report("preempted", expired=True)),
        ([lost(PEER), lost(KILLED)], lost(KILLED)),
        ([lost(PEER), lost(RAISED)], lost(RAISED)),
        (
            [Report("done"), lost(PEER)],
            Report("done"),
        ),  # all was written before something fell over
        ([Report("quiet"), Report("quiet")], Report("done")),  # scripts that know nothing of us
        ([Report("quiet"), lost(KILLED)], lost(KILLED)),
    ],
)
def test_reports_come_to_one_verdict(reports, expected):
    assert judge(dict(enumerate(reports))) == expected


def test_all_get_the_same_restart_once_the_last_is_there(nodes):
    assert [start.restart for start in nodes.meet()] == [0, 0, 0]


def test_one_lost_gang_ends_the_others_and_all_hear_the_same_cause(nodes):
    nodes.meet()
    zero, one, two = nodes.members
    assert one.poll() is None

    def others(member):
        while (halt := member.poll()) is None:
            time.sleep(0.01)
        assert not halt.stacks
        return member.settle(lost(PEER))

    verdicts = nodes.all(
        lambda: one.settle(lost(KILLED)), lambda: others(zero), lambda: others(two)
    )
    assert verdicts == [lost(KILLED)] * 3
    assert {start.restart for start in nodes.meet(1)} == {1}


def test_a_hang_makes_the_other_nodes_write_down_their_stacks(nodes):
    nodes.meet()
    zero, one, two = nodes.members
    waits = Cause("waits", 2, 100.0, "rank 2 hangs in step 7")
    hangs = Cause("hung", 5, 100.2, "rank 5 hangs in step 7", "data.py:9 in read")

    def dumps(member, cause):
        while (halt := member.poll()) is None:
            time.sleep(0.01)
        assert halt.stacks
        return member.settle(lost(cause))

    verdicts = nodes.all(
        lambda: one.settle(lost(waits)), lambda: dumps(zero, PEER), lambda: dumps(two, hangs)
    )
    assert verdicts == [lost(hangs)] * 3


def test_a_killed_node_ends_the_others_and_joins_again_under_the_next_number(nodes):
    nodes.meet()
    zero, one, two = nodes.members
    two.close()  # as the kernel does for a killed process

    def others(member):
        while member.poll() is None:
            time.sleep(0.01)
        return member.settle(lost(PEER))

    first, second = nodes.all(lambda: others(zero), lambda: others(one))
    assert first == second
    assert first.cause.what == "node 2 is gone (rank 4 to 5)"
    nodes.members[2] = Member(nodes.places[2], lambda: False)  # knows nothing of restarts
    assert {start.restart for start in nodes.meet(1)} == {1}


def test_a_node_that_was_restarted_before_anybody_noticed_takes_its_place(nodes):
    nodes.meet()
    zero, one, _ = nodes.members
    again = Member(nodes.places[2], lambda: False)

    def others(member):
        while member.poll() is None:
            time.sleep(0.01)
        assert member.settle(lost(PEER)).cause.kind == "node"
        return member.meet(1)

    met = nodes.all(lambda: others(zero), lambda: others(one), lambda: again.meet(0))
    assert [start.restart for start in met] == [1, 1, 1]
    again.close()


def test_when_the_coordinator_is_lost_and_comes_back_all_go_on(nodes):
    nodes.meet()
    nodes.coordinator.end()
    for member in nodes.members:
        while member.poll() is None:  # the ranks have to end
            time.sleep(0.01)
        assert member.settle(lost(PEER)).cause.what.startswith("node 0 is gone")
    nodes.members[0].close()
    nodes.members[0] = Member(nodes.places[0], lambda: False)
    nodes.listen()
    calls = [lambda m=m, r=r: m.meet(r) for m, r in zip(nodes.members, (0, 1, 1), strict=True)]
    assert {start.restart for start in nodes.all(*calls)} == {1}


def test_who_waits_in_vain_is_told_for_whom():
    nodes = Nodes(patience=2)
    nodes.listen()
    zero, one, _ = nodes.members
    for error in nodes.all(lambda: zero.meet(0), lambda: one.meet(0)):
        assert error.exit_code == 75
        assert "gave up after 2 s of waiting for node 2" in str(error)
    nodes.coordinator.end()
    (error,) = nodes.all(lambda: one.meet(0))
    assert "waiting for node 0" in str(error)


def test_a_stranger_on_the_port_does_no_harm(nodes):
    address = ("127.0.0.1", nodes.places[0].port)
    for noise in (
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"kind": "join"}\n',
        b'{"kind": "join", "nodes": 9, "node": 1}\n',
        b"[]\n",
        b"\xff\n",
    ):
        with socket.create_connection(address) as stranger:
            stranger.sendall(noise)
    assert [start.restart for start in nodes.meet()] == [0, 0, 0]


def test_the_last_word_of_somebody_who_hangs_up_is_heard():
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = socket.create_connection(server.getsockname())
        other = Connection(server.accept()[0], SECRET, accepts=True)
        line = Connection(connection, SECRET, accepts=False)
    line.send("join")
    while not other.receive():
        time.sleep(0.01)
    other.send("verdict", verdict=1)
    other.close()
    assert line.receive() == [{"kind": "verdict", "verdict": 1}]
    with pytest.raises(Disconnected):
        line.receive()
    line.close()
