"""What kfp-kubernetes asks of the pod of a step, in the words of the pods of a TrainJob.

On a step of one node KFP's driver reads these settings (extendPodSpecPatch in kubeflow/pipelines,
backend/src/v2/driver/k8s.go, whose ways are kept here); the nodes of a TrainJob get them as a patch
of their runtime, whose fields are those of Trainer v2.3's PodTemplatePatch.

A setting that names an input of the pipeline (`secretNameParameter`, `tolerationJson`) is refused,
as images and resources that do: the job is written down when the pipeline is compiled.

A piece of a pod is what Kubernetes would write: `{"env": [...], "metadata": {...}, "spec": {...}}`,
where `env` is for the container of the node (Trainer takes it in its own field, and refuses it in a
patch) and the rest is a patch of the pod's template. Lists that Kubernetes merges by a key are
merged by that key here; others have every item of both once. Volumes are named after their kind and
place in the list (`claim-0`), so that none meets a volume of the runtime by chance."""

import functools
import posixpath
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rekindle.ir.graph import Constant, FromInput, FromTask, Secret, Setting, Step
from rekindle.platforms.submission import problems_in

Piece = Mapping[str, Any]
Entries = Sequence[Mapping[str, Any]]  # of a setting
NODE = "node"  # the replicated job, and the container in its pods, that Trainer looks for
_KEYS = {
    "env": "name",
    "containers": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
}
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the place of shared memory, no file of ours
_SELECTOR = ("key", "operator", "values")
_TOLERATION = ("effect", "key", "operator", "tolerationSeconds", "value")
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
# Labels by which Job, JobSet, Trainer and Kueue know their pods
_OWNED = ("batch.kubernetes.io/", "jobset.sigs.k8s.io/", "trainer.kubeflow.org/")
_QUEUES = "kueue.x-k8s.io/"
_problem = problems_in(__file__)


class Misfit(Exception):
    """A setting that the pods of a TrainJob cannot have, or two that say different things of one:
    the name of the problem, and what is known of it."""

    def __init__(self, name: str, **about: Any) -> None:
        self.problem = _problem(name, **about)
        super().__init__(self.problem.what)


