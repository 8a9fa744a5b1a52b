"""A rank of a training by transformers' Trainer: `torchrun -m rekindle.train.hf_trainer
JOB.json`.

The Trainer decides the order of examples, the loss (the architecture's own) and the
steps. rekindle's are the examples, the arguments, heartbeats, the answer to SIGTERM, and
what counts as saved. Where accelerate does not find the other ranks, the Trainer would
train on each rank alone: what is in effect is compared with what was asked for before the
first step.

Its checkpoints are trainer_saves.py's."""

import functools
import importlib.metadata
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.utils import logging as transformers_logging

from rekindle.data.manifest import Shards
from rekindle.engines import engine_of
from rekindle.errors import StepError
from rekindle.launch.events import emit
from rekindle.records import HistoryRow
from rekindle.spec import rates
from rekindle.spec.model import DEFAULT_EPOCHS
from rekindle.tasks import Task, load_task
from rekindle.train import modelfolder
from rekindle.train.batches import TRAIN, VALIDATION
from rekindle.train.history import History, read_history
from rekindle.train.job import Job
from rekindle.train.loop import StopFlag, diverged
from rekindle.train.rank import connect, run_rank, with_precision
from rekindle.train.rank import preload as preload  # which launch/agent.py asks for here
from rekindle.train.schedule import peak_rate
from rekindle.train.stored import headers_of, match
from rekindle.train.throughput import device_name
from rekindle.train.trainer_saves import TrainerSaves, step_of
from rekindle.train.vitals import Vitals


def main() -> None:
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_")):
            del os.environ[name]  # would change the training without a word in the config
    run_rank(Job, _train)


def _train(job: Job, rank: int, stop: StopFlag, vitals: Vitals) -> dict[str, object]:
    device = connect()
    rates.require(job.task, job.model, job.train)
    task = load_task(job.task)
    shards = job.reading()
    trainer = _trainer(job, task, shards, device)
    steps = int(trainer.args.max_steps)
    history = History(job.curve)
    saves = TrainerSaves(job)
    watch = _Watch(job, trainer, saves, history, stop, vitals, steps)
    trainer.add_callback(watch)
    trainer.remove_callback(PrinterCallback)  # progress is said by ours
    transformers_logging.disable_progress_bar()
    newest = saves.newest()
    first_step = step_of(newest.name) if newest is not None else 0
    if rank == 0:
        # the curve that came with the checkpoint counts, whatever is left on this machine
        history.resume(first_step, saves.curve_of(newest) if newest is not None else None)
        _say_beginning(first_step, steps, trainer)
    dist.barrier()
    facts: Mapping[str, str]
    if newest is not None and first_step == steps:  # the Trainer would make one more
        trained = type(trainer.model).from_pretrained(newest, config=trainer.model.config)
        trainer.model.load_state_dict(trained.state_dict())
        facts = saves.facts_of(newest)
        last_step = steps
    else:
        trainer.train(resume_from_checkpoint=str(newest) if newest is not None else None)
        facts = watch.facts
        last_step = trainer.state.global_step
    vitals.beat(last_step, "validation")
    if last_step < steps:
        return {"status": "preempted", "step": last_step}
    validation: dict[str, float] = {}
    if shards.rows(VALIDATION):
        trainer.label_smoother = None  # validation is of the labels as they are, as rekindle's is
        validation = {"loss": trainer.evaluate(_Rows(shards, VALIDATION))["eval_loss"]}
        if rank == 0:
            history.amend(last_step, {"validation_loss": validation["loss"]})
    if rank == 0:
        _finish(job, trainer, shards, last_step, facts, validation)
    return {"status": "done", "step": last_step}


def _say_beginning(first_step: int, steps: int, trainer: Trainer) -> None:
    if first_step:
        beginning = f"resumed from the checkpoint of step {first_step} of {steps}"
    else:
        beginning = f"{steps} steps from the start"
    ranks = f"on {dist.get_world_size()} ranks, {_precision(trainer)}, by the Trainer"
    emit("notice", text=f"{beginning} {ranks}")


