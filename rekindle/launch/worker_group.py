"""One attempt of the worker group: this node's ranks, from their start to a report of
their end.

Decides when ranks are given up: after an error or a death the others get a little time to
say what they saw and are then killed, because a collective may wait for a dead peer for
ever; a rank without a heartbeat for `train.hang_seconds` makes all write down their
stacks first. Warming up, saving and finishing may take three times as long, and at least
two minutes. A start may take any time, as long as one rank of the node sends a heartbeat
every `train.start_seconds`."""

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
PEER_SECONDS = 15.0  # for the peers of a lost rank to notice it and end by themselves
OVERTIME_SECONDS = 15.0  # beyond the grace period, until ranks that do not stop are killed
STACKS_SECONDS = 3.0
SLOW_PHASES = ("start", "warm-up", "save", "finish")
SLOW_FACTOR = 3
SLOW_SECONDS = 120.0

# done, preempted: rank 0 wrote so. quiet: the ranks ended with exit code 0 and write no
# status, on another node than rank 0's or in a script that knows nothing of rekindle.
Ending = Literal["done", "preempted", "quiet", "lost"]


@dataclasses.dataclass(frozen=True)
class Report:
    """How the ranks of one node ended."""

    ending: Ending
    cause: Cause | None = None
    """Why they were lost, as far as this node knows."""
    expired: bool = False
    """Whether `train.max_hours` were over."""
    asked: bool = False
    """Whether they had been asked to stop."""

    @property
    def hung(self) -> bool:
        """Whether the other nodes should write down their stacks, too."""
        return self.cause is not None and self.cause.kind in ("hung", "waits")

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Self:
        """From its fields, which another node sent: raises ValueError, TypeError or
        KeyError."""
        if facts["ending"] not in get_args(Ending):
            raise ValueError(f"no ending: {facts['ending']!r}")
        cause = Cause.of(facts["cause"]) if facts["cause"] else None
        return cls(**{**facts, "cause": cause})


@dataclasses.dataclass(frozen=True)
class Halt:
    """Another node's request to end the ranks of this one; `stacks`: to write down their
    stacks first."""

    stacks: bool = False


@dataclasses.dataclass(frozen=True)
class GroupStart:
    """What the ranks of a node are started with."""

    restart: int
    """The number of the restart; 0 is the first start."""
    port: int = 0
    """The port on loopback by which ranks of several nodes reach torch's store."""
    store: socket.socket | None = None
    """On node rank 0 of several, the socket at which that store is to listen."""


class WorkerGroup:
    """The ranks of this node, from one restart to the next.

    `run` starts them once and waits for their end; `stop` may be called from a signal
    handler."""

    def __init__(
        self,
        script: Sequence[str],
        train: TrainSpec,
        status: Path,
        rendezvous: Rendezvous,
        environment: Mapping[str, str],
    ) -> None:
        self.script = list(script)
        self.train = train
        self.status = status
        self.place = rendezvous
        # one thread for each rank, because ranks share the cores: torchrun sets the same if
        # it starts several
        self.environment = {"OMP_NUM_THREADS": "1", **os.environ, **rendezvous.network()}
        self.environment |= {**environment, LAUNCHER: str(os.getpid())}
        self.gpus = has_gpu()
        if self.gpus:
            self.environment |= allocator(self.environment)
        self.foreign = train.entrypoint is not None  # a script that writes no heartbeats
        self.began = time.monotonic()
        self.agent: Agent | None = None
        self.stopped_at: float | None = None
        self.expired = False

    def stop(self, number: int = 0) -> None:
        """Ask all ranks to save and end; torchrun hands SIGTERM to them."""
        self.stopped_at = self.stopped_at or time.monotonic()
        if self.agent is not None and self.agent.poll() is None:
            self.agent.send_signal(signal.SIGTERM)

    def run(self, start: GroupStart, on_poll: Callable[[], Halt | None]) -> Report:
        """Start the ranks, and return how they ended.

        `on_poll` is called some times a second; the ranks are ended if it returns a Halt."""
        self.status.mkdir(parents=True, exist_ok=True)
        (self.status / "status.json").unlink(missing_ok=True)
        heartbeats.clear(self.status)
        with contextlib.closing(_Attempt(self, start)) as attempt:
            if self.stopped_at is not None:  # `stop` was called before torchrun was started
                self.stop()
            attempt.watch(on_poll)
            end_marked(attempt.mark)
            return attempt.report()


