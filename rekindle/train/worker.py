"""One training rank: `torchrun -m rekindle.train.worker JOB.json`. At CPU size: two on
gloo. Decides where a rank's weights come from and what the training leaves behind."""

import dataclasses
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from torch import nn

from rekindle.data.manifest import Shards
from rekindle.data.order import SampleOrder
from rekindle.errors import CheckpointError, RequestError
from rekindle.launch.events import emit
from rekindle.objectives import loss_of
from rekindle.spec import rates
from rekindle.spec.layout import Layout, resolve, undivided, uneven
from rekindle.spec.layout_support import KIND_OF, Cell, cell_of, require
from rekindle.spec.model import CheckpointSpec
from rekindle.tasks import TASKS, Task, load_task
from rekindle.tasks.pretrained import check_positions
from rekindle.train import checkpoint, compat, export, modelfolder, modules, quantised, weights
from rekindle.train.batches import TRAIN, VALIDATION
from rekindle.train.checkpoint import Checkpoint, Checkpointer
from rekindle.train.compare import Gap, SmallNetwork, compare_with_one_rank
from rekindle.train.dcp import pieces_of
from rekindle.train.evaluation import Evaluation
from rekindle.train.history import ExampleLedger, History, forget_steps, read_history
from rekindle.train.job import Job
from rekindle.train.loop import RunLength, StepLog, StopFlag, Trainer
from rekindle.train.mesh import Mesh
from rekindle.train.parallel import build, prepare_network, settle
from rekindle.train.parts import Parts
from rekindle.train.proof import (
    Packing,
    describe_left_out,
    describe_weights,
    prove_forward,
    prove_packing,
)
from rekindle.train.rank import arrange, connect, keep_positions, run_rank, with_precision
from rekindle.train.rank import preload as preload  # which launch/agent.py asks for here
from rekindle.train.routers import check_losses
from rekindle.train.snapshot import check_host_memory
from rekindle.train.stepped import start_engine
from rekindle.train.teacher import goal_of
from rekindle.train.throughput import PROFILE, Clock, Profiler, StepCost, device_name, tips
from rekindle.train.vitals import Vitals

log = logging.getLogger(__name__)


def main() -> None:
    run_rank(Job, _train)


def _train(job: Job, rank: int, stop: StopFlag, vitals: Vitals) -> dict[str, object]:
    """Train until the end or a stop, save the model; how it ended, for the supervisor."""
    device = connect()
    rates.require(job.task, job.model, job.train)
    task = load_task(job.task)
    shards = job.reading()
    resumed = checkpoint.agreed(job.checkpoints, job.run_key)
    began_in = resumed.state.get("precision") if resumed is not None else None
    job = dataclasses.replace(job, train=with_precision(job.train, device, began_in))
    arrange(job.train, device)
    start = TrainingStart.of(job, task, shards, device)
    # asked of the whole network, which `parts` cuts up
    cost = StepCost.of(start.network, frozen=job.model.lora is not None)
    parts = start.parts(fresh=resumed is None)
    if device.type == "cuda":
        keep_positions(parts)
    packing = _packing(job, task, shards, parts, resumed)
    length = RunLength.of(job.train, order_of(job, task, shards, parts, packing.packs))
    trainer = Trainer(task, shards, job.train, length, parts, job.train.seed, vitals.beat)
    vitals.held_bytes = _held_bytes(trainer)
    first_step = trainer.restore(resumed) if resumed is not None else 0
    proof = _prove(start, trainer, packing)
    history = History(job.curve)
    if rank == 0:
        _begin(job, trainer, history, resumed, first_step)
    dist.barrier()
    saver = Checkpointer(job.checkpoints, _retention(job, shards), job.run_key, history.path)
    check_host_memory(pieces_of(trainer.tensors()))
    clock = Clock(length.steps, cost, device, trainer.world, job.train)
    step_log = StepLog(rank, history, clock, _ledger(job, start.mesh, rank))
    profiler = _profiler(job, start.mesh, rank)
    last_step = trainer.fit(first_step, saver, step_log, profiler, stop)
    seconds = trainer.seconds()
    vitals.beat(last_step, "finish")
    saver.wait()
    if not trainer.is_done(last_step):
        return {"status": "preempted", "step": last_step}
    best_step = None
    if job.train.exports_best:
        best_step = _return_to_best(job, trainer, last_step)
    start.save(parts, Path(job.output))
    if rank == 0:
        _finish(job, trainer, history, last_step, best_step, seconds, proof)
    return {"status": "done", "step": last_step}


