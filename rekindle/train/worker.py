"""One training rank: `torchrun -m rekindle.train.worker JOB.json`. At CPU size: two on gloo.
Decides where a rank's weights come from and what the training leaves behind."""

import dataclasses
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from torch import nn

from rekindle.data.manifest import Shards
from rekindle.data.order import SampleOrder
from rekindle.errors import CheckpointError, RequestError
from rekindle.launch.events import emit
from rekindle.spec import rates
from rekindle.spec.layout import Layout, resolve, undivided, uneven
from rekindle.spec.layout_support import KIND_OF, Cell, cell_of, require
from rekindle.spec.model import CheckpointSpec
from rekindle.tasks import TASKS, Task, load_task
from rekindle.tasks.pretrained import check_positions
from rekindle.train import checkpoint, compat, export, modelfolder, modules, quantised, weights
from rekindle.train.batches import TRAIN, VALIDATION
from rekindle.train.checkpoint import Checkpointer
from rekindle.train.compare import Small, compared
from rekindle.train.dcp import pieces_of
from rekindle.train.evaluation import Evaluation
from rekindle.train.history import History, Ledger, forget, read_history
from rekindle.train.job import Job
from rekindle.train.loop import Plan, StopFlag, Trainer
from rekindle.train.mesh import Mesh
from rekindle.train.objectives import objective_of
from rekindle.train.optimizer import taken
from rekindle.train.parallel import Parts, build, prepared, settle
from rekindle.train.proof import (
    Packing,
    describe_left_out,
    describe_weights,
    prove_forward,
    prove_packing,
)
from rekindle.train.rank import arrange, connect, decided, keep_positions, live
from rekindle.train.rank import preload as preload  # which launch/agent.py asks for here
from rekindle.train.routers import check_losses
from rekindle.train.snapshot import check_host_memory
from rekindle.train.teacher import goal_of
from rekindle.train.throughput import PROFILE, Clock, Cost, Profiler, device_name, tips
from rekindle.train.vitals import Vitals

log = logging.getLogger(__name__)


def main() -> None:
    live(Job, _train)


def _train(job: Job, rank: int, stop: StopFlag, vitals: Vitals) -> dict[str, object]:
    device = connect()
    rates.require(job.task, job.model, job.train)
    task = load_task(job.task)
    shards = job.reading()
    found = checkpoint.agreed(job.checkpoints, job.run_key)
    began = found.state.get("precision") if found is not None else None
    job = dataclasses.replace(job, train=decided(job.train, device, began))
    arrange(job.train, device)
    start = Start.of(job, task, shards, device)
    cost = Cost.of(start.network, frozen=job.model.lora is not None)
    parts = start.parts(fresh=found is None)
    if device.type == "cuda":
        keep_positions(parts)
    packing = _packing(job, task, shards, parts, found)
    plan = Plan.of(job.train, order_of(job, task, shards, parts, packing.packs))
    trainer = Trainer(task, shards, job.train, plan, parts, job.train.seed, vitals.beat)
    vitals.held = _held(trainer)
    first = trainer.restore(found) if found is not None else 0
    proof = {
        "weights": describe_weights(start.match) if rank == 0 else "",
        "forward": prove_forward(
            task, shards, parts, job.train, trainer.evaluation, start.small_parts
        ),
        "packing": packing.said,
        "losses": start.left_out,
        "left out": describe_left_out(parts, job.train),
    }
    history = History(job.curve)
    if rank == 0:
        _begin(job, trainer, history, found, first)
    dist.barrier()
    checkpointer = Checkpointer(job.checkpoints, _keeps(job, shards), job.run_key, history.path)
    check_host_memory(pieces_of(trainer.tensors()))
    clock = Clock(plan.steps, cost, device, trainer.world, job.train)
    # of pp, cp and tp peers, which see the same examples, one writes them down
    speaks = job.train.ledger and start.mesh.leads("pp", "cp", "tp")
    ledger = Ledger(job.working, rank) if speaks else None
    hints = tips(job.train, start.mesh.layout, _cell(job, start.mesh.layout))
    profiled = job.train.profile if rank == 0 else 0
    profiler = Profiler(profiled, device, job.working / PROFILE, hints)
    last = trainer.fit(checkpointer, history, stop, first, clock, profiler, ledger)
    seconds = trainer.seconds()
    vitals.beat(last, "finish")
    checkpointer.wait()
    if not trainer.done(last):
        return {"status": "preempted", "step": last}
    best = _return_to_best(job, trainer, last) if job.train.exports_best else None
    start.save(parts, Path(job.output))
    if rank == 0:
        _finish(job, trainer, history, last, best, seconds, proof)
    return {"status": "done", "step": last}


def _keeps(job: Job, shards: Shards) -> CheckpointSpec:
    """Which checkpoints are kept; RequestError where the best is, and no validation finds it."""
    if job.train.exports_best and not shards.rows(VALIDATION):
        what = "without a validation split no weights are the best"
        fix = "give it rows, or remove early_stopping_patience and checkpoint.keep_best"
        raise RequestError(what, where="data.split.validation", fix=fix)
    return job.train.checkpoint.model_copy(update={"keep_best": job.train.exports_best})


