"""The parity report: how each platform carries what each step of a pipeline uses."""

from collections.abc import Mapping, Sequence
from typing import Any

from rekindle.catalog.features import Feature
from rekindle.ir.features import uses
from rekindle.ir.graph import Graph
from rekindle.platforms.feature_checks import carried_on, row_of


def as_markdown(
    graph: Graph, platforms: Sequence[str], arguments: Mapping[str, Any] | None = None
) -> str:
    """A table of step x platform, for the `arguments` of a run if there are any, then what is
    behind each word that is not `native`."""
    rows: dict[str, list[Feature]] = {leaf.path: [] for leaf in graph.leaves()}
    for use in uses(graph, arguments):
        rows.setdefault(use.path or "(the pipeline)", []).append(row_of(use))
    lines = [
        f"# {graph.name}: how each platform carries it",
        "",
        f"| step | {' | '.join(platforms)} |",
        "|---" * (len(platforms) + 1) + "|",
    ]
    for path, features in rows.items():
        cells = [_cell(features, platform) for platform in platforms]
        lines.append(f"| {path} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_reasons(rows, platforms)]) + "\n"


def _cell(features: Sequence[Feature], platform: str) -> str:
    """The features that are not native there, or `native`."""
    said = [
        f"{carried.verdict}: {feature.what}"
        for feature in features
        if (carried := carried_on(feature, platform)).verdict != "native"
    ]
    return "; ".join(said) or "native"


def _reasons(rows: dict[str, list[Feature]], platforms: Sequence[str]) -> list[str]:
    found = [
        f"- {feature.what}, {platform}: {carried.verdict}, {carried.how}"
        for features in rows.values()
        for feature in features
        for platform in platforms
        if (carried := carried_on(feature, platform)).how
    ]
    return list(dict.fromkeys(found))
