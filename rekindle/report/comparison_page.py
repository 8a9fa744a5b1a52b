"""The comparison of runs as one HTML file, like a card: tables of what differs, and the curves of
their trainings in one plot."""

from collections.abc import Sequence
from pathlib import Path

from rekindle.outputs import Compared
from rekindle.records import write_atomically
from rekindle.report import page, plots, texts
from rekindle.report.comparison import Pair, certainly, change_text, facts, value_text
from rekindle.report.plots import Series
from rekindle.report.training import Curve, points, running_mean, window

COLOURS = ("a", "b", "c", "a dashed", "b dashed", "c dashed")


def render_comparison(target: Path, runs: Sequence[Pair], found: Compared) -> None:
    """Write the page to `target`; the same records give the same bytes."""
    text = page.render(
        "compare.html.j2", compared=found, facts=facts(found.runs),
        change_text=change_text, certainly=certainly, value_text=value_text,
        curves=[curves for curves in _curves(runs) if curves.plot],
        left_out=max(0, len(runs) - len(COLOURS)),
    )  # fmt: skip
    write_atomically(target, text)


def _curves(runs: Sequence[Pair]) -> list[Curve]:
    """Figures with a line for each run."""
    shown = list(zip(COLOURS, runs, strict=False))
    legend = tuple((css, texts.shorten(record.run_id, 60)) for css, (record, _) in shown)
    training, validation = [], []
    for css, (record, found) in shown:
        loss, held_out = (points(found.history, f) for f in ("loss", "validation_loss"))
        if width := window(len(loss)):
            loss = running_mean(loss, width)
        training.append(Series(record.run_id, loss, css))
        validation.append(Series(record.run_id, held_out, css, marks=len(held_out) <= 40))
    return [
        Curve(name, plots.line(series, label=f"{name} of {len(series)} runs.", zero=True), legend)
        for name, series in (("Training loss", training), ("Validation loss", validation))
    ]
