"""The card of a run: one HTML file that says what happened, what the model is worth, and
why it was promoted or not.

Each section of the template asks one of the modules here for what it shows, and one
without a record is left out. A run that failed opens with the step that failed and how to
go on."""

import contextlib
import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from rekindle import formats
from rekindle.catalog.prices import book
from rekindle.errors import RekindleError, RequestError
from rekindle.records import ArtifactRecord, RunRecord, write_atomically
from rekindle.report import (
    costs,
    evaluation,
    ledger,
    lineage,
    page,
    plan_vs_actual,
    plots,
    texts,
    timeline,
    training,
    verdicts,
)
from rekindle.report.collect import collect, local_path

_MOST_BYTES = 2_000_000  # of a document: cards are passed on by mail
_LONGEST_VALUE = 200


def render_card(home: Path, run: RunRecord) -> Path:
    """Writes `home/runs/<run_id>/card.html`; the same records give the same bytes."""
    # an id is a folder's name, and a record may say anything
    if Path(run.run_id).name != run.run_id or run.run_id in ("", ".", ".."):
        raise RequestError(f"{run.run_id!r} is not a run id", fix="name a folder under runs/")
    folder = home / "runs" / run.run_id
    target = folder / "card.html"
    findings = collect(run)
    paid = ""
    if run.platform != "local":
        with contextlib.suppress(RekindleError):  # `rekindle runs --costs` says what is wrong
            paid = costs.in_words(ledger.Entry.of(run).cost(book(home)))
    text = page.render(
        "card.html.j2",
        run=run,
        found=findings,
        paid=paid,
        folder=folder,
        shown=shown_by_steps(run),
        trained_before=any(step.cached and step.holding("training") for step in run.steps),
        evaluation=evaluation,
        lineage=lineage,
        plan_vs_actual=plan_vs_actual,
        plots=plots,
        timeline=timeline,
        training=training,
        verdicts=verdicts,
    )
    write_atomically(target, text)
    return target


@dataclasses.dataclass(frozen=True)
class Shown:
    """What a step shows under one name. `plots` are (caption, CSS class of its box,
    drawing), `html` is a document, `note` why something is not shown."""

    step: str
    name: str
    metrics: tuple[tuple[str, str], ...] = ()
    plots: tuple[tuple[str, str, Markup], ...] = ()
    markdown: Markup | None = None
    html: str = ""
    note: str = ""


def shown_by_steps(run: RunRecord) -> tuple[Shown, ...]:
    """What the steps show as KFP artifacts: metrics, confusion matrices, ROC curves,
    Markdown, and HTML, which gets a frame without scripts and without a network. In the
    order of the steps; those with a record have sections of their own."""
    is_here = run.platform == "local"  # what a platform says names no file of this machine
    shown = []
    for step in run.steps:
        if any("record" in artifact.metadata for artifact in step.artifacts.values()):
            continue
        for name, artifact in step.artifacts.items():
            view = _shown(step.name, name, artifact, is_here)
            if view is not None:
                shown.append(view)
    return tuple(shown)


def _shown(step: str, name: str, artifact: ArtifactRecord, is_here: bool) -> Shown | None:
    """What is shown of an artifact, or why that cannot be; None for other kinds."""
    kind = artifact.schema_title.rpartition(".")[2]
    try:
        if kind == "Metrics" and artifact.metadata:
            rows = ((str(key), _value(value)) for key, value in artifact.metadata.items())
            return Shown(step, name, metrics=tuple(rows))
        if kind == "ClassificationMetrics" and artifact.metadata:
            return Shown(step, name, plots=_plots(artifact.metadata))
        if kind == "Markdown":
            return Shown(step, name, markdown=_markdown(_text(artifact.uri, is_here)))
        if kind == "HTML":
            return Shown(step, name, html=_text(artifact.uri, is_here))
    # a step may write anything there, and the rest of the card is to be read all the same
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        OSError,
        TypeError,
        ValueError,
    ) as error:
        reason = texts.shorten(texts.plain(str(error)), _LONGEST_VALUE)
        return Shown(step, name, note=f"This {kind} cannot be shown: {reason}.")
    return None


def _markdown(text: str) -> Markup:
    from markdown_it import MarkdownIt

    # without HTML in it and without images, which a page of its own may not load
    parser = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
    return Markup(parser.render(text))  # noqa: S704 - HTML in it is escaped


def _value(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return formats.metric(value)
    return texts.shorten(str(value), _LONGEST_VALUE)


def _plots(metadata: Mapping[str, Any]) -> tuple[tuple[str, str, Markup], ...]:
    """The confusion matrix and the ROC curve of KFP's ClassificationMetrics."""
    drawings = []
    matrix = metadata.get("confusionMatrix")
    if matrix:
        names = [spec["displayName"] for spec in matrix["annotationSpecs"]]
        rows = [[int(count) for count in row["row"]] for row in matrix["rows"]]
        caption = f"Confusion matrix of {len(names)} classes"
        drawings.append((caption, "scroll", plots.heatmap(names, rows, label=caption)))
    curve = metadata.get("confidenceMetrics")
    if curve:
        points = sorted((float(p["falsePositiveRate"]), float(p["recall"])) for p in curve)
        # trapezoids
        area = sum((x2 - x1) * (y1 + y2) / 2 for (x1, y1), (x2, y2) in itertools.pairwise(points))
        caption = f"ROC curve, area {formats.metric(area)}"
        line = plots.Series("hits", points)
        drawing = plots.line([line], label=caption, x_name="false positive rate", zero=True)
        drawings.append((caption, "frame", drawing))
    return tuple(drawings)


def _text(uri: str, is_here: bool) -> str:
    """The file's text; ValueError where it is too long to be shown,
    or not on this machine."""
    path = local_path(uri)
    if not is_here or not path.is_file():
        raise ValueError(f"it is not on this machine, but at {uri}")
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"it has more than {formats.size(_MOST_BYTES)}; open {path}")
    return path.read_text(encoding="utf-8", errors="replace")
