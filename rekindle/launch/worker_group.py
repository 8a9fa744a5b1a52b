"""One attempt of the worker group: this node's ranks, from their start to a report of their end.

Decides when ranks are given up: after an error or a death the others get a little time to say what
they saw and are then killed, because a collective may wait for a dead peer for ever; a rank without
a heartbeat for `train.hang_seconds` makes all write down their stacks first. What a rank warms
up with, saves or finishes may take three times as long, and at least two minutes. A start may take
as long as it likes while one rank of the node sends a heartbeat every `train.start_seconds`."""

import contextlib
import dataclasses
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, get_args

from rekindle.launch import fork_server, heartbeats, meeting, process
from rekindle.launch.fault import LAUNCHER
from rekindle.launch.heartbeats import Cause, Heartbeat, Stack
from rekindle.launch.preloaded import CONSTANT, fork_agent
from rekindle.launch.process import MARK, allocator, can_bind, end_marked, has_gpu, is_running
from rekindle.launch.rendezvous import Rendezvous
from rekindle.spec.model import TrainSpec

log = logging.getLogger(__name__)

Agent: TypeAlias = "subprocess.Popen[bytes] | fork_server.Forked"
POLL_SECONDS = 0.2
PEER_SECONDS = 15.0  # for the peers of a lost rank to notice by themselves
OVERTIME_SECONDS = 15.0  # beyond the grace period, until ranks that do not stop are killed
STACKS_SECONDS = 3.0
SLOW_PHASES, SLOW_FACTOR, SLOW_SECONDS = ("start", "warm-up", "save", "finish"), 3, 120.0

# done, preempted: rank 0 said so. quiet: ranks ended well that cannot say so, on another node than
# rank 0's or in a script that knows nothing of us.
Ending = Literal["done", "preempted", "quiet", "lost"]


@dataclasses.dataclass(frozen=True)
class Report:
    """How the ranks of one node ended: the `cause` of a loss as far as this node knows, whether its
    time was `expired` (train.max_hours), and whether it was `asked` to stop."""

    ending: Ending
    cause: Cause | None = None
    expired: bool = False
    asked: bool = False

    @property
    def hung(self) -> bool:
        """Whether the other nodes should write down their stacks, too."""
        return self.cause is not None and self.cause.kind in ("hung", "waits")

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Self:
        """From its fields, which another node sent: raises ValueError, TypeError or KeyError."""
        if facts["ending"] not in get_args(Ending):
            raise ValueError(f"no ending: {facts['ending']!r}")
        cause = Cause.of(facts["cause"]) if facts["cause"] else None
        return cls(**{**facts, "cause": cause})


@dataclasses.dataclass(frozen=True)
class Halt:
    """Another node wants this one to end; with `stacks` written down first."""

    stacks: bool = False


@dataclasses.dataclass(frozen=True)
class Start:
    """The `restart` that begins, and where on loopback ranks of several nodes reach torch's store;
    on node rank 0 the socket at which it is to listen."""

    restart: int
    port: int = 0
    store: socket.socket | None = None


class WorkerGroup:
    """The ranks of this node. `run` is one life; `stop` may be called from a signal handler."""

    def __init__(
        self,
        script: Sequence[str],
        train: TrainSpec,
        status: Path,
        rendezvous: Rendezvous,
        environment: Mapping[str, str],
    ) -> None:
        self.script, self.train, self.status, self.place = list(script), train, status, rendezvous
        self.environment = {"OMP_NUM_THREADS": "1", **os.environ, **rendezvous.network()}
        self.environment |= {**environment, LAUNCHER: str(os.getpid())}
        self.gpus = has_gpu()
        if self.gpus:
            self.environment |= allocator(self.environment)
        self.foreign = train.entrypoint is not None
        self.began = time.monotonic()
        self.agent: Agent | None = None
        self.stopped_at: float | None = None
        self.expired = False

    def stop(self, number: int = 0) -> None:
        """Ask all ranks to save and end; torchrun hands SIGTERM to them."""
        self.stopped_at = self.stopped_at or time.monotonic()
        if self.agent is not None and self.agent.poll() is None:
            self.agent.send_signal(signal.SIGTERM)

    def run(self, start: Start, on_poll: Callable[[], Halt | None]) -> Report:
        """One life; `on_poll` is called some times a second and may end it."""
        self.status.mkdir(parents=True, exist_ok=True)
        (self.status / "status.json").unlink(missing_ok=True)
        heartbeats.clear(self.status)
        with contextlib.closing(_Attempt(self, start)) as life:
            if self.stopped_at is not None:
                self.stop()
            life.watch(on_poll)
            end_marked(life.mark)
            return life.report()


