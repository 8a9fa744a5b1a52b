"""mpirun in the place of torchrun: `python -m rekindle.launch.mpi LIFELINE REPORT PLACE
SCRIPT...` starts it, and it starts `python -m rekindle.launch.mpi --rank REPORT
SCRIPT...` for each rank.

LIFELINE and REPORT are those of agent.py. PLACE is JSON: how many `ranks` this `node` of
`nodes` has, and the `port` of torch's store, where one is `listening` at that descriptor.
MPI starts the ranks of this node and ends them together; of several nodes each has an
mpirun of its own, so that no node logs in to another. Ranks meet as torchrun's do, and
gradients are exchanged by gloo or NCCL, because torch's wheels have no MPI. SIGTERM would
make mpirun kill the ranks after a second: it is sent SIGUSR1 instead, which it hands on
to all of them (mpirun(1), "Signal Propagation"), and which becomes their SIGTERM."""

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
_RANK = "OMPI_COMM_WORLD_RANK"
_WORLD = "OMPI_COMM_WORLD_SIZE"
_OUTER = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "SLURM_", "PBS_", "LSB_")
# torchrun's names
_NODE = "GROUP_RANK"
_NODES = "GROUP_WORLD_SIZE"


def main() -> int:
    """Either side; the exit code is mpirun's, or the script's."""
    if sys.argv[1] == "--rank":
        return _rank(Path(sys.argv[2]), sys.argv[3:])
    lifeline, report, node_text, *script = sys.argv[1:]
    node = json.loads(node_text)
    ranks = str(node["ranks"])
    os.set_inheritable(int(lifeline), False)
    threading.Thread(target=hold_on, args=(int(lifeline),), daemon=True).start()
    store, port = meeting.store(node["port"], node["listening"])  # held until the end
    command = [
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
    if os.getuid() == 0:  # which containers often are, and mpirun refuses
        command.append("--allow-run-as-root")
    command += [sys.executable, "-P", "-m", "rekindle.launch.mpi", "--rank", report, *script]
    environment = {}
    for name, value in os.environ.items():
        # of a batch system, of another mpirun around this one, or a default list of hosts
        if not name.startswith(_OUTER):
            environment[name] = value
    environment |= {
        "MASTER_ADDR": meeting.HOST,
        "MASTER_PORT": str(port),
        _NODE: str(node["node"]),
        _NODES: str(node["nodes"]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # or rank 0 would listen on all interfaces
    }
    mpirun = subprocess.Popen(command, env=environment)
    signal.signal(signal.SIGTERM, lambda *_: mpirun.send_signal(signal.SIGUSR1))
    code = mpirun.wait()
    del store
    return int(code != 0)


def _rank(report: Path, script: list[str]) -> int:
    """Run the script as the rank that mpirun made of this process, and say how it
    failed."""
    die_with_parent()
    # mpirun knows this node alone
    local_rank = int(os.environ[_RANK])
    ranks_per_node = int(os.environ[_WORLD])
    node = int(os.environ[_NODE])
    nodes = int(os.environ[_NODES])
    rank = node * ranks_per_node + local_rank
    rank_variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(nodes * ranks_per_node),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
    }
    child = subprocess.Popen([sys.executable, *script], env={**os.environ, **rank_variables})
    is_ended_by_mpirun = False  # because another rank failed

    def end(*_: object) -> None:
        nonlocal is_ended_by_mpirun
        is_ended_by_mpirun = True
        child.terminate()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGUSR1, lambda *_: child.terminate())
    code = child.wait()
    if code and not is_ended_by_mpirun:
        line = {"rank": rank, "exit_code": code, "time": int(time.time())}
        with report.open("a") as file:
            file.write(json.dumps(line) + "\n")
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