def _prove(start: "TrainingStart", trainer: Trainer, packing: Packing) -> dict[str, str]:
    """What is proven before the first step, by subject, in words; all ranks have to call it."""
    job = start.job
    parts = trainer.parts
    forward = prove_forward(
        start.task, start.shards, parts, job.train, trainer.evaluation, start.small_parts
    )
    return {
        # one rank's words are enough: all match the same files
        "weights": describe_weights(start.match) if trainer.rank == 0 else "",
        "forward": forward,
        "packing": packing.finding,
        "losses": start.left_out,
        "left out": describe_left_out(parts, job.train),
    }


def _ledger(job: Job, mesh: Mesh, rank: int) -> ExampleLedger | None:
    """Where this rank notes its examples, if it does.

    Of pp, cp and tp peers, which see the same ones, the first does."""
    if job.train.ledger and mesh.leads("pp", "cp", "tp"):
        return ExampleLedger(job.working, rank)
    return None


def _profiler(job: Job, mesh: Mesh, rank: int) -> Profiler:
    """Rank 0 records the steps that `train.profile` asks for."""
    steps = job.train.profile if rank == 0 else 0
    hints = tips(job.train, mesh.layout, _cell(job, mesh.layout))
    return Profiler(steps, mesh.device, job.working / PROFILE, hints)


def _retention(job: Job, shards: Shards) -> CheckpointSpec:
    """Which checkpoints stay; RequestError where the best should and no validation finds it."""
    if job.train.exports_best and not shards.rows(VALIDATION):
        message = "without a validation split no weights are the best"
        fix = "give it rows, or remove early_stopping_patience and checkpoint.keep_best"
        raise RequestError(message, where="data.split.validation", fix=fix)
    return job.train.checkpoint.model_copy(update={"keep_best": job.train.exports_best})


def _return_to_best(job: Job, trainer: Trainer, last_step: int) -> int | None:
    """Give the parts the best validation's weights; returns its step, None if there is none."""
    best_step = trainer.best.step
    if best_step not in (0, last_step):
        best = checkpoint.agreed(job.checkpoints, job.run_key, best_step)
        if best is None:
            message = f"the weights of step {best_step}, the best, are lost"
            fix = "remove this folder, and train again"
            raise CheckpointError(message, where=job.checkpoints, fix=fix)
        checkpoint.load(best, trainer.tensors(), trainer.optimizer.replicas)
        trainer.optimizer.finish_restore(None)
    if dist.get_rank() == 0:
        steps = trainer.length.steps
        ending = ""
        if last_step < steps:
            ending = f"stopped early, at step {last_step} of {steps}; "
        if best_step:
            exported = f"{best_step}, the best"
        else:
            exported = f"{last_step}: no validation loss is a number"
        emit("notice", text=f"{ending}the model has the weights of step {exported}")
    return best_step or None


def _begin(
    job: Job, trainer: Trainer, history: History, resumed: Checkpoint | None, first_step: int
) -> None:
    """Rank 0 puts curve and ledger into the state of `first_step`, and says where it starts."""
    carried_curve = resumed.history() if resumed is not None else None
    damaged_curve = history.resume(first_step, carried_curve)
    damaged_ledger = forget_steps(job.working, after=first_step)
    for damage in (damaged_curve, damaged_ledger):
        if damage:
            log.warning("%s", damage)
            emit("notice", text=damage)
    steps = trainer.length.steps
    layout = trainer.mesh.layout
    if first_step:
        beginning = f"resumed from the checkpoint of step {first_step} of {steps}"
    else:
        beginning = f"{steps} steps from the start"
    layout_name = "" if layout.only_replicates else f", {layout}"
    engine = f", by {job.train.engine}" if trainer.parts.stepper else ""
    ranks = f"on {trainer.world} ranks{layout_name}"
    emit("notice", text=f"{beginning} {ranks}, {job.train.precision}{engine}")
    if hint := uneven(job.train, layout):
        emit("notice", text=hint)


def _held_bytes(trainer: Trainer) -> dict[str, int]:
    """Bytes of what this rank holds from the first step to the last, by the plan's terms."""
    parameters = sum(weights.local_of(p).nbytes for _, p in trainer.parts.parameters())
    parameters += sum(codes.nbytes for codes in quantised.codes_of(trainer.parts.networks))
    moments = pieces_of(trainer.tensors()["optimizer"]).values()
    return {"parameters": parameters, "optimizer": sum(piece.local.nbytes for piece in moments)}


