"""Whether the cluster has what runs need: accounts and their rights, Trainer with its
runtime, room in quotas, a queue, Secrets; and what of it does things differently.

Each check reads, as the user of kubectl's context; what that user may not read is not
asked. Secrets are looked for by their metadata alone, and no value is read.

Authority: Kubernetes' authorization, quota and limit range APIs v1; Trainer's v1alpha1;
Kueue's v1beta1; Istio's injection labels; Argo's workflowDefaults."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rekindle.errors import Problem, RequestError, StepError, first_line
from rekindle.platforms.checks import CurableError, NotChecked
from rekindle.platforms.kubeflow.cluster import ApiServer
from rekindle.platforms.kubeflow.section import KubeflowSpec
from rekindle.protojson import Json

MANIFESTS = Path(__file__).with_name("manifests")
_TRAINER = "/apis/trainer.kubeflow.org/v1alpha1/clustertrainingruntimes"
_AUTHORIZATION = "/apis/authorization.k8s.io/v1"
_OWN_RUNTIME = "rekindle"
# the account that Kubeflow's controller of profiles creates in each profile
_PROFILE_ACCOUNT = "default-editor"
_GRANT = "rekindle doctor CONFIG --platform kubeflow | kubectl apply -f -"
_INJECTION = "sidecar.istio.io/inject"


def accounts(place: KubeflowSpec, cluster: ApiServer, *, is_distributed: bool) -> str:
    """Whether the accounts that steps and nodes run as are there."""
    names = [place.service_account]
    if is_distributed:
        names.append(place.node_account)
    folder = f"/api/v1/namespaces/{place.namespace}/serviceaccounts"
    missing = [name for name in names if not cluster.exists(f"{folder}/{name}")]
    if place.service_account in missing and cluster.exists(f"{folder}/{_PROFILE_ACCOUNT}"):
        raise CurableError(
            f"the namespace {place.namespace} has no ServiceAccount {place.service_account}, and "
            f"{_PROFILE_ACCOUNT}, which Kubeflow creates in a profile",
            {"platforms.kubeflow.service_account": _PROFILE_ACCOUNT},
            where="platforms.kubeflow.service_account",
            fix=f"set platforms.kubeflow.service_account: {_PROFILE_ACCOUNT}, or pass --write",
        )
    if missing:
        problems = [_missing_account(place, cluster, name) for name in missing]
        raise RequestError(dict.fromkeys(problems))
    return ", ".join(names)


def _missing_account(place: KubeflowSpec, cluster: ApiServer, name: str) -> Problem:
    namespace = place.namespace
    field = "service_account" if name == place.service_account else "node_account"
    where = f"platforms.kubeflow.{field}"
    try:
        has_namespace = cluster.exists(f"/api/v1/namespaces/{namespace}")
    except StepError:  # to see namespaces is a right of its own
        has_namespace = True
    if not has_namespace:
        message = f"the cluster has no namespace {namespace}"
        return Problem(message, "platforms.kubeflow.namespace", "name that of your profile")
    fix = _GRANT if field == "node_account" else "name the one that runs of the namespace have"
    return Problem(f"the namespace {namespace} has no ServiceAccount {name}", where, fix)


def rights(place: KubeflowSpec, cluster: ApiServer, manifest: str) -> str:
    """Whether the accounts may do what a manifest of Roles and RoleBindings grants them."""
    granted = [document for document in yaml.safe_load_all(manifest) if document]
    rules_of = {doc["metadata"]["name"]: doc["rules"] for doc in granted if doc["kind"] == "Role"}
    missing: dict[str, list[str]] = {}
    for binding in granted:
        if binding["kind"] != "RoleBinding":
            continue
        account = binding["subjects"][0]["name"]
        missing.setdefault(account, [])
        for attributes in _attributes(rules_of[binding["roleRef"]["name"]]):
            review = {"user": f"system:serviceaccount:{place.namespace}:{account}"}
            groups = ["system:serviceaccounts", f"system:serviceaccounts:{place.namespace}"]
            spec = {**review, "groups": groups}
            if not _is_allowed(place, cluster, "subjectaccessreviews", spec, attributes):
                missing[account].append(_right(attributes))
    problems = [
        Problem(f"{account} may not {', '.join(names)}", f"serviceaccount {account}", _GRANT)
        for account, names in missing.items()
        if names
    ]
    if problems:
        raise RequestError(problems)
    return f"{', '.join(missing)} may do what the manifest grants"


def own_rights(place: KubeflowSpec, cluster: ApiServer, manifest: str, role: str) -> str:
    """Whether who asks may do what a Role of a manifest grants, which no binding gives to steps."""
    documents = [document for document in yaml.safe_load_all(manifest) if document]
    (rules,) = [
        document["rules"]
        for document in documents
        if document["kind"] == "Role" and document["metadata"]["name"] == role
    ]
    missing = [
        _right(attributes)
        for attributes in _attributes(_needed_for_deploying(place, rules))
        if not _is_allowed(place, cluster, "selfsubjectaccessreviews", {}, attributes)
    ]
    if missing:
        raise RequestError(
            f"you may not {', '.join(missing)}",
            where=f"namespace {place.namespace}",
            fix=f"have the Role {role} that doctor prints bound to you",
        )
    return f"you may do what the Role {role} grants"


def _needed_for_deploying(place: KubeflowSpec, rules: Sequence[Json]) -> list[Json]:
    """The rules without those for what the config does not use."""
    unused = set()
    if place.serving != "kserve":
        unused.add("serving.kserve.io")
    if not place.gateway:
        unused.add("gateway.networking.k8s.io")
    return [rule for rule in rules if not unused & set(rule["apiGroups"])]


def _attributes(rules: Sequence[Json]) -> Iterator[dict[str, str]]:
    """What rules grant, one verb on one resource each."""
    for rule in rules:
        for group in rule["apiGroups"]:
            for full_name in rule["resources"]:
                resource, _, subresource = full_name.partition("/")
                for verb in rule["verbs"]:
                    yield {
                        "group": group,
                        "resource": resource,
                        "subresource": subresource,
                        "verb": verb,
                    }


def _right(attributes: Mapping[str, str]) -> str:
    name = "/".join(filter(None, (attributes["resource"], attributes["subresource"])))
    return f"{attributes['verb']} {name}"


def _is_allowed(
    place: KubeflowSpec,
    cluster: ApiServer,
    kind: str,
    spec: Mapping[str, Any],
    attributes: Mapping[str, str],
) -> bool:
    kinds = {
        "subjectaccessreviews": "SubjectAccessReview",
        "selfsubjectaccessreviews": "SelfSubjectAccessReview",
    }
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": kinds[kind],
        "spec": {**spec, "resourceAttributes": {"namespace": place.namespace, **attributes}},
    }
    try:
        answer = cluster.create(f"{_AUTHORIZATION}/{kind}", review)
    except StepError as error:
        raise NotChecked(f"you may not ask what others may: {error.problems[0].what}") from None
    return bool((answer.get("status") or {}).get("allowed"))


def runtime(place: KubeflowSpec, cluster: ApiServer) -> str:
    """Whether Kubeflow Trainer is installed, with the runtime that the config names, as this
    release has it."""
    if cluster.get(_TRAINER) is None:
        raise RequestError(
            "the cluster has no Kubeflow Trainer v2",
            where=cluster.server,
            fix="install Kubeflow Trainer v2.3: kubectl apply --server-side -k "
            "https://github.com/kubeflow/trainer.git/manifests/overlays/manager?ref=v2.3.0",
        )
    installed = cluster.get(f"{_TRAINER}/{place.runtime}")
    manifest = MANIFESTS / "runtime.yaml"
    file = shlex.quote(str(manifest))
    if installed is None:
        message = f"the cluster has no ClusterTrainingRuntime {place.runtime}"
        raise RequestError(message, fix=f"kubectl apply -f {file}")
    if place.runtime != _OWN_RUNTIME:
        return f"{place.runtime}, which is your own"
    shipped = yaml.safe_load(manifest.read_text(encoding="utf-8"))
    differences = list(_lacking(shipped["spec"], installed.get("spec") or {}, ""))
    if differences:
        raise RequestError(
            f"the ClusterTrainingRuntime {place.runtime} is not that of this release: "
            f"{', '.join(differences[:3])}{' ...' if len(differences) > 3 else ''}",
            fix=f"kubectl delete -f {file}; kubectl apply -f {file} (jobs that "
            "run keep theirs), or name one of your own in platforms.kubeflow.runtime",
        )
    return f"{place.runtime}, as this release has it"


def _lacking(wanted: Any, installed: Any, path: str) -> Iterator[str]:
    """Where an object of the cluster does not have what a manifest says; what it has beside
    that are defaults."""
    if isinstance(wanted, dict):
        if not isinstance(installed, dict):
            yield path
            return
        for name, value in wanted.items():
            inner = f"{path}.{name}".lstrip(".")
            # the API server leaves out what is empty
            if name not in installed and value not in ({}, [], None):
                yield inner
            elif name in installed:
                yield from _lacking(value, installed[name], inner)
    elif isinstance(wanted, list):
        if not isinstance(installed, list) or len(installed) != len(wanted):
            yield path
            return
        for index, pair in enumerate(zip(wanted, installed, strict=True)):
            yield from _lacking(*pair, f"{path}[{index}]")
    elif str(wanted) != str(installed):
        yield path


def mesh(place: KubeflowSpec, cluster: ApiServer) -> str:
    """Whether Istio puts a proxy beside pods of the namespace, and what nodes make of it."""
    try:
        namespace = cluster.get(f"/api/v1/namespaces/{place.namespace}") or {}
    except StepError as error:
        raise NotChecked(error.problems[0].what) from None
    labels = (namespace.get("metadata") or {}).get("labels") or {}
    if labels.get("istio-injection") != "enabled" and "istio.io/rev" not in labels:
        return f"Istio does not inject into {place.namespace}"
    installed = cluster.get(f"{_TRAINER}/{place.runtime}") or {}
    for job in _replicated_jobs(installed):
        pod = job["template"]["spec"]["template"]
        metadata = pod.get("metadata") or {}
        marks = {**(metadata.get("annotations") or {}), **(metadata.get("labels") or {})}
        if str(marks.get(_INJECTION)).lower() != "false":
            raise RequestError(
                f"Istio puts a proxy beside the pods of {place.namespace}, which never ends, and "
                f"so the nodes of ClusterTrainingRuntime {place.runtime} never would",
                where=f"clustertrainingruntime {place.runtime}",
                fix=f'label its pods {_INJECTION}: "false", as runtime.yaml does',
            )
    return (
        f"Istio injects into {place.namespace}; nodes ask for no proxy, so what they reach (the "
        "store, the registry of models) has to take plain connections"
    )


def _replicated_jobs(runtime_object: Json) -> list[Json]:
    spec = (runtime_object.get("spec") or {}).get("template", {}).get("spec", {})
    return list(spec.get("replicatedJobs") or ())


def queue(place: KubeflowSpec, cluster: ApiServer) -> str:
    """Whether the LocalQueue of Kueue that the config names is there."""
    for version in ("v1beta1", "v1beta2"):
        path = f"/apis/kueue.x-k8s.io/{version}/namespaces/{place.namespace}/localqueues"
        if cluster.get(f"{path}/{place.queue}") is not None:
            return place.queue
    raise RequestError(
        f"the namespace {place.namespace} has no LocalQueue {place.queue} of Kueue",
        where="platforms.kubeflow.queue",
        fix="create it, or name one of `kubectl get localqueues`",
    )


def secret(place: KubeflowSpec, cluster: ApiServer, name: str) -> str:
    """Whether a Secret that steps get variables from is there; no value is read."""
    if not cluster.exists(f"/api/v1/namespaces/{place.namespace}/secrets/{name}"):
        raise RequestError(
            f"the namespace {place.namespace} has no Secret {name}: steps would never start",
            fix=f"kubectl -n {place.namespace} create secret generic {name} ...",
        )
    return name


def argo(place: KubeflowSpec, cluster: ApiServer) -> str:
    """What Argo's defaults on this cluster make of retries, and of runs that have ended."""
    path = "/api/v1/namespaces/kubeflow/configmaps/workflow-controller-configmap"
    try:
        config = cluster.get(path)
    except StepError as error:
        raise NotChecked(error.problems[0].what) from None
    if config is None:
        raise NotChecked("the namespace kubeflow has no workflow-controller-configmap")
    spec = _workflow_defaults(config).get("spec") or {}
    retry = (spec.get("templateDefaults") or {}).get("retryStrategy") or {}
    policy = retry.get("retryPolicy") or "OnFailure"
    sentence = f"Argo retries steps by its policy {policy}"
    if policy == "OnError":
        sentence = (
            "Argo retries pods that vanish, and none that fails (retryPolicy OnError): steps with "
            "set_retry try again in their pods, from platforms.kubeflow.version 2.17 on"
        )
    sentences = [sentence]
    ttl = spec.get("ttlStrategy") or {}
    seconds = ttl.get("secondsAfterCompletion") or ttl.get("secondsAfterFailure")
    if seconds:
        sentences.append(f"pods and logs of a run go {int(seconds):,} s after its end")
    return "; ".join(sentences)


