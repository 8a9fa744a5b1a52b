"""A model that keeps a reference, and what a client might have asked it."""

import base64
import dataclasses
from pathlib import Path

import numpy as np

from rekindle.modalities import load_modality
from rekindle.modalities.vocabulary import word_hashes
from rekindle.records import CalibrationBin, ClassResult, Evidence, Reference, Slice
from rekindle.serve.messages import LogTo, ServedModel
from tests.serve import models

COMMON = [f"word{i:02}" for i in range(40)]
NEW = [f"neu{i:02}" for i in range(40)]


def texts(count: int, seed: int, unknown: float = 0.1) -> list[str]:
    """Texts of 5 to 30 words, such a share of which is new."""
    draw = np.random.default_rng(seed)
    return [
        " ".join(
            str(draw.choice(NEW if draw.random() < unknown else COMMON))
            for _ in range(draw.integers(5, 30))
        )
        for _ in range(count)
    ]


def watched(folder: Path, log: Path | str, text: bool = False) -> ServedModel:
    """A classifier of texts with a reference of 300 rows, right in 80 of 100, that logs."""
    model = models.made(folder, "text")
    words = frozenset(word_hashes(COMMON))
    rows = [load_modality("text").signals(one, words) for one in texts(300, seed=1)]
    reference = Reference(
        words=base64.b64encode(np.array(sorted(words), "<u4").tobytes()).decode(),
        inputs={name: tuple(round(row[name], 4) for row in rows) for name in ("length", "unknown")},
        confidence=tuple(np.random.default_rng(2).uniform(0.5, 1, 300)),
    )
    classes = tuple(ClassResult(label=name, rows=100, predicted=100) for name in models.LABELS)
    bins = tuple(
        CalibrationBin(
            lower=lower, upper=lower + 0.5, rows=150, confidence=lower + 0.25, accuracy=accuracy
        )
        for lower, accuracy in ((0.0, 0.5), (0.5, 0.8))
    )
    slices = tuple(
        Slice(column="lang", value=value, rows=150, candidate={"accuracy": 0.8})
        for value in ("de", "fr")
    )
    evidence = Evidence.read(model.evidence).model_copy(
        update={
            "reference": reference,
            "classes": classes,
            "rows": 300,
            "metrics": {"accuracy": 0.8},
            "calibration": bins,
            "slices": slices,
        }
    )
    evidence.write(Path(model.evidence))
    return dataclasses.replace(model, log=LogTo(str(log), "id", text))
