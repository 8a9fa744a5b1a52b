"""A rank of a training by transformers' Trainer: `torchrun -m rekindle.train.hf_trainer JOB.json`.

The Trainer decides the order of examples, the loss (the architecture's own) and the steps.
rekindle's are the examples, the arguments, heartbeats, the answer to SIGTERM, and what counts as
saved. Where accelerate does not find the other ranks, the Trainer would train on each rank alone:
what is in effect is compared with what was asked for before the first step.

The Trainer writes into a folder of this machine. A checkpoint counts once rank 0 has written
`complete.json` into it, after all ranks. Where checkpoints belong into an object store, each
machine puts there what its ranks wrote, and fetches all of it before it resumes."""

import functools
import importlib.metadata
import json
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
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
from rekindle.train.mesh import of_all, of_first
from rekindle.train.optimizer import peak_rate
from rekindle.train.rank import connect, run_rank, with_precision
from rekindle.train.rank import preload as preload  # which launch/agent.py asks for here
from rekindle.train.storage import put_file, storage_of
from rekindle.train.stored import headers_of, match
from rekindle.train.throughput import device_name
from rekindle.train.vitals import Vitals


def main() -> None:
    for name in [n for n in os.environ if n.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]  # would change the training without a word in the config
    run_rank(Job, _train)


def _train(job: Job, rank: int, stop: StopFlag, vitals: Vitals) -> dict[str, object]:
    device = connect()
    rates.require(job.task, job.model, job.train)
    task, shards = load_task(job.task), job.reading()
    trainer = _trainer(job, task, shards, device)
    steps, world = int(trainer.args.max_steps), dist.get_world_size()
    history = History(job.curve)
    saves = Saves(job)
    watch = _Watch(job, trainer, saves, history, stop, vitals, steps)
    trainer.add_callback(watch)
    trainer.remove_callback(PrinterCallback)  # progress is said by ours
    transformers_logging.disable_progress_bar()
    found = saves.newest()
    first = step_of(found.name) if found else 0
    if rank == 0:
        # the curve up to there counts, whatever is left on this machine
        curve = (found / CURVE).read_text(errors="replace") if found else None
        history.resume(first, curve)
        begins = f"resumed from the checkpoint of step {first} of {steps}" if first else ""
        begins = begins or f"{steps} steps from the start"
        emit("notice", text=f"{begins} on {world} ranks, {_precision(trainer)}, by the Trainer")
    dist.barrier()
    if found and first == steps:  # the Trainer would make one more
        made = type(trainer.model).from_pretrained(found, config=trainer.model.config)
        trainer.model.load_state_dict(made.state_dict())
        facts, last = json.loads((found / COMPLETE).read_text())["facts"], steps
    else:
        trainer.train(resume_from_checkpoint=str(found) if found else None)
        facts, last = watch.facts, trainer.state.global_step
    vitals.beat(last, "validation")
    validation: dict[str, float] = {}
    if last == steps and shards.rows(VALIDATION):
        trainer.label_smoother = None  # validation is of the labels as they are, as rekindle's is
        validation = {"loss": trainer.evaluate(_Rows(shards, VALIDATION))["eval_loss"]}
        if rank == 0:
            history.amend(last, {"validation_loss": validation["loss"]})
    if last < steps:
        return {"status": "preempted", "step": last}
    if rank == 0:
        _finish(job, trainer, shards, last, facts, validation)
    return {"status": "done", "step": last}


