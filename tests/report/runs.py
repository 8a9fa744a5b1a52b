"""Runs that went as they should: a first model that is promoted, a candidate that is refused."""

from __future__ import annotations

import random

from rekindle.records import (
    Check,
    Churn,
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
    digest,
    fingerprint,
    manifest,
    registration,
    spec,
    steps,
    training,
)

COUNTS = ((98, 31, 20), (27, 84, 39), (15, 24, 112))


def promoted_digits(
    home: Home,
    run_id: str = "20261121-090800-digits-a1b2",
    accuracy: float = 0.9778,
    version: str = "1",
) -> RunRecord:
    """The first model of the demo: ten classes, no champion, promoted by the floor alone."""
    labels = tuple(str(i) for i in range(10))
    rows = {"train": 1437, "validation": 180, "test": 180}
    evidence = Evidence(
        run_key=digest("sklearn:digitsrun"),
        promote=True,
        reason=f"Accuracy {accuracy} meets the floor of 0.9, and there is no champion to beat.",
        checks=(
            Check(
                name="floor_accuracy",
                passed=True,
                detail="accuracy is at least the configured floor",
                value=accuracy,
                threshold=0.9,
            ),
            Check(
                name="beats_majority",
                passed=True,
                detail="accuracy is above that of always answering the most frequent class",
                value=accuracy,
                threshold=0.1111,
            ),
            Check(name="finite", passed=True, detail="every metric is a number"),
        ),
        metrics={
            "accuracy": accuracy,
            "macro_f1": 0.9771,
            "log_loss": 0.0812,
            "calibration_error": 0.0143,
        },
        labels=labels,
        confusion=confusion(10, 18, 0.965),
        classes=by_class(labels, confusion(10, 18, 0.965)),
        calibration=bins(0.02),
        rows=180,
        examples=digest("digits test"),
    )
    artifacts = {
        "fingerprint": home.artifact(
            run_id, "fingerprint", "fingerprint", fingerprint("sklearn:digits")
        ),
        "shard": home.artifact(
            run_id,
            "shard",
            "shards",
            manifest("image_classification", "sklearn:digits", labels, rows),
        ),
        "finetune": home.artifact(
            run_id,
            "finetune",
            "training",
            training("sklearn:digits", "image_classification", 276, 1437, 421_642),
        ),
        "evaluate": home.artifact(run_id, "evaluate", "evidence", evidence),
        "promote": home.artifact(
            run_id,
            "promote",
            "registration",
            registration("digits", version, "promoted", ("champion",)),
        ),
    }
    home.history(run_id, curve(276, 2.31, 0.04, 0.003, 2900))
    seconds = {
        "fingerprint": 1.4,
        "ingest": 2.9,
        "validate": 0.4,
        "shard": 2.2,
        "finetune": 21.7,
        "evaluate": 4.8,
        "condition-1/promote": 3.9,
    }
    ran = steps(
        home,
        run_id,
        artifacts,
        seconds,
        ingest={
            "cached": True,
            "seconds": 0.1,
            "reason": "the same inputs and code gave this in run 20261121-085500-digits-77fe",
        },
        evaluate={"parameters": {"promote": True, "accuracy": accuracy}},
    )
    skipped = StepRecord(
        name="condition-2/register",
        component="register",
        status="skipped",
        reason="its condition is false: promote is true",
    )
    return home.run(
        run_id=run_id,
        name="digits",
        status="succeeded",
        started_at=began(run_id),
        seconds=39.6,
        config="configs/digits.yaml",
        command="rekindle run configs/digits.yaml --set train.epochs=12",
        spec=spec("digits", "image_classification", "sklearn:digits"),
        steps=(*ran, skipped),
        ignored=(
            Ignored(
                what="resources.gpus_per_node: 8 is not used here; this machine trains on its CPU."
            ),
        ),
    )


CATEGORIES = (
    "rain jacket",
    "coffee maker",
    "mechanical keyboard",
    "tent",
    "headphones",
    "office chair",
    "blender",
    "running shoes",
    "desk lamp",
    "backpack",
    "water bottle",
    "board game",
    "robot vacuum",
    "garden hose",
    "phone case",
)


