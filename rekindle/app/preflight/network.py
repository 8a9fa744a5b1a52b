"""The check of the network that a config describes, or that lies in a folder."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

from rekindle.app.preflight.check import Need, PreflightCheck
from rekindle.app.preflight.files import is_folder
from rekindle.app.preflight.machine import is_installed
from rekindle.errors import Problem, first_line
from rekindle.spec.model import BUILTIN_TASKS, Spec
from rekindle.train.look import Question, look

log = logging.getLogger(__name__)

LOOK_SECONDS = 120


class NetworkCheck(PreflightCheck):
    """The problems of a text task's network and of the checkpoint in a local folder, as
    transformers sees them; none where it is not installed."""

    name = "network"
    need = Need.NETWORK

    def problems(self, spec: Spec, home: Path) -> list[Problem]:
        is_text = spec.task in BUILTIN_TASKS and spec.task != "image_classification"
        if not is_text or spec.data is None or spec.pipeline is not None or spec.train.entrypoint:
            return []
        if not (isinstance(spec.model.source, dict) or is_folder(spec.model.source)):
            return []
        if not all(is_installed(name) for name in ("torch", "transformers", "safetensors")):
            return []
        question = Question(
            task=spec.task, data=spec.data, model=spec.model, engine=spec.train.engine
        )
        try:
            if "torch" in sys.modules:
                return look(question)
            return _look_in_a_process(question)
        except Exception as error:  # noqa: BLE001 - it says nothing of the config
            log.warning("the network was not looked at: %s", first_line(error))
            return []


def _look_in_a_process(question: Question) -> list[Problem]:
    """The same from a process of its own: the control plane loads no torch, which takes
    seconds and memory, except where it is loaded already, as in a notebook."""
    answer = subprocess.run(
        # -P: a file of the working directory may be called like a module
        [sys.executable, "-P", "-m", "rekindle.train.look"],
        input=question.model_dump_json(),
        capture_output=True,
        text=True,
        timeout=LOOK_SECONDS,
        env=look_env(),
    )
    if answer.returncode:
        lines = answer.stderr.strip().splitlines() or [f"it ended with {answer.returncode}"]
        raise RuntimeError(lines[-1])
    # libraries may have printed lines before
    rows = json.loads(answer.stdout.splitlines()[-1])
    return [Problem(row["what"], row["where"], row["fix"]) for row in rows]


def look_env() -> dict[str, str]:
    """The environment of that process: one thread and no network, so that a look takes no
    more than this machine has."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