def _trainer(job: Job, task: Task, shards: Shards, device: torch.device) -> Trainer:
    """With the arguments that follow from the spec, the data and the ranks."""
    train = with_precision(job.train, device, None)
    world = dist.get_world_size()
    batch = train.global_batch_size
    if batch % world:
        message = f"{world} ranks do not divide a global batch of {batch}"
        raise StepError(message, where="train.global_batch_size", fix="choose a multiple")
    steps_in_epoch = math.ceil(shards.rows(TRAIN) / batch)
    steps = train.steps or max(1, round((train.epochs or DEFAULT_EPOCHS) * steps_in_epoch))
    engine = engine_of(train.engine)
    assert engine is not None
    fields: Mapping[str, Any] = {
        **engine.config(train, world),
        "output_dir": str(job.working / "trainer"),
        "learning_rate": peak_rate(train),
        "max_steps": steps,
        "use_cpu": device.type == "cpu",
        "warmup_steps": math.ceil(train.warmup * steps),
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "eval_strategy": "no",
        "prediction_loss_only": True,
        "remove_unused_columns": False,
        "ddp_find_unused_parameters": False,
        "logging_nan_inf_filter": False,
    }
    try:
        arguments = TrainingArguments(**fields)
    except (TypeError, ValueError, ImportError) as error:
        message = f"TrainingArguments: {error}"
        fix = "compare it with the documentation of this version of transformers"
        raise StepError(message, where="train.engine_config", fix=fix) from None
    torch.manual_seed(train.seed)
    network: Any = _network(job, task, shards)
    # The Trainer asks whether a model's forward takes any keyword: those of classes do,
    # and leave the number of labels in it alone. Their gradients would be a sum over
    # accumulated batches.
    network.accepts_loss_kwargs = task.kind.writes
    rows = _Rows(shards, TRAIN)
    collate = functools.partial(_collated, task, shards.manifest.settings)
    return Trainer(model=network, args=arguments, train_dataset=rows, data_collator=collate)


def _precision(trainer: Trainer) -> str:
    return "bf16" if trainer.args.bf16 else "fp32"


def _network(job: Job, task: Task, shards: Shards) -> torch.nn.Module:
    """With the weights that the training starts from."""
    manifest = shards.manifest
    if job.init:
        return modelfolder.check_start(Path(job.init), shards, code=job.code).network().train()
    built: Any = task.build(job.model, manifest.labels, manifest.settings, shards.assets)
    folder = task.weights(job.model)
    if folder is None:
        return built  # type: ignore[no-any-return]
    match(built, headers_of(folder), folder, task.makes_head)  # from_pretrained only logs it
    return type(built).from_pretrained(folder, config=built.config)  # type: ignore[no-any-return]


class _Rows(torch.utils.data.Dataset[tuple[Shards, str, int]]):
    """Rows of a split by their number: `_collated` takes a batch of them at once."""

    def __init__(self, shards: Shards, split: str) -> None:
        self.shards = shards
        self.split = split

    def __len__(self) -> int:
        return self.shards.rows(self.split)

    def __getitem__(self, row: int) -> tuple[Shards, str, int]:
        return self.shards, self.split, row


def _collated(
    task: Task, settings: Mapping[str, Any], rows: Sequence[tuple[Shards, str, int]]
) -> dict[str, torch.Tensor]:
    """Inputs and labels as the architecture's own loss takes them."""
    shards, split, _ = rows[0]
    table: pa.Table = shards.take(split, np.array([row for *_, row in rows], np.int64))
    inputs = dict(task.collate(table, settings))
    if task.kind.label == "class":
        inputs["labels"] = torch.tensor(table.column("label").to_pylist())
        return inputs
    documents = inputs.pop("documents")
    following = inputs.pop("labels")
    # ours say what follows a token, and the architecture moves its labels by one itself
    labels = torch.full_like(following, -100)
    labels[:, 1:] = following[:, :-1]
    return {**inputs, "attention_mask": (documents > 0).long(), "labels": labels}


