"""`rekindle run CONFIG`: the whole pipeline here and now; with several values of a field a training
for each, and the best to its end; with --rehearse-preemption proof that a fault changes nothing."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path

import click
from rich.table import Table

from rekindle import formats
from rekindle.app.grid import Point, Trained, best_of, points, train
from rekindle.app.pipeline import TRAINING
from rekindle.app.progress import Progress, RunConsole, step_table
from rekindle.app.rehearse import rehearse
from rekindle.app.run import Options, execute, windows
from rekindle.app.runs import summary
from rekindle.cli.options import Overrides, answer, of_config, shared, tell
from rekindle.cli.serving import SERVING, require
from rekindle.errors import RekindleError, RequestError, StepError
from rekindle.launch.fault import Fault
from rekindle.outputs import Grid, GridRow
from rekindle.records import RehearsalRecord, RunRecord, RunSummary
from rekindle.spec.model import Spec
from rekindle.tables import rows

log = logging.getLogger(__name__)

# of a gate's decision
WORDS: dict[str, str] = rows(Path(__file__).with_name("words.yaml"))["gate"]


@click.command("run")
@of_config
@click.option("--fresh", is_flag=True, help="Rerun every step; ignore the cache.")
@click.option(
    "--from", "from_step", metavar="STEP", help="Rerun this step and all steps that depend on it."
)
@click.option(
    "--require-promotion", is_flag=True, help="Exit with 1 if the candidate was not promoted."
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

    Steps whose code and inputs have not changed come from the cache. An interrupted run continues
    from its last checkpoint when you rerun the command. A candidate that the gate refuses is a
    success: exit code 0.

    Several values of a field (--set train.lr=1e-4,3e-4 --set train.seed=1,2) make a grid: a
    training for each combination. Only the one with the lowest validation loss is judged on the
    test split and registered.

    A rehearsal (--rehearse-preemption) proves that an interrupted training ends with the same
    losses and weights as an uninterrupted one: exit code 0 if so, else 1. It registers nothing and
    leaves only its record, in the home's folder `rehearsals`."""
    found = points(config, overrides)
    options = Options(home, fresh, from_step)
    if len(found) > 1:
        if fault is not None:
            raise RequestError("a rehearsal takes one value of each field", where="--set")
        return _exit_code(gridded(found, options, as_json), require_promotion)
    spec = found[0].spec
    if spec.deploy.after_promotion:
        require(*SERVING)
    if fault is not None:
        return rehearsed(windows(spec)[-1], fault, home, as_json)
    *before, last = [carry_out(one, options, as_json) for one in windows(spec)]
    if as_json:
        answer(last.model_copy(update={"earlier": tuple(result.run_id for result in before)}))
    return _exit_code(last, require_promotion)


def _exit_code(result: RunSummary, require_promotion: bool) -> int:
    return 1 if require_promotion and not (result.gate and result.gate.promoted) else 0


def carry_out(spec: Spec, options: Options, as_json: bool) -> RunSummary:
    """Execute one window; prints what came of it."""
    progress = Progress()
    try:
        with progress:
            record = execute(spec, options, progress.changed, progress.event)
    except RekindleError:  # once the live table is gone, which would erase what is printed
        if progress.record is not None and not as_json:
            conclude(progress.record, summary(progress.record, options.home))
        raise
    result = summary(record, options.home)
    if not as_json:
        conclude(record, result)
    if spec.deploy.after_promotion and result.gate and result.gate.promoted:
        from rekindle.app import deploy
        from rekindle.cli.deploy import print_event, traffic_printer

        seen = traffic_printer(spec.deploy.min_requests)
        deploy.deploy(
            spec, options.home, deploy.Options(wait=True, on_event=print_event, on_traffic=seen)
        )
    return result


