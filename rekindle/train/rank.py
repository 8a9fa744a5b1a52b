"""How a rank starts and ends, whatever it works on: process, log, heartbeats, device.

Rank 0 leaves `status.json`; a rank that fails leaves the cause (vitals.py); all leave through
os._exit, because gloo's threads now and then abort the interpreter's own shutdown
(pytorch#190489)."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from rekindle.launch import meeting
from rekindle.launch.process import die_with_parent, leave, name_process, on_signal
from rekindle.records import write_atomically
from rekindle.train.job import Job
from rekindle.train.loop import StopFlag
from rekindle.train.pieces import ScoreJob
from rekindle.train.vitals import Vitals

J = TypeVar("J", Job, ScoreJob)

# warnings from torch that a user cannot act on
_NOT_FOR_USERS = (
    "`broadcast_buffers` is deprecated",  # its successor sends buffers once more
    "Slicing a flattened dim",
    "Grad strides do not match bucket view strides",  # of one channel, where they mean the same
)


def live(kind: type[J], work: Callable[[J, int, StopFlag, Vitals], None]) -> NoReturn:
    """Do `work` as the rank that torchrun made of this process, for the job whose file the command
    line names, then end it."""
    sys.path.append(str(Path.cwd()))  # last, so that modules of the user's hide nothing
    job = kind.read(Path(sys.argv[1]))
    die_with_parent()
    rank = int(os.environ["RANK"])
    name_process(f"rank {rank}")
    vitals = Vitals(Path(job.status), rank)
    restart = os.environ.get("REKINDLE_RESTART", "0")
    logging.basicConfig(
        level=logging.INFO, stream=sys.stdout, format=f"[rank {rank} restart {restart}] %(message)s"
    )
    for words in _NOT_FOR_USERS:
        warnings.filterwarnings("ignore", message=words)
    stop = StopFlag(job.train.grace_seconds)
    try:
        with on_signal(stop.raise_it):
            work(job, rank, stop, vitals)
            dist.barrier()
            # With everything still alive: a process group that is taken apart, here or when its
            # last user is, may wait for ever for a thread of gloo's that waits for Python's lock.
            leave(0)
    except BaseException as error:  # noqa: BLE001 - the supervisor must learn of any error
        vitals.failed(error)
        os._exit(1)


def connect() -> torch.device:
    """Join the other ranks; the device of this one. With a device, NCCL makes its communicators
    now, and those of later groups when they are made: in the first step they would count as the
    step's time."""
    if not torch.cuda.is_available():
        meeting.join("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    meeting.join("cuda:nccl,cpu:gloo", device_id=device)
    return device


def say(status: Path, ending: dict[str, object]) -> None:
    """Tell the supervisor how the work ended; rank 0 does."""
    write_atomically(status / "status.json", json.dumps(ending))
