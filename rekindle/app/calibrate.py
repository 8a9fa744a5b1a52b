"""`rekindle plan --calibrate RUN`: corrects planned times by a measured training."""

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
from rekindle.spec.model import recorded_spec


def calibrate(home: Path, wanted_run: str) -> Calibration:
    """Measure a training that is over, or under way, and keep what was measured;
    RequestError without enough steps, or without a plan to compare them with."""
    run = find_run(home, wanted_run)
    findings = collect(run)
    history = findings.history
    if not history and findings.fingerprint is not None:
        # under way: it lies beside the checkpoints
        folder = home / "checkpoints" / findings.fingerprint.run_key
        history = history_beside(folder / "training.json", [])
    rows, left_out = measured(history)
    if len(rows) < FEWEST:
        raise RequestError(
            f"{run.run_id} has {len(rows)} steps that were measured, and {FEWEST} are needed",
            fix="wait until it has trained; of a run elsewhere, ask `rekindle status` first",
        )
    plan = findings.plan
    if plan is None:
        raise RequestError(
            f"{run.run_id} has no plan to compare with",
            fix="the planner supports causal_lm and text_classification, on GPUs of its catalog "
            "or on this machine",
        )
    differences = otherwise_trained(plan, findings.training)
    if differences:
        raise RequestError(
            f"{run.run_id} was not trained as it was planned: {differences}",
            fix="measure a run that was, or plan for the machines that it had",
        )
    work, cluster = _planned(run, plan.chosen)
    seconds = statistics.median(row.step_seconds or 0.0 for row in rows)
    # predicted for the lengths that came, so that only the speed is corrected
    trained_work = dataclasses.replace(work, sequence=_sequence(rows, work, run))
    constants = profile_of(cluster.gpu.name, work.compile, work.engine).constants
    predicted = step_time(trained_work, cluster, constants).seconds
    calibration = Calibration(
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
        sequence=trained_work.sequence,
        engine=work.engine,
    )
    calibration.write(home / SPEEDS / f"{run.run_id}.json")
    return calibration


def lines(calibration: Calibration) -> list[str]:
    """A calibration as text for people."""
    low, high = sorted((calibration.measured, calibration.predicted))
    word = "faster" if calibration.measured < calibration.predicted else "slower"
    same_job = f"{spread_of('same_job'):.0%}"
    other_jobs = f"{spread_of('calibrated'):.0%}"
    return [
        f"measured   {calibration.measured:.3g} s a step (median of {calibration.steps}, the first"
        f" {calibration.left_out} left out) of {calibration.run_id}, on {calibration.gpu},"
        f" {calibration.layout}",
        f"predicted  {calibration.predicted:.3g} s: it is {high / low:.2f} times {word}",
        f"from now   plans for {calibration.gpu} are corrected by that: within"
        f" {same_job} for the same work, {other_jobs} for other work",
    ]


def _planned(run: RunRecord, planned: PlannedLayout) -> tuple[Work, Cluster]:
    """What every rank of the run did, on which machines, as its plan has it."""
    spec = recorded_spec(run.spec)
    layout = Layout(
        **planned.degrees,
        schedule=planned.schedule,  # type: ignore[arg-type]
        micro_batch_size=planned.micro_batch_size,
    )
    resources = spec.resources
    if run.platform != "local":
        machines = {
            "machine": planned.machine,
            "nodes": planned.nodes,
            "gpus_per_node": planned.gpus_per_node,
        }
        resources = resources.model_copy(update=machines)
    no_prices = PriceBook(())
    fleet = fleets(resources, run.platform, planned.region, no_prices, planned.gpus_per_node)[0]
    request = on_gpu(asked_of(spec, ask_hub=False), fleet.gpu)
    work = work_of(request, layout, planned.activation_checkpointing)  # type: ignore[arg-type]
    return work, fleet.cluster


def _sequence(rows: Sequence[HistoryRow], work: Work, run: RunRecord) -> int:
    """Tokens of an example as it came, which may be fewer than the most that may come."""
    tokens_by_step = [row.tokens for row in rows if row.tokens]
    if not tokens_by_step:
        return work.sequence
    examples = recorded_spec(run.spec).train.global_batch_size
    mean = round(statistics.mean(tokens_by_step) / examples)
    return max(1, min(work.sequence, mean))
