"""Run compiled pipelines under kfp.local in this one process; print their outputs as JSON.

    python run_corpus.py ROOT FILE=ARGUMENTS ...

KFP's preambles would install its SDK into this environment, and kfp.local starts them as they are:
whoever starts this puts an empty `pip` before the real one."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import warnings
from pathlib import Path
from typing import Any

from kfp import components, local

sys.path.insert(0, str(Path(__file__).parent))
from run_oracle import plain


def main(root: Path, words: list[str]) -> dict[str, Any]:
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=str(root))
    answers = {}
    for word in words:
        name, _, arguments = word.partition("=")
        try:
            task = components.load_component_from_file(name)(**json.loads(arguments))
            answers[name] = {key: plain(value) for key, value in task.outputs.items()}
        except Exception as error:  # noqa: BLE001 - whatever kfp.local raises is the answer
            answers[name] = str(error)
    return answers


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(io.StringIO()):
        result = main(Path(sys.argv[1]), sys.argv[2:])
    print(json.dumps(result))
