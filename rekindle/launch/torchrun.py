"""Start a gang of ranks with torchrun, keep it alive, and say how it ended.

Restarts are ours and not torchrun's: after a lost rank the whole gang starts anew with a fresh
store and port, because a survivor's stale connections make torchrun's own in-place restart fail now
and then. A rank that died of an exception of its own would die of it again, so only ranks lost from
outside (killed, out of memory, a peer's connection gone) are worth a restart. Success and
preemption are what rank 0 wrote into `status.json`; torchrun's exit code is not proof of either.
Authority: torch.distributed.run, and facts measured on torch 2.13."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from rekindle.errors import PreemptedError, StepError
from rekindle.launch.events import emit
from rekindle.launch.process import die_with_parent, on_signal
from rekindle.launch.rendezvous import Rendezvous

log = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 110  # below the two minutes that a reclaimed machine is given
POLL_SECONDS = 0.2

Ending = Literal["done", "preempted", "lost"]


def argv(script: Sequence[str], rendezvous: Rendezvous) -> list[str]:
    """The torchrun command line for `script` (a path or `-m module`, and its arguments)."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={rendezvous.ranks_per_node}",
    ]
    if rendezvous.nodes == 1:
        command += ["--standalone"]
    else:
        command += [
            f"--nnodes={rendezvous.nodes}",
            f"--node-rank={rendezvous.node_rank}",
            f"--master-addr={rendezvous.address}",
            f"--master-port={rendezvous.port}",
        ]
    return [*command, "--max-restarts=0", *script]


def torchrun(
    script: Sequence[str],
    *,
    status: Path,
    rendezvous: Rendezvous | None = None,
    max_restarts: int = 3,
    environment: Mapping[str, str] | None = None,
    on_poll: Callable[[], None] = lambda: None,
    foreign: bool = False,
) -> None:
    """Run `script` on the ranks of this node until it is done.

    `status` is a folder in which ranks leave `status.json` (rank 0) and `error-<rank>.json`; a
    `foreign` script does not know of it and is done when torchrun exits with 0. `on_poll` is called
    some times a second. Raises PreemptedError after a SIGTERM and a save, StepError when the gang
    cannot go on."""
    command = argv(script, rendezvous or Rendezvous.current())
    gang = _Gang(command, status, dict(environment or {}), on_poll, foreign)
    with on_signal(gang.stop):
        for restart in range(max_restarts + 1):
            ending = gang.run(restart)
            if ending == "done":
                return
            if ending == "preempted":
                raise PreemptedError(
                    "stopped from outside after a save", fix="the same command resumes"
                )
            if restart < max_restarts:
                emit(
                    "notice",
                    text=f"{gang.how}; restarting all ranks ({restart + 1} of {max_restarts})",
                )
    raise StepError(
        f"{gang.how}, after {max_restarts} restarts",
        fix="the same command resumes from the last checkpoint; "
        "raise train.max_restarts if machines are this unstable",
    )


class _Gang:
    def __init__(
        self,
        command: list[str],
        status: Path,
        environment: dict[str, str],
        on_poll: Callable[[], None],
        foreign: bool,
    ) -> None:
        self.command, self.status, self.on_poll, self.foreign = command, status, on_poll, foreign
        self.environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        self.environment |= {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_SECONDS), **environment}
        self.process: subprocess.Popen[bytes] | None = None
        self.stopped = False
        self.how = ""

    def stop(self, number: int) -> None:
        """Forward a request to stop; torchrun hands it to every rank."""
        self.stopped = True
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def run(self, restart: int) -> Ending:
        self._clear()
        environment = {**self.environment, "REKINDLE_RESTART": str(restart)}
        self.process = subprocess.Popen(self.command, env=environment, preexec_fn=die_with_parent)
        if self.stopped:
            self.stop(signal.SIGTERM)
        code = self._wait()
        return self._ending(code)

    def _clear(self) -> None:
        self.status.mkdir(parents=True, exist_ok=True)
        for old in [self.status / "status.json", *self.status.glob("error-*.json")]:
            old.unlink(missing_ok=True)

    def _wait(self) -> int:
        assert self.process is not None
        while True:
            try:
                return self.process.wait(POLL_SECONDS)
            except subprocess.TimeoutExpired:
                self.on_poll()

    def _ending(self, code: int) -> Ending:
        said = self._read("status.json").get("status")
        if said == "done" or (self.foreign and code == 0):
            return "done"
        if said == "preempted":
            return "preempted"
        errors = [json.loads(path.read_text()) for path in sorted(self.status.glob("error-*.json"))]
        own = next((error for error in errors if not error["peer_lost"]), None)
        if own is not None:
            raise StepError(
                f"rank {own['rank']} failed: {own['message']}", where=own["where"], fix=own["fix"]
            )
        if self.stopped:
            raise PreemptedError(
                "stopped from outside; what the last checkpoint holds is kept",
                fix="the same command resumes",
            )
        lost = "the script failed or lost a rank" if self.foreign else "a rank was killed or lost"
        self.how = lost if code else "the ranks ended without saying that they are done"
        log.warning("%s (torchrun exit code %s)", self.how, code)
        return "lost"

    def _read(self, name: str) -> dict[str, str]:
        path = self.status / name
        return dict(json.loads(path.read_text())) if path.exists() else {}
