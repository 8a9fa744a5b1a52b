"""rekindle keeps machine-learning models current: one YAML retrains, judges and
registers.

    import rekindle

    spec = rekindle.load("configs/digits.yaml", ["train.epochs=5"])
    rekindle.planned("configs/plan/7b-spot.yaml")
    run = rekindle.run(spec)
    run.metrics, run.gate, run.history
    rekindle.compare(*rekindle.runs()[-2:])
    run = rekindle.submit(spec, platform="sagemaker").wait()
    rekindle.deploy(spec).address, rekindle.champion(spec).version

Importing this imports neither torch nor kfp: a name below is imported from its module when
it is first used (`__getattr__`)."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rekindle.app.api import (
        Comparison,
        Run,
        champion,
        compare,
        deploy,
        load,
        planned,
        rollback,
        run,
        runs,
        submit,
    )
    from rekindle.app.forecast import Forecast
    from rekindle.errors import RekindleError
    from rekindle.ir.distribution import distribute
    from rekindle.spec.model import Spec
    from rekindle.tasks.base import Task

# where names are defined, if not in app/api.py
_MODULES = {
    "Forecast": "app.forecast",
    "RekindleError": "errors",
    "Spec": "spec.model",
    "distribute": "ir.distribution",
    "Task": "tasks.base",
}
__all__ = [
    "Comparison",
    "Forecast",
    "RekindleError",
    "Run",
    "Spec",
    "Task",
    "__version__",
    "champion",
    "compare",
    "deploy",
    "distribute",
    "load",
    "planned",
    "rollback",
    "run",
    "runs",
    "submit",
]


def __dir__() -> list[str]:
    return list(__all__)


def __getattr__(name: str) -> Any:
    """A public name, from the module that defines it (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module 'rekindle' has no attribute {name!r}")
    import importlib

    module = _MODULES.get(name, "app.api")
    return getattr(importlib.import_module(f"rekindle.{module}"), name)
