"""Which nodes of the cluster the nodes of a TrainJob may run on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rekindle.platforms.kubeflow.pod_patch import Entries, Misfit, Piece, given

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
