"""The second document of a compiled pipeline: what each executor, and the pipeline as a whole, asks
of a platform.

`kubernetes` is what kfp-kubernetes writes (kubernetes_executor_config.proto): timeouts and secrets
in the environment are typed, everything else stays a `Setting` under the name that it has there,
for each platform to take or to refuse by name. `rekindle` is what `distribute()` writes."""

from typing import Any

from rekindle.ir.distribution import PLATFORM, from_settings
from rekindle.ir.graph import Constant, Secret, Setting
from rekindle.ir.read.bindings import read_parameter
from rekindle.ir.read.fields import Fields, Refusals, malformed

Wishes = dict[str, Any]  # what an executor asks for, as fields of its Step


def read_platforms(
    document: Any, refusals: Refusals
) -> tuple[dict[str, Wishes], tuple[Setting, ...]]:
    """Wishes by the label of the executor, and what is asked for the whole pipeline."""
    executors: dict[str, Wishes] = {}
    whole: list[Setting] = []
    top = Fields(document, "", refusals)
    for platform, fields in top.each("platforms"):
        if platform not in ("kubernetes", PLATFORM):
            refusals.add(f"settings of the platform `{platform}`", fields.where)
            continue
        deployment = fields.fields("deploymentSpec")
        for label, executor in deployment.each("executors"):
            wishes = executors.setdefault(label, {})
            if platform == PLATFORM:
                wishes["distribution"] = from_settings(executor.data, executor.where)
            else:
                wishes |= _wishes(executor)
        deployment.close()
        whole += _settings(fields.fields("pipelineConfig"), set())
        fields.close()
    top.close()
    return executors, tuple(whole)


def _wishes(executor: Fields) -> Wishes:
    seconds = executor.any("activeDeadlineSeconds")  # protobuf writes an int64 as text
    if seconds is not None and not str(seconds).removesuffix(".0").isdecimal():
        raise malformed(seconds, "a number of seconds", executor.at("activeDeadlineSeconds"))
    return {
        "timeout_seconds": float(seconds) if seconds is not None else None,
        "secrets": tuple(s for one in executor.list_of("secretAsEnv") for s in _secrets(one)),
        "settings": tuple(_settings(executor, {"activeDeadlineSeconds", "secretAsEnv"})),
    }


def _settings(fields: Fields, taken: set[str]) -> list[Setting]:
    names = [str(key) for key in fields.data if key not in taken and fields.has(str(key))]
    return [Setting(name, fields.any(name), fields.at(name)) for name in names]


def _secrets(fields: Fields) -> list[Secret]:
    plain = fields.take("secretName", str, "")
    named = read_parameter(fields.fields("secretNameParameter"), None) or Constant(plain)
    optional = fields.take("optional", bool, False)
    found = [
        Secret(p.take("envVar", str, ""), named, p.take("secretKey", str, ""), p.where, optional)
        for p in fields.list_of("keyToEnv")
    ]
    fields.close()
    return found
