"""What a node of a platform's job does around shim.py: packages before it, the task for
it, the result after it.

Standard library only: it runs in any image that has Python, from what the platform's
bundle brings."""

import json
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_EXECUTED = ("source", "command", "args", "env")


def installed(pip: Mapping[str, list[str]]) -> int:
    """The exit code of what KFP's own preamble would do: install what the component
    needs, and KFP's runtime only where the image lacks it."""
    packages = list(pip["needed"])
    if find_spec("kfp") is None:
        packages += pip["runtime"]
    if not packages:
        return 0
    command = [sys.executable, "-m", "pip", "install", "--quiet", *pip["options"], *packages]
    return subprocess.run(command, check=False).returncode


def prepared(
    task: Mapping[str, Any],
    executor_input: Mapping[str, Any],
    facts: Mapping[str, str],
    scratch: Path,
    *,
    leads: bool,
    cwd: Path,
) -> list[str]:
    """The arguments of `shim.main` for a step, whose task is written into `scratch`;
    `facts` stand for placeholders of the run. Only the node that `leads` has outputs."""
    shim_task = {
        **{key: task[key] for key in _EXECUTED},
        "outputs": task["outputs"] if leads else {"parameters": {}, "artifacts": {}},
        "executor_input": executor_input,
        "run": facts,
        "work": str(scratch / "work"),
        "cwd": str(cwd),
        "result": str(scratch / "result.json"),
        "parent": None,
    }
    (scratch / "work").mkdir(parents=True, exist_ok=True)
    (scratch / "task.json").write_text(json.dumps(shim_task), encoding="utf-8")
    return ["", str(scratch / "task.json")]


def left(scratch: Path) -> dict[str, Any]:
    """The result of the step: parameters, artifacts, and `error`; {} if there is none."""
    file = scratch / "result.json"
    if not file.exists():
        return {}
    return json.loads(file.read_text(encoding="utf-8"))  # type: ignore[no-any-return]
