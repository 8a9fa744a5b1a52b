"""What a training that ran tells about the planner's times: `rekindle plan --calibrate RUN`."""

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path

from rekindle.app.history import SPEEDS
from rekindle.app.runs import find_run
from rekindle.catalog.prices import PriceBook
from rekindle.errors import RequestError
from rekindle.outputs import Calibration, PlannedLayout
from rekindle.plan.calibration import job_of
from rekindle.plan.cluster import Cluster
from rekindle.plan.constants import profile_of, spread_of, stamp
from rekindle.plan.fleet import fleets
from rekindle.plan.request import asked_of, on_gpu
from rekindle.plan.search import work_of
from rekindle.plan.steptime import step_time
from rekindle.plan.work import Work
from rekindle.records import HistoryRow, RunRecord
from rekindle.report.collect import collect, history_beside
from rekindle.report.plan_vs_actual import FEWEST, measured, otherwise_trained
from rekindle.spec.layout import Layout
from rekindle.spec.model import Spec
from rekindle.tables import problems_in

_problem = problems_in(__file__)


def calibrate(home: Path, wanted: str) -> Calibration:
    """Measure a training that is over, or under way, and keep that; RequestError without steps."""
    run = find_run(home, wanted)
    found = collect(run)
    history = found.history
    if not history and found.fingerprint is not None:  # under way: it lies beside the checkpoints
        folder = home / "checkpoints" / found.fingerprint.run_key
        history = history_beside(folder / "training.json", [])
    rows, left_out = measured(history)
    if len(rows) < FEWEST:
        about = {"run": run.run_id, "steps": len(rows), "least": FEWEST}
        raise RequestError([_problem("few_steps", **about)])
    if (plan := found.plan) is None:
        raise RequestError([_problem("no_plan", run=run.run_id)])
    if differs := otherwise_trained(plan, found.training):
        raise RequestError([_problem("trained_otherwise", run=run.run_id, differs=differs)])
    work, cluster = _planned(run, plan.chosen)
    seconds = statistics.median(row.step_seconds or 0.0 for row in rows)
    trained = dataclasses.replace(work, sequence=_sequence(rows, work, run))
    constants = profile_of(cluster.gpu.name, work.compile, work.engine).constants
    predicted = step_time(trained, cluster, constants).seconds
    kept = Calibration(
        run_id=run.run_id,
        gpu=cluster.gpu.name,
        compiled=work.compile,
        layout=str(work.layout),
        measured=seconds,
        predicted=predicted,
        ratio=seconds / predicted,
        steps=len(rows),
        left_out=left_out,
        job=job_of(work, cluster),
        constants=stamp(),
        sequence=trained.sequence,
        engine=work.engine,
    )
    kept.write(home / SPEEDS / f"{run.run_id}.json")
    return kept


def lines(found: Calibration) -> list[str]:
    """The same for people."""
    low, high = sorted((found.measured, found.predicted))
    word = "faster" if found.measured < found.predicted else "slower"
    return [
        f"measured   {found.measured:.3g} s a step (median of {found.steps}, the first"
        f" {found.left_out} left out) of {found.run_id}, on {found.gpu}, {found.layout}",
        f"predicted  {found.predicted:.3g} s: it is {high / low:.2f} times {word}",
        f"from now   plans for {found.gpu} are corrected by that: within"
        f" {spread_of('same_job'):.0%} for the same work, {spread_of('calibrated'):.0%} for other"
        " work",
    ]


def _planned(run: RunRecord, had: PlannedLayout) -> tuple[Work, Cluster]:
    """What every rank of the run did, on which machines, as its plan has it."""
    spec = Spec.model_validate(run.spec)
    layout = Layout(**had.degrees, schedule=had.schedule, micro_batch_size=had.micro_batch_size)  # type: ignore[arg-type]
    machines = spec.resources.model_copy(
        update={}
        if run.platform == "local"
        else {"machine": had.machine, "nodes": had.nodes, "gpus_per_node": had.gpus_per_node}
    )
    fleet = fleets(machines, run.platform, had.region, PriceBook(()), had.gpus_per_node)[0]
    asked = on_gpu(asked_of(spec, ask_hub=False), fleet.gpu)
    return work_of(asked, layout, had.activation_checkpointing), fleet.cluster  # type: ignore[arg-type]


def _sequence(rows: Sequence[HistoryRow], work: Work, run: RunRecord) -> int:
    """Tokens of an example as it came, which may be shorter than the longest that may come."""
    each = [row.tokens for row in rows if row.tokens]
    if not each:
        return work.sequence
    examples = Spec.model_validate(run.spec).train.global_batch_size
    return max(1, min(work.sequence, round(statistics.mean(each) / examples)))
