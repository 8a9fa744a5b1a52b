"""What kfp-kubernetes asks of the pod of a step, in the words of the pods of a TrainJob.

On a step of one node KFP's driver reads these settings (extendPodSpecPatch in
kubeflow/pipelines, backend/src/v2/driver/k8s.go, whose ways are kept here); the nodes of
a TrainJob get them as a patch of their runtime, whose fields are those of Trainer v2.3's
PodTemplatePatch.

A setting that names an input of the pipeline (`secretNameParameter`, `tolerationJson`) is
refused, as images and resources that do: the job is written down when the pipeline is
compiled.

A piece of a pod is what Kubernetes would write: `{"env": [...], "metadata": {...},
"spec": {...}}`, where `env` is for the container of the node (Trainer takes it in its own
field, and refuses it in a patch) and the rest is a patch of the pod's template. Lists
that Kubernetes merges by a key are merged by that key here; others have every item of
both once. Volumes are named after their kind and place in the list (`claim-0`), so that
none meets a volume of the runtime by chance."""

import functools
import posixpath
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from rekindle.ir.graph import Constant, FromInput, FromTask, Secret, Setting, Step
from rekindle.protojson import Json

Piece: TypeAlias = Mapping[str, Any]
Entry: TypeAlias = Mapping[str, Any]
Entries: TypeAlias = Sequence[Entry]  # of a setting
NODE = "node"  # the replicated job, and the container in its pods, that Trainer looks for
# the keys by which Kubernetes merges lists (`patchMergeKey` of core/v1); others are
# atomic
_MERGE_KEYS = {
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
_ONE_OF_TWO = "take it out, or what says the other"


class Misfit(Exception):
    """A setting that the pods of a TrainJob cannot have, or two settings that contradict
    each other: `what` is wrong, and the `fix`."""

    def __init__(self, what: str, fix: str) -> None:
        self.fix = fix
        super().__init__(what)


def joined(first: Piece, second: Piece, where: str = "") -> Json:
    """What both pieces ask for; Misfit where they differ.
    `joined({"a": {"x": 1}}, {"a": {"y": 2}})` is `{"a": {"x": 1, "y": 2}}`."""
    merged = dict(first)
    for key, value in second.items():
        if key not in merged:
            merged[key] = value
            continue
        before = merged[key]
        path = f"{where}.{key}"
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            merged[key] = joined(before, value, path)
        elif isinstance(before, list) and isinstance(value, list):
            merged[key] = _joined_lists(before, value, key, path)
        elif before != value:
            raise Misfit(
                f"`{path.lstrip('.')}` would be both {before!r} and {value!r}", _ONE_OF_TWO
            )
    return merged


def _joined_lists(first: list[Any], second: list[Any], key: str, where: str) -> list[Any]:
    if key not in _MERGE_KEYS:
        return [*first, *(item for item in second if item not in first)]
    by_name = {_merge_name(item, key): item for item in first}
    for item in second:
        name = _merge_name(item, key)
        if key == "containers" and name in by_name:
            by_name[name] = joined(by_name[name], item, f"{where}.{name}")
        elif by_name.setdefault(name, item) != item:
            raise Misfit(f"`{where.lstrip('.')}` would have two of the name `{name}`", _ONE_OF_TWO)
    return list(by_name.values())


def _merge_name(item: Entry, key: str) -> str:
    """What an item of the list `key` is merged by."""
    name = str(item[_MERGE_KEYS[key]])
    # `/data` and `/data/` are one place to mount at
    return posixpath.normpath(name) if key == "volumeMounts" else name


def _constant(entry: Entry, parameter: str, plain: str = "") -> Any:
    """The value that an entry has for `parameter`, or in the field `plain` as older
    versions wrote it; Misfit if only the run knows it."""
    if parameter not in entry:
        return entry[plain]
    if {"componentInputParameter", "taskOutputParameter"} & set(entry[parameter]):
        raise Misfit(f"`{parameter}` depends on an input", "write it down")
    value: Any = entry[parameter]["runtimeValue"]["constant"]
    if isinstance(value, str) and "{{" in value:
        raise Misfit(
            f"`{parameter}` holds a placeholder, which Kubeflow itself does not fill in there",
            "pass the whole name as one parameter",
        )
    return value


def node_selector(value: Entry) -> Piece:
    """Labels that a node must have."""
    labels = value.get("labels", {})
    if "nodeSelectorJson" in value:
        if labels:
            raise Misfit(
                "`nodeSelector` has labels and JSON, of which KFP drops the labels",
                "put all of them into the JSON",
            )
        labels = _constant(value, "nodeSelectorJson") or {}
    for label, label_value in labels.items():
        if not isinstance(label_value, str):
            raise Misfit(f"the value of the label `{label}` is not text", "put it in quotes")
    if not labels:
        return {}
    return {"spec": {"nodeSelector": dict(labels)}}


def tolerations(entries: Entries) -> Piece:
    """Taints of nodes that do not matter."""
    wishes: list[Entry] = []
    for entry in entries:
        if "tolerationJson" not in entry:
            wishes.append(entry)
            continue
        # KFP takes one toleration there, or a list of them
        from_json = _constant(entry, "tolerationJson")
        if isinstance(from_json, Mapping):
            wishes.append(from_json)
        else:
            wishes += from_json or []
    for wish in wishes:
        unknown = set(wish) - set(_TOLERATION)
        if unknown:
            raise Misfit(
                f"a toleration has `{', '.join(sorted(unknown))}`",
                f"it may have {', '.join(_TOLERATION)}",
            )
    taints = [_toleration(wish) for wish in wishes if wish]
    if not taints:
        return {}
    return {"spec": {"tolerations": taints}}


def _toleration(wish: Entry) -> Json:
    return {key: _whole(key, value) for key, value in wish.items()}


def _whole(key: str, value: Any) -> Any:
    """The value as Kubernetes types it: protobuf writes an int64 as text, and YAML a
    number as a double."""
    return int(float(value)) if key in ("tolerationSeconds", "weight") else value


def node_affinity(entries: Entries) -> Piece:
    """Nodes that are needed, any one of several, or wished for."""
    required: list[object] = []
    preferred: list[object] = []
    for entry in entries:
        if "nodeAffinityJson" in entry:
            from_json = _constant(entry, "nodeAffinityJson") or {}
            required += from_json.get(_REQUIRED, {}).get("nodeSelectorTerms", [])
            for wish in from_json.get(_PREFERRED, []):
                preferred.append({**wish, "weight": _whole("weight", wish["weight"])})
            continue
        term = _node_term(entry)
        if term and "weight" in entry:
            preferred.append({"weight": _whole("weight", entry["weight"]), "preference": term})
        elif term:
            required.append(term)
    affinity: Json = {}
    if required:
        affinity[_REQUIRED] = {"nodeSelectorTerms": required}
    if preferred:
        affinity[_PREFERRED] = preferred
    if not affinity:
        return {}
    return {"spec": {"affinity": {"nodeAffinity": affinity}}}


def _node_term(entry: Entry) -> Json:
    kinds = [kind for kind in ("matchExpressions", "matchFields") if kind in entry]
    return {kind: _requirements(entry[kind]) for kind in kinds}


def _requirements(expressions: Entries) -> list[Json]:
    return [_fields_of(expression, _SELECTOR) for expression in expressions]


def _fields_of(entry: Entry, names: Sequence[str]) -> Json:
    """The fields of an entry that it has of these."""
    return {name: entry[name] for name in names if name in entry}


def pod_affinity(entries: Entries) -> Piece:
    """Pods that a node is to be near to, or far from."""
    affinity: dict[str, dict[str, list[object]]] = {}
    for entry in entries:
        term = {"topologyKey": entry["topologyKey"], **_pods(entry)}
        side = affinity.setdefault("podAntiAffinity" if entry.get("anti") else "podAffinity", {})
        if "weight" in entry:
            wish = {"weight": _whole("weight", entry["weight"]), "podAffinityTerm": term}
            side.setdefault(_PREFERRED, []).append(wish)
        else:
            side.setdefault(_REQUIRED, []).append(term)
    return {"spec": {"affinity": affinity}}


def _pods(entry: Entry) -> Json:
    """Which pods a term is about."""
    pods: Json = {}
    if entry.get("namespaces"):
        pods["namespaces"] = list(entry["namespaces"])
    for field, kind in (("labelSelector", "Pod"), ("namespaceSelector", "Namespace")):
        selector: Json = {}
        labels = entry.get(f"match{kind}Labels")
        if labels:
            selector["matchLabels"] = dict(labels)
        expressions = entry.get(f"match{kind}Expressions")
        if expressions:
            selector["matchExpressions"] = _requirements(expressions)
        if selector:
            pods[field] = selector
    return pods


def _mounted(kind: str, entries: Entries, source: Callable[[Entry], Piece]) -> Piece:
    """Volumes of a kind, each from its `source`, and where the node's container has
    them."""
    volumes = [{"name": f"{kind}-{i}", **source(entry)} for i, entry in enumerate(entries)]
    mounts = []
    paths: list[str] = []
    for i, entry in enumerate(entries):
        mount = {"name": f"{kind}-{i}", "mountPath": entry["mountPath"]}
        if entry.get("subPath"):
            mount["subPath"] = entry["subPath"]
        mounts.append(mount)
        paths.append(entry["mountPath"])
    for path in paths:
        if paths.count(path) > 1:
            raise Misfit(f"two volumes would be mounted at {path}", _ONE_OF_TWO)
    if not entries:
        return {}
    container = {"name": NODE, "volumeMounts": mounts}
    return {"spec": {"volumes": volumes, "containers": [container]}}


def _claims(entries: Entries) -> Piece:
    """Volumes of PersistentVolumeClaims."""

    def source(entry: Entry) -> Piece:
        claim = _constant(entry, "pvcNameParameter", "pvcName")
        return {"persistentVolumeClaim": {"claimName": claim}}

    return _mounted("claim", entries, source)


def _secret_files(entries: Entries) -> Piece:
    """Volumes with the keys of secrets as files."""

    def source(entry: Entry) -> Piece:
        optional = bool(entry.get("optional"))
        name = _constant(entry, "secretNameParameter", "secretName")
        return {"secret": {"secretName": name, "optional": optional}}

    return _mounted("secret", entries, source)


def _config_files(entries: Entries) -> Piece:
    """Volumes with the keys of config maps as files."""

    def source(entry: Entry) -> Piece:
        optional = bool(entry.get("optional"))
        name = _constant(entry, "configMapNameParameter", "configMapName")
        return {"configMap": {"name": name, "optional": optional}}

    return _mounted("config", entries, source)


def _ephemeral_claims(entries: Entries) -> Piece:
    """Claims that come and go with each pod."""

    def source(entry: Entry) -> Piece:
        spec: Json = {"accessModes": list(entry["accessModes"])}
        spec["resources"] = {"requests": {"storage": entry["size"]}}
        # without the field Kubernetes takes the default class, with "" none
        if not entry.get("defaultStorageClass"):
            spec["storageClassName"] = entry.get("storageClassName", "")
        claim = {"metadata": dict(entry.get("metadata", {})), "spec": spec}
        return {"ephemeral": {"volumeClaimTemplate": claim}}

    return _mounted("ephemeral", entries, source)


def _empty_folders(entries: Entries) -> Piece:
    return _mounted("empty", entries, _empty_folder)


def shared_memory(value: Entry) -> Piece:
    """Shared memory of this size; without one, as much as there is."""
    mount = {"mountPath": SHARED_MEMORY, "medium": "Memory"}
    if value.get("size"):
        mount["sizeLimit"] = value["size"]
    return _mounted("memory", [mount], _empty_folder)


def _empty_folder(entry: Entry) -> Piece:
    fields = {key: entry[key] for key in ("medium", "sizeLimit") if entry.get(key)}
    return {"emptyDir": fields}


def settings_of(step: Step) -> list[Setting]:
    """All settings of a step's pod, each a list with its place in the IR; secrets,
    too."""
    return [*map(_secret_setting, step.secrets), *map(_without_version_1, step.settings)]


def variables(step: Step) -> set[str]:
    """The environment variables that the step's own settings fill."""
    names = set()
    for setting in settings_of(step):
        if not setting.name.endswith("AsEnv"):
            continue
        for entry in _entries(setting.value):
            # `fieldPathAsEnv` has a `name`, the others pairs of a key and an `envVar`
            for source in (entry, *_entries(entry.get("keyToEnv", []))):
                for key in ("envVar", "name"):
                    if key in source:
                        names.add(str(source[key]))
    return names


def _entries(value: object) -> list[Entry]:
    """The entries of a setting, as far as it is as kfp-kubernetes writes it."""
    if not isinstance(value, list):
        return []
    return [entry for entry in value if isinstance(entry, Mapping)]


def piece(name: str, value: Any, image: str) -> Piece:
    """The part of a pod that a setting asks for; Misfit if there is none."""
    if name == "imagePullPolicy":
        return _pull_policy(value, image)
    if name not in _PIECES:
        carried = ", ".join(sorted(_PIECES))
        raise Misfit(f"`{name}` has no field in a TrainJob", f"take it out; {carried} are carried")
    try:
        return _PIECES[name](value)
    # the IR may be anyone's: a value of another shape fails at whichever field is read
    # first
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        message = f"`{name}` is not as kfp-kubernetes writes it ({error})"
        raise Misfit(message, "write it again") from error


def _secret_setting(secret: Secret) -> Setting:
    """A secret of the Graph as the setting that kfp-kubernetes wrote for it."""
    match secret.name:
        case Constant(value):
            name: Json = {"runtimeValue": {"constant": value}}
        case FromInput(parameter):
            name = {"componentInputParameter": parameter}
        case FromTask(task, output):
            name = {"taskOutputParameter": {"producerTask": task, "outputParameterKey": output}}
        case _:
            name = {"runtimeValue": {"constant": "{{$}}"}}  # a placeholder, which is refused
    pairs = [{"secretKey": secret.key, "envVar": secret.env}]
    entry = {"secretNameParameter": name, "keyToEnv": pairs, "optional": secret.optional}
    return Setting("secretAsEnv", [entry], secret.where)


def _without_version_1(setting: Setting) -> Setting:
    """Claims as kfp-kubernetes 2 writes them: it repeats the name in the fields of
    version 1."""
    mounts = [dict(mount) for mount in _entries(setting.value)]
    if setting.name != "pvcMount" or mounts != setting.value:
        return setting
    for mount in mounts:
        name: Json = {}
        for key in ("constant", "componentInputParameter", "taskOutputParameter"):
            if key in mount:
                name[key] = mount.pop(key)
        if "constant" in name:
            name = {"runtimeValue": name}
        mount.setdefault("pvcNameParameter", name)
    return Setting(setting.name, mounts, setting.where)


def _key_variables(source: str, entries: Entries) -> Piece:
    """Variables from the keys of secrets or config maps; `source` is `secret` or
    `configMap`."""
    found_variables = []
    for entry in entries:
        name = _constant(entry, f"{source}NameParameter", f"{source}Name")
        optional = {"optional": True} if entry.get("optional") else {}
        for pair in entry["keyToEnv"]:
            reference = {"name": name, "key": pair[f"{source}Key"], **optional}
            found_variables.append(variable(pair["envVar"], f"{source}KeyRef", reference))
    return {"env": found_variables}


def variable(name: str, reference: str, source: Mapping[str, Any]) -> Json:
    """A variable whose value Kubernetes finds; Misfit if Trainer keeps the name for
    itself."""
    if name.startswith("PET_"):
        raise Misfit(f"`{name}` in the environment is Trainer's own", "give it another name")
    return {"name": name, "valueFrom": {reference: dict(source)}}


def _field_variables(entries: Entries) -> Piece:
    """Variables from fields of the pod."""
    paths = [(entry["name"], {"fieldPath": entry["fieldPath"]}) for entry in entries]
    return {"env": [variable(name, "fieldRef", path) for name, path in paths]}


def _metadata(value: Entry) -> Piece:
    for label in value.get("labels", {}):
        if label.startswith(_QUEUES):
            raise Misfit(
                f"the label `{label}` is for a whole TrainJob", "set platforms.kubeflow.queue"
            )
        if label.startswith(_OWNED):
            raise Misfit(f"the label `{label}` is not for a step to set", "take it out")
    metadata = {key: dict(value[key]) for key in ("labels", "annotations") if value.get(key)}
    return {"metadata": metadata} if metadata else {}


def _pull_secrets(entries: Entries) -> Piece:
    names = [_constant(entry, "secretNameParameter", "secretName") for entry in entries]
    if not names:
        return {}
    distinct_names = dict.fromkeys(names)
    return {"spec": {"imagePullSecrets": [{"name": name} for name in distinct_names]}}


def _security(value: Entry) -> Piece:
    """The security context of the container; KFP gives up all capabilities with it, and
    so it is here."""
    context: Json = {"capabilities": {"drop": ["ALL"]}}
    for key in ("runAsUser", "runAsGroup"):
        if key in value:
            context[key] = int(value[key])  # protobuf writes an int64 as text
    if "runAsNonRoot" in value:
        context["runAsNonRoot"] = value["runAsNonRoot"]
    return {"spec": {"containers": [{"name": NODE, "securityContext": context}]}}


def _pull_policy(policy: str, image: str) -> Piece:
    """Nothing, if it is what Kubernetes does anyhow with an image of this name."""
    last = image.rpartition("/")[2]
    is_mutable = "@" not in last and last.partition(":")[2] in ("", "latest")
    usual = "Always" if is_mutable else "IfNotPresent"
    if policy != usual:
        raise Misfit(
            f"`imagePullPolicy` {policy} has no field in a TrainJob, whose nodes follow "
            f"{usual} for {image}",
            "take it out, and name the image by its digest",
        )
    return {}


_PIECES: Mapping[str, Callable[[Any], Piece]] = {
    "secretAsEnv": functools.partial(_key_variables, "secret"),
    "fieldPathAsEnv": _field_variables,
    "configMapAsEnv": functools.partial(_key_variables, "configMap"),
    "pvcMount": _claims,
    "secretAsVolume": _secret_files,
    "configMapAsVolume": _config_files,
    "genericEphemeralVolume": _ephemeral_claims,
    "emptyDirMounts": _empty_folders,
    "enabledSharedMemory": shared_memory,
    "nodeSelector": node_selector,
    "tolerations": tolerations,
    "nodeAffinity": node_affinity,
    "podAffinity": pod_affinity,
    "podMetadata": _metadata,
    "imagePullSecret": _pull_secrets,
    "securityContext": _security,
}
