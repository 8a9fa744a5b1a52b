"""Two ranks that add their numbers up, so that a machine or an image is known to train on several:
`python3 /opt/rekindle/selftest/allreduce.py` starts them as a fine-tune step starts its own.

They use gloo, and NCCL too where there are two GPUs."""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

from rekindle.errors import RekindleError
from rekindle.launch import meeting
from rekindle.launch.process import leave
from rekindle.launch.rendezvous import Rendezvous
from rekindle.launch.torchrun import torchrun
from rekindle.spec.model import TrainSpec

RANKS = 2
_PATIENCE_SECONDS = 60.0


def main() -> None:
    """Start the ranks, or be one, whose folder the command line names."""
    if sys.argv[1:]:
        _be_rank(Path(sys.argv[1]))
    train = TrainSpec(max_restarts=0, hang_seconds=_PATIENCE_SECONDS)
    with tempfile.TemporaryDirectory() as folder:
        script = ["-m", Path(__file__).stem, folder]
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        place = Rendezvous(ranks_per_node=RANKS)
        try:
            torchrun(
                script,
                train,
                status=Path(folder),
                rendezvous=place,
                environment={"PYTHONPATH": path.rstrip(os.pathsep)},
            )
        except RekindleError as error:
            sys.stderr.write(f"{error}\n")
            sys.exit(error.exit_code)


def _be_rank(status: Path) -> NoReturn:
    import torch
    import torch.distributed as dist

    has_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= RANKS
    meeting.join("cuda:nccl,cpu:gloo" if has_gpus else "gloo")
    rank, expected = dist.get_rank(), RANKS * (RANKS + 1) / 2
    devices = [torch.device("cpu")] + [torch.device("cuda", rank)] * has_gpus
    for device in devices:
        number = torch.tensor([rank + 1.0], device=device)
        dist.all_reduce(number)
        if number.item() != expected:
            raise ArithmeticError(f"{device}: {number.item()} is not {expected}")
    dist.barrier()
    if rank == 0:
        (status / "status.json").write_text(json.dumps({"status": "done"}))
    leave(0)  # as a training rank does: gloo's threads may abort the interpreter's own end


if __name__ == "__main__":
    main()
