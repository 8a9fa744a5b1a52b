"""What ran: the steps on a timeline, and for a run that did not succeed which step to
look at, with its last words."""

import json
import math
import os
from pathlib import Path
from urllib.parse import quote

from rekindle import formats
from rekindle.records import RunRecord, StepRecord
from rekindle.report import texts, verdicts
from rekindle.report.drawing import Axis, time_axis
from rekindle.report.readable_log import lines_of

_TAIL_BYTES = 32_768  # of a log, which may have gigabytes
_TAIL_LINES = 40
_LONGEST_VALUE = 600

Output = tuple[str, str, str]  # its name, what it is, its value
# a step, its state in a word, its start and length in seconds, its outputs, and the link
# to its log
Row = tuple[StepRecord, str, tuple[float, float] | None, list[Output], str]
# a step that failed or was stopped, its error, the end of its log, where that is, and
# whether lines before it are left out
Failure = tuple[StepRecord, str, str, str, bool]


def timeline(run: RunRecord, folder: Path) -> tuple[Axis, list[Row]]:
    """The ruler of the run whose folder is `folder`, and its steps."""
    begin = formats.instant(run.started_at)
    starts: list[float | None] = []  # seconds from there
    ends = [run.seconds]
    for step in run.steps:
        start = None
        moment = formats.instant(step.started_at)
        if begin and moment:
            start = max((moment - begin).total_seconds(), 0.0)
            ends.append(start + (step.seconds or 0))
        starts.append(start)
    scale = time_axis(max((end for end in ends if math.isfinite(end)), default=0.0))
    pairs = zip(run.steps, starts, strict=True)
    return scale, [_row(step, start, scale, folder) for step, start in pairs]


def failures(run: RunRecord, folder: Path) -> list[Failure]:
    """What went wrong, step by step; empty for a run that succeeded."""
    if run.status == "succeeded":
        return []
    failures = []
    for step in verdicts.failed_steps(run):
        name = step.failed_log or step.log
        log = ""
        tail = ""
        left_out = False
        if name:
            path = folder / name
            log = str(path)
            tail, left_out = last_lines(path)
        # an error may repeat what a step printed, colours and passwords included
        error = texts.without_assignments(texts.plain(step.error))
        failures.append((step, error, tail, log, left_out))
    return failures


def run_error(run: RunRecord, failures: list[Failure]) -> str:
    """The error of the run, unless it only repeats that of a step."""
    text = texts.without_assignments(texts.plain(run.error))
    if any(error and error in text for _, error, *_ in failures):
        return ""
    return text


def last_lines(path: Path) -> tuple[str, bool]:
    """The readable end of a log's last 32 kB,
    and whether something before it is left out."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - _TAIL_BYTES, 0))
            text = file.read(_TAIL_BYTES).decode("utf-8", "replace")
    except OSError:
        return "", False
    lines = [line.text for line in lines_of([texts.plain(text).rstrip()])]
    is_cut = size > _TAIL_BYTES
    last = lines[-_TAIL_LINES:]
    if is_cut and len(lines) > 1:
        # the first line is the end of one
        last = lines[1:][-_TAIL_LINES:]
    left_out = is_cut or len(last) < len(lines)
    return texts.without_assignments("\n".join(last)), left_out


def _row(step: StepRecord, start: float | None, scale: Axis, folder: Path) -> Row:
    """A step as the timeline shows it."""
    state = "cached" if step.cached and step.status == "succeeded" else step.status
    span = None
    if start is not None and step.status not in ("pending", "skipped"):
        # a step that has not ended lasts until the end of the ruler
        seconds = max(scale.high - start, 0.0) if step.seconds is None else step.seconds
        span = (start, seconds)
    link = ""
    if step.log:
        log = folder / step.log
        # pages link to nothing outside of the run's folder
        if log.is_file() and log.is_relative_to(folder):
            link = quote(log.relative_to(folder).as_posix())
    return step, state, span, _outputs(step), link


def _outputs(step: StepRecord) -> list[Output]:
    """Parameters, and artifacts with what they say of themselves."""
    outputs = [(name, "parameter", _value(value)) for name, value in step.parameters.items()]
    for name, artifact in step.artifacts.items():
        text = artifact.uri
        metadata = {key: value for key, value in artifact.metadata.items() if key != "record"}
        if metadata:
            text += f"  {_value(metadata)}"
        outputs.append((name, artifact.schema_title.rpartition(".")[2], text))
    return outputs


def _value(value: object) -> str:
    text = value
    if not isinstance(text, str):
        text = json.dumps(value, ensure_ascii=False, default=str)
    return texts.shorten(text, _LONGEST_VALUE)
