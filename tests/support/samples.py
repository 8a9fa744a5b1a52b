"""KFP's own sample pipelines, compiled: those in the folder that KFP_SAMPLES names (`make conformance
SAMPLES=...`), else those that lie beside the checkout. Tests that need them skip without."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_BESIDE = Path(__file__).parents[3] / "shared" / "kfp-corpus"
SAMPLES = Path(os.environ.get("KFP_SAMPLES") or _BESIDE)
COUNT = 98  # of those that tests name


def files() -> list[Path]:
    """The samples in order."""
    return sorted(f for f in SAMPLES.rglob("*") if f.suffix in (".yaml", ".json"))


needs_samples = pytest.mark.skipif(
    not SAMPLES.exists(), reason="there are no KFP samples: KFP_SAMPLES names a folder of them"
)
needs_these_samples = pytest.mark.skipif(
    len(files()) != COUNT, reason=f"the {COUNT} KFP samples that this test names are not here"
)
