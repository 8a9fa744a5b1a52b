"""Whether a pipeline may go to a platform. The feature table decides (the rows of
catalog/features.yaml, with a column in each platform's own features.yaml): a feature that
it refuses is an error with its place in the IR before anything is sent or run, one that
it ignores is listed for the user."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rekindle.catalog.tables import Carried, Feature, feature_rows, lacks_python
from rekindle.errors import Problem, RequestError, SpecError, UnsupportedError, collected
from rekindle.ir.features import Use, uses
from rekindle.ir.graph import Graph, Step
from rekindle.records import Ignored


def admit(
    graph: Graph,
    platform: str,
    honoured: Collection[tuple[str, str]] = (),
    unproven: Collection[str] = (),
    arguments: Mapping[str, Any] | None = None,
    release: str = "",
) -> tuple[Ignored, ...]:
    """What `platform` ignores of the pipeline, run with these `arguments`.

    Raises UnsupportedError with all that it refuses. Neither holds what counts as native
    this time: uses (feature and path of the node) in `honoured`, which the platform can do
    with this config, and features in `unproven`, which the user tries nevertheless.
    `release` is that of the platform (`2.17.0`), which refuses what came later; "" knows
    all."""
    refused: list[Problem] = []
    ignored: dict[str, list[str]] = {}
    for use in uses(graph, arguments):
        row = row_of(use)
        carried = carried_on(row, platform, release)
        if (use.feature, use.path) in honoured or use.feature in unproven:
            continue
        if carried.verdict == "refused":
            refused.append(_refusal(use, row, platform, carried.how))
        elif carried.verdict == "ignored":
            ignored.setdefault(carried.how, []).append(use.path)
    if refused:
        raise UnsupportedError(refused)
    rows = []
    for how, paths in ignored.items():
        steps = dict.fromkeys(path for path in paths if path)  # "" is the pipeline itself
        rows.append(Ignored(what=how, asked_by=tuple(steps)))
    return tuple(rows)


def notices(
    graph: Graph, platform: str, arguments: Mapping[str, Any] | None = None, release: str = ""
) -> tuple[str, ...]:
    """What the platform does with a fault that a step may meet, a sentence for each."""
    steps_by_text: dict[str, list[str]] = {}
    for use in uses(graph, arguments):
        row = row_of(use)
        carried = carried_on(row, platform, release)
        if carried.verdict == "noticed":
            steps = steps_by_text.setdefault(f"{row.what}: {carried.how}", [])
            steps.append(f"`{use.path}`" if use.path else "the pipeline")
    sentences = []
    for text, steps in steps_by_text.items():
        who = ", ".join(dict.fromkeys(steps))
        verb = "use" if len(set(steps)) > 1 else "uses"
        sentences.append(f"{who} {verb} {text}")
    return tuple(sentences)


def lacks(
    graph: Graph,
    platform: str,
    of_place: Iterable[Problem],
    honoured: Collection[tuple[str, str]] = (),
    unproven: Collection[str] = (),
    arguments: Mapping[str, Any] | None = None,
    release: str = "",
) -> list[Problem]:
    """The problems in `of_place`, which are what the config's section lacks.

    If `admit` refuses anything, both are raised together, so that the user sees all."""
    refused: list[Problem] = []
    with collected(refused):
        admit(graph, platform, honoured, unproven, arguments, release)
    if refused:
        raise refusal([*refused, *of_place])
    return list(of_place)


def row_of(use: Use) -> Feature:
    """The table's row of a feature; for one that the table does not have, a row that every
    platform refuses."""
    return feature_rows().get(use.feature, Feature(use.feature, f"`{use.feature}`", {}))


def carried_on(feature: Feature, platform: str, release: str = "") -> Carried:
    """How a `release` of a platform carries a feature: what is not in the table, or came
    with a later one, is refused."""
    carried = feature.on.get(platform, Carried("refused", "rekindle knows nothing of it"))
    if release and carried.since and numbers_of(release) < numbers_of(carried.since):
        how = f"its release {release} does not have it, {carried.since} does"
        return Carried("refused", how, carried.source)
    return carried


def numbers_of(release: str) -> tuple[int, ...]:
    """The numbers of a release, to compare: (2, 17) of `2.17`, and of `2.17.0` too."""
    numbers = [int(part) for part in release.split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def known_secrets(
    graph: Graph, named: Collection[str], gets: Callable[[Step], bool]
) -> set[tuple[str, str]]:
    """For `honoured` of `admit`: the uses of Kubernetes' secrets that a platform without
    them can honour.

    They are those of a step whose secrets all become variables in `named`, for which the
    config names a secret of the platform's own, if the step `gets` these."""
    honoured = set()
    for step in graph.steps():
        if gets(step) and all(secret.env in named for secret in step.secrets):
            honoured.add(("secrets", step.path))
    return honoured


