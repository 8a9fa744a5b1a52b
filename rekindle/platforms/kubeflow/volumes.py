"""Volumes of the nodes of a TrainJob, and where they are mounted.

They are named after their kind and place in the list (`claim-0`), so that none meets a volume of
the runtime by chance: there Trainer merges by name, and mounts by their path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rekindle.platforms.kubeflow.pod_patch import NODE, Clash, Entries, Piece, given

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the place of shared memory, no file of ours


def _mounted(kind: str, entries: Entries, source: Callable[[Any], Any]) -> Piece:
    """Volumes of a kind; an entry whose source is None is left out."""
    found = [(f"{kind}-{i}", entry, source(entry)) for i, entry in enumerate(entries)]
    there = [(name, entry, what) for name, entry, what in found if what is not None]
    mounts = [
        {"name": name, "mountPath": e["mountPath"]}
        | ({"subPath": e["subPath"]} if e.get("subPath") else {})
        for name, e, _ in there
    ]
    paths = [mount["mountPath"] for mount in mounts]
    if twice := [path for path in paths if paths.count(path) > 1]:
        raise Clash(f"two volumes would be mounted at {twice[0]}")
    container = {"name": NODE, "volumeMounts": mounts}
    volumes = [{"name": name, **what} for name, _, what in there]
    return {"spec": {"volumes": volumes, "containers": [container]}} if there else {}


def claims(entries: Entries) -> Piece:
    """Persistent volume claims."""
    return _named("claim", entries, "persistentVolumeClaim", "claimName", "pvcNameParameter")


def secret_files(entries: Entries) -> Piece:
    """Secrets as files."""
    names = ("secretNameParameter", "secretName")
    return _named("secret", entries, "secret", "secretName", *names)


def config_files(entries: Entries) -> Piece:
    """Config maps as files."""
    names = ("configMapNameParameter", "configMapName")
    return _named("config", entries, "configMap", "name", *names)


def _named(kind: str, entries: Entries, source_of: str, key: str, *names: str) -> Piece:
    """Volumes of what an entry `names`; all but claims may be missing."""

    def source(entry: Mapping[str, Any]) -> Piece | None:
        name = given(entry, *names)
        may_miss = {} if kind == "claim" else {"optional": bool(entry.get("optional"))}
        return None if name is None else {source_of: {key: name, **may_miss}}

    return _mounted(kind, entries, source)


def ephemeral(entries: Entries) -> Piece:
    """A claim that comes and goes with each pod."""

    def source(entry: Mapping[str, Any]) -> Piece:
        asked = {
            "accessModes": list(entry["accessModes"]),
            "resources": {"requests": {"storage": entry["size"]}},
        }
        if not entry.get("defaultStorageClass"):
            asked["storageClassName"] = entry.get("storageClassName", "")
        claim = {"metadata": dict(entry.get("metadata", {})), "spec": asked}
        return {"ephemeral": {"volumeClaimTemplate": claim}}

    return _mounted("ephemeral", entries, source)


def empty(entries: Entries) -> Piece:
    """Folders that are empty when a pod begins."""
    return _mounted("empty", entries, _folder)


def shared_memory(value: Mapping[str, Any]) -> Piece:
    """Shared memory of this size; without one, as much as there is."""
    size = {"sizeLimit": value["size"]} if value.get("size") else {}
    return _mounted("memory", [{"mountPath": SHARED_MEMORY, "medium": "Memory", **size}], _folder)


def _folder(entry: Mapping[str, Any]) -> Piece:
    return {"emptyDir": {key: entry[key] for key in ("medium", "sizeLimit") if entry.get(key)}}