def _trainer(job: Job, task: Task, shards: Shards, device: torch.device) -> Any:
    """With the arguments that follow from the spec, the data and the ranks."""
    train = with_precision(job.train, device, None)
    world, batch = dist.get_world_size(), train.global_batch_size
    if batch % world:
        what = f"{world} ranks do not divide a global batch of {batch}"
        raise StepError(what, where="train.global_batch_size", fix="choose a multiple")
    each_epoch = math.ceil(shards.rows(TRAIN) / batch)
    steps = train.steps or max(1, round((train.epochs or DEFAULT_EPOCHS) * each_epoch))
    engine = engine_of(train.engine)
    assert engine is not None
    arguments: Mapping[str, Any] = {
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
        made = TrainingArguments(**arguments)
    except (TypeError, ValueError, ImportError) as error:
        what = f"TrainingArguments: {error}"
        fix = "compare it with the documentation of this version of transformers"
        raise StepError(what, where="train.engine_config", fix=fix) from None
    torch.manual_seed(train.seed)
    network: Any = _network(job, task, shards)
    # The Trainer asks whether a model's forward takes any keyword: those of classes do, and leave
    # the number of labels in it alone. Their gradients would be a sum over accumulated batches.
    network.accepts_loss_kwargs = task.objective == "tokens"
    rows = _Rows(shards, TRAIN)
    collate = functools.partial(_collated, task, shards.manifest.settings)
    return Trainer(model=network, args=made, train_dataset=rows, data_collator=collate)


def _precision(trainer: Any) -> str:
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


class _Rows(torch.utils.data.Dataset[int]):
    """Rows of a split by their number: `_collated` takes a batch of them at once."""

    def __init__(self, shards: Shards, split: str) -> None:
        self.shards, self.split = shards, split

    def __len__(self) -> int:
        return self.shards.rows(self.split)

    def __getitem__(self, row: int) -> Any:
        return self.shards, self.split, row


def _collated(
    task: Task, settings: Mapping[str, Any], rows: Sequence[tuple[Shards, str, int]]
) -> dict[str, torch.Tensor]:
    """Inputs and labels as the architecture's own loss takes them."""
    shards, split, _ = rows[0]
    table: pa.Table = shards.take(split, np.array([row for *_, row in rows], np.int64))
    inputs = dict(task.collate(table, settings))
    if task.objective == "classes":
        inputs["labels"] = torch.tensor(table.column("label").to_pylist())
        return inputs
    documents, following = inputs.pop("documents"), inputs.pop("labels")
    # ours say what follows a token, and the architecture moves its labels by one itself
    labels = torch.full_like(following, -100)
    labels[:, 1:] = following[:, :-1]
    return {**inputs, "attention_mask": (documents > 0).long(), "labels": labels}


class _Watch(TrainerCallback):  # type: ignore[misc]
    """Heartbeats, the curve, saves, and the answer to a request to stop."""

    def __init__(
        self,
        job: Job,
        trainer: Any,
        saves: "Saves",
        history: History,
        stop: StopFlag,
        vitals: Vitals,
        steps: int,
    ) -> None:
        self.job, self.trainer, self.history, self.steps = job, trainer, history, steps
        self.saves = saves
        self.stop, self.vitals, self.began = stop, vitals, time.monotonic()
        self.facts: Mapping[str, str] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if not self.facts:
            self.facts = _facts(self.trainer)
        self.began = time.monotonic()
        self.vitals.beat(state.global_step + 1, "step")

    def on_substep_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.vitals.beat(state.global_step + 1, "step")

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> Any:
        asked = torch.tensor(float(self.stop.raised), device=args.device)
        dist.all_reduce(asked)
        every, step = self.job.train.checkpoint.every, state.global_step
        control.should_log = True
        control.should_training_stop = control.should_training_stop or bool(asked > 0)
        due = every is not None and step % every == 0
        control.should_save = due or bool(asked > 0) or step == self.steps
        if control.should_save:
            self.vitals.beat(step, "save")
        return control

    def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
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

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        dist.barrier()  # all ranks have written theirs
        self.saves.completed(state.global_step, self.facts)


def _facts(trainer: Any) -> dict[str, str]:
    """What is in effect; StepError where ranks train alone."""
    world, found = dist.get_world_size(), trainer.accelerator.num_processes
    wrapped = type(trainer.model_wrapped).__name__
    if found != world or (world > 1 and wrapped == type(trainer.model).__name__):
        what = f"accelerate found {found} of {world} ranks, and trains a {wrapped}: each alone"
        fix = "remove what chooses its devices or its strategy"
        raise StepError(what, where="train.engine_config", fix=fix)
    return {
        "transformers": importlib.metadata.version("transformers"),
        "accelerate": importlib.metadata.version("accelerate"),
        "distributed": str(trainer.accelerator.distributed_type).rpartition(".")[2],
        "wrapped": wrapped,
        "optimizer": type(trainer.optimizer.optimizer).__name__,
        "backend": dist.get_backend(),
        "ranks": str(found),
    }


def _finish(
    job: Job,
    trainer: Any,
    shards: Shards,
    last: int,
    facts: Mapping[str, str],
    validation: Mapping[str, float],
) -> None:
    """Rank 0 leaves the model and the summary."""
    output = Path(job.output)
    known = modelfolder.inherited(job.init, job.model)
    trainer.accelerator.unwrap_model(trainer.model).save_pretrained(output, safe_serialization=True)
    precision = _precision(trainer)
    modelfolder.describe(job.task, shards, output, job.run_key, precision=precision, known=known)
    rows = list(read_history(job.curve))
    job.summarise(
        engine=job.train.engine,
        in_effect=facts,
        world_size=dist.get_world_size(),
        steps=last,
        epochs=rows[-1].epoch if rows else 0.0,
        precision=precision,
        parameters=modelfolder.count_parameters(output),
        train_rows=shards.rows(TRAIN),
        device=device_name(trainer.args.device),
        validation=validation,
    )


COMPLETE, CURVE = "complete.json", "history.jsonl"


class Saves:
    """Those of a job. All ranks call each method."""

    def __init__(self, job: Job) -> None:
        self.folder, self.curve = job.working / "trainer", job.curve
        self.keep = job.train.checkpoint.keep
        self.store, self.away = storage_of(f"{job.checkpoints}/trainer"), "://" in job.checkpoints
        self.first_here = os.environ.get("LOCAL_RANK", "0") == "0"

    def newest(self) -> Path | None:
        """The newest complete checkpoint, on this machine; incomplete ones are removed."""
        if self.away and self.first_here:
            shutil.rmtree(self.folder, ignore_errors=True)
        found: list[str] = []
        for name in self._names() if dist.get_rank() == 0 else ():
            if self.store.size(f"{name}/{COMPLETE}"):
                found.append(name)
            elif not self.away:  # a store may have one that another attempt is writing
                self.store.remove(name, COMPLETE)
        name = of_first(max(found, key=step_of, default=None))
        if name and self.away and self.first_here:
            complete = self.store.read(f"{name}/{COMPLETE}")
            assert complete is not None, "rank 0 has seen it"
            here = self.folder / name
            here.mkdir(parents=True, exist_ok=True)
            for file in json.loads(complete)["files"]:
                path = here / file
                with self.store.reader(f"{name}/{file}") as source, path.open("wb") as target:
                    shutil.copyfileobj(source, target)
            (here / COMPLETE).write_bytes(complete)
        dist.barrier()
        return self.folder / name if name else None

    def completed(self, step: int, facts: Mapping[str, str]) -> None:
        """The checkpoint of a step counts from now on, and older ones than are kept go."""
        name = f"checkpoint-{step}"
        here = self.folder / name
        if dist.get_rank() == 0:
            shutil.copyfile(self.curve, here / CURVE)
        dist.barrier()
        mine: list[str] = []
        if self.away and self.first_here:
            mine = sorted(path.name for path in here.iterdir() if path.is_file())
            for file in mine:
                put_file(self.store, f"{name}/{file}", here / file)
        files = [file for each in of_all(mine) for file in each]
        if dist.get_rank() > 0:
            return
        body = {"step": step, "world": dist.get_world_size(), "files": files, "facts": dict(facts)}
        self.store.put_new(f"{name}/{COMPLETE}", json.dumps(body).encode())
        for old in sorted(self._names(), key=step_of)[: -self.keep]:
            shutil.rmtree(self.folder / old, ignore_errors=True)
            self.store.remove(old, COMPLETE)

    def _names(self) -> list[str]:
        return [name for name in self.store.folders() if name.startswith("checkpoint-")]


def step_of(name: str) -> int:
    return int(name.rpartition("-")[2])


if __name__ == "__main__":
    main()
