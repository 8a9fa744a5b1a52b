"""Runs that went wrong or that nobody foresaw: failed, killed, hostile, without records, empty.

`python -m tests.report.mishaps DIR` writes all runs below DIR with their cards, for a look.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

from rekindle.errors import Problem
from rekindle.records import (
    ArtifactRecord,
    Check,
    ClassResult,
    Comparison,
    Evidence,
    Ignored,
    RunRecord,
    Slice,
    StepRecord,
)
from tests.report.homes import (
    Home,
    began,
    bins,
    by_class,
    confusion,
    curve,
    fingerprint,
    manifest,
    registration,
    spec,
    steps,
    training,
)
from tests.report.runs import promoted_digits, refused_reviews

HOSTILE = (
    '"><script>window.pwned = 1</script>'
    '<img src="https://evil.example/x.png" onerror="window.pwned=1">'
)
TOKEN = "hf_" + "aB3dE6gH9j" * 3
LOG = (
    "\x1b[32mINFO\x1b[0m rank 0: resuming from nothing, step 0\n"
    + "\rstep 10 loss 2.31\rstep 20 loss 2.11\rstep 30 loss nan\n"
    + "".join(f"INFO rank {i % 2}: step {i} of 300\n" for i in range(60))
    + f"WARNING pulling with token={TOKEN} from https://ada:hunter2secret@registry.example/v2\n"
    + 'Traceback (most recent call last):\n  File "/work/rekindle/train/loop.py", line 88, in fit\n'
    + "RuntimeError: <b>loss</b> is not a number at step 30\n"
)


def failed(home: Home, run_id: str = "20261121-111500-digits-e5f6") -> RunRecord:
    """Training diverged: the history holds NaN, later steps never began."""
    rows = curve(40, 2.31, 0.4, 3.0, 2900)
    rows = [
        row.model_copy(update={"loss": math.nan, "grad_norm": math.inf}) if row.step >= 30 else row
        for row in rows
    ]
    artifacts = {
        "fingerprint": home.artifact(
            run_id, "fingerprint", "fingerprint", fingerprint("sklearn:digits")
        ),
        "finetune": home.artifact(
            run_id,
            "finetune",
            "training",
            training("sklearn:digits", "image_classification", 40, 1437, 421_642),
        ),
    }
    home.history(run_id, rows)
    error = str(Problem("the loss is not a number at step 30", "train.lr = 3.0", "lower train.lr"))
    done = steps(
        home,
        run_id,
        artifacts,
        {"fingerprint": 1.4, "ingest": 2.9, "validate": 0.4, "shard": 2.2, "finetune": 12.0},
        finetune={
            "status": "failed",
            "attempts": 3,
            "error": error,
            "reason": "exit code 1 after 3 attempts",
        },
    )
    home.log(run_id, "finetune", LOG)
    waiting = tuple(
        StepRecord(name=name, status="skipped", reason="an earlier step failed")
        for name in ("evaluate", "register")
    )
    return home.run(
        run_id=run_id,
        name="digits",
        status="failed",
        started_at=began(run_id),
        seconds=19.4,
        command="rekindle run configs/digits.yaml --set train.lr=3",
        spec=spec("digits", "image_classification", "sklearn:digits"),
        steps=(*done, *waiting),
        error=f"step finetune failed: {error}",
    )


def killed(home: Home, run_id: str = "20261121-121500-digits-9a9a") -> RunRecord:
    """kill -9 of the whole tree: the record still says running."""
    done = steps(
        home,
        run_id,
        {},
        {"fingerprint": 1.4, "finetune": 0.0},
        finetune={"status": "running", "seconds": None},
    )
    return home.run(
        run_id=run_id,
        name="digits",
        status="running",
        started_at=began(run_id),
        seconds=8.0,
        command="rekindle run configs/digits.yaml",
        steps=done,
    )


def hostile(home: Home, run_id: str = "20261121-131500-hostile-0666") -> RunRecord:
    """Everything a user controls holds HTML, right-to-left marks or 300 letters; 24 classes."""
    long = "x" * 300
    labels = (HOSTILE, long, "\u202egnp.exe", *(f"class with a name {i}" for i in range(21)))
    evidence = Evidence(
        run_key=HOSTILE,
        promote=False,
        reason=HOSTILE,
        checks=(
            Check(name=HOSTILE, passed=False, detail=long, value=math.nan, threshold=math.inf),
        ),
        metrics={"accuracy": math.nan, HOSTILE: 0.5},
        champion_version=HOSTILE,
        champion_metrics={"accuracy": 0.5},
        comparison=Comparison(
            metric=HOSTILE,
            estimate=math.nan,
            lower=-0.1,
            upper=0.1,
            confidence=0.95,
            resamples=2,
            seed=0,
        ),
        labels=labels,
        confusion=confusion(24, 30, 0.7),
        classes=(
            *by_class(labels, confusion(24, 30, 0.7), champion_f1=math.nan),
            ClassResult(label=HOSTILE, rows=5, predicted=0, recall=0.0, f1=0.0),
        ),
        calibration=bins(0.0),
        slices=tuple(
            Slice(column=HOSTILE, value=label, rows=5, candidate={"accuracy": 0.5})
            for label in labels
        ),
        rows=720,
        examples=long,
    )
    shards = manifest(HOSTILE, HOSTILE, labels, {HOSTILE: 1000, "test": 0}, window=HOSTILE)
    artifacts = {
        "shard": home.artifact(run_id, "shard", "shards", shards),
        "evaluate": home.artifact(run_id, "evaluate", "evidence", evidence, note=HOSTILE),
        "register": home.artifact(
            run_id,
            "register",
            "registration",
            registration(HOSTILE, HOSTILE, "refused", (HOSTILE,), **{HOSTILE: long}),
        ),
    }
    ran = steps(
        home,
        run_id,
        artifacts,
        {"shard": 1, "evaluate": 2, f"{long}/register": 1},
        evaluate={
            "reason": HOSTILE,
            "parameters": {HOSTILE: HOSTILE, "secret": {"uri": "s3://ada:hunter2secret@bucket"}},
        },
    )
    return home.run(
        run_id=run_id,
        name=f"{HOSTILE}{long}",
        status="succeeded",
        started_at=HOSTILE,
        seconds=math.inf,
        config=HOSTILE,
        command=f"rekindle run '{HOSTILE}' {long}",
        spec={"name": HOSTILE, "nested": [HOSTILE, {long: HOSTILE}]},
        steps=ran,
        ignored=(Ignored(what=HOSTILE), Ignored(what=long)),
    )


def own_pipeline(home: Home, run_id: str = "20261121-141500-hello-1111") -> RunRecord:
    """Somebody's own pipeline: no records of ours, parameters and a metrics artifact."""
    artifact = ArtifactRecord(
        uri="/nowhere/metrics", schema_title="system.Metrics", metadata={"rmse": 0.31}
    )
    done = steps(
        home,
        run_id,
        {"fit": artifact},
        {"load": 1.0, "fit": 3.0},
        load={"parameters": {"rows": 120}},
    )
    return home.run(
        run_id=run_id,
        name="hello",
        status="succeeded",
        started_at=began(run_id),
        seconds=5.0,
        arguments={"rows": 120},
        steps=done,
    )


