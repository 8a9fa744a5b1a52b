"""Checks of what a config says, wherever it runs."""

import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from rekindle.app.preflight.check import PreflightCheck
from rekindle.app.preflight.files import missing_file
from rekindle.errors import Problem, RequestError, did_you_mean
from rekindle.spec.model import BUILTIN_TASKS, Spec
from rekindle.tasks import load_task

_FEWEST_MODEL_TYPES = 50  # fewer: transformers' tables are written in another way


class TaskCheck(PreflightCheck):
    """What the task refuses of the sections `data` and `model`."""

    name = "task"

    def problems(self, spec: Spec, home: Path) -> Iterator[Problem]:
        if not spec.task:
            return
        if spec.task not in BUILTIN_TASKS:
            yield from missing_file(spec.task.rpartition(":")[0], "task")
            return
        if spec.data is None or spec.train.entrypoint:
            return
        try:
            load_task(spec.task).check(spec.data, spec.model)
        except RequestError as error:
            yield from error.problems


class ArchitectureCheck(PreflightCheck):
    """An inline config whose `model_type` transformers does not know."""

    name = "architecture"

    def problems(self, spec: Spec, home: Path) -> Iterator[Problem]:
        source = spec.model.source
        if not isinstance(source, dict) or "model_type" not in source:
            return
        model_type = source["model_type"]
        known_types = model_types()
        if known_types and model_type not in known_types:
            nearest = did_you_mean(str(model_type), known_types)
            yield Problem(
                f"transformers has no architecture `{model_type}`",
                "model.source.model_type",
                nearest or "see transformers' list of models",
            )


class AdaptersCheck(PreflightCheck):
    """Adapters on a network whose weights nothing has trained."""

    name = "adapters"

    def problems(self, spec: Spec, home: Path) -> Iterator[Problem]:
        model = spec.model
        if model.lora is not None and isinstance(model.source, dict) and model.init_from == "base":
            yield Problem(
                "adapters need trained weights: model.source describes a new network",
                "model.lora",
                "name a pretrained model as model.source or model.init_from, or leave out "
                "model.lora",
            )


@functools.cache
def model_types() -> frozenset[str]:
    """The architectures that transformers' tables name, read as text: importing them
    takes seconds. Empty where transformers is not installed, or has other tables."""
    package = importlib.util.find_spec("transformers")
    if package is None:
        return frozenset()
    texts: list[str] = []
    for folder in package.submodule_search_locations or ():
        tables = Path(folder, "models", "auto").glob("*.py")
        texts += [
            path.read_text(encoding="utf-8", errors="replace")
            for path in tables
            if path.name in ("auto_mappings.py", "configuration_auto.py")
        ]
    pattern = r"[\"']([\w.-]+)[\"'][,:]\s*[\"']\w+Config[\"']"
    names = re.findall(pattern, "\n".join(texts))
    if len(names) <= _FEWEST_MODEL_TYPES:
        return frozenset()
    return frozenset(names)
