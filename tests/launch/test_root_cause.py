"""Which of many causes is the first, from facts alone; and what a rank leaves behind, whatever its disk says."""

import errno
import os
import subprocess
import sys
import time
import timeit
from pathlib import Path

import pytest

from rekindle.errors import CheckpointError, RequestError
from rekindle.launch import heartbeats
from rekindle.launch.fault import RehearsedFault
from rekindle.launch.heartbeats import (
    Heartbeat,
    HeartbeatFile,
    Stack,
    causes_of,
    first_cause,
    hung_causes,
)
from rekindle.train.vitals import explain, is_peer_lost


def heartbeat(rank, step=7, words=None, age=0.0):
    return Heartbeat(rank, 1, 1, time.monotonic() - age, step, "step", 1, words)


def words(when, message, peer_lost=False):
    return {"time": when, "message": message, "where": "", "fix": "", "peer_lost": peer_lost}


def exited(rank, code, when=100):
    return {"rank": rank, "exit_code": code, "time": when}


OWN, PEER = words(102.0, "ValueError: 7"), words(101.0, "Connection reset", peer_lost=True)
CASES = {
    "an own error counts before a peer's that was written earlier": (
        [heartbeat(0, words=PEER), heartbeat(1, words=OWN)],
        [],
        (),
        0,
        "rank 1 failed in step 7: ValueError: 7",
    ),
    "of two own errors the earlier one": (
        [heartbeat(0, words=OWN), heartbeat(1, words=words(101.9, "first"))],
        [],
        (),
        0,
        "rank 1 failed in step 7: first",
    ),
    "a killed rank before peers that noticed": (
        [heartbeat(0, words=PEER), heartbeat(1)],
        [exited(1, -9), exited(0, 1)],
        (),
        0,
        "rank 1 was killed by SIGKILL in step 7",
    ),
    "a killed rank before the strange error of a peer a second later": (
        [heartbeat(0, words=OWN), heartbeat(1)],
        [exited(1, -9), exited(0, 1)],
        (),
        0,
        "rank 1 was killed by SIGKILL in step 7",
    ),
    "a crash by its signal": (
        [heartbeat(0, words=PEER), heartbeat(1)],
        [exited(1, -11), exited(0, 1)],
        (),
        0,
        "rank 1 was killed by SIGSEGV in step 7",
    ),
    "missing memory if the kernel says so": (
        [heartbeat(0, words=PEER), heartbeat(1)],
        [exited(1, -9)],
        (),
        2,
        "rank 1 was killed in step 7: the kernel ran out of memory",
    ),
    "not the ranks that we killed": (
        [heartbeat(0), heartbeat(1, words=PEER)],
        [exited(0, -9)],
        (0,),
        0,
        "rank 1 failed in step 7: Connection reset",
    ),
    "an exit code before ranks that torchrun ended": (
        [],
        [exited(0, -15), exited(1, 3)],
        (),
        0,
        "rank 1 ended with exit code 3",
    ),
    "an own error before an exit code": (
        [heartbeat(1, words=OWN)],
        [exited(0, 1)],
        (),
        0,
        "rank 1 failed in step 7: ValueError: 7",
    ),
    "gloo's abort after a peer's end": (
        [heartbeat(0), heartbeat(1)],
        [exited(0, -6), exited(1, -9, 101)],
        (),
        0,
        "rank 1 was killed by SIGKILL in step 7",
    ),
}


@pytest.mark.parametrize(
    ("found", "exits", "ours", "oom", "expected"), CASES.values(), ids=list(CASES)
)
def test_the_first_cause_is(found, exits, ours, oom, expected):
    assert first_cause(causes_of(found, exits, ours, oom)).what == expected


DUMP = """\
Thread 0x00007f0000000001 (most recent call first):
  File "/lib/python3.11/threading.py", line 324 in wait
  File "/lib/python3.11/queue.py", line 180 in get

Current thread 0x00007f0000000002 (most recent call first):
{}
  File "/rekindle/train/worker.py", line 60 in main
"""
COLLECTIVE = '  File "/torch/distributed/distributed_c10d.py", line 2900 in all_reduce'
BACKWARD = '  File "/torch/autograd/graph.py", line 829 in _engine_run_backward'
OPERATOR = '  File "/torch/_ops.py", line 1158 in __call__\n  File "/torch/distributed/_functional_collectives.py", line 140 in wait_tensor'
READ = '  File "/data/shard.py", line 90 in read'


def stack(text):
    return Stack.read(DUMP.format(text), 0x7F0000000002)


@pytest.mark.parametrize(
    ("text", "waits"), [(COLLECTIVE, True), (BACKWARD, True), (OPERATOR, True), (READ, False)]
)
def test_the_main_thread_tells_who_waits(text, waits):
    assert stack(text).waits is waits
    assert stack(text).where.endswith(" < main")


