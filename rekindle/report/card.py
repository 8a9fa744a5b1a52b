"""The card of a run: one HTML file that says what happened, what the model is worth, and why it was
promoted or not.

Each section of the template asks one of the modules here for what it shows, and one without a
record is left out. A run that failed opens with the step that failed and how to go on."""

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

_MOST_BYTES = 2_000_000
_LONGEST_VALUE = 200


def render_card(home: Path, run: RunRecord) -> Path:
    """Writes `home/runs/<run_id>/card.html`; the same records give the same bytes."""
    if Path(run.run_id).name != run.run_id or run.run_id in ("", ".", ".."):
        raise RequestError(f"{run.run_id!r} is not a run id", fix="name a folder under runs/")
    folder = home / "runs" / run.run_id
    target = folder / "card.html"
    found, paid = collect(run), ""
    if run.platform != "local":
        with contextlib.suppress(RekindleError):  # `rekindle runs --costs` says what is wrong
            paid = costs.in_words(ledger.Entry.of(run).cost(book(home)))
    text = page.render(
        "card.html.j2",
        run=run,
        found=found,
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
    """What a step shows under one name. `plots` are (caption, CSS class of its box, drawing),
    `html` is a document, `note` why something is not shown."""

    step: str
    name: str
    metrics: tuple[tuple[str, str], ...] = ()
    plots: tuple[tuple[str, str, Markup], ...] = ()
    markdown: Markup | None = None
    html: str = ""
    note: str = ""


def shown_by_steps(run: RunRecord) -> tuple[Shown, ...]:
    """What the steps show as KFP artifacts: metrics, confusion matrices, ROC curves, Markdown, and
    HTML, which gets a frame without scripts and without a network. In the order of the steps; those
    with a record have sections of their own."""
    steps = [s for s in run.steps if not any("record" in a.metadata for a in s.artifacts.values())]
    here = run.platform == "local"  # what a platform says names no file of this machine
    found = (_shown(s.name, name, a, here) for s in steps for name, a in s.artifacts.items())
    return tuple(one for one in found if one is not None)


def _shown(step: str, name: str, artifact: ArtifactRecord, here: bool) -> Shown | None:
    kind = artifact.schema_title.rpartition(".")[2]
    try:
        if kind == "Metrics" and artifact.metadata:
            rows = ((str(key), _value(value)) for key, value in artifact.metadata.items())
            return Shown(step, name, metrics=tuple(rows))
        if kind == "ClassificationMetrics" and artifact.metadata:
            return Shown(step, name, plots=_plots(artifact.metadata))
        if kind == "Markdown":
            from markdown_it import MarkdownIt

            # without HTML in it and without images, which a page of its own may not load
            parser = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
            rendered = parser.render(_text(artifact.uri, here))
            return Shown(step, name, markdown=Markup(rendered))  # noqa: S704 - HTML in it is escaped
        if kind == "HTML":
            return Shown(step, name, html=_text(artifact.uri, here))
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        said = texts.shorten(texts.plain(str(error)), _LONGEST_VALUE)
        return Shown(step, name, note=f"This {kind} cannot be shown: {said}.")
    return None


def _value(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return formats.metric(value)
    return texts.shorten(str(value), _LONGEST_VALUE)


def _plots(metadata: Mapping[str, Any]) -> tuple[tuple[str, str, Markup], ...]:
    drawn = []
    if matrix := metadata.get("confusionMatrix"):
        names = [spec["displayName"] for spec in matrix["annotationSpecs"]]
        rows = [[int(count) for count in row["row"]] for row in matrix["rows"]]
        said = f"Confusion matrix of {len(names)} classes"
        drawn.append((said, "scroll", plots.heatmap(names, rows, label=said)))
    if curve := metadata.get("confidenceMetrics"):
        points = sorted((float(p["falsePositiveRate"]), float(p["recall"])) for p in curve)
        area = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(points))
        said, line = f"ROC curve, area {formats.metric(area)}", plots.Series("hits", points)
        plot = plots.line([line], label=said, x_name="false positive rate", zero=True)
        drawn.append((said, "frame", plot))
    return tuple(drawn)


def _text(uri: str, here: bool) -> str:
    """The file's text; ValueError where it is too long to be shown, or not on this machine."""
    path = local_path(uri)
    if not here or not path.is_file():
        raise ValueError(f"it is not on this machine, but at {uri}")
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"it has more than {formats.size(_MOST_BYTES)}; open {path}")
    return path.read_text(encoding="utf-8", errors="replace")
