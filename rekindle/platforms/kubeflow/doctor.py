"""The least permissions of runs on Kubeflow, and whether KFP's API, the registries and the cluster
have what a config names."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from rekindle.platforms import reads
from rekindle.platforms.checks import Check, about
from rekindle.platforms.definition import Definition
from rekindle.platforms.kubeflow import api_checks
from rekindle.platforms.kubeflow.outline import images, trainers
from rekindle.spec.platforms import KubeflowSpec


def permissions(place: KubeflowSpec) -> str:
    """The least that the service accounts of runs and of nodes need, as a manifest to apply."""
    text = (api_checks.MANIFESTS / "rbac.yaml").read_text(encoding="utf-8")
    text = text.replace("namespace: kubeflow", f"namespace: {place.namespace}")
    text = text.replace("name: pipeline-runner\n", f"name: {place.service_account}\n")
    return text.replace("name: rekindle-node\n", f"name: {place.node_account}\n")


def checks(place: KubeflowSpec, definition: Definition | None) -> Iterator[Check]:
    """About the config, and about what would be sent."""
    ask = about("kubeflow", place)
    if place.host:
        yield ask("API", "host", api_checks.api, early=True)
    for image in reads.images({place.image or "", *(images(definition) if definition else ())}):
        yield ask("image", "image", api_checks.image, image)
    asked = functools.partial(api_checks.cluster, place)
    yield Check("cluster", "kubectl's context", asked, login=True)
    if definition is None or trainers(definition):
        name = f"clustertrainingruntime {place.runtime}"
        yield Check("runtime", name, functools.partial(api_checks.runtime, place))
