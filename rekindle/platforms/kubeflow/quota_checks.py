"""Whether quotas and limit ranges of the namespace have room for the nodes of a job.

A job that none has room for waits for ever, and Trainer says nothing of it
(trainjob-quota and trainjob-invalid-pod in tests/platforms/kubeflow/recorded).

Authority: Kubernetes' resource quotas (pkg/quota/v1/evaluator/core/pods.go) and limit
ranges (plugin/pkg/admission/limitranger/admission.go), 1.36."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from rekindle.errors import Problem, RequestError, StepError
from rekindle.platforms.checks import NotChecked
from rekindle.platforms.kubeflow.cluster import ApiServer
from rekindle.platforms.kubeflow.section import KubeflowSpec
from rekindle.protojson import Json

# of a step on several nodes there is one of each
_ONE_OF_EACH = (
    "count/trainjobs.trainer.kubeflow.org",
    "count/jobsets.jobset.x-k8s.io",
    "count/jobs.batch",
)
_COMPUTE = ("cpu", "memory")  # of which a quota wants a figure from each pod


@dataclasses.dataclass(frozen=True)
class NodeDemand:
    """What the nodes of a step ask for."""

    step: str
    nodes: int
    requests: Mapping[str, str]
    """Of one node, by resource, as Kubernetes writes amounts."""
    limits: Mapping[str, str]


def demand_of(step: str, trainer: Json) -> NodeDemand:
    """What the `trainer` of a TrainJob asks for."""
    resources = trainer.get("resourcesPerNode") or {}
    limits = resources.get("limits") or {}
    requests = {**limits, **(resources.get("requests") or {})}
    return NodeDemand(step, int(trainer["numNodes"]), requests, limits)


def quota(place: KubeflowSpec, cluster: ApiServer, demands: Sequence[NodeDemand]) -> str:
    """Whether each of the jobs fits into what the namespace may use, alone."""
    base = f"/api/v1/namespaces/{place.namespace}"
    try:
        quotas = (cluster.get(f"{base}/resourcequotas") or {}).get("items") or []
        ranges = (cluster.get(f"{base}/limitranges") or {}).get("items") or []
    except StepError as error:
        raise NotChecked(error.problems[0].what) from None
    problems: list[Problem] = []
    waits: list[str] = []
    for demand in demands:
        for item in ranges:
            problems += _beyond_limits(item, demand)
        for item in quotas:
            if _is_for_some_pods(item):
                continue
            problems += _beyond_quota(item, demand, _defaults_of(ranges))
            waits += _waits(item, demand)
    if problems:
        raise RequestError(problems)
    if not quotas and not ranges:
        return f"{place.namespace} has no quota"
    if waits:
        return "; ".join(waits)
    return f"{place.namespace} has room for the nodes of each step"


def _defaults_of(ranges: Sequence[Json]) -> frozenset[str]:
    """The resources, as quotas call them, that limit ranges give containers without any."""
    names = set()
    for item in ranges:
        for limit in item["spec"].get("limits") or ():
            if limit.get("type") != "Container":
                continue
            for resource in limit.get("default") or ():
                # a limit by default is a request by default, too
                names |= {f"limits.{resource}", f"requests.{resource}", resource}
            for resource in limit.get("defaultRequest") or ():
                names |= {f"requests.{resource}", resource}
    return frozenset(names)


def _is_for_some_pods(item: Json) -> bool:
    """Whether a quota counts only pods of some kind; whether nodes are of it is not known
    here."""
    return bool(item["spec"].get("scopes") or item["spec"].get("scopeSelector"))


def _beyond_quota(item: Json, demand: NodeDemand, defaults: frozenset[str]) -> Iterator[Problem]:
    name = item["metadata"]["name"]
    for resource, most in (item["spec"].get("hard") or {}).items():
        wanted = _wanted(resource, demand)
        if wanted is None:
            kind, _, compute = resource.rpartition(".")
            if compute in _COMPUTE and resource not in defaults:
                field = f"set_{compute}_{(kind or 'requests').removesuffix('s')}"
                yield Problem(
                    f"the quota {name} takes no pod without {resource}, and the nodes of "
                    f"`{demand.step}` have none",
                    f"resourcequota {name}",
                    f"say how much a node needs: {field} of its task, or a LimitRange with "
                    "defaults",
                )
        elif wanted > _amount(most):
            yield Problem(
                f"the quota {name} has {most} of {resource}, and the nodes of `{demand.step}` "
                f"ask for {wanted.normalize():f}: they would wait for ever",
                f"resourcequota {name}",
                "ask for less (resources.nodes, resources.gpus_per_node), or have it raised",
            )


def _waits(item: Json, demand: NodeDemand) -> Iterator[str]:
    """What others use now, and the job would wait for."""
    used = (item.get("status") or {}).get("used") or {}
    for resource, most in (item["spec"].get("hard") or {}).items():
        wanted = _wanted(resource, demand)
        if wanted is None or resource not in used or wanted > _amount(most):
            continue
        if wanted > _amount(most) - _amount(used[resource]):
            yield (
                f"`{demand.step}` waits while others use {used[resource]} of {most} {resource} "
                f"({item['metadata']['name']})"
            )


def _wanted(resource: str, demand: NodeDemand) -> Decimal | None:
    """How much of what a quota counts all nodes take; None for what they do not ask for."""
    if resource in ("pods", "count/pods"):
        return Decimal(demand.nodes)
    if resource in _ONE_OF_EACH:
        return Decimal(1)
    kind, dot, name = resource.partition(".")
    amounts = demand.requests
    if dot and kind == "limits":
        amounts = demand.limits
    elif not dot or kind != "requests":
        name = resource
    if name not in amounts:
        return None
    return demand.nodes * _amount(amounts[name])


def _beyond_limits(item: Json, demand: NodeDemand) -> Iterator[Problem]:
    """Where one node asks for more or less than a limit range lets a container or a pod
    have."""
    name = item["metadata"]["name"]
    for limit in item["spec"].get("limits") or ():
        if limit.get("type") not in ("Container", "Pod"):
            continue
        for resource, most in (limit.get("max") or {}).items():
            wanted = demand.limits.get(resource) or demand.requests.get(resource)
            if wanted is not None and _amount(wanted) > _amount(most):
                yield Problem(
                    f"the limit range {name} lets a {limit['type'].lower()} have {most} of "
                    f"{resource}, and a node of `{demand.step}` asks for {wanted}",
                    f"limitrange {name}",
                    "ask for less, or have it raised",
                )
        for resource, least in (limit.get("min") or {}).items():
            wanted = demand.requests.get(resource)
            if wanted is not None and _amount(wanted) < _amount(least):
                yield Problem(
                    f"the limit range {name} wants at least {least} of {resource} in a "
                    f"{limit['type'].lower()}, and a node of `{demand.step}` asks for {wanted}",
                    f"limitrange {name}",
                    "ask for more, or have it lowered",
                )


def _amount(text: Any) -> Decimal:
    from kubernetes.utils.quantity import parse_quantity

    return Decimal(parse_quantity(str(text)))