def joined(first: Piece, second: Piece, where: str = "") -> dict[str, Any]:
    """What both say; Misfit where they differ. `joined({"a": {"x": 1}}, {"a": {"y": 2}})` is
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
            raise Misfit("both", place=at.lstrip("."), before=before, value=value)
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
            raise Misfit("one_name", place=where.lstrip("."), named=name)
    return list(made.values())


def _name(item: Mapping[str, Any], key: str) -> str:
    name = str(item[_KEYS[key]])
    return posixpath.normpath(name) if key == "volumeMounts" else name


def given(entry: Mapping[str, Any], parameter: str, plain: str = "") -> Any:
    """What an entry names."""
    if parameter not in entry:
        return entry[plain]
    if {"componentInputParameter", "taskOutputParameter"} & set(entry[parameter]):
        raise Misfit("input", parameter=parameter)
    value: Any = entry[parameter]["runtimeValue"]["constant"]
    if isinstance(value, str) and "{{" in value:
        raise Misfit("placeholder", parameter=parameter)
    return value


def node_selector(value: Mapping[str, Any]) -> Piece:
    """Labels that a node must have."""
    labels = value.get("labels", {})
    if "nodeSelectorJson" in value:
        if labels:
            raise Misfit("labels_and_json")
        labels = given(value, "nodeSelectorJson") or {}
    if wrong := [key for key, label in labels.items() if not isinstance(label, str)]:
        raise Misfit("no_text", label=wrong[0])
    return {"spec": {"nodeSelector": dict(labels)}} if labels else {}


def tolerations(entries: Entries) -> Piece:
    """Taints of nodes that do not matter."""
    found: list[Mapping[str, Any]] = []
    for entry in entries:
        said = given(entry, "tolerationJson") if "tolerationJson" in entry else entry
        found += [said] if isinstance(said, Mapping) else said or []
    for unknown in (set(one) - {*_TOLERATION} for one in found):
        if unknown:
            raise Misfit("toleration", has=", ".join(sorted(unknown)), may=", ".join(_TOLERATION))
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
    """Volumes of a kind."""
    volumes = [{"name": f"{kind}-{i}", **source(entry)} for i, entry in enumerate(entries)]
    mounts = [{"name": f"{kind}-{i}", "mountPath": e["mountPath"]} for i, e in enumerate(entries)]
    for mount, entry in zip(mounts, entries, strict=True):
        mount |= {"subPath": entry["subPath"]} if entry.get("subPath") else {}
    paths = [mount["mountPath"] for mount in mounts]
    if twice := [path for path in paths if paths.count(path) > 1]:
        raise Misfit("one_place", path=twice[0])
    container = {"name": NODE, "volumeMounts": mounts}
    return {"spec": {"volumes": volumes, "containers": [container]}} if entries else {}


def named(of: str, kind: str, source_of: str, key: str, entries: Entries) -> Piece:
    """Volumes of what an entry names: a claim, or files of a secret or config map."""

    def source(entry: Mapping[str, Any]) -> Piece:
        may_miss = {} if kind == "claim" else {"optional": bool(entry.get("optional"))}
        return {source_of: {key: given(entry, f"{of}NameParameter", f"{of}Name"), **may_miss}}

    return _mounted(kind, entries, source)


def ephemeral(entries: Entries) -> Piece:
    """A claim that comes and goes with each pod."""

    def source(entry: Mapping[str, Any]) -> Piece:
        asked: dict[str, Any] = {"accessModes": list(entry["accessModes"])}
        asked["resources"] = {"requests": {"storage": entry["size"]}}
        if not entry.get("defaultStorageClass"):
            asked["storageClassName"] = entry.get("storageClassName", "")
        claim = {"metadata": dict(entry.get("metadata", {})), "spec": asked}
        return {"ephemeral": {"volumeClaimTemplate": claim}}

    return _mounted("ephemeral", entries, source)


def shared_memory(value: Mapping[str, Any]) -> Piece:
    """Shared memory of this size; without one, as much as there is."""
    size = {"sizeLimit": value["size"]} if value.get("size") else {}
    return _mounted("memory", [{"mountPath": SHARED_MEMORY, "medium": "Memory", **size}], _folder)


def _folder(entry: Mapping[str, Any]) -> Piece:
    return {"emptyDir": {key: entry[key] for key in ("medium", "sizeLimit") if entry.get(key)}}


def settings_of(step: Step) -> list[Setting]:
    """All settings of a step's pod, each a list with its place in the IR; secrets, too."""
    return [*map(_of_secret, step.secrets), *map(_of_today, step.settings)]


def variables(step: Step) -> set[str]:
    """The environment variables that the step's own settings fill."""
    named = (one.value for one in settings_of(step) if one.name.endswith("AsEnv"))
    entries = [entry for value in named for entry in _entries(value)]
    pairs = [pair for entry in entries for pair in _entries(entry.get("keyToEnv", []))]
    return {str(one[key]) for one in (*pairs, *entries) for key in ("envVar", "name") if key in one}


def _entries(value: Any) -> list[Mapping[str, Any]]:
    """The entries of a setting, as far as it is as kfp-kubernetes writes it."""
    return [e for e in value if isinstance(e, Mapping)] if isinstance(value, list) else []


def piece(name: str, value: Any, image: str) -> Piece:
    """The part of a pod that a setting asks for; Misfit if there is none."""
    if name == "imagePullPolicy":
        return _pull_policy(value, image)
    if name not in _PIECES:
        raise Misfit("no_field", setting=name, carried=", ".join(sorted(_PIECES)))
    try:
        return _PIECES[name](value)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Misfit("other_form", setting=name, error=error) from error


def _of_secret(secret: Secret) -> Setting:
    match secret.name:
        case Constant(value):
            name: dict[str, Any] = {"runtimeValue": {"constant": value}}
        case FromInput(parameter):
            name = {"componentInputParameter": parameter}
        case FromTask(task, output):
            name = {"taskOutputParameter": {"producerTask": task, "outputParameterKey": output}}
        case _:
            name = {"runtimeValue": {"constant": "{{$}}"}}  # a placeholder, which is refused
    pairs = [{"secretKey": secret.key, "envVar": secret.env}]
    entry = {"secretNameParameter": name, "keyToEnv": pairs, "optional": secret.optional}
    return Setting("secretAsEnv", [entry], secret.where)


