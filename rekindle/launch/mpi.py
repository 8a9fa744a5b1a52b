"""mpirun in the place of torchrun, on one machine: `python -m rekindle.launch.mpi LIFELINE REPORT
RANKS SCRIPT...` starts it, and it starts `python -m rekindle.launch.mpi --rank REPORT SCRIPT...`
for each rank.

LIFELINE and REPORT are those of agent.py. MPI starts the ranks and ends them together; they meet
as torchrun's do, and gradients are exchanged by gloo or NCCL, because torch's wheels have no MPI.
SIGTERM would make mpirun kill the ranks after a second: it is sent SIGUSR1 instead, which it hands
on to all of them (mpirun(1), "Signal Propagation"), and which becomes their SIGTERM."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from rekindle.launch import meeting
from rekindle.launch.agent import hold_on
from rekindle.launch.process import die_with_parent

# Open MPI's names; others', such as PMI_RANK, are refused by their absence
_RANK, _WORLD = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
_OUTER = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "SLURM_", "PBS_", "LSB_")
_LOCAL_RANK, _LOCAL_WORLD = "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"


def main() -> int:
    """Either side; the exit code is mpirun's, or the script's."""
    if sys.argv[1] == "--rank":
        return _rank(Path(sys.argv[2]), sys.argv[3:])
    lifeline, report, ranks, *script = sys.argv[1:]
    os.set_inheritable(int(lifeline), False)
    threading.Thread(target=hold_on, args=(int(lifeline),), daemon=True).start()
    store, port = meeting.store()  # held until the end
    words = [
        shutil.which("mpirun") or "mpirun", "-np", ranks, "--oversubscribe", "--bind-to", "none",
        "--host", f"localhost:{ranks}", "--mca", "plm", "isolated",
    ]  # fmt: skip
    words += ["--allow-run-as-root"] if os.getuid() == 0 else []
    words += [sys.executable, "-P", "-m", "rekindle.launch.mpi", "--rank", report, *script]
    place = {"MASTER_ADDR": meeting.HOST, "MASTER_PORT": str(port)}
    place["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # or rank 0 would listen on all interfaces
    # of a batch system, of another mpirun around this one, or a default list of hosts
    own = {k: v for k, v in os.environ.items() if not k.startswith(_OUTER)}
    mpirun = subprocess.Popen(words, env=own | place)
    signal.signal(signal.SIGTERM, lambda *_: mpirun.send_signal(signal.SIGUSR1))
    code = mpirun.wait()
    del store
    return int(code != 0)


def _rank(report: Path, script: list[str]) -> int:
    """Run the script as the rank that mpirun made of this process, and say how it failed."""
    die_with_parent()
    place = {
        "RANK": os.environ[_RANK], "WORLD_SIZE": os.environ[_WORLD],
        "LOCAL_RANK": os.environ[_LOCAL_RANK], "LOCAL_WORLD_SIZE": os.environ[_LOCAL_WORLD],
        "GROUP_RANK": "0",
    }  # fmt: skip
    child = subprocess.Popen([sys.executable, *script], env={**os.environ, **place})
    ended = []  # by mpirun, because another rank failed

    def end(*_: object) -> None:
        ended.append(True)
        child.terminate()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGUSR1, lambda *_: child.terminate())
    code = child.wait()
    if code and not ended:
        line = {"rank": int(place["RANK"]), "exit_code": code, "time": int(time.time())}
        with report.open("a") as file:
            file.write(json.dumps(line) + "\n")
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