def _workflow_defaults(config: Json) -> Json:
    """Argo's workflowDefaults, a key of the ConfigMap or of the YAML in its key `config`
    (config/controller.go of argo-workflows 4.0.5)."""
    data = config.get("data") or {}
    try:
        defaults = yaml.safe_load(data.get("workflowDefaults") or "")
        if "config" in data:
            defaults = (yaml.safe_load(data["config"]) or {}).get("workflowDefaults")
        if isinstance(defaults, str):
            defaults = yaml.safe_load(defaults)
    except (yaml.YAMLError, AttributeError) as error:
        reason = first_line(error)
        raise NotChecked(f"workflow-controller-configmap is not YAML: {reason}") from None
    return defaults if isinstance(defaults, dict) else {}


def gateway(place: KubeflowSpec, cluster: ApiServer) -> str:
    """Whether the cluster has the Gateway that shares requests among Deployments."""
    namespace, _, name = place.gateway.partition("/")
    path = f"/apis/gateway.networking.k8s.io/v1/namespaces/{namespace}/gateways/{name}"
    if cluster.get(path) is None:
        raise RequestError(
            f"the cluster has no Gateway {place.gateway} of the Gateway API v1",
            fix="make it, or leave platforms.kubeflow.gateway out and set deploy.canary: []",
        )
    return f"{place.gateway}, for versions that are Deployments"
