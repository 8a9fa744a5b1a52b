"""Start a worker group of ranks with torchrun, keep it alive, and say how it ended.

Restarts are ours and not torchrun's: after a lost rank the whole worker group, on all
nodes, starts again with a fresh store and port, because a survivor's stale connections
make torchrun's own in-place restart fail now and then. A rank that died of its own
exception would die of it again, so only ranks lost from outside (killed, hung, out of
memory, a peer's connection gone) are worth a restart; a rank that the kernel kills for
its memory in the same step again is not. Success and preemption are what rank 0 wrote
into `status.json`; torchrun's exit code is not proof of either. Authority:
torch.distributed.run, and facts measured on torch 2.13.

Google's plugins for NCCL come with a script that sets NCCL's variables.
REKINDLE_NCCL_PROFILE, from catalog/network.yaml by the machine's name, is that script,
and after colons whatever else has to exist for it to be right. Nothing of this has run on
such a machine yet."""

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
from rekindle.launch.worker_group import GroupStart, Halt, Report, WorkerGroup
from rekindle.spec.model import TrainSpec

log = logging.getLogger(__name__)

# variables that the log shows: what NCCL, libfabric and gloo read
_NETWORK_PREFIXES = ("NCCL_", "FI_", "GLOO_")
PROFILE = "REKINDLE_NCCL_PROFILE"
# variables that are taken over from the script of PROFILE
_PROFILE_PREFIXES = ("NCCL_", "CUDA_", "LD_LIBRARY_PATH")
_PROFILE_SECONDS = 60.0
_RESUMES = "the same command resumes"


def torchrun(
    script: Sequence[str],
    train: TrainSpec,
    *,
    status: Path,
    rendezvous: Rendezvous | None = None,
    environment: Mapping[str, str] | None = None,
    on_poll: Callable[[], None] = lambda: None,
) -> None:
    """Run `script` on the ranks of this node; return once it is done on all nodes.

    `train` has the limits of time and of restarts. `status` is a folder of this attempt
    and node: ranks write heartbeats and last words there, rank 0 also `status.json`. A
    script of `train.entrypoint` knows nothing of that folder, and is done when torchrun
    exits with 0. `on_poll` is called some times a second.

    Raises PreemptedError after a SIGTERM, or if other nodes did not come; StepError, which
    names the first rank at fault and its cause."""
    own_rendezvous = rendezvous or Rendezvous.current()
    if train.launcher == "mpirun" and shutil.which("mpirun") is None:
        raise StepError(
            "there is no mpirun here",
            where="train.launcher",
            fix="install Open MPI (apt-get install openmpi-bin), in the image of the step where "
            "it has one, or use torchrun",
        )
    if own_rendezvous.nodes == 1:
        _check_loopback()
    variables: dict[str, str] = {}
    profile = ""
    if own_rendezvous.nodes > 1:
        variables, profile = variables_of_profile(os.environ)
    if train.deterministic:
        # before CUDA and NCCL start: cuBLAS with workspaces of its own
        # (docs.nvidia.com/cuda/cublas on reproducible results), and sums along rings,
        # because the order in which NCCL's trees add up is not fixed (so does
        # Megatron-LM's `--deterministic-mode`, NVIDIA/Megatron-LM#5718)
        variables |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
    group = WorkerGroup(script, train, status, own_rendezvous, {**variables, **(environment or {})})
    with on_signal(group.stop), _membership(group) as member:
        restart = 0
        starved_at = None  # the step in which the kernel killed a rank for its memory
        while True:
            start = member.meet(restart) if member else GroupStart(restart)
            # the coordinator's count: a node that was started again alone asked for 0
            restart = start.restart
            if member and restart == 0:
                in_effect = {**os.environ, **own_rendezvous.network(), **variables}
                emit("notice", text=_network_line(in_effect, profile))
            report = group.run(start, lambda: _poll(member, on_poll))
            verdict = member.settle(report) if member else judge({0: report})
            if verdict.ending == "done":
                return
            # ranks that were preempted, or told to stop, have no cause
            cause = verdict.cause or Cause("followed", 0, 0.0, "")
            _raise_unless_restartable(verdict, cause, train)
            if cause.starved_at is not None and cause.starved_at == starved_at:
                message = f"{cause.what}, twice in the same step"
                raise StepError(message, where=cause.where, fix=cause.fix)
            starved_at = cause.starved_at
            if restart >= train.max_restarts:
                raise _too_many_restarts(cause, restart)
            restart += 1
            text = f"{cause.what}; restarting all ranks ({restart} of {train.max_restarts})"
            log.warning("%s\n  where: %s\n  fix: %s", text, cause.where, cause.fix)
            emit("notice", text=text)


