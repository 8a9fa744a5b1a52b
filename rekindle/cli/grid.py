"""`rekindle run CONFIG --set train.lr=1e-4,3e-4`: a training for each value, and the best to its
end."""

import math
from collections.abc import Callable, Sequence

from rich.table import Table

from rekindle import formats
from rekindle.app.grid import Point, Trained, best_of, train
from rekindle.app.pipeline import TRAINING
from rekindle.app.progress import Progress, RunConsole
from rekindle.app.run import Options, windows
from rekindle.cli.options import answer
from rekindle.errors import StepError
from rekindle.outputs import Grid, GridRow
from rekindle.records import RunSummary
from rekindle.spec.model import Spec


def gridded(
    points: Sequence[Point], options: Options, as_json: bool,
    carry_out: Callable[[Spec, Options, bool], RunSummary],
) -> RunSummary:  # fmt: skip
    """Train at every point, show what came of each, and run the best one's pipeline to its end."""
    console, trained = RunConsole(stderr=as_json), list[Trained]()
    for number, point in enumerate(points, 1):
        console.print(f"training {number} of {len(points)}: {' '.join(point.settings)}",
                      highlight=False, markup=False)  # fmt: skip
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
        settings=each.point.settings, run_id=each.record.run_id, status=each.record.status,
        seconds=each.record.seconds or 0.0, validation_loss=found.get("loss"),
        validation_accuracy=found.get("accuracy"),
    )  # fmt: skip
