"""What tests share with platforms/sagemaker/test_execution.py."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from rekindle.ir.compile import compile_function
from rekindle.ir.read.pipeline import read
from tests.platforms.local.runs import left_by, run
from tests.servers.aws.container import read as read_object
from tests.servers.aws.sagemaker import Execution


def what_came_of_it(execution: Execution, s3: Any) -> dict[str, Any]:
    """Parameters and artifacts by job, the artifacts as schema, metadata and what is in them."""
    found = {}
    for name in execution.jobs:
        result = execution.result(name, s3)
        if "skipped" in result:
            continue
        outputs = execution.jobs[name].outputs
        artifacts = {
            n: [a["schema_title"], a["metadata"], stored_content(s3, f"{outputs[n]}/data")]
            for n, a in result["artifacts"].items()
        }
        found[name] = [result["parameters"], artifacts]
    return found


def stored_content(s3: Any, uri: str) -> dict[str, str]:
    """What `content` says, of what is in S3."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    names = [
        found["Key"] for found in s3.list_objects_v2(Bucket=bucket, Prefix=key).get("Contents", ())
    ]
    return {
        name.removeprefix(key).strip("/") or ".": hashlib.sha256(
            read_object(s3, f"s3://{bucket}/{name}")
        ).hexdigest()
        for name in names
    }


def what_came_of_it_here(home: Path, pipeline: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    left = left_by(run(read(compile_function(pipeline)), home, arguments))
    return {name.replace("/", "-"): outcome for name, outcome in left.items()}
