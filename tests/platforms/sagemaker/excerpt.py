"""Writes platforms/sagemaker/shapes.json from botocore: the request shapes of the jobs that a pipeline
starts. `make generate` runs it; test_shapes.py looks whether it is fresh."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import botocore
import botocore.session

FILE = Path(__file__).parents[3] / "rekindle" / "platforms" / "sagemaker" / "shapes.json"
REQUESTS = ("CreateProcessingJobRequest", "CreateTrainingJobRequest", "CreateModelPackageInput")
KEPT = ("type", "required", "members", "member", "key", "value", "min", "max", "pattern", "enum")


def excerpt() -> dict[str, Any]:
    """The shapes reachable from REQUESTS, without their documentation."""
    model = botocore.session.get_session().get_service_model("sagemaker")
    raw = model._service_description["shapes"]  # the public classes hide `max` and `pattern`
    found: dict[str, Any] = {}
    pending = list(REQUESTS)
    while pending:
        name = pending.pop()
        if name in found:
            continue
        shape = {key: raw[name][key] for key in KEPT if key in raw[name]}
        if "members" in shape:
            shape["members"] = {n: m["shape"] for n, m in shape["members"].items()}
            pending += shape["members"].values()
        for key in ("member", "key", "value"):
            if key in shape:
                shape[key] = shape[key]["shape"]
                pending.append(shape[key])
        found[name] = shape
    return {
        "source": "botocore's model of SageMaker, 2017-07-24",
        "botocore": botocore.__version__,
        "shapes": dict(sorted(found.items())),
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(excerpt(), sort_keys=True, separators=(",", ":")) + "\n")