def _of_today(setting: Setting) -> Setting:
    """Claims as kfp-kubernetes 2 writes them: it repeats the name in the fields of version 1."""
    mounts = [dict(mount) for mount in _entries(setting.value)]
    if setting.name != "pvcMount" or mounts != setting.value:
        return setting
    older = ("constant", "componentInputParameter", "taskOutputParameter")
    for mount in mounts:
        before = {key: mount.pop(key) for key in older if key in mount}
        if "constant" in before:
            before = {"runtimeValue": before}
        mount.setdefault("pvcNameParameter", before)
    return Setting(setting.name, mounts, setting.where)


def _keys(of: str, entries: Entries) -> Piece:
    """Variables from the keys of secrets or config maps."""
    found = []
    for entry in entries:
        name = given(entry, f"{of}NameParameter", f"{of}Name")
        optional = {"optional": True} if entry.get("optional") else {}
        for pair in entry["keyToEnv"]:
            source = {"name": name, "key": pair[f"{of}Key"], **optional}
            found.append(variable(pair["envVar"], f"{of}KeyRef", source))
    return {"env": found}


def variable(name: str, reference: str, source: Mapping[str, Any]) -> dict[str, Any]:
    """A variable whose value Kubernetes finds; Misfit if Trainer keeps the name for itself."""
    if name.startswith("PET_"):
        raise Misfit("trainers_own", variable=name)
    return {"name": name, "valueFrom": {reference: dict(source)}}


def _fields(entries: Entries) -> Piece:
    paths = [(entry["name"], {"fieldPath": entry["fieldPath"]}) for entry in entries]
    return {"env": [variable(name, "fieldRef", path) for name, path in paths]}


def _metadata(value: Mapping[str, Any]) -> Piece:
    for label in value.get("labels", {}):
        if label.startswith(_QUEUES):
            raise Misfit("queue", label=label)
        if label.startswith(_OWNED):
            raise Misfit("owned", label=label)
    made = {key: dict(value[key]) for key in ("labels", "annotations") if value.get(key)}
    return {"metadata": made} if made else {}


def _pull_secrets(entries: Entries) -> Piece:
    names = [given(entry, "secretNameParameter", "secretName") for entry in entries]
    found = [{"name": name} for name in dict.fromkeys(names)]
    return {"spec": {"imagePullSecrets": found}} if found else {}


def _security(value: Mapping[str, Any]) -> Piece:
    """The container's; KFP gives up all capabilities with it, and so it is here."""
    made: dict[str, Any] = {"capabilities": {"drop": ["ALL"]}}
    made |= {key: int(value[key]) for key in ("runAsUser", "runAsGroup") if key in value}
    made |= {"runAsNonRoot": value["runAsNonRoot"]} if "runAsNonRoot" in value else {}
    return {"spec": {"containers": [{"name": NODE, "securityContext": made}]}}


def _pull_policy(policy: str, image: str) -> Piece:
    """Nothing, if it is what Kubernetes does anyhow with an image of this name."""
    last = image.rpartition("/")[2]
    moving = "@" not in last and last.partition(":")[2] in ("", "latest")
    usual = "Always" if moving else "IfNotPresent"
    if policy != usual:
        raise Misfit("pull_policy", policy=policy, usual=usual, image=image)
    return {}


_PIECES: Mapping[str, Callable[[Any], Piece]] = {
    "secretAsEnv": functools.partial(_keys, "secret"),
    "fieldPathAsEnv": _fields,
    "configMapAsEnv": functools.partial(_keys, "configMap"),
    "pvcMount": functools.partial(named, "pvc", "claim", "persistentVolumeClaim", "claimName"),
    "secretAsVolume": functools.partial(named, "secret", "secret", "secret", "secretName"),
    "configMapAsVolume": functools.partial(named, "configMap", "config", "configMap", "name"),
    "genericEphemeralVolume": ephemeral,
    "emptyDirMounts": lambda entries: _mounted("empty", entries, _folder),
    "enabledSharedMemory": shared_memory,
    "nodeSelector": node_selector,
    "tolerations": tolerations,
    "nodeAffinity": node_affinity,
    "podAffinity": pod_affinity,
    "podMetadata": _metadata,
    "imagePullSecret": _pull_secrets,
    "securityContext": _security,
}