class _Watch(TrainerCallback):  # type: ignore[misc]
    """Heartbeats, the curve, saves, and the answer to a request to stop."""

    def __init__(
        self,
        job: Job,
        trainer: Trainer,
        saves: TrainerSaves,
        history: History,
        stop: StopFlag,
        vitals: Vitals,
        steps: int,
    ) -> None:
        self.job = job
        self.trainer = trainer
        self.saves = saves
        self.history = history
        self.stop = stop
        self.vitals = vitals
        self.steps = steps
        self.began = time.monotonic()
        self.facts: Mapping[str, str] = {}

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        if not self.facts:
            self.facts = _facts(self.trainer)
        self.began = time.monotonic()
        self.vitals.beat(state.global_step + 1, "step")

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        self.vitals.beat(state.global_step + 1, "step")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> TrainerControl:
        stops = torch.tensor(float(self.stop.raised), device=args.device)
        dist.all_reduce(stops)
        is_stopping = bool(stops > 0)
        every = self.job.train.checkpoint.every
        step = state.global_step
        is_due = every is not None and step % every == 0
        control.should_log = True
        control.should_training_stop = control.should_training_stop or is_stopping
        control.should_save = is_due or is_stopping or step == self.steps
        if control.should_save:
            self.vitals.beat(step, "save")
        return control

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        logs = more.get("logs")
        if not logs or "loss" not in logs:
            return
        if not (math.isfinite(logs["loss"]) and math.isfinite(logs["grad_norm"])):
            raise diverged(state.global_step, logs["loss"], logs["grad_norm"])
        if state.is_world_process_zero:
            seconds = time.monotonic() - self.began
            row = HistoryRow(
                step=state.global_step,
                epoch=state.epoch,
                loss=logs["loss"],
                lr=logs["learning_rate"],
                grad_norm=logs["grad_norm"],
                samples_per_second=self.job.train.global_batch_size / seconds,
                step_seconds=seconds,
            )
            self.history.append(row)
            emit(
                "progress",
                step=row.step,
                steps=self.steps,
                loss=row.loss,
                samples_per_second=row.samples_per_second,
                eta_seconds=(self.steps - row.step) * seconds,
            )

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        dist.barrier()  # all ranks have written theirs
        self.saves.complete(state.global_step, self.facts)


def _facts(trainer: Trainer) -> dict[str, str]:
    """What is in effect; StepError where ranks train alone."""
    world = dist.get_world_size()
    processes = trainer.accelerator.num_processes
    wrapped = type(trainer.model_wrapped).__name__
    is_bare = wrapped == type(trainer.model).__name__
    if processes != world or (world > 1 and is_bare):
        message = f"accelerate found {processes} of {world} ranks, and trains a {wrapped}: "
        message += "each alone"
        fix = "remove what chooses its devices or its strategy"
        raise StepError(message, where="train.engine_config", fix=fix)
    return {
        "transformers": importlib.metadata.version("transformers"),
        "accelerate": importlib.metadata.version("accelerate"),
        "distributed": str(trainer.accelerator.distributed_type).rpartition(".")[2],
        "wrapped": wrapped,
        "optimizer": type(trainer.optimizer.optimizer).__name__,
        "backend": dist.get_backend(),
        "ranks": str(processes),
    }


def _finish(
    job: Job,
    trainer: Trainer,
    shards: Shards,
    last_step: int,
    facts: Mapping[str, str],
    validation: Mapping[str, float],
) -> None:
    """Rank 0 leaves the model and the summary."""
    output = Path(job.output)
    trained_on = modelfolder.inherited(job.init, job.model)
    trainer.accelerator.unwrap_model(trainer.model).save_pretrained(output, safe_serialization=True)
    precision = _precision(trainer)
    modelfolder.describe(
        job.task, shards, output, job.run_key, precision=precision, known=trained_on
    )
    rows = list(read_history(job.curve))
    job.summarise(
        engine=job.train.engine,
        in_effect=facts,
        world_size=dist.get_world_size(),
        steps=last_step,
        epochs=rows[-1].epoch if rows else 0.0,
        precision=precision,
        parameters=modelfolder.count_parameters(output),
        train_rows=shards.rows(TRAIN),
        device=device_name(trainer.args.device),
        validation=validation,
    )


if __name__ == "__main__":
    main()
