"""What tests share with launch/test_shim.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def task(folder: Path, command: list[Any], **changes: Any) -> Path:
    """TASK.json for `command` with an output parameter of each type and one artifact."""
    kinds = (
        {"s": "STRING", "n": "NUMBER_INTEGER"} if "kinds" not in changes else changes.pop("kinds")
    )
    content = {
        "source": "",
        "command": command,
        "args": [],
        "env": {},
        "executor_input": {
            "inputs": {"parameterValues": {"word": "a b"}, "artifacts": {}},
            "outputs": {
                "parameters": {n: {"outputFile": str(folder / "out" / n)} for n in kinds},
                "artifacts": {
                    "data": {
                        "artifacts": [
                            {"name": "data", "uri": str(folder / "deep" / "data"), "metadata": {}}
                        ]
                    }
                },
                "outputFile": str(folder / "out" / "executor_output.json"),
            },
        },
        "run": {"pipeline_job_name": "job"},
        "outputs": {
            "parameters": kinds,
            "artifacts": {"data": {"schema_title": "system.Dataset", "schema_version": "0.0.1"}},
        },
        "work": str(folder / "work"),
        "cwd": str(folder),
        "result": str(folder / "result.json"),
        "parent": None,
    }
    file = folder / "task.json"
    file.write_text(json.dumps({**content, **changes}))
    return file