def test_of_hung_ranks_the_one_that_does_not_wait_is_the_first_even_if_its_last_beat_is_newer():
    stacks = {0: stack(COLLECTIVE), 1: stack(READ), 2: stack(BACKWARD)}
    found = [heartbeat(0, age=30), heartbeat(1, age=29), heartbeat(2, age=31)]
    cause = first_cause(hung_causes(found, stacks, "fix"))
    assert cause.what == "rank 1 hangs in step 7: no heartbeat for 29 s"
    assert cause.where == "/data/shard.py:90 in read < main"


def test_where_all_wait_the_one_furthest_behind_is_named():
    stacks = {0: stack(COLLECTIVE), 1: stack(COLLECTIVE)}
    (cause,) = hung_causes(
        [heartbeat(0, step=8, age=40), heartbeat(1, step=7, age=20)], stacks, "fix"
    )
    assert (cause.rank, cause.kind) == (1, "waits")


def test_a_beat_costs_less_than_twenty_microseconds(tmp_path):
    file = HeartbeatFile(tmp_path, 0, 5)
    assert min(timeit.repeat(lambda: file.beat(3, "step"), number=500, repeat=20)) / 500 < 20e-6


def test_signs_are_read_back(tmp_path):
    for rank in (11, 2):
        file = HeartbeatFile(tmp_path, rank, 5)
        file.beat(0, "warm-up")
        for step in (4, 5):
            file.beat(step, "step")
        file.beat(5, "validation")
        file.say({"message": "é" * 1000})
        file.say({"message": "only the first words count"})
    two, eleven = heartbeats.read(tmp_path)
    assert (two.rank, eleven.rank) == (2, 11)
    assert (two.pid, two.thread, two.step, two.phase, two.first_step) == (
        os.getpid(),
        5,
        5,
        "validation",
        4,
    )
    assert two.words == {"message": "é" * 1000}
    assert two.doing == "validation at step 5"
    heartbeats.clear(tmp_path)
    assert heartbeats.read(tmp_path) == []


LAST_WORDS_ON_A_FULL_DISK = """
import sys
from pathlib import Path
from rekindle.launch import heartbeats
from rekindle.train.vitals import Vitals
folder = Path(sys.argv[1])
vitals = Vitals(folder / "status", 0)
try:
    (folder / "filler").write_bytes(bytes(8 << 20))
except OSError:
    pass
try:
    (folder / "checkpoint").write_bytes(b"x" * 4096)
except OSError as error:
    vitals.beat(3, "save")
    vitals.failed(error)
(sign,) = heartbeats.read(folder / "status")
print(sign.doing, sign.words["message"], sign.words["where"], sep="|")
"""


def test_last_words_reach_the_supervisor_although_the_disk_is_full(tmp_path):
    small = 'mount -t tmpfs -o size=4m none "$1" && exec "$2" -c "$3" "$1"'
    done = subprocess.run(
        [
            "unshare",
            "--map-root-user",
            "--mount",
            "sh",
            "-c",
            small,
            "-",
            str(tmp_path),
            sys.executable,
            LAST_WORDS_ON_A_FULL_DISK,
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no file system can be mounted here: {done.stderr}")
    last = done.stdout.splitlines()[-1]
    assert last == "save at step 3|the disk is full: No space left on device|", done


def test_causes_are_explained_wherever_in_the_chain_they_are():
    full = RuntimeError("save failed")
    full.__cause__ = OSError(errno.ENOSPC, "No space left on device", "/c/step-5")
    assert explain(full).what == "the disk is full: No space left on device"
    assert explain(full).where == "/c/step-5"
    store = CheckpointError("cannot reach s3://b", where="s3://b/c", fix="check the endpoint")
    assert explain(store) == store.problems[0]
    memory = RuntimeError(
        "[enforce fail at alloc_cpu.cpp:132] . DefaultCPUAllocator: can't allocate memory"
    )
    assert explain(memory).what.startswith("out of memory (RuntimeError): ")
    assert explain(KeyError("x")).what == "KeyError: 'x'"


def test_a_lost_peer_is_told_from_an_own_error():
    import torch.distributed as dist

    assert is_peer_lost(dist.DistNetworkError("The client socket has timed out"))
    assert is_peer_lost(
        RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:3")
    )
    assert not is_peer_lost(RuntimeError("shape mismatch"))
    assert not is_peer_lost(ConnectionResetError("connection reset"))  # a store's, not a rank's


def test_a_fault_is_read_from_its_text():
    assert RehearsedFault.parse("hang@step=12") == RehearsedFault("hang", 12)
    for wrong in ("kill", "kill@step=0", "melt@step=3", "kill@step=x"):
        with pytest.raises(RequestError, match="kill@step=5"):
            RehearsedFault.parse(wrong)
