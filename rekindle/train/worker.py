"""One training rank: `torchrun -m rekindle.train.worker JOB.json`. At CPU size: two of these, gloo,
DDP.

Decides how a rank starts, where its weights come from, and how it ends: rank 0 leaves
`status.json`, a rank that fails leaves `error-<rank>.json`, and all leave through os._exit, because
gloo's threads now and then abort the interpreter's own shutdown (pytorch#190489)."""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from rekindle.data.manifest import open_shards
from rekindle.errors import RekindleError
from rekindle.launch.events import emit
from rekindle.launch.process import die_with_parent, on_signal
from rekindle.records import TrainingSummary, write_atomically
from rekindle.tasks import load_task
from rekindle.train import modelfolder
from rekindle.train.checkpoint import Checkpointer
from rekindle.train.history import History, read_history
from rekindle.train.job import Job
from rekindle.train.loop import TRAIN, Plan, StopFlag, Trainer, restore

log = logging.getLogger(__name__)


def main() -> None:
    """Read the job, train, leave."""
    die_with_parent()
    job = Job.read(Path(sys.argv[1]))
    rank = int(os.environ["RANK"])
    restart = os.environ.get("REKINDLE_RESTART", "0")
    logging.basicConfig(
        level=logging.INFO, stream=sys.stdout, format=f"[rank {rank} restart {restart}] %(message)s"
    )
    stop = StopFlag()
    try:
        with on_signal(stop.raise_it):
            _train(job, rank, stop)
    except BaseException as error:  # noqa: BLE001 - whatever it was, the gang must learn of it
        _leave_error(job, rank, error)
        sys.stdout.flush()
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _train(job: Job, rank: int, stop: StopFlag) -> None:
    device = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo")
    task = load_task(job.task)
    shards = open_shards(job.shards)
    plan = Plan.of(job.train, shards.rows(TRAIN))
    torch.manual_seed(job.train.seed)
    manifest = shards.manifest
    if job.init:
        network = modelfolder.load_network(task, Path(job.init), manifest.labels)
    else:
        network = task.build(job.model, manifest.labels, manifest.settings, shards.assets)
    trainer = Trainer(task, shards, job.train, plan, network, device)
    root = Path(job.checkpoints)
    start = restore(trainer, root)
    history = History(root / "history.jsonl")
    if rank == 0:
        history.resume(start)
        where = (
            f"resumed from the checkpoint of step {start} of {plan.steps}"
            if start
            else f"{plan.steps} steps from the start"
        )
        emit("notice", text=f"{where} on {trainer.world} ranks")
    checkpointer = Checkpointer(root, job.train.checkpoint.keep)
    last = trainer.fit(checkpointer, history, stop, start)
    checkpointer.wait()
    if rank == 0:
        _finish(job, trainer, history, last)
    dist.barrier()
    dist.destroy_process_group()


def _finish(job: Job, trainer: Trainer, history: History, last: int) -> None:
    """Rank 0 writes the model and its summary, then the word that says so."""
    if last < trainer.plan.steps:
        _say(job, {"status": "preempted", "step": last})
        return
    manifest = trainer.shards.manifest
    output = Path(job.output)
    modelfolder.save(trainer.task, job.task, trainer.network, trainer.shards, output, job.run_key)
    rows = list(read_history(history.path))
    final = rows[-1] if rows else None
    validation = {
        "loss": final.validation_loss, "accuracy": final.validation_accuracy,
    } if final else {}  # fmt: skip
    summary = TrainingSummary(
        run_key=job.run_key,
        task=job.task,
        engine="native",
        world_size=trainer.world,
        steps=last,
        epochs=last / trainer.plan.steps_per_epoch,
        global_batch_size=trainer.plan.global_batch_size,
        seed=job.train.seed,
        precision=job.train.precision,
        parameters=sum(p.numel() for p in trainer.network.parameters()),
        init_from=job.init_from,
        weights_sha256=modelfolder.weights_sha256(output),
        train_rows=manifest.rows[TRAIN],
        validation={name: value for name, value in validation.items() if value is not None},
    )
    target = Path(job.history)
    target.mkdir(parents=True, exist_ok=True)
    summary.write(target / "training.json")
    write_atomically(
        target / "history.jsonl", history.path.read_text() if history.path.exists() else ""
    )
    _say(job, {"status": "done", "step": last})


def _say(job: Job, status: dict[str, object]) -> None:
    write_atomically(Path(job.status) / "status.json", json.dumps(status))


def _leave_error(job: Job, rank: int, error: BaseException) -> None:
    """What the gang's supervisor needs to tell a mistake of ours from a lost peer."""
    traceback.print_exc(file=sys.stdout)
    problem = error.problems[0] if isinstance(error, RekindleError) else None
    kind = type(error).__name__
    text = f"{kind}: {error}" if problem is None else problem.what
    record = {
        "rank": rank,
        "message": text,
        "where": problem.where if problem else "",
        "fix": problem.fix if problem else "see the step's log for the traceback",
        "peer_lost": _peer_lost(error),
    }
    write_atomically(Path(job.status) / f"error-{rank}.json", json.dumps(record))


def _peer_lost(error: BaseException) -> bool:
    """Whether a collective failed because another rank went away. gloo says so only in the text of
    a RuntimeError.
    """
    if isinstance(error, dist.DistError):
        return True
    words = (
        "connection closed by peer",
        "connection reset",
        "connection refused",
        "timed out waiting",
        "gloo",
        "broken pipe",
    )
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


if __name__ == "__main__":
    main()
