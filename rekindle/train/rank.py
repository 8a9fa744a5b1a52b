"""How a rank starts and ends, whatever it works on: process, log, heartbeats, device.

Rank 0 leaves `status.json`; a rank that fails leaves the cause (vitals.py); all leave
through os._exit, because gloo's threads now and then abort the interpreter's own shutdown
(pytorch#190489).

And its arithmetic: precision, TF32, deterministic algorithms
(docs.pytorch.org/docs/stable/notes/randomness.html). `auto` becomes bf16 where all GPUs
have it, fp32 elsewhere; a training that resumes keeps the precision of its checkpoint.
What CUDA and NCCL read when they start, the launcher puts into the environment
(launch/torchrun.py)."""

import gc
import importlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from rekindle.errors import UnsupportedError
from rekindle.launch import meeting
from rekindle.launch.process import die_with_parent, leave, name_process, on_signal
from rekindle.records import write_atomically
from rekindle.spec.model import TrainSpec
from rekindle.tasks import TASKS, load_task
from rekindle.train.job import Job
from rekindle.train.loop import StopFlag
from rekindle.train.parts import Parts
from rekindle.train.pieces import ScoreJob
from rekindle.train.vitals import Vitals

J = TypeVar("J", Job, ScoreJob)

# warnings from torch that a user cannot act on
_NOT_FOR_USERS = (
    "`broadcast_buffers` is deprecated",  # its successor sends buffers once more
    "Slicing a flattened dim",
    "Grad strides do not match bucket view strides",  # of one channel, where they mean the same
)


def run_rank(
    kind: type[J], work: Callable[[J, int, StopFlag, Vitals], dict[str, object]]
) -> NoReturn:
    """Do `work` as torchrun's rank, for the job that the command line names, then end the
    process.

    Rank 0 tells the supervisor how it ended: what `work` returns."""
    sys.path.append(str(Path.cwd()))  # last, so that modules of the user's hide nothing
    job = kind.read(Path(sys.argv[1]))
    die_with_parent()
    rank = int(os.environ["RANK"])
    name_process(f"rank {rank}")
    vitals = Vitals(Path(job.status), rank)
    restart = os.environ.get("REKINDLE_RESTART", "0")
    line = f"[rank {rank} restart {restart}] %(message)s"
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format=line)
    for words in _NOT_FOR_USERS:
        warnings.filterwarnings("ignore", message=words)
    stop = StopFlag(job.train.grace_seconds)
    try:
        with on_signal(stop.raise_it):
            ending = work(job, rank, stop, vitals)
            if rank == 0:
                write_atomically(Path(job.status) / "status.json", json.dumps(ending))
            dist.barrier()
            # With everything still alive: a process group that is taken apart, here or
            # when its last user is, may wait for ever for a thread of gloo's that waits
            # for Python's lock.
            leave(0)
    except BaseException as error:  # noqa: BLE001 - the supervisor must learn of any error
        vitals.failed(error)
        os._exit(1)


def import_for(task: str) -> None:
    """What ranks of this task import while they start."""
    for module in load_task(task).imports if task in TASKS else ():
        importlib.import_module(module)


def preload(job: str) -> None:
    """Import what ranks of the training in this file will, before they are forked."""
    import_for(Job.read(Path(job)).task)


def connect() -> torch.device:
    """Join the other ranks; the device of this one. NCCL connects now, not in the first step."""
    if not torch.cuda.is_available():
        meeting.join("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    meeting.join("cuda:nccl,cpu:gloo", device_id=device)
    return device


def with_precision(train: TrainSpec, device: torch.device, began: str | None) -> TrainSpec:
    """`train` with the precision that all ranks compute in; all ranks have to call it.

    `began` is the precision of the checkpoint to resume from. Raises UnsupportedError for
    bf16 on GPUs without it."""
    all_have_bf16 = _all_have_bf16(device)
    precision: Any = train.precision
    if precision == "auto":
        precision = began or ("bf16" if device.type == "cuda" and all_have_bf16 else "fp32")
    if {"bf16", "fp8"} & {precision, train.weights} and not all_have_bf16:
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "this machine"
        message = f"{gpu}, or another GPU of this job, does not have bf16"
        if train.precision == "auto":
            message += ", and this training began in it"
        fix = "use GPUs that have it (NVIDIA's from A100, L4 and RTX 3090 on), or set "
        fix += "train.precision to fp32 or fp16 and train.weights to fp32: it trains from step 0"
        where = "train.weights" if precision != "bf16" else "train.precision"
        raise UnsupportedError(message, where=where, fix=fix)
    return train.model_copy(update={"precision": precision})


def _all_have_bf16(device: torch.device) -> bool:
    # a CPU computes in it, if slowly; GPUs only where they have units for it
    has_bf16 = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    flag = torch.tensor(int(has_bf16))
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def arrange(train: TrainSpec, device: torch.device) -> None:
    """Set torch's switches, which hold for the whole process, before anything is computed."""
    if train.deterministic:
        torch.use_deterministic_algorithms(True)
        # it would fill all new memory, for readers of memory that was never written
        torch._C._set_deterministic_fill_uninitialized_memory(False)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
    if device.type == "cuda":
        torch.set_float32_matmul_precision("highest" if train.deterministic else "high")
        torch.backends.cudnn.allow_tf32 = not train.deterministic


def free(device: torch.device) -> None:
    """Give back what no name holds any more; shards and their hooks refer to each other."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def keep_positions(parts: Parts) -> None:
    """Multiply positions with frequencies in full fp32: TF32 holds whole numbers up to
    2,048 only, so that rotary embeddings would be wrong beyond
    (huggingface/transformers#48428)."""
    for stage in parts.stages:
        for network in (stage.part.network, *stage.part.teachers):
            for module in network.modules():
                if type(module).__name__.endswith("RotaryEmbedding"):
                    _in_full(module)


def _in_full(module: nn.Module) -> None:
    """Have a module's forward pass multiply in full fp32, whatever holds around it."""
    before: list[str] = []

    def enter(*_: object) -> None:
        before.append(torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("highest")

    def leave(*_: object) -> None:
        torch.set_float32_matmul_precision(before.pop())

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)
