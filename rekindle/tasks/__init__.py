"""Learning objectives by name; `load_task` also takes a user's `path.py:Class`."""

import importlib
import importlib.util
import sys
from pathlib import Path

from rekindle.errors import RequestError
from rekindle.spec.imports import folders_of
from rekindle.spec.tasks import BUILT_IN_TASKS
from rekindle.tasks.base import Task, TokenTask

TASKS = {name: task.target for name, task in BUILT_IN_TASKS.items()}


def load_task(name: str) -> Task:
    """The task registered under `name`, or a user's `path.py:Class`.
    Raises RequestError."""
    target, _, attribute = TASKS.get(name, name).rpartition(":")
    if name in TASKS:
        module = importlib.import_module(target)
    else:
        path = Path(target)
        if not path.is_file():
            message = f"task `{name}`: file not found: {path}"
            raise RequestError(message, fix=f"use one of {', '.join(TASKS)} or path.py:Class")
        spec = importlib.util.spec_from_file_location(f"rekindle_user_task_{path.stem}", path)
        assert spec is not None
        # modules beside it, as when a pipeline is loaded;
        # last, so that they hide nothing installed
        folders = [str(folder) for folder in folders_of(path.absolute())]
        sys.path += [folder for folder in folders if folder not in sys.path]
        module = importlib.util.module_from_spec(spec)
        # without bytecode beside it, which would change the files of a model
        exec(compile(path.read_bytes(), path, "exec"), module.__dict__)  # noqa: S102 - as an import
    task_class = getattr(module, attribute, None)
    if not (isinstance(task_class, type) and issubclass(task_class, Task)):
        message = f"`{attribute}` in {target or name} is not a task"
        raise RequestError(message, fix="name a subclass of rekindle.tasks.Task, as path.py:Class")
    return task_class()


__all__ = ["TASKS", "Task", "TokenTask", "load_task"]
