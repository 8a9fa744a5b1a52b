"""The second document of a compiled pipeline: what each executor, and the pipeline as a
whole, asks of a platform.

Of what kfp-kubernetes writes (`kubernetes`, kubernetes_executor_config.proto) timeouts
and secrets in the environment are typed, everything else stays a `Setting` under its name
there, for each platform to take or to refuse. `rekindle` is what `distribute()`
writes."""

from typing import Any

from rekindle.ir.distribution import PLATFORM, from_settings
from rekindle.ir.graph import Constant, Secret, Setting
from rekindle.ir.read.bindings import read_parameter
from rekindle.ir.read.raw import Fields, Refusals, malformed

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
        for label, executor in fields.fields("deploymentSpec").each("executors"):
            wishes = executors.setdefault(label, {})
            if platform == PLATFORM:
                wishes["distribution"] = from_settings(executor.data, executor.where)
            else:
                seconds = executor.any("activeDeadlineSeconds")  # protobuf writes an int64 as text
                if seconds is not None and not str(seconds).removesuffix(".0").isdecimal():
                    where = executor.at("activeDeadlineSeconds")
                    raise malformed(seconds, "a number of seconds", where)
                secrets: list[Secret] = []
                for secret in executor.list_of("secretAsEnv"):
                    secrets += _secrets(secret)
                wishes["timeout_seconds"] = float(seconds) if seconds is not None else None
                wishes["secrets"] = tuple(secrets)
                wishes["settings"] = tuple(_settings(executor))
        whole += _settings(fields.fields("pipelineConfig"))
    top.close()
    return executors, tuple(whole)


def _settings(fields: Fields) -> list[Setting]:
    settings = []
    for name in [str(key) for key in fields.data if key not in fields.taken]:
        value = fields.any(name)
        if value is not None:
            settings.append(Setting(name, value, fields.at(name)))
    return settings


def _secrets(fields: Fields) -> list[Secret]:
    plain = fields.take("secretName", str, "")
    named = read_parameter(fields.fields("secretNameParameter"), None) or Constant(plain)
    optional = fields.take("optional", bool, False)
    secrets = []
    for pair in fields.list_of("keyToEnv"):
        env = pair.take("envVar", str, "")
        key = pair.take("secretKey", str, "")
        secrets.append(Secret(env, named, key, pair.where, optional))
    return secrets
