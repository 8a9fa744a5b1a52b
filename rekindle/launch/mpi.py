"""mpirun in the place of torchrun: `python -m rekindle.launch.mpi LIFELINE REPORT PLACE SCRIPT...`
starts it, and it starts `python -m rekindle.launch.mpi --rank REPORT SCRIPT...` for each rank.

LIFELINE and REPORT are those of agent.py. PLACE is JSON: how many `ranks` this `node` of `nodes`
has, and the `port` of torch's store, where one is `listening` at that descriptor. MPI starts the
ranks of this node and ends them together; of several nodes each has an mpirun of its own, so that
no node logs in to another. Ranks meet as torchrun's do, and gradients are exchanged by gloo or
NCCL, because torch's wheels have no MPI. SIGTERM would make mpirun kill the ranks after a second:
it is sent SIGUSR1 instead, which it hands on to all of them (mpirun(1), "Signal Propagation"), and
which becomes their SIGTERM."""

import json
import os
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
_NODE, _NODES = "GROUP_RANK", "GROUP_WORLD_SIZE"  # torchrun's names


def main() -> int:
    """Either side; the exit code is mpirun's, or the script's."""
    if sys.argv[1] == "--rank":
        return _rank(Path(sys.argv[2]), sys.argv[3:])
    lifeline, report, given, *script = sys.argv[1:]
    node = json.loads(given)
    ranks = str(node["ranks"])
    os.set_inheritable(int(lifeline), False)
    threading.Thread(target=hold_on, args=(int(lifeline),), daemon=True).start()
    store, port = meeting.store(node["port"], node["listening"])  # held until the end
    words = [
        "mpirun",
        "-np",
        ranks,
        "--oversubscribe",
        "--bind-to",
        "none",
        "--host",
        f"localhost:{ranks}",
        "--mca",
        "plm",
        "isolated",
    ]
    words += ["--allow-run-as-root"] if os.getuid() == 0 else []
    words += [sys.executable, "-P", "-m", "rekindle.launch.mpi", "--rank", report, *script]
    place = {"MASTER_ADDR": meeting.HOST, "MASTER_PORT": str(port)}
    place |= {_NODE: str(node["node"]), _NODES: str(node["nodes"])}
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
    local, ranks = int(os.environ[_RANK]), int(os.environ[_WORLD])
    node, nodes = int(os.environ[_NODE]), int(os.environ[_NODES])
    place = {
        "RANK": str(node * ranks + local),
        "WORLD_SIZE": str(nodes * ranks),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
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
