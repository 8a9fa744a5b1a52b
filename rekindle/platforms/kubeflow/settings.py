"""What kfp-kubernetes asks of the pod of a step, in the words of the pods of a TrainJob.

On a step of one node KFP's driver reads these settings (extendPodSpecPatch in kubeflow/pipelines,
backend/src/v2/driver/k8s.go, whose ways are kept here); the nodes of a TrainJob get them as a patch
of their runtime, whose fields are those of Trainer v2.3's PodTemplatePatch.

A setting may name an input of the pipeline (`secretNameParameter`, `tolerationJson`). `opened`
takes these out, and the launcher puts their values in (`closed`) before it asks for the piece. An
input that is empty at run time leaves its entry out, as KFP does."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rekindle.ir.graph import Constant, FromInput, FromTask, Secret, Setting, Step
from rekindle.platforms.kubeflow import placement
from rekindle.platforms.kubeflow.pod_patch import NODE, Entries, Misfit, Piece, given

INPUT = "rekindle-setting-"
# Labels by which Job, JobSet, Trainer and Kueue know their pods
_OWNED = ("batch.kubernetes.io/", "jobset.sigs.k8s.io/", "trainer.kubeflow.org/")
_QUEUES = "kueue.x-k8s.io/"


def settings_of(step: Step) -> list[Setting]:
    """All settings of a step's pod, secrets in the environment among them, each a list of its own
    with its place in the IR."""
    return [*map(_of_secret, step.secrets), *map(_of_today, step.settings)]


def variables(settings: Sequence[Setting]) -> set[str]:
    """The environment variables that settings fill."""
    entries = [e for s in settings if s.name.endswith("AsEnv") for e in _entries(s.value)]
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
        carried = ", ".join(sorted(_PIECES))
        raise Misfit(f"`{name}` has no field in a TrainJob", f"take it out; {carried} are carried")
    try:
        return _PIECES[name](value)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Misfit(
            f"`{name}` is not as kfp-kubernetes writes it ({error})", "write it again"
        ) from error


def opened(value: Any, take: Callable[[Mapping[str, Any]], str]) -> Any:
    """A setting with `{"input": NAME}` in place of what only the run knows; `take` is told the
    binding, as the IR writes it, and gives the name."""
    if isinstance(value, Mapping):
        if "componentInputParameter" in value or "taskOutputParameter" in value:
            return {"input": take(value)}
        return {key: opened(one, take) for key, one in value.items()}
    return [opened(one, take) for one in value] if isinstance(value, list) else value


def closed(value: Any, inputs: Mapping[str, Any]) -> Any:
    """The same with the values that the run has; None where it has none."""
    if isinstance(value, Mapping):
        if set(value) == {"input"}:
            return {"runtimeValue": {"constant": inputs.get(value["input"])}}
        return {key: closed(one, inputs) for key, one in value.items()}
    return [closed(one, inputs) for one in value] if isinstance(value, list) else value


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
    entry = {
        "secretNameParameter": name,
        "keyToEnv": [{"secretKey": secret.key, "envVar": secret.env}],
        "optional": secret.optional,
    }
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
        for pair in entry["keyToEnv"] if name is not None else ():
            source = {"name": name, "key": pair[f"{of}Key"], **optional}
            found.append(variable(pair["envVar"], f"{of}KeyRef", source))
    return {"env": found}


def variable(name: str, reference: str, source: Mapping[str, Any]) -> dict[str, Any]:
    """A variable whose value Kubernetes finds; Misfit if Trainer keeps the name for itself."""
    if name.startswith("PET_"):
        raise Misfit(f"`{name}` in the environment is Trainer's own", "give it another name")
    return {"name": name, "valueFrom": {reference: dict(source)}}


def _fields(entries: Entries) -> Piece:
    pairs = [(e["name"], {"fieldPath": e["fieldPath"]}) for e in entries]
    return {"env": [variable(name, "fieldRef", source) for name, source in pairs]}


def _metadata(value: Mapping[str, Any]) -> Piece:
    for label in value.get("labels", {}):
        if label.startswith(_QUEUES):
            raise Misfit(
                f"the label `{label}` is for a whole TrainJob", "set platforms.kubeflow.queue"
            )
        if label.startswith(_OWNED):
            raise Misfit(f"the label `{label}` is not for a step to set", "take it out")
    made = {key: dict(value[key]) for key in ("labels", "annotations") if value.get(key)}
    return {"metadata": made} if made else {}


def _pull_secrets(entries: Entries) -> Piece:
    names = [given(entry, "secretNameParameter", "secretName") for entry in entries]
    found = [{"name": name} for name in dict.fromkeys(names) if name is not None]
    return {"spec": {"imagePullSecrets": found}} if found else {}


def _security(value: Mapping[str, Any]) -> Piece:
    """The container's; KFP gives up all capabilities with it, and so it is here."""
    made: dict[str, Any] = {"capabilities": {"drop": ["ALL"]}}
    made |= {key: int(value[key]) for key in ("runAsUser", "runAsGroup") if key in value}
    made |= {key: value[key] for key in ("runAsNonRoot",) if key in value}
    return {"spec": {"containers": [{"name": NODE, "securityContext": made}]}}


def _pull_policy(policy: str, image: str) -> Piece:
    """Nothing, if it is what Kubernetes does anyhow with an image of this name."""
    last = image.rpartition("/")[2]
    moving = "@" not in last and last.partition(":")[2] in ("", "latest")
    usual = "Always" if moving else "IfNotPresent"
    if policy != usual:
        raise Misfit(
            f"`imagePullPolicy` {policy} has no field in a TrainJob, whose nodes follow {usual} "
            f"for {image}",
            "take it out, and name the image by its digest",
        )
    return {}


_PIECES: Mapping[str, Callable[[Any], Piece]] = {
    "secretAsEnv": functools.partial(_keys, "secret"), "fieldPathAsEnv": _fields,
    "configMapAsEnv": functools.partial(_keys, "configMap"),
    "pvcMount": functools.partial(
        placement.named, "claim", "persistentVolumeClaim", "claimName", ["pvcNameParameter"]
    ),
    "secretAsVolume": functools.partial(
        placement.named, "secret", "secret", "secretName", ["secretNameParameter", "secretName"]
    ),
    "configMapAsVolume": functools.partial(
        placement.named, "config", "configMap", "name", ["configMapNameParameter", "configMapName"]
    ),
    "genericEphemeralVolume": placement.ephemeral,
    "emptyDirMounts": placement.empty, "enabledSharedMemory": placement.shared_memory,
    "nodeSelector": placement.node_selector, "tolerations": placement.tolerations,
    "nodeAffinity": placement.node_affinity, "podAffinity": placement.pod_affinity,
    "podMetadata": _metadata, "imagePullSecret": _pull_secrets, "securityContext": _security,
}  # fmt: skip