class _Attempt:
    """One start of a worker group: its agent, from its start to `close`."""

    def __init__(self, group: WorkerGroup, start: GroupStart) -> None:
        self.group = group
        self.restart = start.restart
        self.status = group.status
        self.mark = uuid.uuid4().hex
        # on this machine's own disk: that of `status` may be full, or take no named pipes
        self.scratch = tempfile.TemporaryDirectory(prefix="rekindle-")
        self.exits = Path(self.scratch.name) / "exits.jsonl"
        self.began = time.monotonic()
        self.ending_at: float | None = None
        self.killed_at: float | None = None
        self.killed_by_us: set[int] = set()
        self.hung: list[Cause] = []
        self.oom_kills = process.oom_kills()
        reading, self.lifeline = os.pipe()
        handles = [process.moved(reading)]
        if start.store:
            handles.append(process.moved(start.store.detach()))
        module = ""  # ranks may be forks that call its `main`
        if group.script[0] == "-m" and not group.foreign and group.train.launcher != "mpirun":
            module = group.script[1]
        command = self._command(start, handles, module)
        env = {**group.environment, **self._environment()}
        try:
            agent: Agent | None = fork_agent(command, env, handles) if module else None
            # in a session of its own, which signals to this process's group do not reach: it
            # has to outlive them, to end its ranks
            self.agent = agent or subprocess.Popen(
                [sys.executable, "-P", "-m", *command],
                env=env,
                start_new_session=True,
                pass_fds=handles,
            )
            group.agent = self.agent
        finally:
            for handle in handles:
                os.close(handle)

    def _command(self, start: GroupStart, handles: Sequence[int], module: str) -> list[str]:
        """The module that starts the ranks, and its arguments. `handles` are the lifeline
        and on node rank 0 of several the socket of the store."""
        group = self.group
        rendezvous = group.place
        if group.train.launcher == "mpirun":
            node = {
                "ranks": rendezvous.ranks_per_node,
                "node": rendezvous.node_rank,
                "nodes": rendezvous.nodes,
                "port": start.port,
                "listening": handles[1] if start.store else None,
            }
            command = ["rekindle.launch.mpi", str(handles[0]), str(self.exits)]
            return [*command, json.dumps(node), *group.script]
        command = ["rekindle.launch.agent", str(handles[0]), str(self.exits), module]
        command.append(f"--log-dir={self.scratch.name}")
        is_bound = group.gpus and can_bind()
        return [*command, *argv(group.script, rendezvous, start, handles[1:], is_bound)]

    def _environment(self) -> dict[str, str]:
        """The variables of this attempt."""
        group = self.group
        variables = {MARK: self.mark, "REKINDLE_RESTART": str(self.restart), **CONSTANT}
        # NCCL writes its record of the last collectives on a timeout, and when it is asked to
        if group.gpus:
            variables |= {
                "TORCH_FR_BUFFER_SIZE": "2000",
                "TORCH_FR_DUMP_TEMP_FILE": str(self.status / "flight-recorder-"),
                "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
                "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{self.scratch.name}/",
            }
        # a script of the user's may import modules beside its config; rekindle must not
        if group.foreign:
            del variables["PYTHONSAFEPATH"]
        elif group.place.nodes == 1:
            variables[meeting.FILE] = f"{self.scratch.name}/store"
        # how long torchrun waits for ranks after SIGTERM, until it kills them
        variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(int(group.train.grace_seconds))
        return variables

    def close(self) -> None:
        """End all processes of this start, and remove its files from this machine's disk."""
        end_marked(self.mark)
        self.agent.wait()
        os.close(self.lifeline)
        self.scratch.cleanup()

    def watch(self, on_poll: Callable[[], Halt | None]) -> None:
        """Wait until torchrun has ended; kill the ranks when they have to be given up."""
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
        group = self.group
        now = time.monotonic()
        hours = group.train.max_hours
        is_out_of_time = hours is not None and now - group.began > hours * 3600
        if is_out_of_time and group.stopped_at is None:
            log.warning("train.max_hours are over; asking the ranks to save and end")
            group.expired = True
            group.stop()
        if group.stopped_at is not None:
            patience = group.train.grace_seconds + OVERTIME_SECONDS
            if now - max(group.stopped_at, self.began) > patience:
                return True
        beats = heartbeats.read(self.status)
        if halt is not None:
            if halt.stacks:
                self._write_stacks(beats)
            return True
        # the training has ended, and the ranks have only to exit; or one has failed or died
        if self._status() or any(beat.words or not is_running(beat.pid) for beat in beats):
            self.ending_at = self.ending_at or now
            return now - self.ending_at > PEER_SECONDS
        return self._hangs(beats)

    def _hangs(self, beats: Sequence[Heartbeat]) -> bool:
        """Whether a rank has had no heartbeat for too long; if so, all stacks are written
        down."""
        if self.group.foreign:
            return False
        all_beats = list(beats)
        started_ranks = {beat.rank for beat in beats}
        for rank in self.group.place.ranks:
            if rank not in started_ranks:
                all_beats.append(Heartbeat(rank, 0, 0, self.began, 0, "start", 0, None))
        late = [beat for beat in all_beats if beat.age > self._patience_seconds(beat)]
        if any(beat.phase == "start" and beat not in late for beat in all_beats):
            # one rank is still starting, and others may wait for it in a collective, in which
            # no rank sends heartbeats
            late = [beat for beat in late if beat.phase != "start"]
        if late:
            self._write_stacks(all_beats)
        return bool(late)

    def _patience_seconds(self, beat: Heartbeat) -> float:
        """How long a rank may be without a heartbeat in its phase."""
        train = self.group.train
        if beat.phase == "start" and train.start_seconds is not None:
            return train.start_seconds
        if beat.phase in SLOW_PHASES:
            return max(SLOW_SECONDS, SLOW_FACTOR * train.hang_seconds)
        return train.hang_seconds

    def _write_stacks(self, beats: Sequence[Heartbeat]) -> None:
        """Write the stacks of all ranks into the log and one file; sets `hung` from them."""
        texts = _stacks(self.status, [beat for beat in beats if beat.pid])
        for rank in sorted(texts):
            log.warning("stacks of rank %d:\n%s", rank, texts[rank])
        path = self.status / f"stacks-{self.restart}.txt"
        with contextlib.suppress(OSError):  # a full disk; the log has them
            path.write_text("".join(f"rank {rank}\n{text}\n" for rank, text in texts.items()))
        for beat in beats:  # NCCL writes its record when it reads something from this pipe
            with contextlib.suppress(OSError):  # no NCCL in this rank, or it does not read
                name = f"{self.scratch.name}/{beat.rank}.pipe"
                pipe = os.open(name, os.O_WRONLY | os.O_NONBLOCK)
                os.write(pipe, b"1")
                os.close(pipe)
        is_start = all(beat.phase == "start" for beat in beats)
        field = "train.start_seconds" if is_start else "train.hang_seconds"
        fix = f"all stacks are in {path}; if it was only slow, raise {field}"
        stacks = {beat.rank: Stack.read(texts.get(beat.rank, ""), beat.thread) for beat in beats}
        # also ranks that are not late yet: which of them hangs, the stacks tell
        quiet = [beat for beat in beats if beat.age > self._patience_seconds(beat) / 2]
        self.hung = heartbeats.hung_causes(quiet, stacks, fix)

    def kill(self) -> None:
        """Kill the ranks; torchrun then reports how each ended, and ends by itself."""
        self.killed_at = time.monotonic()
        beats = heartbeats.read(self.status)
        dead_ranks = {beat.rank for beat in beats if not is_running(beat.pid)}
        self.killed_by_us = set(self.group.place.ranks) - dead_ranks
        end_marked(self.mark, spared={self.agent.pid})

    def report(self) -> Report:
        """How the ranks ended, once torchrun has ended."""
        code = self.agent.wait()
        status = self._status()
        expired = self.group.expired
        asked = self.group.stopped_at is not None
        if status == "done":
            return Report("done")
        if status == "preempted":
            return Report("preempted", expired=expired, asked=asked)
        if code == 0 and (self.group.foreign or self.group.place.node_rank):
            return Report("quiet", expired=expired, asked=asked)
        oom_kills = process.oom_kills() - self.oom_kills
        beats = heartbeats.read(self.status)
        lines = self.exits.read_text().splitlines() if self.exits.exists() else []
        exits = [json.loads(line) for line in lines]
        causes = heartbeats.causes_of(beats, exits, self.killed_by_us, oom_kills)
        cause = heartbeats.first_cause([*causes, *self.hung])
        if cause is None:
            cause = self._unknown_cause(code, oom_kills)
        return Report("lost", cause, expired, asked)

    def _unknown_cause(self, code: int, oom_kills: int) -> Cause:
        first_rank = self.group.place.ranks[0]
        if code < 0 and self.killed_at is None:
            return heartbeats.agent_killed(first_rank, -code, oom_kills)
        message = "the ranks ended without saying that they are done"
        if code:
            launcher = "mpirun" if self.group.train.launcher == "mpirun" else "torchrun"
            message = f"{launcher} ended with exit code {code}"
        return Cause("followed", first_rank, time.time(), message, fix="see the step's log")

    def _status(self) -> str:
        """The ending that rank 0 wrote; "" as long as it wrote none."""
        path = self.status / "status.json"
        return str(json.loads(path.read_text())["status"]) if path.exists() else ""