def artifacts(home: Home, run_id: str = "20261121-143000-shows-1212") -> RunRecord:
    """A pipeline of a user's own whose steps show more than they should."""
    folder = home.root / "artifacts" / "shows"
    folder.mkdir(parents=True)
    page = "<style>h1 { color: teal }</style><h1>Errors</h1><img src='https://evil.example/x.png'>"
    (folder / "page").write_text(f"{page}<script>document.body.innerHTML = 'pwned'</script>")
    text = "# Notes\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n<b onclick=pwned()>raw</b> [go](javascript:pwned())"
    (folder / "text").write_text(f"{text} ![x](https://evil.example/y.png)")
    (folder / "long").write_bytes(b"#" * 2_000_001)
    matrix = {
        "annotationSpecs": [{"displayName": "cat"}, {"displayName": "dog"}],
        "rows": [{"row": [8, 2]}, {"row": [1, 9]}],
    }
    curve = [
        {"confidenceThreshold": t, "falsePositiveRate": x, "recall": y}
        for t, x, y in ((1, 0, 0), (0.5, 0.2, 0.8), (0, 1, 1))
    ]
    shown = {
        "page": ("HTML", {}),
        "text": ("Markdown", {}),
        "long": ("Markdown", {}),
        "gone": ("HTML", {}),
        "quality": ("Metrics", {"auc": 0.9, "name": "<i>best</i>"}),
        "classes": (
            "ClassificationMetrics",
            {"confusionMatrix": matrix, "confidenceMetrics": curve},
        ),
        "broken": ("ClassificationMetrics", {"confusionMatrix": {"rows": 3}}),
    }
    records = {
        name: ArtifactRecord(
            uri=str(folder / name), schema_title=f"system.{kind}", metadata=metadata
        )
        for name, (kind, metadata) in shown.items()
    }
    done = steps(home, run_id, {}, {"judge": 1.0}, judge={"artifacts": records})
    return home.run(
        run_id=run_id,
        name="shows",
        status="succeeded",
        started_at=began(run_id),
        seconds=2.0,
        steps=done,
    )


def empty(home: Home, run_id: str = "20261121-150000-nothing-2222") -> RunRecord:
    """A run that ended before its first step."""
    return home.run(run_id=run_id, name="nothing", status="cancelled", started_at="")


def build(root: Path) -> dict[str, RunRecord]:
    """All runs, and a damaged run.json, in one home."""
    home = Home(root)
    makers = (
        promoted_digits,
        refused_reviews,
        failed,
        killed,
        hostile,
        own_pipeline,
        artifacts,
        empty,
    )
    runs = {make.__name__: make(home) for make in makers}
    for i, accuracy in enumerate((0.9784, 0.9833, 0.9889), 2):
        promoted_digits(home, f"2026112{i}-080000-digits-000{i}", accuracy, str(i))
    (root / "runs" / "broken").mkdir()
    (root / "runs" / "broken" / "run.json").write_text(json.dumps({"run_id": 3}))
    return runs


if __name__ == "__main__":
    from rekindle.report.card import render_card
    from rekindle.report.index import render_index

    target = Path(sys.argv[1])
    for run in build(target).values():
        print(render_card(target, run))
    print(render_index(target))