def conclude(record: RunRecord, result: RunSummary) -> None:
    """The step table, the gate, the model, the card."""
    console = RunConsole(soft_wrap=False)
    console.print(step_table(record, console.width))
    console.print()
    lines = [("run", f"{result.run_id}  {result.status} in {formats.duration(result.seconds)}")]
    if result.window:
        lines.append(("window", formats.window(result.window)))
    if result.metrics:
        lines.append(
            ("metrics", "  ".join(f"{k} {formats.fixed(v)}" for k, v in result.metrics.items()))
        )
    if result.gate:
        words = WORDS[result.gate.decision].format(run=result.run_id)
        if result.model and not result.model.created:
            words = f"decided before: {words}; compared now"
        reasons = result.gate.reason.replace("; ", f"\n{'':8}")
        lines.append(("gate", f"{words}: {reasons}"))
    lines += [("warning", warning) for warning in result.warnings]
    if model := result.model:
        aliases = f" ({', '.join(model.aliases)})" if model.aliases else ""
        new = "new" if model.created else "known"
        lines.append(("model", f"{model.name} version {model.version}{aliases}, {new}"))
    if Path(result.card).is_file():
        lines.append(("card", result.card))
    for name, text in lines:
        console.print(f"{name:8}{text}", highlight=False, markup=False, soft_wrap=True)


def gridded(grid: Sequence[Point], options: Options, as_json: bool) -> RunSummary:
    """Train at every point, show what came of each, and run the best one's pipeline to its end."""
    console, trained = RunConsole(stderr=as_json), list[Trained]()
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
            trained.append(Trained(point, progress.record, None))
            console.print(str(error), highlight=False, markup=False)
    best = best_of(trained)
    console.print("\non the validation split:")
    console.print(_table(trained, best), "")
    # what was trained above is not trained again, also where steps are to be fresh
    whole = Options(options.home, settings=best.point.settings)
    result = carry_out(windows(best.point.spec)[-1], whole, as_json)
    if as_json:
        answer(Grid(trainings=tuple(map(_row, trained)), best=result))
    return result


def _table(trained: Sequence[Trained], best: Trained) -> Table:
    """From the lowest validation loss on."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("", no_wrap=True)
    names = [setting.partition("=")[0] for setting in best.point.settings]
    for name in (*names, "loss", "accuracy", "time"):
        table.add_column(name, justify="right", overflow="fold")
    table.add_column("run", overflow="fold")
    for each in sorted(trained, key=lambda each: each.loss):
        row = _row(each)
        values = [setting.partition("=")[2] for setting in row.settings]
        loss = formats.metric(each.loss) if math.isfinite(each.loss) else row.status
        right = "" if row.validation_accuracy is None else formats.metric(row.validation_accuracy)
        mark, time = "best" if each is best else "", formats.duration(row.seconds)
        table.add_row(mark, *values, loss, right, time, row.run_id)
    return table


def _row(each: Trained) -> GridRow:
    found = each.summary.validation if each.summary else {}
    return GridRow(
        settings=each.point.settings,
        run_id=each.record.run_id,
        status=each.record.status,
        seconds=each.record.seconds or 0.0,
        validation_loss=found.get("loss"),
        validation_accuracy=found.get("accuracy"),
    )


def rehearsed(spec: Spec, text: str, home: Path, as_json: bool) -> int:
    """Train twice and compare; 0 when equal, 1 when not."""
    fault = Fault.parse(text)
    every = spec.train.checkpoint.every
    if fault.kind != "term" and (every is None or fault.step <= every):
        due = f"the first is due after step {every}" if every else "train.checkpoint.every is null"
        log.warning(
            "step %d comes before any checkpoint (%s): training will begin from its start. To "
            "rehearse a resume, name a later step, or set train.checkpoint.every",
            fault.step,
            due,
        )
    record = rehearse(spec, fault, home)
    tell(record, rehearsal_text(record), as_json)
    found = record.rehearsal
    return 0 if found.losses_equal and found.weights_equal else 1


def rehearsal_text(record: RehearsalRecord) -> str:
    """The lines that say whether the fault changed anything."""
    found = record.rehearsal
    lost = f"{found.samples_lost:,} samples trained again" if found.samples_lost else "nothing lost"
    equal = {True: "equal, bit for bit", False: "DIFFERENT"}
    start = f"from step {found.resumed_from_step}"
    if not found.resumed_from_step:
        start = "from the start: no checkpoint was complete, so no resume was rehearsed"
    attempts = "1 attempt" if record.attempts == 1 else f"{record.attempts} attempts"
    return (
        f"fault    {found.fault} at step {found.step}, {record.ranks} ranks, {attempts}\n"
        f"resumed  {start}, {lost}\n"
        f"losses   {equal[found.losses_equal]}\n"
        f"weights  {equal[found.weights_equal]}"
    )