def _return_to_best(job: Job, trainer: Trainer, last: int) -> int | None:
    """Give the parts the best validation's weights; returns its step, None if there is none."""
    step = trainer.best.step
    if step not in (0, last):
        found = checkpoint.agreed(job.checkpoints, job.run_key, step)
        if found is None:
            what = f"the weights of step {step}, the best, are lost"
            fix = "remove this folder, and train again"
            raise CheckpointError(what, where=job.checkpoints, fix=fix)
        checkpoint.load(found, trainer.tensors(), trainer.optimizer.replicas)
        trainer.optimizer.restored(None)
    if dist.get_rank() == 0:
        steps = trainer.plan.steps
        ended = f"stopped early, at step {last} of {steps}; " if last < steps else ""
        which = f"{step}, the best" if step else f"{last}: no validation loss is a number"
        emit("notice", text=f"{ended}the model has the weights of step {which}")
    return step or None


def _begin(
    job: Job, trainer: Trainer, history: History, found: checkpoint.Checkpoint | None, first: int
) -> None:
    """Rank 0 puts curve and ledger into the state of step `first`, and says where it starts."""
    for damage in (
        history.resume(first, found.history() if found is not None else None),
        forget(job.working, after=first),
    ):
        if damage:
            log.warning("%s", damage)
            emit("notice", text=damage)
    steps, layout = trainer.plan.steps, trainer.mesh.layout
    where = f"resumed from the checkpoint of step {first} of {steps}" if first else ""
    where = where or f"{steps} steps from the start"
    named = "" if layout.only_replicates else f", {layout}"
    by = f", by {job.train.engine}" if trainer.parts.stepper else ""
    emit("notice", text=f"{where} on {trainer.world} ranks{named}, {job.train.precision}{by}")
    if hint := uneven(job.train, layout):
        emit("notice", text=hint)


def _held(trainer: Trainer) -> dict[str, int]:
    """Bytes of what this rank holds from the first step to the last, by the plan's terms."""
    parameters = sum(weights.local_of(p).nbytes for _, p in trainer.parts.parameters())
    parameters += sum(tensor.nbytes for tensor in quantised.held(trainer.parts))
    moments = pieces_of(trainer.tensors()["optimizer"]).values()
    return {"parameters": parameters, "optimizer": sum(piece.local.nbytes for piece in moments)}


def _packing(
    job: Job, task: Task, shards: Shards, parts: Parts, found: checkpoint.Checkpoint | None
) -> Packing:
    """Whether documents share sequences: proven at the start, and then kept."""
    if found is None:
        evaluation = Evaluation(parts, job.train.precision)
        return prove_packing(task, shards, parts, job.train, evaluation)
    if found.state.get("packed", False):
        return Packing(True, "documents share sequences, as when the training began")
    return Packing(False)


def order_of(job: Job, task: Task, shards: Shards, parts: Parts, packs: bool = True) -> SampleOrder:
    """Which examples each step trains on: packed, by length where padded, else at random."""
    settings = shards.manifest.settings
    has_lengths = any(file.tokens for file in shards.manifest.shards)
    return shards.order(
        TRAIN,
        global_batch_size=job.train.global_batch_size,
        seed=job.train.seed,
        by_length=has_lengths and not parts.stages[0].part.joins_texts,
        pack_length=objective_of(task).pack_length(settings) if packs else None,
        balanced=job.train.sampling == "balanced",
    )


def _cell(job: Job, layout: Layout) -> Cell | None:
    if job.task not in TASKS or job.train.engine != "rekindle":
        return None
    return cell_of(KIND_OF[job.task], layout, job.train, job.model.lora is not None)


