"""`rekindle run CONFIG`: the whole pipeline here and now; with several values of a field
a training for each, and the best to its end; with --rehearse-preemption proof that a
fault changes nothing."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click
from rich.table import Table

from rekindle import formats
from rekindle.app.grid import GridTraining, Point, best_of, points, train
from rekindle.app.pipeline import TRAINING
from rekindle.app.prepared import Prepared, prepare_here
from rekindle.app.progress import Progress, RunConsole, step_table
from rekindle.app.rehearse import rehearse
from rekindle.app.run import RunOptions, execute, windows
from rekindle.app.runs import summary
from rekindle.cli.options import Overrides, answer, of_config, shared, tell
from rekindle.cli.serving import SERVING, require
from rekindle.errors import RekindleError, RequestError, StepError
from rekindle.launch.fault import RehearsedFault
from rekindle.outputs import Grid, GridRow
from rekindle.records import Decision, RehearsalRecord, RunRecord, RunSummary
from rekindle.spec.model import Spec

log = logging.getLogger(__name__)

_NEXT_LINE = f"\n{'':8}"  # below the text of the line before


@click.command("run")
@of_config
@click.option("--fresh", is_flag=True, help="Rerun every step; ignore the cache.")
@click.option(
    "--from",
    "from_step",
    metavar="STEP",
    help="Rerun this step and all steps that depend on it.",
)
@click.option(
    "--require-promotion",
    is_flag=True,
    help="Exit with 1 if the candidate was not promoted.",
)
@click.option(
    "--rehearse-preemption",
    "fault",
    metavar="FAULT@step=N",
    help="Only train, twice, the second time with a real fault at step N (kill, term "
    "or hang), and compare.",
)
@shared
def command(
    config: Path,
    overrides: Overrides,
    fresh: bool,
    from_step: str | None,
    require_promotion: bool,
    fault: str | None,
    home: Path,
    as_json: bool,
) -> int:
    """Retrain, judge and register the model of CONFIG on this machine.

    Steps whose code and inputs have not changed come from the cache. An interrupted run
    continues from its last checkpoint when you rerun the command. A candidate that the
    gate refuses is a success: exit code 0.

    Several values of a field (--set train.lr=1e-4,3e-4 --set train.seed=1,2) make a grid:
    a training for each combination. Only the one with the lowest validation loss is
    judged on the test split and registered.

    A rehearsal (--rehearse-preemption) proves that an interrupted training ends with the
    same losses and weights as an uninterrupted one: exit code 0 if so, else 1. It
    registers nothing and leaves only its record, in the home's folder `rehearsals`."""
    grid = points(config, overrides)
    options = RunOptions(home, fresh, from_step)
    if len(grid) > 1:
        if fault is not None:
            raise RequestError("a rehearsal takes one value of each field", where="--set")
        return _exit_code(run_grid(grid, options, as_json), require_promotion)
    spec = grid[0].spec
    # before hours of training: the deployment comes last
    if spec.deploy.after_promotion:
        require(*SERVING)
    if fault is not None:
        return run_rehearsal(windows(spec)[-1], fault, home, as_json)
    results = []
    for windowed in windows(spec):
        prepared = prepare_here(windowed, home)
        results.append(carry_out(prepared, options, as_json))
    *earlier, last = results
    # one object on stdout: that of the last window names the others
    if as_json:
        answer(last.model_copy(update={"earlier": tuple(result.run_id for result in earlier)}))
    return _exit_code(last, require_promotion)


def _exit_code(result: RunSummary, require_promotion: bool) -> int:
    was_promoted = result.gate is not None and result.gate.promoted
    return 1 if require_promotion and not was_promoted else 0


def gate_text(decision: Decision, run_id: str) -> str:
    """A gate's decision, in words."""
    texts: dict[Decision, str] = {
        "promoted": "promoted",
        "pending": "passed, but the promotion did not happen",
        "approval_needed": f"passed, waits for `rekindle promote {run_id}`",
        "refused": "refused",
        "rolled_back": "passed, but was rolled back; "
        f"`rekindle promote {run_id} --reason WHY` overrides",
    }
    return texts[decision]


def carry_out(prepared: Prepared, options: RunOptions, as_json: bool) -> RunSummary:
    """Execute one window, print how it ended, and deploy it where the config says so."""
    progress = Progress()
    try:
        with progress:
            record = execute(prepared, options, progress.changed, progress.event)
    except RekindleError:  # once the live table is gone, which would erase what is printed
        if progress.record is not None and not as_json:
            conclude(progress.record, summary(progress.record, options.home))
        raise
    result = summary(record, options.home)
    if not as_json:
        conclude(record, result)
    deploy_section = prepared.spec.deploy
    if deploy_section.after_promotion and result.gate and result.gate.promoted:
        from rekindle.app import deploy
        from rekindle.cli.deploy import print_event, traffic_printer

        deploy_options = deploy.DeployOptions(
            wait=True,
            on_event=print_event,
            on_traffic=traffic_printer(deploy_section.min_requests),
        )
        deploy.deploy(prepared.spec, options.home, deploy_options)
    return result


def conclude(record: RunRecord, result: RunSummary) -> None:
    """Print the step table, the gate, the model, the card."""
    console = RunConsole(soft_wrap=False)
    console.print(step_table(record, console.width))
    console.print()
    for name, text in _conclusion(result):
        console.print(f"{name:8}{text}", highlight=False, markup=False, soft_wrap=True)


