"""Is the cluster ready for steps on several nodes? Kubeflow Trainer, rekindle's runtime, and what
the service account of runs may do.

Permissions are asked of the account that launchers run as (SubjectAccessReview), because what the
person at the keyboard may do says nothing of it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rekindle.errors import Problem, RekindleError
from rekindle.platforms.kubeflow.cluster import Cluster
from rekindle.platforms.kubeflow.kubeconfig import connected
from rekindle.spec.places import KubeflowSpec

MANIFESTS = Path(__file__).with_name("manifests")
_TRAINER = "/apis/trainer.kubeflow.org/v1alpha1/clustertrainingruntimes"
_REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
_INSTALL = (
    "install Kubeflow Trainer v2.3: kubectl apply --server-side -k "
    "https://github.com/kubeflow/trainer.git/manifests/overlays/manager?ref=v2.3.0"
)


def permissions(place: KubeflowSpec) -> str:
    """The least that the service account of runs needs, as a manifest to apply."""
    text = (MANIFESTS / "rbac.yaml").read_text(encoding="utf-8")
    text = text.replace("namespace: kubeflow", f"namespace: {place.namespace}")
    return text.replace("name: pipeline-runner", f"name: {place.service_account}")


def problems(place: KubeflowSpec) -> list[Problem]:
    """Everything that is missing, each with its fix."""
    try:
        cluster = connected()
        return [*_runtime(cluster, place), *_permissions(cluster, place)]
    except RekindleError as error:
        return list(error.problems)


def _runtime(cluster: Cluster, place: KubeflowSpec) -> Iterator[Problem]:
    if cluster.get(_TRAINER) is None:
        yield Problem("the cluster has no Kubeflow Trainer v2", cluster.server, _INSTALL)
        return
    runtime = cluster.get(f"{_TRAINER}/{place.runtime}")
    where = f"clustertrainingruntime {place.runtime}"
    apply = f"kubectl apply -f {shlex.quote(str(MANIFESTS / 'runtime.yaml'))}"
    if runtime is None:
        yield Problem(f"the cluster has no ClusterTrainingRuntime {place.runtime}", where, apply)
        return
    spec = runtime["spec"]
    if "torch" not in spec.get("mlPolicy", {}):
        what = "its mlPolicy is not torch, so that nodes would not be told of each other"
        yield Problem(what, where, apply)
    if not spec.get("template", {}).get("spec", {}).get("failurePolicy", {}).get("maxRestarts"):
        yield Problem("it has no failurePolicy: a lost node would end the job", where, apply)


def _permissions(cluster: Cluster, place: KubeflowSpec) -> Iterator[Problem]:
    account = f"system:serviceaccount:{place.namespace}:{place.service_account}"
    manifest = next(yaml.safe_load_all(permissions(place)))
    fix = "kubectl apply -f - with the manifest that this command prints"
    for rule in manifest["rules"]:
        (group,), (resource,) = rule["apiGroups"], rule["resources"]
        missing = [
            verb
            for verb in rule["verbs"]
            if not _may(cluster, account, verb, group, resource, place.namespace)
        ]
        if missing:
            what = f"{account} may not {', '.join(missing)} {resource}"
            yield Problem(what, f"namespace {place.namespace}", fix)


def _may(
    cluster: Cluster, account: str, verb: str, group: str, resource: str, namespace: str
) -> bool:
    name, _, part = resource.partition("/")
    attributes = {"namespace": namespace, "verb": verb, "group": group, "resource": name}
    if part:
        attributes["subresource"] = part
    review: Mapping[str, Any] = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": account, "resourceAttributes": attributes},
    }
    return bool(cluster.create(_REVIEWS, review)["status"]["allowed"])