def beyond(platform: str, path: str, where: str, how: str, fix: str) -> Problem:
    """The problem that a pipeline goes beyond a limit of the platform; `path` is that of
    the step, or "" for the pipeline."""
    who = f"`{path}`" if path else "the pipeline"
    message = f"{who} uses {feature_rows()['limits'].what}, which {platform} refuses: {how}"
    return Problem(message, where, fix, UnsupportedError.code)


def python_problems(platform: str, step: Step, image: str) -> Iterator[Problem]:
    """Refusals of an image that is known to lack python3, which rekindle runs in it."""
    if lacks_python(image):
        how = f"{image} has no python3, which rekindle needs in it"
        fix = "add python3 to an image of yours, and name that"
        yield beyond(platform, step.path, step.where, how, fix)


def refusal(problems: Iterable[Problem]) -> RequestError:
    """UnsupportedError if all are limits of the platform, else SpecError."""
    distinct_problems = tuple(dict.fromkeys(problems))
    if all(problem.code == UnsupportedError.code for problem in distinct_problems):
        return UnsupportedError(distinct_problems)
    return SpecError(dataclasses.replace(problem, code="") for problem in distinct_problems)


def _refusal(use: Use, row: Feature, platform: str, why: str) -> Problem:
    who = f"`{use.path}`" if use.path else "the pipeline"
    elsewhere = [name for name, carried in row.on.items() if carried.verdict != "refused"]
    fix = "take it out"
    if elsewhere:
        fix = f"take it out, or run the pipeline on {' or '.join(elsewhere)}"
    message = f"{who} uses {row.what}, which {platform} refuses: {why}"
    return Problem(message, use.where, fix)


def parity_report(graph: Graph, platforms: Sequence[str], arguments: Mapping[str, Any]) -> str:
    """How each platform carries what each step uses, in Markdown: a table of steps and
    platforms, for the `arguments` of a run, then the reason of each verdict in it."""
    rows: dict[str, list[Feature]] = {leaf.path: [] for leaf in graph.leaves()}
    for use in uses(graph, arguments):
        rows.setdefault(use.path or "(the pipeline)", []).append(row_of(use))
    lines = [f"# {graph.name}: how each platform carries it", ""]
    lines += [f"| step | {' | '.join(platforms)} |", "|---" * (len(platforms) + 1) + "|"]
    for path, features in rows.items():
        cells = [_cell(features, platform) for platform in platforms]
        lines.append(f"| {path} | {' | '.join(cells)} |")
    reasons: dict[str, None] = {}  # each once, in order
    for features in rows.values():
        for feature in features:
            for platform in platforms:
                carried = carried_on(feature, platform)
                if carried.how:
                    line = f"- {feature.what}, {platform}: {carried.verdict}, {carried.how}"
                    reasons[line] = None
    return "\n".join([*lines, "", *reasons]) + "\n"


def _cell(features: Sequence[Feature], platform: str) -> str:
    """The features that are not native there, or `native`."""
    exceptions = []
    for feature in features:
        verdict = carried_on(feature, platform).verdict
        if verdict != "native":
            exceptions.append(f"{verdict}: {feature.what}")
    return "; ".join(exceptions) or "native"
