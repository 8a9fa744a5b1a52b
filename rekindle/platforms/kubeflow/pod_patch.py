"""Pieces of a pod, put together: nothing that one piece says is dropped for what another says.

A piece is what Kubernetes would write: `{"env": [...], "metadata": {...}, "spec": {...}}`, where
`env` is for the container of the node (Trainer takes it in its own field, and refuses it in a
patch) and the rest is a patch of the pod's template. Lists that Kubernetes merges by a key are
merged by that key here; others have every item of both once."""

import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

Piece = Mapping[str, Any]
Entries = Sequence[Mapping[str, Any]]  # of a setting
NODE = "node"  # the replicated job, and the container in its pods, that Trainer looks for
_KEYS = {
    "env": "name", "containers": "name", "volumes": "name", "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
}  # fmt: skip


class Clash(Exception):
    """Two pieces say different things of one; the text says what."""


class Misfit(Exception):
    """A setting that the pods of a TrainJob cannot have: `what` it is, and the `fix`."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.fix = fix


def joined(first: Piece, second: Piece, where: str = "") -> dict[str, Any]:
    """What both say; Clash where they differ. `joined({"a": {"x": 1}}, {"a": {"y": 2}})` is
    `{"a": {"x": 1, "y": 2}}`."""
    made = dict(first)
    for key, value in second.items():
        if key not in made:
            made[key] = value
            continue
        before, at = made[key], f"{where}.{key}"
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            made[key] = joined(before, value, at)
        elif isinstance(before, list) and isinstance(value, list):
            made[key] = _lists(before, value, key, at)
        elif before != value:
            raise Clash(f"`{at.lstrip('.')}` would be both {before!r} and {value!r}")
    return made


def _lists(first: list[Any], second: list[Any], key: str, where: str) -> list[Any]:
    if key not in _KEYS:
        return [*first, *(item for item in second if item not in first)]
    made = {_name(item, key): item for item in first}
    for item in second:
        name = _name(item, key)
        if key == "containers" and name in made:
            made[name] = joined(made[name], item, f"{where}.{name}")
        elif made.setdefault(name, item) != item:
            raise Clash(f"`{where.lstrip('.')}` would have two of the name `{name}`")
    return list(made.values())


def _name(item: Mapping[str, Any], key: str) -> str:
    name = str(item[_KEYS[key]])
    return posixpath.normpath(name) if key == "volumeMounts" else name


def given(entry: Mapping[str, Any], parameter: str, plain: str = "") -> Any:
    """What an entry names; None if the run gives nothing."""
    if parameter not in entry:
        return entry[plain]
    value: Any = entry[parameter]["runtimeValue"]["constant"]
    if isinstance(value, str) and "{{" in value:
        what = f"`{parameter}` holds a placeholder, which Kubeflow itself does not fill in there"
        raise Misfit(what, "pass the whole name as one parameter")
    return value
