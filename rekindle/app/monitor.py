"""`rekindle monitor`: a check of what serves, kept under the home for pages and for `watch`."""

import datetime as dt
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.compute as pc

from rekindle import formats, monitor
from rekindle.app import champion
from rekindle.app.deploy import log_to
from rekindle.data.window import parse_duration, shift
from rekindle.errors import RequestError
from rekindle.platforms.local.store import make_home, slug
from rekindle.records import Evidence, Monitored, Signal, write_atomically
from rekindle.registry.models import served_model
from rekindle.spec.deploy import MonitorSpec
from rekindle.spec.model import Spec
from rekindle.tasks import load_task
from rekindle.telemetry import Telemetry

_MOST_KEPT = 1_000  # checks
_SHARES = ("unknown", "prediction", "accuracy", "confidence", "brightness", "contrast")


def check(
    spec: Spec, home: Path, platform: str = "local", now: dt.datetime | None = None
) -> Monitored:
    """Judge what the champion answered within `monitor.window` before `now` (UTC), and keep what
    was found. RequestError where nothing is to be logged, or the champion keeps no reference."""
    asked, to = spec.monitor or MonitorSpec(), log_to(spec, home, platform)
    if to is None or spec.data is None:
        fix = "add `monitor: {}`, deploy, and send requests"
        raise RequestError("the config has no section `monitor`", where="monitor", fix=fix)
    now = now or dt.datetime.now(dt.UTC)
    window = parse_duration(asked.window)
    start = shift(now, window, back=True)
    model = served_model(champion.registry_of(spec, home), spec.data, spec.task)
    evidence = Evidence.read(model.evidence) if model.evidence else None
    if evidence is None or evidence.reference is None:
        what = f"version {model.version} was registered without rows to compare with"
        fix = "train it again: what is registered now keeps them"
        raise RequestError(what, where=model.name, fix=fix)
    seen = monitor.seen(to.root, model.name, model.digest, start, now)
    rows, labels = seen.rows, dict[str, monitor.Label]()
    answers = (rows.column(name).null_count < len(rows) for name in ("label", "value"))
    if asked.labels and len(rows) and any(answers):
        young = now
        if asked.label_delay:
            young = shift(now, parse_duration(asked.label_delay), back=True)
        old = rows.filter(pc.less(rows.column("time"), young))
        modality, ids = load_task(spec.task).modality, {*old.column("id").to_pylist()}
        labels = monitor.labels(spec.data, modality, asked.labels, ids)
    begin = shift(start, window, back=True)
    earlier = monitor.seen(to.root, model.name, model.digest, begin, start)
    signals = monitor.judge(
        evidence, rows, labels, asked.min_rows, asked.false_alarms, earlier.rows
    )
    found = Monitored(
        name=spec.name,
        version=model.version,
        at=now.isoformat(timespec="seconds"),
        start=start.isoformat(timespec="seconds"),
        end=now.isoformat(timespec="seconds"),
        **_said(signals, seen, asked.min_rows, f"{to.root}/{model.name}"),
        signals=signals,
        rows=seen.total,
        different=_different(seen),
        left_out=seen.left_out,
        expected_accuracy=monitor.expected_accuracy(evidence, rows),
        p99_seconds=float(np.quantile(rows.column("seconds"), 0.99)) if len(rows) else None,
    )
    make_home(home)
    file = home / "monitored" / f"{slug(spec.name)}.jsonl"
    file.parent.mkdir(exist_ok=True)
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    before = text.rstrip("\n").split("\n") if text else []
    write_atomically(file, "\n".join([*before[-_MOST_KEPT:], found.to_json(), ""]))
    _push(found, platform)
    return found


def _push(found: Monitored, platform: str) -> None:
    """Give a monitoring system the figures, as telemetry.py is asked to."""
    telemetry = Telemetry(config=found.name, platform=platform)
    telemetry.set(
        {
            "monitor.rows": found.rows,
            "monitor.alarm": found.verdict == "alarm",
            "monitor.expected_accuracy": found.expected_accuracy,
            "monitor.p99_seconds": found.p99_seconds,
        }
    )
    for one in found.signals:
        figures = {"now": one.now, "effect": one.effect, "p_value": one.p_value}
        named = {f"monitor.signal.{name}": value for name, value in figures.items()}
        telemetry.set({**named, "monitor.signal.alarm": one.alarm}, signal=one.name)
    telemetry.close()


def _different(seen: monitor.Seen) -> int:
    """How many contents are among the rows; of more rows than are drawn, among those."""
    return len(monitor.distinct(seen.rows))


def _said(
    signals: tuple[Signal, ...], seen: monitor.Seen, least: int, place: str
) -> dict[str, str]:
    counted, drawn = _different(seen), len(seen.rows)
    repeats = f" (of {drawn:,} rows {counted:,} different)" if counted < drawn else ""
    alarms = [one for one in signals if one.alarm]
    if alarms:
        return {"verdict": "alarm", "reason": "; ".join(map(sentence, alarms)) + repeats}
    if not signals:
        different = "different rows" if repeats else "rows"
        reason = f"{counted:,} {different} in {place} are too few to tell: {least:,} are needed"
        return {"verdict": "too_few", "reason": reason + repeats}
    reason = f"{len(signals)} signals are as they were before{repeats}"
    return {"verdict": "quiet", "reason": reason}


def sentence(one: Signal) -> str:
    """What a signal says, in words."""
    is_share = one.name.partition(":")[0] in _SHARES
    shown: Callable[[float], str] = "{:.1%}".format if is_share else formats.metric
    rows, shown = ("requests", formats.seconds) if one.name == "latency" else ("rows", shown)
    before, now = map(shown, (one.before, one.now))
    words = {
        "unknown": "unknown words",
        "prediction": "the most frequent class",
        "latency": "the median latency",
    }
    what = words.get(one.name, one.name)
    return f"{what} went from {before} to {now} ({one.rows:,} {rows}, p = {one.p_value:.2g})"
