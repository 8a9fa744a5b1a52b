"""The second document of a pipeline (settings of Kubernetes) as KFP's server parses it.

The server parses it strictly, and leaves out all of it if one field is unknown to it: the
run is made, and every step has lost its secrets, volumes and node selectors
(IsPlatformSpecWithKubernetesConfig in kubeflow/pipelines, backend/src/apiserver/template).
So nothing is compiled whose fields that server does not have. `second_document.json`
holds the messages and fields of its protos; `make generate` writes it from the packages
kfp-kubernetes and kfp-pipeline-spec, which are the server's own protos."""

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rekindle.errors import Problem
from rekindle.protojson import Json

_TABLE = Path(__file__).with_name("second_document.json")
_LIST = "list of "
_MAP = "map of "
_ROOT = "SinglePlatformSpec"
# the value of a field of this message is itself parsed, as another one
_OF_EXECUTOR = "KubernetesExecutorConfig"
_FIX = (
    "take it out: KFP's server would leave out all settings of Kubernetes with it, and say nothing"
)


@functools.cache
def _messages() -> Mapping[str, Mapping[str, str]]:
    table: Json = json.loads(_TABLE.read_text(encoding="utf-8"))
    messages: Mapping[str, Mapping[str, str]] = table["messages"]
    return messages


def refused_fields(document: Mapping[str, Any]) -> Iterator[Problem]:
    """The fields of a second document that the server does not know, or takes nothing of
    that kind for."""
    where = "platforms.kubernetes"
    kubernetes = document["platforms"].get("kubernetes")
    if kubernetes is None:  # settings of other platforms
        return
    problems = list(_refused_in(kubernetes, _ROOT, where))
    yield from problems
    if problems:  # it may be anything
        return
    executors = (kubernetes.get("deploymentSpec") or {}).get("executors") or {}
    for label, settings in executors.items():
        yield from _refused_in(settings, _OF_EXECUTOR, f"{where}.deploymentSpec.executors.{label}")


def _refused_in(value: Any, kind: str, where: str) -> Iterator[Problem]:
    """The problems of a value in the place of a message, or of a scalar."""
    if kind.startswith(_LIST):
        yield from _refused_items(value, kind.removeprefix(_LIST), where)
    elif kind.startswith(_MAP):
        yield from _refused_entries(value, kind.removeprefix(_MAP), where)
    elif kind in _messages():
        yield from _refused_members(value, kind, where)
    elif value is None or not _is_of_kind(value, kind):
        yield Problem(f"{value!r} stands where KFP reads {kind}", where, _FIX)


def _refused_items(values: Any, kind: str, where: str) -> Iterator[Problem]:
    if not isinstance(values, list):
        yield Problem(f"{values!r} stands where KFP reads a list", where, _FIX)
        return
    for index, item in enumerate(values):
        yield from _refused_in(item, kind, f"{where}[{index}]")


def _refused_entries(values: Any, kind: str, where: str) -> Iterator[Problem]:
    if not isinstance(values, Mapping):
        yield Problem(f"{values!r} stands where KFP reads a mapping", where, _FIX)
        return
    for name, item in values.items():
        yield from _refused_in(item, kind, f"{where}.{name}")


def _refused_members(value: Any, message: str, where: str) -> Iterator[Problem]:
    if not isinstance(value, Mapping):
        yield Problem(f"{value!r} stands where KFP reads a mapping", where, _FIX)
        return
    fields = _messages()[message]
    for name, member in value.items():
        if name in fields and member is None:  # as if it were not there
            continue
        if name in fields:
            yield from _refused_in(member, fields[name], f"{where}.{name}")
        else:
            yield Problem(f"KFP 2.17 knows no field `{name}` there", f"{where}.{name}", _FIX)


def _is_of_kind(value: Any, kind: str) -> bool:
    """Whether proto's JSON takes the value for a scalar of this kind."""
    match kind:
        case "text":
            return isinstance(value, str)
        case "true or false":
            return isinstance(value, bool)
        case "a whole number":
            return _is_whole(value)
        case "a struct":
            return isinstance(value, Mapping)
        case _:  # "anything"
            return True


def _is_whole(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    if isinstance(value, float):
        return value.is_integer()
    if isinstance(value, str):
        return value.removeprefix("-").isdecimal()
    return isinstance(value, int)