def _packing(
    job: Job, task: Task, shards: Shards, parts: Parts, resumed: Checkpoint | None
) -> Packing:
    """Whether documents share sequences: proven at the start, and then kept."""
    if resumed is None:
        evaluation = Evaluation(parts, job.train.precision)
        return prove_packing(task, shards, parts, job.train, evaluation)
    if resumed.state.get("packed", False):
        return Packing(True, "documents share sequences, as when the training began")
    return Packing(False)


def order_of(job: Job, task: Task, shards: Shards, parts: Parts, packs: bool = True) -> SampleOrder:
    """Which examples each step trains on: packed, by length where padded, else at random."""
    has_lengths = any(file.tokens for file in shards.manifest.shards)
    pack_length = None
    if packs:
        pack_length = loss_of(task.objective).pack_length(shards.manifest.settings)
    return shards.order(
        TRAIN,
        global_batch_size=job.train.global_batch_size,
        seed=job.train.seed,
        by_length=has_lengths and not parts.stages[0].part.joins_texts,
        pack_length=pack_length,
        balanced=job.train.sampling == "balanced",
    )


def _cell(job: Job, layout: Layout) -> Cell | None:
    """The run's cell of docs/layouts.md; None where the user's task or an engine divides."""
    if job.task not in TASKS or job.train.engine != "rekindle":
        return None
    return cell_of(KIND_OF[job.task], layout, job.train, job.model.lora is not None)


class TrainingStart:
    """The network before it is divided, and where its values come from."""

    def __init__(
        self,
        job: Job,
        task: Task,
        shards: Shards,
        mesh: Mesh,
        network: nn.Module,
        source: weights.WeightSource | None,
        origins: dict[str, modules.Origin],
    ) -> None:
        self.job = job
        self.task = task
        self.shards = shards
        self.mesh = mesh
        # a model folder whose list cannot be read is refused now, not after hours
        self.trained_on = modelfolder.inherited(job.init, job.model)
        self.network = network
        self.source = source
        self.origins = origins
        self.match = source.match if source is not None else None
        self.base: Path | None = None
        if source is not None and source.checkpoint is not None:
            self.base = source.checkpoint.folder
        self.left_out = check_losses(network) if task.kind.writes else ""
        positions = modules.usable_positions(network)
        if positions is not None:
            longest = max(shards.longest(split) for split in shards.manifest.rows)
            check_positions(positions, longest)
        # a layout that cuts the network leaves no whole to ask: a small one is asked instead
        is_cut = mesh.layout.tp * mesh.layout.pp * mesh.layout.cp > 1
        self.small: SmallNetwork | None = None
        if is_cut and hasattr(network, "config"):
            self.small = SmallNetwork(job, task, shards, network, mesh)

    @classmethod
    def of(cls, job: Job, task: Task, shards: Shards, device: torch.device) -> Self:
        """Our own tasks' networks are built without values; a user's task's is taken as it is."""
        network, source = _network_and_source(job, task, shards)
        layout = resolve(job.train, dist.get_world_size(), modules.shape_of(network))
        problems = list(undivided(layout, job.model.lora))
        if problems:
            raise RequestError(problems)
        cell = _cell(job, layout)
        support = require(cell, job.train.untested) if cell is not None else None
        compat.check_schedule(layout)
        mesh = Mesh.of(layout, device)
        start = cls(job, task, shards, mesh, network, source, modules.unfused(network))
        if cell is not None and support == "composed" and job.train.untested == "check":
            # of this layout tests know each two parts only
            gaps = compare_with_one_rank(cell, job, task, shards, start.network, mesh)
            if dist.get_rank() == 0:
                _say_how_near(cell, gaps)
        return start

    def parts(self, fresh: bool) -> Parts:
        """What this rank trains, with starting values if `fresh`, or where LoRA leaves them."""
        job = self.job
        scaling = prepare_network(
            self.network, self.source, self.origins, job.train, job.model.lora
        )
        goal = goal_of(job, self.task, self.shards, self.mesh)
        parts = build(self.task, self.network, self.origins, job.train, goal, self.mesh, scaling)
        # a checkpoint of adapters holds no frozen weights: these come from the source each time
        if self.source is not None and (fresh or scaling is not None):
            weights.fill(parts.networks, self.source, parts.origins)
        return start_engine(parts, job.train) or settle(parts)

    def small_parts(self) -> tuple[Parts, Evaluation, Shards]:
        """A small network of the same configuration on this rank alone; see `prove_forward`."""
        assert self.small is not None
        return self.small.alone()

    def save(self, parts: Parts, output: Path) -> None:
        """The trained model as a folder; all ranks have to call it."""
        if hasattr(parts.network, "config"):
            export.export(parts, output)
            if dist.get_rank() == 0:
                modelfolder.configure(parts.network, output, self.base)
        else:
            state = dict(export.gathered(parts))
            if dist.get_rank() == 0:
                self._save_by_task(state, output)
        if dist.get_rank() == 0:
            modelfolder.describe(
                self.job.task,
                self.shards,
                output,
                self.job.run_key,
                precision=self.job.train.precision,
                known=self.trained_on,
            )

    def _save_by_task(self, state: Mapping[str, torch.Tensor], output: Path) -> None:
        """Write a network that is not in transformers' layout as its task does."""
        manifest = self.shards.manifest
        if self.job.init:
            network = modelfolder.open_model(Path(self.job.init), self.job.code).network()
        else:
            network = self.task.build(
                self.job.model, manifest.labels, manifest.settings, self.shards.assets
            )
        network.load_state_dict(state)
        output.mkdir(parents=True, exist_ok=True)
        self.task.save(network.eval(), output, manifest.labels, manifest.settings)


