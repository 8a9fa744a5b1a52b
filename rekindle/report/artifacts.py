"""What the steps of a pipeline show as KFP artifacts: metrics, confusion matrices, ROC curves,
Markdown, and HTML, which gets a frame without scripts and without a network."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from rekindle import formats
from rekindle.records import ArtifactRecord, RunRecord
from rekindle.report import plots, texts
from rekindle.report.collect import local_path

_MOST_BYTES = 2_000_000
_LONGEST_VALUE = 200


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


def shown(run: RunRecord) -> tuple[Shown, ...]:
    """In the order of the steps; those with a record have sections of their own."""
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