def _conclusion(result: RunSummary) -> Iterator[tuple[str, str]]:
    """How a run ended: lines of text, each with its name."""
    yield "run", f"{result.run_id}  {result.status} in {formats.duration(result.seconds)}"
    if result.window:
        yield "window", formats.window(result.window)
    if result.metrics:
        metrics = [f"{name} {formats.fixed(value)}" for name, value in result.metrics.items()]
        yield "metrics", "  ".join(metrics)
    model = result.model
    if result.gate:
        decision = gate_text(result.gate.decision, result.run_id)
        if model and not model.created:
            decision = f"decided before: {decision}; compared now"
        reasons = result.gate.reason.replace("; ", _NEXT_LINE)
        yield "gate", f"{decision}: {reasons}"
    for warning in result.warnings:
        yield "warning", warning
    if model:
        version = f"{model.name} version {model.version}"
        if model.aliases:
            version += f" ({', '.join(model.aliases)})"
        age = "new" if model.created else "known"
        yield "model", f"{version}, {age}"
    if Path(result.card).is_file():
        yield "card", result.card


def run_grid(grid: Sequence[Point], options: RunOptions, as_json: bool) -> RunSummary:
    """Train at every point, print the results, and run the best one to its end."""
    console = RunConsole(stderr=as_json)
    trained: list[GridTraining] = []
    for number, point in enumerate(grid, 1):
        console.print(
            f"training {number} of {len(grid)}: {' '.join(point.settings)}",
            highlight=False,
            markup=False,
        )
        progress = Progress()
        try:
            with progress:
                trained.append(train(point, options, progress.changed, progress.event))
        except StepError as error:
            if progress.record is None or progress.record.step(TRAINING).status != "failed":
                raise  # what comes before the training is the same for all
            trained.append(GridTraining(point, progress.record, None))
            console.print(str(error), highlight=False, markup=False)
    best = best_of(trained)
    console.print("\non the validation split:")
    console.print(_table(trained, best), "")
    # without `fresh`: what was trained above is not trained again
    to_the_end = RunOptions(options.home, settings=best.point.settings)
    prepared = prepare_here(windows(best.point.spec)[-1], options.home)
    result = carry_out(prepared, to_the_end, as_json)
    if as_json:
        answer(Grid(trainings=tuple(map(_row, trained)), best=result))
    return result


def _table(trained: Sequence[GridTraining], best: GridTraining) -> Table:
    """The trainings of a grid, from the lowest validation loss on."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("", no_wrap=True)
    names = [setting.partition("=")[0] for setting in best.point.settings]
    for name in (*names, "loss", "accuracy", "time"):
        table.add_column(name, justify="right", overflow="fold")
    table.add_column("run", overflow="fold")
    for training in sorted(trained, key=lambda training: training.loss):
        row = _row(training)
        mark = "best" if training is best else ""
        values = [setting.partition("=")[2] for setting in row.settings]
        loss: str = row.status  # of a training without one
        if math.isfinite(training.loss):
            loss = formats.metric(training.loss)
        accuracy = ""
        if row.validation_accuracy is not None:
            accuracy = formats.metric(row.validation_accuracy)
        seconds = formats.duration(row.seconds)
        table.add_row(mark, *values, loss, accuracy, seconds, row.run_id)
    return table


def _row(training: GridTraining) -> GridRow:
    validation: Mapping[str, float] = {}
    if training.summary is not None:
        validation = training.summary.validation
    return GridRow(
        settings=training.point.settings,
        run_id=training.record.run_id,
        status=training.record.status,
        seconds=training.record.seconds or 0.0,
        validation_loss=validation.get("loss"),
        validation_accuracy=validation.get("accuracy"),
    )


def run_rehearsal(spec: Spec, fault_text: str, home: Path, as_json: bool) -> int:
    """Train twice and compare; returns the exit code, 0 when equal, 1 when not."""
    fault = RehearsedFault.parse(fault_text)
    every = spec.train.checkpoint.every
    # SIGTERM leaves time for a checkpoint, a kill and a hang do not
    if fault.kind != "term" and (every is None or fault.step <= every):
        due = "train.checkpoint.every is null"
        if every:
            due = f"the first is due after step {every}"
        log.warning(
            "step %d comes before any checkpoint (%s): training will begin from its start. To "
            "rehearse a resume, name a later step, or set train.checkpoint.every",
            fault.step,
            due,
        )
    record = rehearse(spec, fault, home)
    tell(record, rehearsal_text(record), as_json)
    is_equal = record.rehearsal.losses_equal and record.rehearsal.weights_equal
    return 0 if is_equal else 1


def rehearsal_text(record: RehearsalRecord) -> str:
    """The lines that say whether the fault changed anything."""
    rehearsal = record.rehearsal
    lost = "nothing lost"
    if rehearsal.samples_lost:
        lost = f"{rehearsal.samples_lost:,} samples trained again"
    start = f"from step {rehearsal.resumed_from_step}"
    if not rehearsal.resumed_from_step:
        start = "from the start: no checkpoint was complete, so no resume was rehearsed"
    attempts = "1 attempt" if record.attempts == 1 else f"{record.attempts} attempts"
    equality = {True: "equal, bit for bit", False: "DIFFERENT"}
    return (
        f"fault    {rehearsal.fault} at step {rehearsal.step}, {record.ranks} ranks, {attempts}\n"
        f"resumed  {start}, {lost}\n"
        f"losses   {equality[rehearsal.losses_equal]}\n"
        f"weights  {equality[rehearsal.weights_equal]}"
    )
