"""Whatever happens to a rank, the first one at fault and its cause are the last thing printed. Real torchrun, real signals,
ranks without torch."""

import argparse
import contextlib
import inspect
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from rekindle.launch.process import has_gpu
from tests.durations import PACE_MS
from tests.support.launch_torchrun import EXECUTED, FORKED, Run
from tests.support.launch_torchrun import run as run


@contextlib.contextmanager
def small_memory(limit_bytes):
    """The words before a command that has only so much memory, from a cgroup of its own."""
    for root, limit in (("memory", "memory.limit_in_bytes"), ("", "memory.max")):
        group = Path("/sys/fs/cgroup", root, f"rekindle-test-{os.getpid()}")
        try:
            group.mkdir()
            (group / limit).write_text(str(limit_bytes))
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
            continue
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "-"]
        group.rmdir()
        return
    pytest.skip("no memory cgroup can be made here")


def facts_of(run):
    run.folder.mkdir()
    # as nohup does, and `&` in a script
    ignoring = ["sh", "-c", 'trap "" HUP INT QUIT; exec "$@"', "-"]
    run.start("tells", prefix=ignoring).ends(0)
    assert run.said.count("seen at once") == 2, "nothing that is printed waits in the rank"
    return [json.loads((run.folder / f"facts-{n}").read_text()) for n in (0, 1)]


@pytest.mark.slow
@pytest.mark.skipif(has_gpu(), reason="with a GPU all ranks are executed")
def test_a_forked_rank_finds_what_one_of_its_own_finds(tmp_path):
    executed = facts_of(Run(tmp_path / "executed", EXECUTED))
    forked = facts_of(Run(tmp_path / "forked", FORKED))
    assert [facts.pop("forked") for facts in (*executed, *forked)] == [False, False, True, True]
    assert executed == forked


def test_a_killed_rank_is_named_with_its_step_and_all_start_again(run):
    said = run.start("killed").ends(0)
    assert "rank 1 was killed by SIGKILL in step 5; restarting all ranks (1 of 3)" in said
    assert said.endswith("done\n")


def test_agents_that_are_forked_start_again_as_those_that_are_executed(tmp_path):
    run = Run(tmp_path, FORKED, preloaded=os.environ["REKINDLE_PRELOADED"])
    said = run.start("killed").ends(0)
    assert "rank 1 was killed by SIGKILL in step 5; restarting all ranks (1 of 3)" in said
    assert said.endswith("done\n")


@pytest.mark.slow
def test_restarts_are_bounded(run):
    run.start("always_killed", max_restarts=1).ends(1)
    assert "restarting all ranks (1 of 1)" in run.said
    assert run.last.startswith("rank 0 was killed by SIGKILL in step 5; after 1 restarts\n")


@pytest.mark.slow
def test_a_rank_that_raises_is_the_cause_even_if_its_peers_noticed_before_and_is_not_tried_again(
    run,
):
    run.start("raised").ends(1)
    assert "restarting" not in run.said
    assert run.last.splitlines() == [
        "rank 1 failed in step 5: the shard is torn",
        "  where: shard-3.arrow",
        "  fix:   run `shard` again",
    ]


@pytest.mark.slow
def test_missing_memory_says_what_to_lower(run):
    run.start("out_of_memory").ends(1)
    assert run.last.startswith("rank 1 failed in step 5: out of memory (MemoryError)\n")
    assert "lower train.micro_batch_size" in run.last


@pytest.mark.slow
def test_a_rank_that_leaves_without_a_word_is_named_with_its_exit_code(run):
    run.start("silent", max_restarts=0).ends(1)
    assert run.last.startswith("rank 1 ended with exit code 3 in step 5; after 0 restarts\n")


@pytest.mark.slow
def test_a_hung_rank_is_named_with_the_place_where_it_hangs(run):
    run.start("wedged", hang_seconds=2, max_restarts=0).ends(1)
    assert run.last.startswith("rank 1 hangs in step 5: no heartbeat for ")
    assert "rank.py:" in run.last
    assert " in wait_for_a_lock_that_nobody_holds < wedged" in run.last
    stacks = (run.folder / "status" / "stacks-0.txt").read_text()
    assert stacks.count("in wedged") == 2, "the stacks of all ranks are written down"
    assert stacks.count("in wedged") == run.said.count(" in wedged\n")


