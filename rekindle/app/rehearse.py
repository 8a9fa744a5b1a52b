"""A proof that training survives a fault: the rehearsal of a preemption.

Decides how: the pipeline is cut behind its step `finetune` and runs in two scratch homes, first
left alone, then with a real fault and as many further attempts as it takes; data steps come from
the cache of the real home. Then losses and weights are compared bit for bit."""

import dataclasses
import datetime
import logging
import secrets
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from rekindle.app.pipeline import TRAINING, arguments_of, graph_of, training_of
from rekindle.app.plan import planned_here
from rekindle.app.preflight import preflight
from rekindle.app.progress import Progress
from rekindle.app.run import environment_of, resolved
from rekindle.app.runs import new_record
from rekindle.errors import PreemptedError, RequestError, StepError
from rekindle.launch import heartbeats
from rekindle.launch.fault import Fault
from rekindle.platforms.local import execute as local
from rekindle.platforms.local.cache import lend
from rekindle.platforms.local.store import Store
from rekindle.records import HistoryRow, Rehearsal, RehearsalRecord, RunRecord, TrainingSummary
from rekindle.spec.identity import source_hash
from rekindle.spec.model import Spec
from rekindle.tables import problems_in
from rekindle.train.history import read_history

log = logging.getLogger(__name__)

HANG_SECONDS = 30.0
_problem = problems_in(__file__)


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a training left: its summary, its curve, and how many attempts it took."""

    summary: TrainingSummary
    rows: tuple[HistoryRow, ...]
    attempts: int

    @property
    def losses(self) -> list[tuple[object, ...]]:
        """What has to be equal, step by step."""
        return [(row.step, row.loss, row.lr, row.grad_norm) for row in self.rows]


def rehearse(spec: Spec, fault: Fault, home: Path) -> RehearsalRecord:
    """Train twice and compare; RequestError where the fault cannot be caused, or StepError."""
    preflight(spec, home)
    if spec.train.entrypoint:
        raise RequestError([_problem("entrypoint")])
    stage = _Stage(spec, home.resolve())
    try:
        return _rehearse(stage, fault)
    except StepError:
        log.warning("what it left is in %s", stage.folder)
        raise
    except BaseException:
        stage.clear()
        raise


class _Stage:
    """Scratch homes of one rehearsal, below the real one; removed when it has succeeded."""

    def __init__(self, spec: Spec, home: Path) -> None:
        model, train = spec.model, spec.train
        if model.init_from == "champion":  # the registry is left alone
            model = model.model_copy(update={"init_from": "base"})
        train = train.model_copy(update={"hang_seconds": min(train.hang_seconds, HANG_SECONDS)})
        register = spec.registration.model_copy(update={"tracking_uri": ""})
        update = {"model": model, "train": train, "registration": register}
        self.spec, _ = planned_here(resolved(spec.model_copy(update=update), home), home)
        graph = graph_of(self.spec, here=True)[1]
        if TRAINING not in graph.dag.nodes:
            raise RequestError([_problem("no_step", step=TRAINING)])
        self.graph = graph.until(TRAINING)
        self.home = home
        self.started = datetime.datetime.now(datetime.UTC)
        self.name = f"{spec.name}-{self.started:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
        self.folder = home / "rehearsals" / self.name

    def train(self, name: str, fault: Fault | None) -> Trained:
        """Run the cut pipeline in the scratch home `name`; once more if the fault ended it."""
        home = self.folder / name
        earlier = self.folder / "whole"
        lend(Store(earlier if earlier.exists() else self.home), Store(home))
        environment = fault.environment() if fault else {}
        try:
            return _trained(self._attempt(home, environment), 1)
        except (PreemptedError, StepError) as error:
            asked = isinstance(error, PreemptedError)  # perhaps not by the fault
            if fault is None or asked != (fault.kind == "term"):
                raise
            log.warning("%s\n\nthe same command again:", error)
        return _trained(self._attempt(home, environment), 2)

    def _attempt(self, home: Path, environment: Mapping[str, str]) -> RunRecord:
        with Progress() as progress:
            return local.execute(
                self.graph,
                arguments_of(self.spec, self.graph, str(home)),
                home=home,
                record=new_record(self.spec, ()),
                env={**environment_of(self.spec), **environment},
                source_hash=source_hash(),
                from_step=TRAINING,
                on_change=progress.changed,
                on_event=progress.event,
                grace_seconds=self.spec.train.grace_seconds,
            )

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _rehearse(stage: _Stage, fault: Fault) -> RehearsalRecord:
    began = time.monotonic()
    whole = stage.train("whole", None)
    if fault.step > whole.summary.steps:
        what = f"step {fault.step} never comes: the training has {whole.summary.steps}"
        raise RequestError(what, where="--rehearse-preemption")
    checkpoints = stage.folder / "faulted" / "checkpoints"
    checkpoints.mkdir(parents=True)
    fault = dataclasses.replace(fault, folder=str(checkpoints))
    faulted = stage.train("faulted", fault)
    if not fault.mark.exists():
        raise StepError(f"the fault {fault.kind} did not happen", fix="report this: it is a bug")
    resumed, done = _resumed_from(checkpoints, faulted.summary.steps)
    steps_lost = max(0, fault.step - 1 - resumed, done - resumed)
    found = Rehearsal(
        fault=fault.kind,
        step=fault.step,
        resumed_from_step=resumed,
        samples_lost=steps_lost * stage.spec.train.global_batch_size,
        losses_equal=whole.losses == faulted.losses,
        weights_equal=whole.summary.weights_sha256 == faulted.summary.weights_sha256,
    )
    record = RehearsalRecord(
        rehearsal_id=stage.name,
        config=stage.spec.origin[0],
        started_at=stage.started.isoformat(timespec="milliseconds"),
        seconds=round(time.monotonic() - began, 1),
        ranks=stage.spec.platforms.local.ranks,
        attempts=faulted.attempts,
        rehearsal=found,
    )
    record.write(stage.folder.with_suffix(".json"))
    stage.clear()
    return record


def _trained(record: RunRecord, attempts: int) -> Trained:
    file = training_of(record)
    rows = read_history(file.with_name("history.jsonl"))
    return Trained(TrainingSummary.read(file), tuple(rows), attempts)


def _resumed_from(checkpoints: Path, steps: int) -> tuple[int, int]:
    """The step after which the last attempt went on (all of them if there was nothing left), and
    how many the attempt before it had done."""
    found = checkpoints.glob("*/attempts/*/rank-0.signs")
    *before, last = sorted(found, key=lambda path: path.stat().st_mtime)
    done = heartbeats.read(before[-1].parent)[0].step - 1 if before else 0
    return (heartbeats.read(last.parent)[0].first_step or steps + 1) - 1, done
