"""What ran: the steps on a timeline, and for a run that did not succeed which step to look at, with
its last words."""

import json
import math
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rekindle import formats
from rekindle.records import RunRecord, StepRecord
from rekindle.report import texts, verdicts
from rekindle.report.drawing import Axis, time_axis
from rekindle.report.readable_log import lines_of

_TAIL_BYTES = 32_768
_TAIL_LINES = 40
_LONGEST_VALUE = 600

Output = tuple[str, str, str]  # its name, what it is, its value
# a step, its state in a word, its start and length in seconds, its outputs, and the link to its log
Row = tuple[StepRecord, str, tuple[float, float] | None, list[Output], str]
# a step that failed or was stopped, its error, the end of its log, where that is, and whether lines
# before it are left out
Failure = tuple[StepRecord, str, str, str, bool]


def timeline(run: RunRecord, folder: Path) -> tuple[Axis, list[Row]]:
    """The ruler of the run whose folder is `folder`, and its steps."""
    begin, starts = formats.instant(run.started_at), list[float | None]()  # seconds from there
    for step in run.steps:
        start = formats.instant(step.started_at)
        starts.append(max((start - begin).total_seconds(), 0.0) if begin and start else None)
    pairs = list(zip(starts, run.steps, strict=True))
    ends = [start + (step.seconds or 0) for start, step in pairs if start is not None]
    scale = time_axis(max((t for t in (run.seconds, *ends) if math.isfinite(t)), default=0.0))
    return scale, [_row(step, start, scale, folder) for start, step in pairs]


def failures(run: RunRecord, folder: Path) -> list[Failure]:
    """What went wrong, step by step; empty for a run that succeeded."""
    found = []
    for step in verdicts.failed_steps(run) if run.status != "succeeded" else ():
        name = step.failed_log or step.log
        log = folder / name if name else None
        tail, left_out = last_lines(log) if log else ("", False)
        error = texts.without_assignments(texts.plain(step.error))
        found.append((step, error, tail, str(log or ""), left_out))
    return found


def run_error(run: RunRecord, failures: list[Failure]) -> str:
    """The error of the run, unless it only repeats that of a step."""
    text = texts.without_assignments(texts.plain(run.error))
    return "" if any(error and error in text for _, error, *_ in failures) else text


def last_lines(path: Path) -> tuple[str, bool]:
    """The readable end of a log's last 32 kB, and whether something before it is left out."""
    try:
        with path.open("rb") as file:
            whole = file.seek(0, os.SEEK_END)
            file.seek(max(whole - _TAIL_BYTES, 0))
            text = file.read(_TAIL_BYTES).decode("utf-8", "replace")
    except OSError:
        return "", False
    lines = [line.text for line in lines_of([texts.plain(text).rstrip()])]
    cut = whole > _TAIL_BYTES and len(lines) > 1  # its first line is the end of one
    kept = lines[int(cut) :][-_TAIL_LINES:]
    left_out = whole > _TAIL_BYTES or len(kept) < len(lines)
    return texts.without_assignments("\n".join(kept)), left_out


def _row(step: StepRecord, start: float | None, scale: Axis, folder: Path) -> Row:
    word = "cached" if step.cached and step.status == "succeeded" else step.status
    span = None
    if start is not None and step.status not in ("pending", "skipped"):
        span = start, max(scale.high - start, 0.0) if step.seconds is None else step.seconds
    log = folder / step.log if step.log else None
    inside = log is not None and log.is_file() and log.is_relative_to(folder)
    link = quote(log.relative_to(folder).as_posix()) if log and inside else ""
    return step, word, span, _outputs(step), link


def _outputs(step: StepRecord) -> list[Output]:
    found = [(name, "parameter", _value(value)) for name, value in step.parameters.items()]
    for name, artifact in step.artifacts.items():
        metadata = {k: v for k, v in artifact.metadata.items() if k != "record"}
        said = f"{artifact.uri}  {_value(metadata)}" if metadata else artifact.uri
        found.append((name, artifact.schema_title.rpartition(".")[2], said))
    return found


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return texts.shorten(text, _LONGEST_VALUE)
