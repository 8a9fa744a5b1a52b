"""Which nodes of the cluster the nodes of a TrainJob may run on, and what is mounted there.

Volumes are named after their kind and place in the list (`claim-0`), so that none meets a volume of
the runtime by chance: there Trainer merges by name, and mounts by their path."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rekindle.platforms.kubeflow.pod_patch import NODE, Clash, Entries, Misfit, Piece, given

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the place of shared memory, no file of ours
_SELECTOR = ("key", "operator", "values")
_TOLERATION = ("effect", "key", "operator", "tolerationSeconds", "value")
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def node_selector(value: Mapping[str, Any]) -> Piece:
    """Labels that a node must have."""
    labels = value.get("labels", {})
    if "nodeSelectorJson" in value:
        if labels:
            what = "`nodeSelector` has labels and JSON, of which KFP drops the labels"
            raise Misfit(what, "put all of them into the JSON")
        labels = given(value, "nodeSelectorJson") or {}
    if wrong := [key for key, label in labels.items() if not isinstance(label, str)]:
        raise Misfit(f"the value of the label `{wrong[0]}` is not text", "put it in quotes")
    return {"spec": {"nodeSelector": dict(labels)}} if labels else {}


def tolerations(entries: Entries) -> Piece:
    """Taints of nodes that do not matter."""
    found: list[Mapping[str, Any]] = []
    for entry in entries:
        said = given(entry, "tolerationJson") if "tolerationJson" in entry else entry
        found += [said] if isinstance(said, Mapping) else said or []
    for unknown in (set(one) - {*_TOLERATION} for one in found):
        if unknown:
            what = f"a toleration has `{', '.join(sorted(unknown))}`"
            raise Misfit(what, f"it may have {', '.join(_TOLERATION)}")
    made = [{key: _whole(key, one[key]) for key in one} for one in found if one]
    return {"spec": {"tolerations": made}} if made else {}


def _whole(key: str, value: Any) -> Any:
    """Protobuf writes an int64 as text, and YAML a number as a double."""
    return int(float(value)) if key in ("tolerationSeconds", "weight") else value


def node_affinity(entries: Entries) -> Piece:
    """Nodes that are needed, any one of several, or wished for."""
    required: list[Any] = []
    preferred: list[Any] = []
    for entry in entries:
        if "nodeAffinityJson" in entry:
            said = given(entry, "nodeAffinityJson") or {}
            required += said.get(_REQUIRED, {}).get("nodeSelectorTerms", [])
            wishes = said.get(_PREFERRED, [])
            preferred += [{**wish, "weight": _whole("weight", wish["weight"])} for wish in wishes]
            continue
        kinds = [key for key in ("matchExpressions", "matchFields") if key in entry]
        term = {key: _requirements(entry[key]) for key in kinds}
        if term and "weight" in entry:
            preferred.append({"weight": _whole("weight", entry["weight"]), "preference": term})
        elif term:
            required.append(term)
    needed = {_REQUIRED: {"nodeSelectorTerms": required}} if required else {}
    made = needed | ({_PREFERRED: preferred} if preferred else {})
    return {"spec": {"affinity": {"nodeAffinity": made}}} if made else {}


def _requirements(several: Entries) -> list[dict[str, Any]]:
    return [{key: one[key] for key in _SELECTOR if key in one} for one in several]


def pod_affinity(entries: Entries) -> Piece:
    """Pods that a node is to be near to, or far from."""
    affinity: dict[str, dict[str, list[Any]]] = {}
    for entry in entries:
        term = {"topologyKey": entry["topologyKey"], **_pods(entry)}
        side = affinity.setdefault("podAntiAffinity" if entry.get("anti") else "podAffinity", {})
        if "weight" in entry:
            wish = {"weight": _whole("weight", entry["weight"]), "podAffinityTerm": term}
            side.setdefault(_PREFERRED, []).append(wish)
        else:
            side.setdefault(_REQUIRED, []).append(term)
    return {"spec": {"affinity": affinity}}


def _pods(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Which pods a term is about."""
    made: dict[str, Any] = {}
    if entry.get("namespaces"):
        made["namespaces"] = list(entry["namespaces"])
    for field, of in (("labelSelector", "Pod"), ("namespaceSelector", "Namespace")):
        selector: dict[str, Any] = {}
        if labels := entry.get(f"match{of}Labels"):
            selector["matchLabels"] = dict(labels)
        if expressions := entry.get(f"match{of}Expressions"):
            selector["matchExpressions"] = _requirements(expressions)
        if selector:
            made[field] = selector
    return made


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


def named(kind: str, source_of: str, key: str, names: Sequence[str], entries: Entries) -> Piece:
    """Volumes of what an entry `names`: claims, or secrets and config maps, which may be missing,
    as files."""

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
