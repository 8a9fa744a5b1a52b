"""`rekindle monitor`: checks what serves; checks are kept for pages and for `watch`."""

import datetime as dt
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rekindle import formats
from rekindle.app import champion
from rekindle.app.deploy import log_to
from rekindle.data.window import parse_duration, shift
from rekindle.errors import RequestError
from rekindle.monitor.labels import Label, read_labels
from rekindle.monitor.log import LoggedRows, read_log
from rekindle.monitor.verdict import distinct, expected_accuracy, judge
from rekindle.platforms.local.store import make_home, slug
from rekindle.records import Evidence, Monitored, Signal, write_atomically
from rekindle.registry.models import served_model
from rekindle.serve.messages import ServedModel
from rekindle.spec.deploy import MonitorSpec
from rekindle.spec.model import DataSpec, Spec
from rekindle.tasks import load_task
from rekindle.telemetry import Telemetry

Verdict = Literal["alarm", "quiet", "too_few"]
_MOST_KEPT = 1_000  # checks
_SHARES = ("unknown", "prediction", "accuracy", "confidence", "brightness", "contrast")
_WORDS = {
    "unknown": "unknown words",
    "prediction": "the most frequent class",
    "latency": "the median latency",
}


def check(
    spec: Spec, home: Path, platform: str = "local", now: dt.datetime | None = None
) -> Monitored:
    """Judge what the champion answered within `monitor.window` before `now` (UTC), and
    keep the result. RequestError where nothing is to be logged, or the champion keeps no
    reference."""
    settings = spec.monitor or MonitorSpec()
    log_of_predictions = log_to(spec, home, platform)
    if log_of_predictions is None or spec.data is None:
        raise RequestError(
            "the config has no section `monitor`",
            where="monitor",
            fix="add `monitor: {}`, deploy, and send requests",
        )
    root = log_of_predictions.root
    now = now or dt.datetime.now(dt.UTC)
    window = parse_duration(settings.window)
    start = shift(now, window, back=True)
    start_of_earlier = shift(start, window, back=True)
    model = served_model(champion.registry_of(spec, home), spec.data, spec.task)
    evidence = _evidence_of(model)
    logged = read_log(root, model.name, model.digest, start, now)
    rows = logged.rows
    labels = _labels(spec.task, spec.data, settings, rows, now)
    # the latency of now is compared with that of the window before
    earlier = read_log(root, model.name, model.digest, start_of_earlier, start)
    signals = judge(evidence, rows, labels, settings.min_rows, settings.false_alarms, earlier.rows)
    verdict, reason = _verdict(signals, logged, settings.min_rows, f"{root}/{model.name}")
    p99_seconds = None
    if len(rows):
        p99_seconds = float(np.quantile(rows.column("seconds"), 0.99))
    monitored = Monitored(
        name=spec.name,
        version=model.version,
        at=now.isoformat(timespec="seconds"),
        start=start.isoformat(timespec="seconds"),
        end=now.isoformat(timespec="seconds"),
        verdict=verdict,
        reason=reason,
        signals=signals,
        rows=logged.total,
        different=_different(logged),
        left_out=logged.left_out,
        expected_accuracy=expected_accuracy(evidence, rows),
        p99_seconds=p99_seconds,
    )
    _keep(monitored, home)
    _push(monitored, platform)
    return monitored


def _evidence_of(model: ServedModel) -> Evidence:
    """The evidence of a version, with the rows to compare with.

    RequestError where it has none."""
    evidence = Evidence.read(model.evidence) if model.evidence else None
    if evidence is None or evidence.reference is None:
        raise RequestError(
            f"version {model.version} was registered without rows to compare with",
            where=model.name,
            fix="train it again: what is registered now keeps them",
        )
    return evidence


def _labels(
    task: str, data: DataSpec, settings: MonitorSpec, rows: pa.Table, now: dt.datetime
) -> dict[str, Label]:
    """The labels that have arrived for the rows, by id; none where none are to arrive, or
    where no row has an answer that they could be compared with."""
    if not settings.labels or not len(rows):
        return {}
    # language models answer neither with a class nor with a number
    if not any(rows.column(name).null_count < len(rows) for name in ("label", "value")):
        return {}
    # younger rows may wait for their label, and are not wrong answers
    labelled_until = now
    if settings.label_delay:
        labelled_until = shift(now, parse_duration(settings.label_delay), back=True)
    old_rows = rows.filter(pc.less(rows.column("time"), labelled_until))
    ids = set(old_rows.column("id").to_pylist())
    return read_labels(data, load_task(task).modality, settings.labels, ids)


def _keep(monitored: Monitored, home: Path) -> None:
    """Append a check to those of its config under `home`; the oldest go."""
    make_home(home)
    path = home / "monitored" / f"{slug(monitored.name)}.jsonl"
    path.parent.mkdir(exist_ok=True)
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = text.rstrip("\n").split("\n") if text else []
    write_atomically(path, "\n".join([*lines[-_MOST_KEPT:], monitored.to_json(), ""]))


def _push(monitored: Monitored, platform: str) -> None:
    """Give a monitoring system the figures, as telemetry.py is asked to."""
    telemetry = Telemetry(config=monitored.name, platform=platform)
    telemetry.set(
        {
            "monitor.rows": monitored.rows,
            "monitor.alarm": monitored.verdict == "alarm",
            "monitor.expected_accuracy": monitored.expected_accuracy,
            "monitor.p99_seconds": monitored.p99_seconds,
        }
    )
    for signal in monitored.signals:
        telemetry.set(
            {
                "monitor.signal.now": signal.now,
                "monitor.signal.effect": signal.effect,
                "monitor.signal.p_value": signal.p_value,
                "monitor.signal.alarm": signal.alarm,
            },
            signal=signal.name,
        )
    telemetry.close()


def _different(logged: LoggedRows) -> int:
    """How many contents are among the rows; of more rows than are drawn, among those."""
    return len(distinct(logged.rows))


def _verdict(
    signals: tuple[Signal, ...], logged: LoggedRows, min_rows: int, folder: str
) -> tuple[Verdict, str]:
    """The verdict on the signals, and the reason in words."""
    drawn = len(logged.rows)
    different = _different(logged)
    repeats = ""
    if different < drawn:
        repeats = f" (of {drawn:,} rows {different:,} different)"
    alarms = [sentence(signal) for signal in signals if signal.alarm]
    if alarms:
        return "alarm", "; ".join(alarms) + repeats
    if not signals:
        rows = "different rows" if repeats else "rows"
        return "too_few", (
            f"{different:,} {rows} in {folder} are too few to tell: {min_rows:,} are needed"
            f"{repeats}"
        )
    return "quiet", f"{len(signals)} signals are as they were before{repeats}"


def sentence(signal: Signal) -> str:
    """What a signal found, in words."""
    rows = "rows"
    shown: Callable[[float], str] = formats.metric
    if signal.name == "latency":
        rows = "requests"
        shown = formats.seconds
    elif signal.name.partition(":")[0] in _SHARES:
        shown = "{:.1%}".format
    name = _WORDS.get(signal.name, signal.name)
    change = f"from {shown(signal.before)} to {shown(signal.now)}"
    return f"{name} went {change} ({signal.rows:,} {rows}, p = {signal.p_value:.2g})"