def refused_reviews(home: Home, run_id: str = "20261121-101500-reviews-c3d4") -> RunRecord:
    """A candidate that is not clearly better than the champion; 15 slices, a window of months."""
    noise = random.Random(5)
    labels = ("negative", "neutral", "positive")
    parts = tuple(
        Slice(
            column="category",
            value=name,
            rows=8 + noise.randrange(60),
            candidate={"accuracy": round(0.66 + noise.gauss(0, 0.07), 4)},
            champion={"accuracy": round(0.65 + noise.gauss(0, 0.06), 4)},
        )
        for name in CATEGORIES
    ) + tuple(
        Slice(
            column="month",
            value=f"2026-{m:02d}",
            rows=40 + m,
            candidate={"accuracy": 0.69 - 0.01 * m},
            champion={"accuracy": 0.66},
        )
        for m in (7, 8, 9)
    )
    evidence = Evidence(
        run_key=digest("reviewsrun"),
        promote=False,
        reason="The gain in accuracy is not certain: the lower bound -0.0087 is not above 0.005"
        + "".join(f"; accuracy of product={one} falls too far" for one in "abcde"),
        checks=(
            Check(
                name="floor_accuracy",
                passed=True,
                detail="accuracy is at least the configured floor",
                value=0.6733,
                threshold=0.45,
            ),
            Check(
                name="better_than_champion",
                passed=False,
                detail="the lower bound of the paired bootstrap lies above min_delta",
                value=-0.0087,
                threshold=0.005,
            ),
            Check(
                name="slice_drop",
                passed=False,
                detail="no slice of at least 30 rows loses more than this; worst: category=tent",
                value=-0.081,
                threshold=-0.05,
            ),
            Check(
                name="must_pass",
                passed=False,
                detail="2 of 40 rows that must pass do not: row 3 expected `good`, predicted `bad`; "
                "row 17 expected `bad`, predicted `good`",
                value=2,
                threshold=0,
            ),
        ),
        churn=Churn(answers=450, share=0.12, fixed=29, broken=24),
        metrics={
            "accuracy": 0.6733,
            "macro_f1": 0.6689,
            "log_loss": 0.8124,
            "calibration_error": 0.0712,
        },
        champion_version="3",
        champion_metrics={
            "accuracy": 0.6621,
            "macro_f1": 0.6602,
            "log_loss": 0.7991,
            "calibration_error": 0.0633,
        },
        comparison=Comparison(
            metric="accuracy",
            estimate=0.0112,
            lower=-0.0087,
            upper=0.0311,
            confidence=0.95,
            resamples=2000,
            seed=0,
        ),
        labels=labels,
        confusion=COUNTS,
        classes=by_class(labels, COUNTS, champion_f1=0.66),
        calibration=bins(0.09),
        slices=parts,
        rows=450,
        excluded=12,
        examples=digest("reviews test"),
    )
    shards = manifest(
        "text_classification",
        "configs/data/reviews.jsonl",
        labels,
        {"train": 900, "validation": 150, "test": 450},
        window="2026-04-01T00:00:00/2026-10-01T00:00:00",
        tokenizer="wordpiece 4096, trained on this data",
        slices=("category", "month"),
        tokens=31,
    )
    artifacts = {
        "fingerprint": home.artifact(
            run_id,
            "fingerprint",
            "fingerprint",
            fingerprint("reviews", "2026-04-01T00:00:00/2026-10-01T00:00:00", "3"),
        ),
        "shard": home.artifact(run_id, "shard", "shards", shards),
        "finetune": home.artifact(
            run_id,
            "finetune",
            "training",
            training("reviews", "text_classification", 1400, 900, 2_930_435),
        ),
        "evaluate": home.artifact(run_id, "evaluate", "evidence", evidence),
        "register": home.artifact(
            run_id,
            "register",
            "registration",
            registration("reviews", "4", "refused", ("challenger",)),
        ),
    }
    home.history(run_id, curve(1400, 1.1, 0.32, 0.0005, 410, seed=4))
    seconds = {
        "fingerprint": 1.3,
        "ingest": 3.4,
        "validate": 0.6,
        "shard": 9.1,
        "finetune": 171.0,
        "evaluate": 12.2,
        "condition-2/register": 4.4,
    }
    reused = {
        "cached": True,
        "reason": "the same inputs and code gave this result in run 20261120-101500-reviews-0f0f",
    }
    return home.run(
        run_id=run_id,
        name="reviews",
        status="succeeded",
        started_at=began(run_id),
        seconds=204.0,
        config="configs/reviews.yaml",
        command="rekindle run configs/reviews.yaml",
        spec=spec("reviews", "text_classification", "configs/data/reviews.jsonl"),
        steps=steps(home, run_id, artifacts, seconds, finetune={**reused, "seconds": 0.3}),
    )
