"""The check of the first rows of the data."""

import logging
from collections.abc import Iterator
from pathlib import Path

from rekindle.app.preflight.check import Need, PreflightCheck
from rekindle.app.preflight.files import missing_source
from rekindle.data.glance import classes, first_rows, golden_rows, one_class
from rekindle.errors import Problem, RekindleError
from rekindle.spec.checks import unknown_classes
from rekindle.spec.model import BUILTIN_TASKS, Spec
from rekindle.tasks import load_task
from rekindle.tasks.base import SAME_NUMBER

log = logging.getLogger(__name__)


class FirstRowsCheck(PreflightCheck):
    """What `ingest` would refuse, as far as the first rows show it."""

    name = "first rows of the data"
    need = Need.DATA

    def problems(self, spec: Spec, home: Path) -> list[Problem]:
        return [*first_look(spec, far=True), *_wrong_classes(spec)]


def first_look(spec: Spec, *, far: bool = False) -> list[Problem]:
    """The problems that `ingest` would refuse, as far as the first rows show them.

    `far`: sources elsewhere are read, too."""
    data = spec.data
    reads_rows = spec.pipeline is None and spec.task in BUILTIN_TASKS
    if data is None or not reads_rows:
        return []
    for part in data.parts:
        if any(missing_source(part.source)):
            return []  # the check of files names what is not there
    if data.columns.time is not None and "by" not in data.split.model_fields_set:
        log.warning("training rows lie after test rows: set data.split.by to time, or to hash")
    task = load_task(spec.task)
    try:
        refusal = task.refusals(data, spec.model)
    except RekindleError as error:
        return list(error.problems)
    problems: list[Problem] = []
    for part in data.parts:
        problems += first_rows(part, task.modality, far=far, refusal=refusal)
    if spec.must_pass:
        problems += golden_rows(spec.must_pass, task.modality)
    return problems


def _wrong_classes(spec: Spec) -> Iterator[Problem]:
    """Labels of a small local source that are all the same, and classes that have a
    weight and do not occur in it."""
    data = spec.data
    weights = spec.train.class_weights
    if data is None or data.labels or spec.pipeline is not None or spec.task not in BUILTIN_TASKS:
        return
    task = load_task(spec.task)
    if task.kind.writes:
        return
    labels = classes(data, task.modality)
    if len(labels) == 1 and task.kind.label == "number":
        yield Problem(SAME_NUMBER, "data.columns.target", "name another column")
    elif len(labels) == 1:
        yield from one_class(labels[0])
    if labels and isinstance(weights, dict):
        for path, message, fix in unknown_classes(spec.train, labels):
            yield Problem(message, ".".join(map(str, path)), fix)
