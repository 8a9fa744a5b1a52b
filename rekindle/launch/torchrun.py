"""Start a worker group of ranks with torchrun, keep it alive, and say how it ended.

Restarts are ours and not torchrun's: after a lost rank the whole worker group, on all nodes, starts
again with a fresh store and port, because a survivor's stale connections make torchrun's own
in-place restart fail now and then. A rank that died of its own exception would die of it again,
so only ranks lost from outside (killed, hung, out of memory, a peer's connection gone) are worth a
restart; a rank that the kernel kills for its memory in the same step again is not. Success and
preemption are what rank 0 wrote into `status.json`; torchrun's exit code is not proof of either.
Authority: torch.distributed.run, and facts measured on torch 2.13.

Google's plugins for NCCL come with a script that sets NCCL's variables. REKINDLE_NCCL_PROFILE, from
catalog/network.yaml by the machine's name, is that script, and after colons whatever else has to
exist for it to be right. Nothing of this has run on such a machine yet."""

import contextlib
import logging
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rekindle.errors import PreemptedError, RequestError, StepError
from rekindle.launch.coordination import Coordinator, Member, judge
from rekindle.launch.events import emit
from rekindle.launch.heartbeats import Cause
from rekindle.launch.process import on_signal
from rekindle.launch.rendezvous import SECRET, Rendezvous
from rekindle.launch.worker_group import Halt, Report, Start, WorkerGroup
from rekindle.spec.model import TrainSpec
from rekindle.tables import problems_in

log = logging.getLogger(__name__)

_NETWORK = ("NCCL_", "FI_", "GLOO_")
PROFILE = "REKINDLE_NCCL_PROFILE"
_ITS_OWN = ("NCCL_", "CUDA_", "LD_LIBRARY_PATH")
_PATIENCE_SECONDS = 60.0
_problem = problems_in(__file__)


def torchrun(
    script: Sequence[str],
    train: TrainSpec,
    *,
    status: Path,
    rendezvous: Rendezvous | None = None,
    environment: Mapping[str, str] | None = None,
    on_poll: Callable[[], None] = lambda: None,
) -> None:
    """Run `script` on the ranks of this node until it is done, on all nodes. `train` says how
    patient to be; with an `entrypoint` the script knows nothing of `status` and is done when
    torchrun exits with 0. `status` is a folder of this attempt and node, in which ranks leave
    heartbeats and last words, and rank 0 `status.json`. `on_poll` is called some times a second.
    Raises PreemptedError after a SIGTERM, or if other nodes did not come; StepError, which names
    the first rank at fault and its cause."""
    place = rendezvous or Rendezvous.current()
    if train.launcher == "mpirun" and shutil.which("mpirun") is None:
        raise StepError([_problem("no_mpirun")])
    if place.nodes == 1:
        _check_loopback()
    told, how = profiled(os.environ) if place.nodes > 1 else ({}, "")
    if train.deterministic:
        # before CUDA and NCCL start: cuBLAS with workspaces of its own (docs.nvidia.com/cuda/cublas
        # on reproducible results), and sums along rings, because the order in which NCCL's trees
        # add up is not fixed (so does Megatron-LM's `--deterministic-mode`,
        # NVIDIA/Megatron-LM#5718)
        told |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
    group = WorkerGroup(script, train, status, place, {**told, **(environment or {})})
    with on_signal(group.stop), _team(group) as team:
        restart, starved_at = 0, None
        while True:
            start = team.meet(restart) if team else Start(restart)
            restart = start.restart
            if team and restart == 0:
                emit("notice", text=_network({**os.environ, **place.network(), **told}, how))
            report = group.run(start, lambda: _polled(team, on_poll))
            verdict = team.settle(report) if team else judge({0: report})
            if verdict.ending == "done":
                return
            cause = verdict.cause or Cause("followed", 0, 0.0, "")
            what, where, fix = cause.what, cause.where, cause.fix
            _give_up(verdict, cause, train)
            before, starved_at = starved_at, cause.starved_at
            if starved_at is not None and starved_at == before:
                raise StepError(f"{what}, twice in the same step", where=where, fix=fix)
            if restart >= train.max_restarts:
                lost = cause.kind != "ended"  # by a script itself
                more = ". Raise train.max_restarts if machines are this unstable" if lost else ""
                fix = f"{fix}; the same command resumes from the last checkpoint{more}"
                raise StepError(f"{what}; after {restart} restarts", where=where, fix=fix)
            restart += 1
            text = f"{what}; restarting all ranks ({restart} of {train.max_restarts})"
            log.warning("%s\n  where: %s\n  fix: %s", text, where, fix)
            emit("notice", text=text)


