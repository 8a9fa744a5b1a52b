"""A proof that training survives a fault: the rehearsal of a preemption.

Decides how: the pipeline is cut behind its step `finetune` and runs in two scratch homes,
first left alone, then with a real fault and as many further attempts as it takes; data
steps come from the cache of the real home. Then losses and weights are compared bit for
bit."""

import dataclasses
import datetime
import logging
import secrets
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from rekindle.app.pipeline import TRAINING, arguments_of, training_of
from rekindle.app.prepared import Prepared, prepare_here
from rekindle.app.progress import Progress
from rekindle.app.run import environment_of
from rekindle.app.runs import new_record
from rekindle.errors import PreemptedError, RequestError, StepError
from rekindle.launch import heartbeats
from rekindle.launch.fault import RehearsedFault
from rekindle.platforms.local import execute as local
from rekindle.platforms.local.cache import lend
from rekindle.platforms.local.step import StepSettings
from rekindle.platforms.local.store import HomeStore
from rekindle.records import (
    HistoryRow,
    Rehearsal,
    RehearsalRecord,
    RunRecord,
    TrainingSummary,
)
from rekindle.spec.identity import source_hash
from rekindle.spec.model import Spec
from rekindle.train.history import read_history

log = logging.getLogger(__name__)

HANG_SECONDS = 30.0  # a rehearsal does not wait longer for a rank that hangs


@dataclasses.dataclass(frozen=True)
class RehearsedTraining:
    """What a training left: its summary, its curve, and how many attempts it took."""

    summary: TrainingSummary
    rows: tuple[HistoryRow, ...]
    attempts: int

    @property
    def losses(self) -> list[tuple[object, ...]]:
        """What has to be equal in both trainings, step by step."""
        return [(row.step, row.loss, row.lr, row.grad_norm) for row in self.rows]


def rehearse(spec: Spec, fault: RehearsedFault, home: Path) -> RehearsalRecord:
    """Train twice, the second time with the fault, and compare. RequestError where the
    fault cannot be caused; StepError where a training fails otherwise."""
    prepared = prepare_here(spec, home)
    if spec.train.entrypoint:
        raise RequestError(
            "a rehearsal needs rekindle's own training loop, which causes the fault",
            where="train.entrypoint",
            fix="try your script with `kill` by hand; the launcher restarts it the same way",
        )
    stage = _Stage(prepared, home.resolve())
    try:
        return _rehearse(stage, fault)
    # its folder stays, so that the user can look at the logs
    except StepError:
        log.warning("what it left is in %s", stage.folder)
        raise
    except BaseException:
        stage.clear()
        raise


def _rehearsed_spec(spec: Spec) -> Spec:
    """The spec with nothing that reaches beyond a scratch home.

    It waits only a short time for ranks that hang."""
    model = spec.model
    train = spec.train
    if model.init_from == "champion":  # the registry is left alone
        model = model.model_copy(update={"init_from": "base"})
    hang_seconds = min(train.hang_seconds, HANG_SECONDS)
    update = {
        "model": model,
        "train": train.model_copy(update={"hang_seconds": hang_seconds}),
        "registration": spec.registration.model_copy(update={"tracking_uri": ""}),
    }
    return spec.model_copy(update=update)


class _Stage:
    """Scratch homes of one rehearsal, below the real one; removed when it succeeds."""

    def __init__(self, prepared: Prepared, home: Path) -> None:
        self.spec = _rehearsed_spec(prepared.spec)
        if TRAINING not in prepared.graph.dag.nodes:
            raise RequestError(
                f"the pipeline has no step `{TRAINING}` to rehearse",
                where="pipeline",
                fix="a rehearsal knows the shipped component `finetune` only",
            )
        self.graph = prepared.graph.until(TRAINING)
        self.home = home
        self.started = datetime.datetime.now(datetime.UTC)
        self.name = f"{self.spec.name}-{self.started:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
        self.folder = home / "rehearsals" / self.name

    def train(self, name: str, fault: RehearsedFault | None) -> RehearsedTraining:
        """Run the cut pipeline in a scratch home, again if the fault ended it."""
        home = self.folder / name
        first_home = self.folder / "whole"
        # data steps come from the cache of the first training, or of the real home
        home_with_data = first_home if first_home.exists() else self.home
        lend(HomeStore(home_with_data), HomeStore(home))
        environment = fault.environment() if fault else {}
        try:
            return _trained(self._attempt(home, environment), 1)
        except (PreemptedError, StepError) as error:
            was_preempted = isinstance(error, PreemptedError)
            # a user may stop a rehearsal, and a training may fail without the fault
            if fault is None or was_preempted != (fault.kind == "term"):
                raise
            log.warning("%s\n\nthe same command again:", error)
        return _trained(self._attempt(home, environment), 2)

    def _attempt(self, home: Path, environment: Mapping[str, str]) -> RunRecord:
        settings = StepSettings(
            env={**environment_of(self.spec), **environment},
            source_hash=source_hash(),
            grace_seconds=self.spec.train.grace_seconds,
        )
        with Progress() as progress:
            return local.execute(
                self.graph,
                arguments_of(self.spec, self.graph, str(home)),
                settings,
                home=home,
                record=new_record(self.spec, ()),
                from_step=TRAINING,
                on_change=progress.changed,
                on_event=progress.event,
            )

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _rehearse(stage: _Stage, fault: RehearsedFault) -> RehearsalRecord:
    began = time.monotonic()
    whole = stage.train("whole", None)
    if fault.step > whole.summary.steps:
        raise RequestError(
            f"step {fault.step} never comes: the training has {whole.summary.steps}",
            where="--rehearse-preemption",
        )
    checkpoints = stage.folder / "faulted" / "checkpoints"
    # outlives restarts, and so holds the mark that the fault has happened
    checkpoints.mkdir(parents=True)
    fault = dataclasses.replace(fault, folder=str(checkpoints))
    faulted = stage.train("faulted", fault)
    if not fault.mark.exists():
        raise StepError(f"the fault {fault.kind} did not happen", fix="report this: it is a bug")
    resumed_from, steps_before = _resumed_from(checkpoints, faulted.summary.steps)
    # the step of the fault was never finished; the attempt before may have gone further than that
    steps_lost = max(0, fault.step - 1 - resumed_from, steps_before - resumed_from)
    rehearsal = Rehearsal(
        fault=fault.kind,
        step=fault.step,
        resumed_from_step=resumed_from,
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
        rehearsal=rehearsal,
    )
    record.write(stage.folder.with_suffix(".json"))
    stage.clear()
    return record


def _trained(record: RunRecord, attempts: int) -> RehearsedTraining:
    file = training_of(record)
    rows = read_history(file.with_name("history.jsonl"))
    return RehearsedTraining(TrainingSummary.read(file), tuple(rows), attempts)


def _resumed_from(checkpoints: Path, steps: int) -> tuple[int, int]:
    """The step after which the last attempt went on (all `steps` if there was nothing
    left), and how many the attempt before it had done."""
    paths = checkpoints.glob("*/attempts/*/rank-0.signs")
    *before, last = sorted(paths, key=lambda path: path.stat().st_mtime)
    done_before = 0
    if before:
        # heartbeats name the step in work, which was not done
        done_before = heartbeats.read(before[-1].parent)[0].step - 1
    first_step = heartbeats.read(last.parent)[0].first_step or steps + 1
    return first_step - 1, done_before
