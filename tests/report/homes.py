"""Pieces of a home as real runs leave it on disk, built with the record classes."""

from __future__ import annotations

import datetime as dt
import hashlib
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rekindle.objectives.classes.scores import class_result
from rekindle.records import (
    RECORD_FILES,
    ArtifactRecord,
    CalibrationBin,
    ClassResult,
    Fingerprint,
    HistoryRow,
    Record,
    Registration,
    RunRecord,
    ShardFile,
    ShardManifest,
    StepRecord,
    TrainingSummary,
)

VERSIONS = {
    "rekindle": "0.1.0",
    "torch": "2.9.1",
    "mlflow": "3.6.0",
    "kfp": "2.15.2",
    "python": "3.11.2",
}


def began(run_id: str, seconds: float = 0.0) -> str:
    """The start of a run by its id, in ISO 8601, and so many seconds after it."""
    start = dt.datetime.strptime(run_id[:15], "%Y%m%d-%H%M%S").replace(tzinfo=dt.UTC)
    return (start + dt.timedelta(seconds=seconds)).isoformat()


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Home:
    """Writes runs as the local platform does: artifacts in the run's folder, `run.json` last."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def artifact(
        self, run_id: str, step: str, kind: str, record: Record, **metadata: Any
    ) -> ArtifactRecord:
        folder = self.root / "runs" / run_id / "artifacts" / step
        record.write(folder / RECORD_FILES[kind])
        return ArtifactRecord(
            uri=str(folder), schema_title="system.Dataset", metadata={"record": kind, **metadata}
        )

    def history(self, run_id: str, rows: list[HistoryRow]) -> None:
        path = self.root / "runs" / run_id / "artifacts" / "finetune" / "history.jsonl"
        path.write_text("".join(row.model_dump_json() + "\n" for row in rows), encoding="utf-8")

    def log(self, run_id: str, step: str, text: str) -> str:
        path = self.root / "runs" / run_id / "logs" / f"{step}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return f"logs/{step}.log"

    def run(self, **fields: Any) -> RunRecord:
        run = RunRecord(platform="local", versions=VERSIONS, **fields)
        run.write(self.root / "runs" / run.run_id / "run.json")
        return run


def spec(name: str, task: str, source: str, **gate: Any) -> dict[str, Any]:
    return {
        "name": name,
        "task": task,
        "data": {
            "source": source,
            "format": "auto",
            "split": {"by": "hash", "train": 0.8, "validation": 0.1},
        },
        "model": {"source": {"channels": [32, 64], "hidden": 128}, "init_from": "base"},
        "train": {"epochs": 12, "global_batch_size": 64, "lr": 0.003, "clip_norm": 1.0, "seed": 0},
        "evaluate": {
            "floor": {"accuracy": 0.9},
            "gate": {
                "metric": "accuracy",
                "min_delta": 0.005,
                "confidence": 0.95,
                "min_slice_size": 30,
                **gate,
            },
        },
        "register": {"model_name": name, "approval": "auto"},
    }


def curve(
    steps: int, start: float, end: float, peak: float, rate: float, seed: int = 0
) -> list[HistoryRow]:
    """A history that looks like one: falling noisy loss, warm-up and cosine, slow first steps."""
    noise = random.Random(seed)
    rows = []
    for step in range(1, steps + 1):
        t = step / steps
        loss = (end + (start - end) * math.exp(-5.5 * t)) * math.exp(noise.gauss(0, 0.16))
        warm = min(1.0, step / max(1, round(0.05 * steps)))
        checked = step % max(1, steps // 12) == 0
        rows.append(
            HistoryRow(
                step=step,
                epoch=12 * t,
                loss=loss,
                lr=peak * warm * 0.5 * (1 + math.cos(math.pi * t)),
                grad_norm=abs(noise.gauss(0.4 + 2.2 * math.exp(-6 * t), 0.22)),
                samples_per_second=(rate if step > 2 else rate / 4) * (1 + noise.gauss(0, 0.05)),
                validation_loss=(end * 1.5 + (start - end) * math.exp(-5 * t)) if checked else None,
                validation_accuracy=0.985 - 0.6 * math.exp(-6 * t) if checked else None,
            )
        )
    return rows


def by_class(
    labels: tuple[str, ...], counts: tuple[tuple[int, ...], ...], champion_f1: float | None = None
) -> tuple[ClassResult, ...]:
    """The results of classes with these counts; a champion was equally good at each."""
    predicted = [sum(row[i] for row in counts) for i in range(len(labels))]
    found = [
        class_result(label, counts[i][i], predicted[i], sum(counts[i]))
        for i, label in enumerate(labels)
    ]
    return tuple(part.model_copy(update={"champion_f1": champion_f1}) for part in found)


def confusion(n: int, per_class: int, hit: float, seed: int = 1) -> tuple[tuple[int, ...], ...]:
    noise = random.Random(seed)
    rows = []
    for i in range(n):
        row = [0] * n
        for _ in range(per_class + noise.randrange(-3, 4)):
            row[
                i
                if noise.random() < hit
                else noise.choice([(i + 1) % n, (i * 3 + 1) % n, noise.randrange(n)])
            ] += 1
        rows.append(tuple(row))
    return tuple(rows)


def bins(bias: float) -> tuple[CalibrationBin, ...]:
    shares = (0, 0, 3, 6, 9, 11, 14, 19, 31, 87)
    return tuple(
        CalibrationBin(
            lower=i / 10,
            upper=(i + 1) / 10,
            rows=rows,
            confidence=(i + 0.5) / 10,
            accuracy=min(1.0, max(0.0, (i + 0.5) / 10 - bias + 0.03 * math.sin(i))),
        )
        for i, rows in enumerate(shares)
    )


def manifest(
    task: str, source: str, labels: tuple[str, ...], rows: Mapping[str, int], **more: Any
) -> ShardManifest:
    noise = random.Random(3)
    by_class: dict[str, dict[str, int]] = {}
    for split, total in rows.items():
        weights = [0.6 + noise.random() for _ in labels]
        by_class[split] = {
            name: round(total * w / sum(weights)) for name, w in zip(labels, weights, strict=True)
        }
    shards = tuple(
        ShardFile(
            path=f"{split}-00000.arrow",
            split=split,
            rows=n,
            tokens=more.get("tokens", 0) * n,
            bytes=n * 97,
            sha256=digest(split),
        )
        for split, n in rows.items()
    )
    return ShardManifest(
        task=task,
        source=source,
        window=more.get("window", ""),
        tokenizer=more.get("tokenizer", ""),
        examples=digest(source + "examples"),
        labels=labels,
        slices=more.get("slices", ()),
        rows=rows,
        class_rows=by_class if labels else {},
        shards=shards,
    )


def steps(
    home: Home,
    run_id: str,
    artifacts: Mapping[str, ArtifactRecord],
    seconds: Mapping[str, float],
    **over: Any,
) -> tuple[StepRecord, ...]:
    """Steps one after the other, in the order of `seconds`; `over` replaces fields of a step."""
    result, clock = [], 1.2
    for name, took in seconds.items():
        last = name.rsplit("/", 1)[-1]
        fields: dict[str, Any] = {
            "name": name,
            "component": last,
            "status": "succeeded",
            "reason": "never cached: it looks at what the source holds now"
            if last == "fingerprint"
            else "no earlier result for these inputs",
            "started_at": began(run_id, clock),
            "seconds": took,
            "attempts": 1,
            "cache_key": digest(name),
            "log": home.log(run_id, last, f"INFO {last} started\nINFO {last} done in {took} s\n"),
            "artifacts": {"output": artifacts[last]} if last in artifacts else {},
        }
        result.append(StepRecord(**{**fields, **over.get(last, {})}))
        clock += took
    return tuple(result)


def fingerprint(source: str, window: str = "", champion: str = "") -> Fingerprint:
    return Fingerprint(
        data=digest(source),
        window=window,
        files=1,
        bytes=288_128,
        run_key=digest(source + "run"),
        work_key=digest(source + "work"),
        init_from="base",
        champion=champion,
    )


def training(source: str, task: str, count: int, rows: int, parameters: int) -> TrainingSummary:
    return TrainingSummary(
        run_key=digest(source + "run"),
        task=task,
        engine="native",
        world_size=2,
        steps=count,
        epochs=12,
        global_batch_size=64,
        seed=0,
        precision="fp32",
        parameters=parameters,
        init_from="base",
        weights_sha256=digest(source + "weights"),
        train_rows=rows,
        validation={"loss": 0.0588, "accuracy": 0.9833},
    )


def registration(
    name: str, version: str, decision: str, aliases: tuple[str, ...], **tags: str
) -> Registration:
    return Registration(
        name=name,
        version=version,
        aliases=aliases,
        created=True,
        decision=decision,  # type: ignore[arg-type]
        tracking_uri="sqlite:////home/ada/digits/.rekindle/mlflow.db",
        tags={
            "code_commit": digest("commit")[:40],
            "config_sha256": digest("config"),
            "rekindle_version": "0.1.0",
            **tags,
        },
    )
