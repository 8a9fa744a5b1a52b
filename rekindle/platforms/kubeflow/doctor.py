"""Does KFP's API answer, and is the cluster ready for steps on several nodes? Kubeflow Trainer,
rekindle's runtime, and what the service account of runs may do.

Permissions are asked of the account that launchers run as (SubjectAccessReview), because what the
person at the keyboard may do says nothing of it."""

from __future__ import annotations

import dataclasses
import functools
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rekindle.answers import ReadinessCheck
from rekindle.errors import Problem, RequestError, StepError
from rekindle.platforms.asking import Question, Unasked, answered
from rekindle.platforms.asking import checks as asked
from rekindle.platforms.definition import Definition
from rekindle.platforms.kubeflow import server
from rekindle.platforms.kubeflow.cluster import Cluster
from rekindle.platforms.kubeflow.kubeconfig import connected
from rekindle.platforms.kubeflow.outline import images
from rekindle.platforms.reads import image
from rekindle.spec.places import KubeflowSpec

MANIFESTS = Path(__file__).with_name("manifests")
_TRAINER = "/apis/trainer.kubeflow.org/v1alpha1/clustertrainingruntimes"
_REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
_PATIENCE_SECONDS = 3.0
_INSTALL = (
    "install Kubeflow Trainer v2.3: kubectl apply --server-side -k "
    "https://github.com/kubeflow/trainer.git/manifests/overlays/manager?ref=v2.3.0"
)


def permissions(place: KubeflowSpec) -> str:
    """The least that the service accounts of runs and of nodes need, as a manifest to apply."""
    text = (MANIFESTS / "rbac.yaml").read_text(encoding="utf-8")
    text = text.replace("namespace: kubeflow", f"namespace: {place.namespace}")
    text = text.replace("name: pipeline-runner\n", f"name: {place.service_account}\n")
    return text.replace("name: rekindle-node\n", f"name: {place.node_account}\n")


def checks(
    place: KubeflowSpec, definition: Definition | None, early: bool = False
) -> tuple[ReadinessCheck, ...]:
    """What KFP's API, the cluster, the store and the registry say of the config and of what would
    be sent."""
    api = _question("API", "host", server.api, place, early=True)
    found = answered([api] if place.host else [])
    if early:
        return found
    there = _There(place)
    cluster = Question("cluster", "kubectl's context", there.version)
    found += asked(cluster, _of_cluster(there))
    return (*found, *answered(list(_around(place, definition))))


def _question(name: str, field: str, ask: Any, *words: Any, early: bool = False) -> Question:
    return Question(name, f"platforms.kubeflow.{field}", functools.partial(ask, *words), early)


def _around(place: KubeflowSpec, definition: Definition | None) -> Iterator[Question]:
    if place.artifact_root.startswith(("s3://", "gs://")):
        yield _question("bucket", "artifact_root", server.bucket, place.artifact_root)
    references = {place.image or "", *(images(definition) if definition else ())}
    for wanted in sorted(filter(None, map(image, references)), key=str):
        yield _question("image", "image", server.anonymously, wanted)


class _There:
    """The cluster that kubectl speaks to; what the user may not look at is not asked."""

    def __init__(self, place: KubeflowSpec) -> None:
        self.place = place
        self._cluster: Cluster | None = None

    def version(self) -> str:
        """Checks that the cluster answers the user; without one, KFP's API alone has to do."""
        try:
            self._cluster = dataclasses.replace(connected(), patience_seconds=_PATIENCE_SECONDS)
        except RequestError as error:
            if self.place.host:
                raise Unasked(error.problems[0].what) from None
            raise
        found = self._cluster.get("/version") or {}
        return f"{self._cluster.server} {found.get('gitVersion', '')}".rstrip()

    def of(self, ask: Any, *words: Any) -> str:
        """What `ask(cluster, place, *words)` finds."""
        assert self._cluster is not None
        try:
            found: str = ask(self._cluster, self.place, *words)
        except StepError as error:
            raise Unasked(error.problems[0].what) from error
        return found


def _of_cluster(there: _There) -> Iterator[Question]:
    place = there.place
    runtime = f"clustertrainingruntime {place.runtime}"
    yield Question("runtime", runtime, functools.partial(there.of, _runtime))
    documents = list(yaml.safe_load_all(permissions(place)))
    rules = {d["metadata"]["name"]: d["rules"] for d in documents if d["kind"] == "Role"}
    where = f"namespace {place.namespace}"
    for binding in (d for d in documents if d["kind"] == "RoleBinding"):
        account = f"system:serviceaccount:{place.namespace}:{binding['subjects'][0]['name']}"
        for rule in rules[binding["roleRef"]["name"]]:
            asked = functools.partial(there.of, _permitted, account, rule)
            yield Question("the account may", where, asked)


def _runtime(cluster: Cluster, place: KubeflowSpec) -> str:
    if cluster.get(_TRAINER) is None:
        raise RequestError(
            "the cluster has no Kubeflow Trainer v2", where=cluster.server, fix=_INSTALL
        )
    runtime = cluster.get(f"{_TRAINER}/{place.runtime}")
    apply = f"kubectl apply -f {shlex.quote(str(MANIFESTS / 'runtime.yaml'))}"
    if runtime is None:
        raise RequestError(f"the cluster has no ClusterTrainingRuntime {place.runtime}", fix=apply)
    spec, lacks = runtime["spec"], []
    if "torch" not in spec.get("mlPolicy", {}):
        lacks.append("its mlPolicy is not torch, so that nodes would not be told of each other")
    if not spec.get("template", {}).get("spec", {}).get("failurePolicy", {}).get("maxRestarts"):
        lacks.append("it has no failurePolicy: a lost node would end the job")
    if lacks:
        raise RequestError(
            Problem(what, f"clustertrainingruntime {place.runtime}", apply) for what in lacks
        )
    return place.runtime


def _permitted(cluster: Cluster, place: KubeflowSpec, account: str, rule: Mapping[str, Any]) -> str:
    (group,), (resource,) = rule["apiGroups"], rule["resources"]
    missing = [
        verb
        for verb in rule["verbs"]
        if not _may(cluster, account, verb, group, resource, place.namespace)
    ]
    if missing:
        fix = "kubectl apply -f - with the manifest that this command prints"
        raise RequestError(f"{account} may not {', '.join(missing)} {resource}", fix=fix)
    return f"{account.rpartition(':')[2]}: {', '.join(rule['verbs'])} {resource}"


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