class _Attempt:
    def __init__(self, group: WorkerGroup, start: Start) -> None:
        self.group, self.restart, self.status = group, start.restart, group.status
        self.mark = uuid.uuid4().hex
        # on this machine's own disk: the other may be full, or hold no pipes
        self.scratch = tempfile.TemporaryDirectory(prefix="rekindle-")
        self.exits = Path(self.scratch.name) / "exits.jsonl"
        self.began = time.monotonic()
        self.ending_at: float | None = None
        self.killed_at: float | None = None
        self.ours: set[int] = set()
        self.hung: list[Cause] = []
        self.oom_kills = process.oom_kills()
        reading, self.lifeline = os.pipe()
        mine = [reading, *([start.store.detach()] if start.store else [])]
        handles = [process.moved(descriptor) for descriptor in mine]
        place, module = group.place, ""  # whose `main` ranks are, as forks
        if group.train.launcher == "mpirun":
            node = {
                "ranks": place.ranks_per_node,
                "node": place.node_rank,
                "nodes": place.nodes,
                "port": start.port,
                "listening": handles[1] if start.store else None,
            }
            words = ["rekindle.launch.mpi", str(handles[0]), str(self.exits)]
            words += [json.dumps(node), *group.script]
        else:
            if group.script[0] == "-m" and not group.foreign:
                module = group.script[1]
            words = ["rekindle.launch.agent", str(handles[0]), str(self.exits), module]
            words += [f"--log-dir={self.scratch.name}"]
            words += argv(group.script, place, start, handles[1:], group.gpus and can_bind())
        own = {MARK: self.mark, "REKINDLE_RESTART": str(start.restart), **CONSTANT}
        if group.gpus:  # NCCL's record of the last collectives, on a timeout and when we ask for it
            own |= {
                "TORCH_FR_BUFFER_SIZE": "2000",
                "TORCH_FR_DUMP_TEMP_FILE": str(self.status / "flight-recorder-"),
                "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
                "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{self.scratch.name}/",
            }
        if group.foreign:  # it may import what lies beside the config, where ours must not look
            del own["PYTHONSAFEPATH"]
        elif place.nodes == 1:
            own[meeting.FILE] = f"{self.scratch.name}/store"
        own["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(int(group.train.grace_seconds))
        env = {**group.environment, **own}
        try:
            agent: Agent | None = fork_agent(words, env, handles) if module else None
            # in a session of its own: a signal to our process group leaves it to tidy up
            self.agent = group.agent = agent or subprocess.Popen(
                [sys.executable, "-P", "-m", *words],
                env=env,
                start_new_session=True,
                pass_fds=handles,
            )
        finally:
            for handle in handles:
                os.close(handle)

    def close(self) -> None:
        """Leave nothing running, and nothing on this machine's disk."""
        end_marked(self.mark)
        self.agent.wait()
        os.close(self.lifeline)
        self.scratch.cleanup()

    def watch(self, on_poll: Callable[[], Halt | None]) -> None:
        """Until torchrun has ended."""
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.agent.wait(POLL_SECONDS)
                return
            halt = on_poll()
            if self.killed_at is not None:
                if time.monotonic() - self.killed_at > PEER_SECONDS:
                    self.agent.kill()
            elif self._is_over(halt):
                self.kill()

    def _is_over(self, halt: Halt | None) -> bool:
        """Whether the ranks have to be killed now."""
        group, now, hours = self.group, time.monotonic(), self.group.train.max_hours
        out_of_time = hours is not None and now - group.began > hours * 3600
        if out_of_time and group.stopped_at is None:
            log.warning("train.max_hours are over; asking the ranks to save and end")
            group.expired = True
            group.stop()
        if group.stopped_at is not None:
            patience = group.train.grace_seconds + OVERTIME_SECONDS
            if now - max(group.stopped_at, self.began) > patience:
                return True
        found = heartbeats.read(self.status)
        if halt is not None:
            if halt.stacks:
                self._write_stacks(found)
            return True
        # all was said, and the ranks need only leave; or one of them has failed or died
        if self._said() or any(rank.words or not is_running(rank.pid) for rank in found):
            self.ending_at = self.ending_at or now
            return now - self.ending_at > PEER_SECONDS
        return self._hangs(found)

    def _hangs(self, found: Sequence[Heartbeat]) -> bool:
        if self.group.foreign:
            return False
        unborn = set(self.group.place.ranks) - {heartbeat.rank for heartbeat in found}
        ranks = [*found]
        ranks += [Heartbeat(r, 0, 0, self.began, 0, "start", 0, None) for r in sorted(unborn)]
        late = [heartbeat for heartbeat in ranks if heartbeat.age > self._patience(heartbeat)]
        if any(rank.phase == "start" and rank not in late for rank in ranks):
            # one is at work, and the others wait for it: in a collective no rank beats
            late = [heartbeat for heartbeat in late if heartbeat.phase != "start"]
        if late:
            self._write_stacks(ranks)
        return bool(late)

    def _patience(self, heartbeat: Heartbeat) -> float:
        limit = self.group.train.hang_seconds
        if heartbeat.phase == "start" and self.group.train.start_seconds is not None:
            return self.group.train.start_seconds
        return max(SLOW_SECONDS, SLOW_FACTOR * limit) if heartbeat.phase in SLOW_PHASES else limit

    def _write_stacks(self, found: Sequence[Heartbeat]) -> None:
        """Have all ranks write down their stacks, into the log and one file, and see who hangs."""
        texts = _stacks(self.status, [heartbeat for heartbeat in found if heartbeat.pid])
        for rank in sorted(texts):
            log.warning("stacks of rank %d:\n%s", rank, texts[rank])
        path = self.status / f"stacks-{self.restart}.txt"
        with contextlib.suppress(OSError):  # a full disk; the log has them
            path.write_text("".join(f"rank {rank}\n{text}\n" for rank, text in texts.items()))
        for heartbeat in found:
            with contextlib.suppress(OSError):  # no NCCL in this rank, or no reader
                name = f"{self.scratch.name}/{heartbeat.rank}.pipe"
                pipe = os.open(name, os.O_WRONLY | os.O_NONBLOCK)
                os.write(pipe, b"1")
                os.close(pipe)
        in_start = all(heartbeat.phase == "start" for heartbeat in found)
        field = "train.start_seconds" if in_start else "train.hang_seconds"
        stacks = {s.rank: Stack.read(texts.get(s.rank, ""), s.thread) for s in found}
        fix = f"all stacks are in {path}; if it was only slow, raise {field}"
        quiet = [heartbeat for heartbeat in found if heartbeat.age > self._patience(heartbeat) / 2]
        self.hung = heartbeats.hung_causes(quiet, stacks, fix)

    def kill(self) -> None:
        """End the ranks at once; torchrun then reports and ends by itself."""
        self.killed_at = time.monotonic()
        dead = {s.rank for s in heartbeats.read(self.status) if not is_running(s.pid)}
        self.ours = set(self.group.place.ranks) - dead
        end_marked(self.mark, spared={self.agent.pid})

    def report(self) -> Report:
        code, said = self.agent.wait(), self._said()
        foreign, expired = self.group.foreign, self.group.expired
        asked = self.group.stopped_at is not None
        if said == "done":
            return Report("done")
        if said == "preempted":
            return Report("preempted", expired=expired, asked=asked)
        if code == 0 and (foreign or self.group.place.node_rank):
            return Report("quiet", expired=expired, asked=asked)
        oom = process.oom_kills() - self.oom_kills
        found = heartbeats.read(self.status)
        lines = self.exits.read_text().splitlines() if self.exits.exists() else []
        causes = heartbeats.causes_of(found, [json.loads(line) for line in lines], self.ours, oom)
        cause = heartbeats.first_cause([*causes, *self.hung]) or self._unknown(code, oom)
        return Report("lost", cause, expired, asked)

    def _unknown(self, code: int, oom_kills: int) -> Cause:
        first = self.group.place.ranks[0]
        if code < 0 and self.killed_at is None:
            return heartbeats.agent_killed(first, -code, oom_kills)
        what = "the ranks ended without saying that they are done"
        if code:
            launcher = "mpirun" if self.group.train.launcher == "mpirun" else "torchrun"
            what = f"{launcher} ended with exit code {code}"
        return Cause("followed", first, time.time(), what, fix="see the step's log")

    def _said(self) -> str:
        path = self.status / "status.json"
        return str(json.loads(path.read_text())["status"]) if path.exists() else ""


def argv(
    script: Sequence[str],
    place: Rendezvous,
    start: Start,
    store: Sequence[int] = (),
    bound: bool = False,
) -> list[str]:
    """torchrun's arguments for `script` (a path or `-m module`, and its arguments), and for the
    descriptor at which torch's `store` is to listen. Each rank is `bound` to the processors and the
    memory beside its GPU."""
    words = [f"--nproc-per-node={place.ranks_per_node}", "--max-restarts=0"]
    words += ["--numa-binding=node"] if bound else []
    # by address: a container without a network cannot look its own name up
    words += [f"--nnodes={place.nodes}", "--local-addr=127.0.0.1"]
    words += [f"--rdzv-backend={meeting.BACKEND}", f"--rdzv-endpoint=127.0.0.1:{start.port}"]
    if place.nodes > 1:
        listens = f",{meeting.LISTENING}={store[0]}" if store else ""
        words += [f"--rdzv-conf=rank={place.node_rank}{listens}"]
    return [*words, *script]


def _stacks(status: Path, found: Sequence[Heartbeat]) -> dict[int, str]:
    """The stacks of all threads of each rank that answers within some seconds."""
    for heartbeat in found:
        if is_running(heartbeat.pid):
            os.kill(heartbeat.pid, signal.SIGUSR1)
    deadline = time.monotonic() + STACKS_SECONDS
    texts: dict[int, str] = {}
    while time.monotonic() < deadline:
        paths = {rank.rank: heartbeats.stacks_path(status, rank.rank) for rank in found}
        before, texts = texts, {r: p.read_text() for r, p in paths.items() if p.exists()}
        if texts == before and all(texts.values()):
            break
        time.sleep(POLL_SECONDS)
    return {rank: text for rank, text in texts.items() if text}
