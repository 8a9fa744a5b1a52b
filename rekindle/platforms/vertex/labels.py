"""The mark of a submission as labels of its PipelineJob, by which it is found again.

A label holds up to 63 of a-z, 0-9, - and _; what does not fit stands there as its digest. The
service hands a run's labels to the jobs of its steps, so catalog/vertex.yaml counts them.

Authority: cloud.google.com/vertex-ai/docs/general/labels."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from rekindle.platforms.submission import RunTag, digest_of

_FITS = re.compile(r"[a-z0-9_-]{1,63}")
_KEYS = {"run_id": "rekindle-run", "definition": "rekindle-definition", "token": "rekindle-token"}
PRESENT = f"labels.{_KEYS['run_id']}:*"  # a filter


def labels_of(mark: RunTag) -> dict[str, str]:
    """The labels of a run with this mark."""
    values = dataclasses.asdict(mark)
    return {
        key: values[name] if _FITS.fullmatch(values[name]) else digest_of({values[name]: b""})
        for name, key in _KEYS.items()
    }


def mark_of(labels: Mapping[str, str]) -> RunTag | None:
    """The mark that labels hold; None where rekindle set none."""
    if not all(key in labels for key in _KEYS.values()):
        return None
    return RunTag(**{name: labels[key] for name, key in _KEYS.items()})