class Start:
    """The network before it is divided, and where its values come from."""

    def __init__(
        self,
        job: Job,
        task: Task,
        shards: Shards,
        mesh: Mesh,
        network: nn.Module,
        source: weights.Source | None,
        origins: dict[str, modules.Origin],
    ) -> None:
        self.job, self.task, self.shards, self.mesh = job, task, shards, mesh
        self.known = modelfolder.inherited(job.init, job.model)  # or it raises before it trains
        self.network, self.source, self.origins = network, source, origins
        self.match = source.match if source is not None else None
        stored = source.checkpoint if source is not None else None
        self.base = stored.folder if stored is not None else None
        self.left_out = check_losses(network) if task.objective == "tokens" else ""
        if (positions := modules.usable_positions(network)) is not None:
            longest = max(shards.longest(split) for split in shards.manifest.rows)
            check_positions(positions, longest)
        cuts = mesh.layout.tp * mesh.layout.pp * mesh.layout.cp > 1
        asks = cuts and hasattr(network, "config") and job.train.engine == "rekindle"
        self.small = Small(job, task, shards, network, mesh) if asks else None

    @classmethod
    def of(cls, job: Job, task: Task, shards: Shards, device: torch.device) -> Self:
        """Our own tasks' networks are built without values; a user's task's is taken as it is."""
        manifest = shards.manifest
        before, model = None, job.model
        if job.init:  # in Hugging Face layout where the task's are
            before = modelfolder.check_start(Path(job.init), shards, code=job.code)
            model = model.model_copy(update={"source": job.init, "revision": None})
        folder = task.weights(model) if job.task in TASKS else None
        given = (model, manifest.labels, manifest.settings, shards.assets)
        torch.manual_seed(job.train.seed)
        source = None
        if job.task not in TASKS or (job.init and folder is None):
            network = before.network().train() if before is not None else task.build(*given)
        else:
            with weights.deferred() as recorder:
                network = task.build(*given)
            source = weights.Source(
                network, recorder, job.train.seed, folder, makes_head=task.makes_head
            )
        layout = resolve(job.train, dist.get_world_size(), modules.shape_of(network))
        if problems := list(undivided(layout, model.lora)):
            raise RequestError(problems)
        cell = _cell(job, layout)
        composed = cell is not None and require(cell, job.train.untested) == "composed"
        compat.check_schedule(layout)
        mesh = Mesh.of(layout, device)
        start = cls(job, task, shards, mesh, network, source, modules.unfused(network))
        if cell is not None and composed and job.train.untested == "check":
            # of the layout tests know each two parts only
            gaps = compared(cell, job, task, shards, start.network, mesh)
            if dist.get_rank() == 0:
                within = " and ".join(
                    f"within {gap.largest:.1g} in {gap.precision} "
                    f"(up to {gap.allowed:g} is rounding)"
                    for gap in gaps
                )
                agree = f"two steps of a small network agree with one rank's {within}"
                emit("notice", text=f"no test has trained {cell} as a whole; {agree}")
        return start

    def parts(self, fresh: bool) -> Parts:
        """What this rank trains, with starting values if `fresh`, or where LoRA leaves them."""
        job = self.job
        scaling = prepared(self.network, self.source, self.origins, job.train, job.model.lora)
        goal = goal_of(job, self.task, self.shards, self.mesh)
        parts = build(self.task, self.network, self.origins, job.train, goal, self.mesh, scaling)
        if self.source is not None and (fresh or scaling is not None):
            weights.fill([s.part.network for s in parts.stages], self.source, parts.origins)
        return taken(parts, job.train) or settle(parts)

    def small_parts(self) -> tuple[Parts, Evaluation, Shards]:
        """A small network of the same configuration on this rank alone; see `prove_forward`."""
        assert self.small is not None
        return self.small.alone()

    def save(self, parts: Parts, output: Path) -> None:
        """The trained model as a folder; all ranks have to call it."""
        shards, job = self.shards, self.job
        if hasattr(parts.network, "config"):
            export.export(parts, output)
            if dist.get_rank() == 0:
                modelfolder.configure(parts.network, output, self.base)
        else:
            state = dict(export.gathered(parts))
            if dist.get_rank() == 0:
                manifest = shards.manifest
                if job.init:
                    network = modelfolder.open_model(Path(job.init), job.code).network()
                else:
                    given = (job.model, manifest.labels, manifest.settings, shards.assets)
                    network = self.task.build(*given)
                network.load_state_dict(state)
                output.mkdir(parents=True, exist_ok=True)
                self.task.save(network.eval(), output, manifest.labels, manifest.settings)
        if dist.get_rank() == 0:
            modelfolder.describe(
                job.task,
                shards,
                output,
                job.run_key,
                precision=job.train.precision,
                known=self.known,
            )


def _finish(
    job: Job,
    trainer: Trainer,
    history: History,
    last: int,
    best: int | None,
    seconds: float,
    proof: Mapping[str, str],
) -> None:
    """Rank 0 writes the summary; `best`: the exported step, if any; `seconds` of training."""
    if trainer.spent:
        spent = f"train.budget_hours are spent: it ends at step {last} of {trainer.plan.steps}"
        emit("notice", text=spent)
    rows = list(read_history(history.path))
    row = next((row for row in reversed(rows) if row.step <= (best or last)), None)
    validation = {"loss": row.validation_loss, "accuracy": row.validation_accuracy} if row else {}
    job.summarise(
        engine=job.train.engine,
        steps=last,
        world_size=trainer.world,
        in_effect=trainer.optimizer.facts() | quantised.facts(trainer.parts),
        epochs=trainer.plan.epoch(last),
        precision=job.train.precision,
        deterministic=job.train.deterministic,
        train_rows=trainer.batches.order.rows,
        parameters=modelfolder.count_parameters(Path(job.output)),
        validation={name: value for name, value in validation.items() if value is not None},
        layout=str(trainer.mesh.layout),
        device=device_name(trainer.mesh.device),
        attention=trainer.parts.attention if trainer.parts.stages[0].part.ours else "",
        proof={name: said for name, said in proof.items() if said},
        best_step=best,
        planned_steps=trainer.plan.steps if last < trainer.plan.steps else None,
        budget_hours=job.train.budget_hours if trainer.spent else None,
        train_seconds=seconds,
    )
    if (job.working / PROFILE).exists():
        shutil.copyfile(job.working / PROFILE, Path(job.history) / PROFILE)


if __name__ == "__main__":
    main()