def argv(
    script: Sequence[str],
    place: Rendezvous,
    start: GroupStart,
    store: Sequence[int] = (),
    is_bound: bool = False,
) -> list[str]:
    """torchrun's arguments for `script` (a path or `-m module`, and its arguments).

    `store` has the descriptor of the socket at which torch's store is to listen, on node
    rank 0 of several nodes. Each rank is bound to the processors and the memory beside its
    GPU if `is_bound`."""
    arguments = [f"--nproc-per-node={place.ranks_per_node}", "--max-restarts=0"]
    if is_bound:
        arguments.append("--numa-binding=node")
    # by address, because a container without a network cannot resolve its own name
    arguments += [f"--nnodes={place.nodes}", "--local-addr=127.0.0.1"]
    arguments += [f"--rdzv-backend={meeting.BACKEND}", f"--rdzv-endpoint=127.0.0.1:{start.port}"]
    if place.nodes > 1:
        configuration = f"rank={place.node_rank}"
        if store:
            configuration += f",{meeting.LISTENING}={store[0]}"
        arguments.append(f"--rdzv-conf={configuration}")
    return [*arguments, *script]


def _stacks(status: Path, beats: Sequence[Heartbeat]) -> dict[int, str]:
    """The stacks of all threads of each rank that answers within some seconds."""
    for beat in beats:
        if is_running(beat.pid):
            os.kill(beat.pid, signal.SIGUSR1)
    deadline = time.monotonic() + STACKS_SECONDS
    texts: dict[int, str] = {}
    while time.monotonic() < deadline:
        texts_before = texts
        texts = {}
        for beat in beats:
            path = heartbeats.stacks_path(status, beat.rank)
            if path.exists():
                texts[beat.rank] = path.read_text()
        if texts == texts_before and all(texts.values()):  # no rank is writing any more
            break
        time.sleep(POLL_SECONDS)
    return {rank: text for rank, text in texts.items() if text}
