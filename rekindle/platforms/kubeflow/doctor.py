"""The least permissions of runs on Kubeflow, and whether KFP's API, the registries and the cluster
have what a config names."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from rekindle.platforms import reads
from rekindle.platforms.asking import Question, about
from rekindle.platforms.definition import Definition
from rekindle.platforms.kubeflow import server
from rekindle.platforms.kubeflow.outline import images, trainers
from rekindle.spec.places import KubeflowSpec


def permissions(place: KubeflowSpec) -> str:
    """The least that the service accounts of runs and of nodes need, as a manifest to apply."""
    text = (server.MANIFESTS / "rbac.yaml").read_text(encoding="utf-8")
    text = text.replace("namespace: kubeflow", f"namespace: {place.namespace}")
    text = text.replace("name: pipeline-runner\n", f"name: {place.service_account}\n")
    return text.replace("name: rekindle-node\n", f"name: {place.node_account}\n")


def questions(place: KubeflowSpec, definition: Definition | None) -> Iterator[Question]:
    """About the config, and about what would be sent."""
    ask = about("kubeflow", place)
    if place.host:
        yield ask("API", "host", server.api, early=True)
    for image in reads.images({place.image or "", *(images(definition) if definition else ())}):
        yield ask("image", "image", server.image, image)
    asked = functools.partial(server.cluster, place)
    yield Question("cluster", "kubectl's context", asked, login=True)
    if definition is None or trainers(definition):
        name = f"clustertrainingruntime {place.runtime}"
        yield Question("runtime", name, functools.partial(server.runtime, place))