def _too_many_restarts(cause: Cause, restarts: int) -> StepError:
    fix = f"{cause.fix}; the same command resumes from the last checkpoint"
    if cause.kind != "ended":  # a script that ended itself would do so on any machine
        fix += ". Raise train.max_restarts if machines are this unstable"
    return StepError(f"{cause.what}; after {restarts} restarts", where=cause.where, fix=fix)


def _check_loopback() -> None:
    """Raises StepError where the ranks of one machine cannot reach each other."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=10).close()
    except OSError as error:
        why = error.strerror or error
        message = f"ranks cannot reach each other over the loopback interface: {why}"
        fix = "bring it up (ip link set lo up), and allow connections to it"
        raise StepError(message, where="127.0.0.1", fix=fix) from error


def variables_of_profile(environment: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """The variables that the script of REKINDLE_NCCL_PROFILE adds to the environment, and
    a line about them for the log; StepError if the script fails."""
    script, *needed_files = environment.get(PROFILE, "").split(":")
    if not script:
        return {}, ""
    missing = [path for path in (script, *needed_files) if not Path(path).exists()]
    if missing:
        return {}, f"no GPUDirect between nodes: {', '.join(missing)} is not in this container"
    before = {"LD_LIBRARY_PATH": "", **environment}  # which the script extends
    # stdout has the environment and nothing else: what the script prints goes to stderr
    command = ["bash", "-c", 'set -a; . "$0" >&2 && exec env -0', script]
    try:
        process = subprocess.run(command, env=before, capture_output=True, timeout=_PROFILE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _failed_profile(script, error) from error
    if process.returncode:
        raise _failed_profile(script, process.stderr.decode(errors="replace").strip()[-500:])
    variables = {}
    for line in process.stdout.decode(errors="replace").split("\0"):
        name, _, value = line.partition("=")
        # what the user set stays, but for the path, to which the script adds
        may_change = name == "LD_LIBRARY_PATH" or name not in environment
        if name.startswith(_PROFILE_PREFIXES) and may_change and before.get(name) != value:
            variables[name] = value
    return variables, f"NCCL as {script} says"


def _failed_profile(script: str, why: object) -> StepError:
    message = f"the script that tells NCCL of this machine's network failed: {why}"
    fix = f"correct what is mounted there, or set {PROFILE} to nothing in the step's environment"
    return StepError(message, where=script, fix=fix)


def _network_line(environment: Mapping[str, str], profile: str) -> str:
    """What NCCL, libfabric and gloo are told about the network, for the log."""
    variables = []
    for name, value in sorted(environment.items()):
        if name.startswith(_NETWORK_PREFIXES):
            variables.append(f"{name}={value}")
    line = f"network: {', '.join(variables) or 'nothing set, NCCL chooses'}"
    return f"{line}; {profile}" if profile else line


@contextlib.contextmanager
def _membership(group: WorkerGroup) -> Iterator[Member | None]:
    """This node's connection to the other nodes; None where there is one node.

    Node rank 0 also runs the coordinator meanwhile."""
    own_rendezvous = group.place
    if own_rendezvous.nodes == 1:
        yield None
        return
    if not own_rendezvous.secret:
        raise RequestError(
            f"{own_rendezvous.nodes} nodes cannot tell each other from strangers: "
            "they share no secret",
            where=SECRET,
            fix="set it to the same text on all nodes, as `openssl rand -hex 32` prints one: in "
            "platforms.P.secrets, in their environment, or as `secret` in REKINDLE_RENDEZVOUS",
        )
    with contextlib.ExitStack() as ends:
        coordinator = None
        if own_rendezvous.node_rank == 0:
            coordinator = Coordinator(own_rendezvous, group.train.max_restarts)
            coordinator.start()
            ends.callback(coordinator.end)
        member = Member(own_rendezvous, lambda: group.stopped_at is not None, coordinator)
        yield ends.enter_context(contextlib.closing(member))


def _poll(member: Member | None, on_poll: Callable[[], None]) -> Halt | None:
    """What other nodes want of this one while its ranks run."""
    on_poll()
    return member.poll() if member else None


def _raise_unless_restartable(verdict: Report, cause: Cause, train: TrainSpec) -> None:
    """Raise the error that the verdict amounts to, unless a restart may help."""
    # a restart would raise it again, whatever else was asked meanwhile
    if cause.kind == "raised":
        raise StepError(cause.what, where=cause.where, fix=cause.fix)
    if verdict.expired:
        saved = "the state was saved" if verdict.ending == "preempted" else "what was saved is kept"
        message = f"train.max_hours ({train.max_hours:g} h) are over; {saved}"
        fix = "raise train.max_hours; the same command resumes, and the time starts again at zero"
        raise StepError(message, where="train.max_hours", fix=fix)
    if verdict.ending == "preempted":
        raise PreemptedError("stopped from outside after a save", fix=_RESUMES)
    if verdict.asked:
        message = "stopped from outside; what the last checkpoint holds is kept"
        raise PreemptedError(message, fix=_RESUMES)
