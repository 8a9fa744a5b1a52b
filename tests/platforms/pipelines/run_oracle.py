"""Run cases of same.py, those that are named, under kfp.local in this one process; print IR and outputs as JSON.

kfp.local keeps its settings in a process-wide singleton, hence a process for it alone.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

from kfp import dsl, local

sys.path.insert(0, str(Path(__file__).parent))
from same import CASES, KNOWN_BUGS

from rekindle.ir.compile import compile_function


def plain(value: Any) -> Any:
    if not isinstance(value, dsl.Artifact):
        return [type(value).__name__, value]
    path = Path(value.path)
    files = sorted(p for p in (path.rglob("*") if path.is_dir() else [path]) if p.is_file())
    content = {p.relative_to(path).as_posix(): p.read_text() for p in files}
    return [
        "artifact",
        {"schema": value.schema_title, "metadata": value.metadata, "files": content},
    ]


def main(root: Path, wanted: Collection[str]) -> dict[str, Any]:
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=str(root))
    answers = {}
    for name, (pipeline, arguments, *_) in {**CASES, **KNOWN_BUGS}.items():
        if name not in wanted:
            continue
        given = {
            k: tempfile.mkdtemp(dir=root) if v == "FOLDER" else v for k, v in arguments.items()
        }
        answer = {"ir": compile_function(pipeline), "arguments": arguments, "error": None}
        try:
            outputs = pipeline(**given).outputs
            answer["outputs"] = {key: plain(value) for key, value in outputs.items()}
        except Exception as error:  # noqa: BLE001 - whatever kfp.local raises is the answer
            answer["error"] = str(error)
        answers[name] = answer
    return answers


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(io.StringIO()):
        result = main(Path(sys.argv[1]), sys.argv[2:])
    print(json.dumps(result))