@pytest.mark.slow
def test_a_frozen_rank_is_named_although_it_cannot_say_where(run):
    run.start("frozen", hang_seconds=2, max_restarts=0).ends(1)
    assert run.last.startswith("rank 1 hangs in step 5: ")
    assert "it does not answer a signal either" in run.last


@pytest.mark.slow
@pytest.mark.parametrize("group", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_killed_launcher_leaves_no_worker_and_none_of_their_children(group, run):
    run.start("parent", entrypoint="rank.py").ready()
    family = run.everybody()
    assert len(family) == 7, family  # torchrun, two ranks, two children each
    os.killpg(run.process.pid, signal.SIGKILL) if group else run.process.kill()
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive, [p.cmdline() for p in alive]


def seconds_here(seconds):
    """So many seconds at the published pace, on this machine."""
    began = time.thread_time()
    compile(inspect.getsource(argparse), "argparse.py", "exec")
    return round(seconds * max(1.0, 1_000 * (time.thread_time() - began) / PACE_MS), 1)


@pytest.mark.slow
def test_a_start_may_take_long_while_one_rank_is_at_work(run):
    start_seconds = seconds_here(3)
    (run.folder / "work-seconds").write_text(str(3 * start_seconds))
    said = run.start("starts_slowly", start_seconds=start_seconds, max_restarts=0).ends(
        0, within=120
    )
    assert "no heartbeat" not in said


@pytest.mark.slow
def test_a_start_that_stopped_working_is_ended_and_names_its_own_setting(run):
    run.start("never_starts", start_seconds=1, max_restarts=0).ends(1)
    assert " hangs in start: no heartbeat for " in run.last
    assert "if it was only slow, raise train.start_seconds" in run.last


@pytest.mark.slow
def test_a_killed_torchrun_takes_its_ranks_along_and_all_start_again(run):
    run.start("parent", max_restarts=1).ready()
    family = run.everybody()
    agent = next(p for p in family if "rekindle.launch.agent" in p.cmdline())
    for ready in run.folder.glob("ready-*"):
        ready.unlink()
    agent.kill()
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive, [p.cmdline() for p in alive]
    run.ready()
    assert "torchrun was killed by SIGKILL; restarting all ranks (1 of 1)" in run.said


def test_sigterm_reaches_the_ranks_and_ends_in_75(run):
    run.start("saves_on_sigterm").ready().process.send_signal(signal.SIGTERM)
    run.ends(75)
    assert run.last.startswith("stopped from outside after a save\n")


@pytest.mark.slow
def test_ranks_that_do_not_listen_are_killed_when_the_grace_period_is_over(run):
    run.start("deaf", grace_seconds=1).ready().process.send_signal(signal.SIGTERM)
    assert "stopped from outside; what the last checkpoint holds is kept" in run.ends(75, within=15)


@pytest.mark.slow
def test_the_wall_clock_guard_asks_for_a_save_and_says_so(run):
    run.start("saves_on_sigterm", max_hours=0.004).ends(1)
    assert "train.max_hours (0.004 h) are over; the state was saved" in run.last


@pytest.mark.slow
def test_peers_that_wait_for_a_dead_rank_for_ever_are_given_up(run):
    began = time.monotonic()
    run.start("always_deaf_peer", max_restarts=0).ends(1)
    assert time.monotonic() - began < 60
    assert run.last.startswith("rank 1 was killed by SIGKILL")


@pytest.mark.slow
def test_a_rank_that_the_kernel_killed_for_its_memory_is_told_from_one_killed_by_hand(run):
    with small_memory(1_400 << 20) as join:  # well above what torchrun itself takes
        said = run.start("greedy", max_restarts=3, prefix=join).ends(1)
    assert "restarting all ranks (1 of 3)" in said
    assert "restarting all ranks (2 of 3)" not in said
    assert run.last.startswith(
        "rank 1 was killed in step 5: the kernel ran out of memory, twice in the same step"
    )
    assert "train.micro_batch_size" in run.last


def test_without_a_loopback_interface_it_says_so_before_a_rank_starts(run):
    alone = ("unshare", "-rn")
    if subprocess.run([*alone, "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs the right to have a network of its own")
    said = run.start("tells", prefix=alone).ends(1)
    assert "ranks cannot reach each other over the loopback interface" in said
    assert "ip link set lo up" in said
    assert not list(run.folder.glob("ready-*"))