def _network_and_source(
    job: Job, task: Task, shards: Shards
) -> tuple[nn.Module, weights.WeightSource | None]:
    """The network of a job, and where its values come from; None: it has them already."""
    manifest = shards.manifest
    model = job.model
    earlier = None
    if job.init:  # in Hugging Face layout where the task's are
        earlier = modelfolder.check_start(Path(job.init), shards, code=job.code)
        model = model.model_copy(update={"source": job.init, "revision": None})
    folder = task.weights(model) if job.task in TASKS else None
    torch.manual_seed(job.train.seed)
    if job.task in TASKS and (folder is not None or not job.init):
        with weights.deferred() as recorder:
            network = task.build(model, manifest.labels, manifest.settings, shards.assets)
        source = weights.WeightSource(
            network, recorder, job.train.seed, folder, makes_head=task.makes_head
        )
        return network, source
    if earlier is not None:
        return earlier.network().train(), None
    return task.build(model, manifest.labels, manifest.settings, shards.assets), None


def _say_how_near(cell: Cell, gaps: Sequence[Gap]) -> None:
    distances = [
        f"within {gap.largest:.1g} in {gap.precision} (up to {gap.allowed:g} is rounding)"
        for gap in gaps
    ]
    agreement = " and ".join(distances)
    emit(
        "notice",
        text=f"no test has trained {cell} as a whole; "
        f"two steps of a small network agree with one rank's {agreement}",
    )


def _finish(
    job: Job,
    trainer: Trainer,
    history: History,
    last_step: int,
    best_step: int | None,
    seconds: float,
    proof: Mapping[str, str],
) -> None:
    """Rank 0 writes the summary; `best_step` was exported, if any; `seconds` of training."""
    planned_steps = trainer.length.steps
    if trainer.is_spent:
        ending = f"it ends at step {last_step} of {planned_steps}"
        emit("notice", text=f"train.budget_hours are spent: {ending}")
    parts = trainer.parts
    job.summarise(
        engine=job.train.engine,
        steps=last_step,
        world_size=trainer.world,
        in_effect=trainer.optimizer.facts() | quantised.facts(parts.networks, trainer.mesh.device),
        epochs=trainer.length.epoch(last_step),
        precision=job.train.precision,
        deterministic=job.train.deterministic,
        train_rows=trainer.batches.order.rows,
        parameters=modelfolder.count_parameters(Path(job.output)),
        validation=_validation_at(history, best_step or last_step),
        layout=str(trainer.mesh.layout),
        device=device_name(trainer.mesh.device),
        attention=parts.attention if parts.stages[0].part.has_our_attention else "",
        proof={subject: words for subject, words in proof.items() if words},
        best_step=best_step,
        planned_steps=planned_steps if last_step < planned_steps else None,
        budget_hours=job.train.budget_hours if trainer.is_spent else None,
        train_seconds=seconds,
    )
    if (job.working / PROFILE).exists():
        shutil.copyfile(job.working / PROFILE, Path(job.history) / PROFILE)


def _validation_at(history: History, step: int) -> dict[str, float]:
    """What the curve's last row up to `step` holds of a validation."""
    rows = [row for row in read_history(history.path) if row.step <= step]
    if not rows:
        return {}
    validation = {"loss": rows[-1].validation_loss, "accuracy": rows[-1].validation_accuracy}
    return {name: value for name, value in validation.items() if value is not None}


if __name__ == "__main__":
    main()