def _check_loopback() -> None:
    """Raises StepError where the ranks of one machine cannot reach each other."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=10).close()
    except OSError as error:
        raise StepError([_problem("loopback", why=error.strerror or error)]) from error


def profiled(environment: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """The unset variables that the script sets, and a line about it; StepError if it fails."""
    script, *others = environment.get(PROFILE, "").split(":")
    if not script:
        return {}, ""
    if missing := [path for path in (script, *others) if not Path(path).exists()]:
        return {}, f"no GPUDirect between nodes: {', '.join(missing)} is not in this container"
    given = {"LD_LIBRARY_PATH": "", **environment}
    words = ["bash", "-c", 'set -a; . "$0" >&2 && exec env -0', script]
    try:
        done = subprocess.run(words, env=given, capture_output=True, timeout=_PATIENCE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StepError([_problem("profile", where=script, why=error)]) from error
    if done.returncode:
        why = done.stderr.decode(errors="replace").strip()[-500:]
        raise StepError([_problem("profile", where=script, why=why)])
    pairs = (line.partition("=") for line in done.stdout.decode(errors="replace").split("\0"))
    told = {n: value for n, _, value in pairs if n.startswith(_ITS_OWN) and given.get(n) != value}
    own = {n for n in environment if n != "LD_LIBRARY_PATH"}
    return {n: v for n, v in told.items() if n not in own}, f"NCCL as {script} says"


def _network(environment: Mapping[str, str], how: str) -> str:
    """What NCCL, libfabric and gloo are told about the network, for the log."""
    told = [f"{n}={v}" for n, v in sorted(environment.items()) if n.startswith(_NETWORK)]
    said = f"network: {', '.join(told) or 'nothing set, NCCL chooses'}"
    return f"{said}; {how}" if how else said


@contextlib.contextmanager
def _team(group: WorkerGroup) -> Iterator[Member | None]:
    """The other nodes; None where there are none."""
    place = group.place
    if place.nodes == 1:
        yield None
        return
    if not place.secret:
        raise RequestError([_problem("no_secret", where=SECRET, nodes=place.nodes)])
    with contextlib.ExitStack() as ends:
        coordinator = None
        if place.node_rank == 0:
            coordinator = Coordinator(place, group.train.max_restarts)
            coordinator.start()
            ends.callback(coordinator.end)
        member = Member(place, lambda: group.stopped_at is not None, coordinator)
        yield ends.enter_context(contextlib.closing(member))


def _polled(team: Member | None, on_poll: Callable[[], None]) -> Halt | None:
    on_poll()
    return team.poll() if team else None


def _give_up(verdict: Report, cause: Cause, train: TrainSpec) -> None:
    """Raise what the verdict comes to, unless a restart may help."""
    if cause.kind == "raised":  # a restart would end so, too
        raise StepError(cause.what, where=cause.where, fix=cause.fix)
    if verdict.expired:
        saved = "the state was saved" if verdict.ending == "preempted" else "what was saved is kept"
        raise StepError([_problem("expired", hours=train.max_hours, saved=saved)])
    if verdict.ending == "preempted":
        raise PreemptedError([_problem("saved")])
    if verdict.asked:
        raise PreemptedError([_problem("stopped")])
