"""A deployment in the cluster: a Deployment and a Service a version, and a Service of the
model's name, whose selector is the version that has most requests and whose annotation is
the last split. Shares of a canary are weights of an HTTPRoute of the Gateway API; without
one there are none.

With KServe, an InferenceService in the mode RawDeployment makes the Deployment of a
version. Its own canary is not used: until 0.20 that mode ignored it without a word
(kserve/kserve#5335), and the other mode knows the latest revision and the one before
alone.

Counts are those of `/metrics` of each pod, less what they were at the split. Whatever is
asked of the API server may be repeated; objects of our names without our label are left
alone. Untested against a real cluster. Authority: apps/v1, v1,
gateway.networking.k8s.io/v1; pkg/apis/serving/v1beta1 and pkg/constants of kserve/kserve
(0.16 calls the mode Standard, too).

KServe is chosen by `platforms.kubeflow.serving`, not found: a deployment would change its
kind with the cluster. Rejected besides its canary: InferenceGraphs, an alpha router of
its own. The cost: no scale to zero, and a switch of the setting means deleting the
deployment. That KServe hands labels on to Deployments, Services and pods is read from its
source."""

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping

from rekindle.errors import RequestError, StepError, UnreachableError
from rekindle.http import HttpError
from rekindle.platforms.kubeflow import serving
from rekindle.platforms.kubeflow.cluster import ApiServer, may_yet_succeed
from rekindle.platforms.kubeflow.section import KubeflowSpec
from rekindle.platforms.kubeflow.serving import LABEL, VERSION
from rekindle.platforms.ownership import OwnerMark
from rekindle.platforms.polling import polls
from rekindle.protojson import Json
from rekindle.serve.messages import BOUNDS_MS, ServedModel, Traffic
from rekindle.serve.staging import stage
from rekindle.spec.deploy import DeploySpec

SPLIT = "rekindle.dev/split"
ROUTE_SECONDS = 120.0
PATIENCE_SECONDS = 60.0
_PORT = 80
_MOST_CONFLICTS = 10  # writes in a row that another process was faster than
_PATIENT_POLLS = 4  # with a reason why pods do not start, until it counts
_API = {
    "Deployment": "apps/v1",
    "Pod": "v1",
    "Service": "v1",
    "HTTPRoute": "gateway.networking.k8s.io/v1",
    "InferenceService": "serving.kserve.io/v1beta1",
}
# with a hash and KServe's own `-predictor`, a Service may be called so
_LONGEST_SERVICE = 46
_MODE = {"serving.kserve.io/deploymentMode": "RawDeployment"}
_GRANT = "grant it: `rekindle doctor --platform kubeflow` prints the Role rekindle-deployer"


@dataclasses.dataclass(frozen=True)
class _PodCounts:
    """What a pod shows of itself: how often its container ended, and the counters of its
    server, None where it does not answer."""

    version: str
    restarts: int
    counters: Counter[str] | None


class KubeflowEndpoint:
    """The `Endpoint` of the model `model` in the namespace of the config; the cluster is,
    without another one, that of kubectl's context, or the one around us."""

    poll_seconds = 15.0

    def __init__(
        self, place: KubeflowSpec, deploy: DeploySpec, model: str, cluster: ApiServer | None = None
    ) -> None:
        self.cluster = cluster or ApiServer.configured(PATIENCE_SECONDS)
        self.place = place
        self.deploy = deploy
        self.model = model
        self.mark = OwnerMark("label", LABEL, model)
        self.name = serving.named(model)
        self.kind = "InferenceService" if place.serving == "kserve" else "Deployment"
        self.prefix = f"/{place.namespace}/{self.name}"
        self.address = f"http://{self.name}.{place.namespace}.svc"
        if place.gateway:
            self.address = f"{self.prefix} of the Gateway {place.gateway}"

    def usd_per_day(self) -> tuple[str, float | None]:
        """See `Endpoint.usd_per_day`; what nodes cost is not known. Raises RequestError
        where the config or the cluster does not allow a deployment."""
        self._check()
        replicas = self.deploy.replicas
        pods = f"{replicas} pods" if replicas > 1 else f"{replicas} pod"
        if self.deploy.machine:
            pods += f" on {self.deploy.machine}"
        return pods, None

    def standing(self) -> Mapping[str, tuple[str, int]]:
        standing = {}
        shares = self._shares()
        pods = self._listed("Pod")
        for deployment in self._listed("Deployment"):
            version = deployment["metadata"]["labels"][VERSION]
            if "deletionTimestamp" in deployment["metadata"]:
                state = "stopping"
            elif serving.complete(deployment):
                state = "ready"
            elif serving.trouble(version, pods)[1]:
                state = "failed"
            else:
                state = "starting"
            standing[version] = (state, shares.get(version, 0))
        return standing

    def create(self, model: ServedModel, number: int) -> None:
        self._check()
        uri = stage(model, self.place.artifact_root)
        name = self._name(model)
        labels = {**self.mark.tags, VERSION: model.version}
        self._have("Service", name, serving.service(labels), labels)
        spec = serving.pods(self.place, self.deploy, labels, uri)
        trouble = ""
        troubled_polls = 0
        for _ in polls(serving.READY_SECONDS, self.poll_seconds):
            deployment = self._deployment(name, spec, labels)
            if serving.complete(deployment):
                return
            conditions = serving.conditions(deployment.get("status", {}))
            refused, message = conditions.get("ReplicaFailure", ("", ""))
            if refused == "True":
                raise RequestError(
                    f"the cluster refuses its pods: {message}",
                    where=name,
                    fix="raise the quota or correct the policy, then run the command again",
                )
            trouble, is_over = serving.trouble(model.version, self._listed("Pod"))
            troubled_polls = troubled_polls + 1 if trouble else 0
            # an autoscaler may yet bring a node; a reason of another kind stays
            is_stuck = troubled_polls >= _PATIENT_POLLS and not trouble.startswith("no node")
            if is_over or is_stuck:
                break
        reason = trouble or f"it is not ready after {serving.READY_SECONDS:.0f} s"
        raise StepError(f"version {model.version} did not start: {reason}", where=name)

    def _deployment(self, name: str, spec: Json, labels: Mapping[str, str]) -> Json:
        """The Deployment of a version as it is, made by us or by KServe; one that is not
        complete where KServe has not made it yet."""
        if self.kind == "Deployment":
            return self._have("Deployment", name, spec, labels)
        digest = hashlib.sha256(name.encode()).hexdigest()[:6]
        short_name = serving.named(name[:_LONGEST_SERVICE], f"-{digest}")
        service = self._have("InferenceService", short_name, serving.predictor(spec), labels, _MODE)
        deployment = None
        seen_generation = service.get("status", {}).get("observedGeneration", 0)
        # until KServe has seen this spec, the Deployment is still of the spec before
        if seen_generation >= service["metadata"]["generation"]:
            path = f"{self._path('Deployment')}/{short_name}-predictor"
            deployment = self._ask("GET", path, none_for=(404,))
        # KServe's autoscaler sets the number of pods a little later
        replicas = {"replicas": spec["replicas"]}
        return {"metadata": {"generation": 1}, **(deployment or {}), "spec": replicas}

    def ask(self, model: ServedModel, body: Json) -> object:
        """See `Endpoint.ask`: by the version's own Service, through the API server."""
        path = f"{self._path('Service')}/http:{self._name(model)}:{_PORT}/proxy/predict"
        try:
            return self.cluster.answer("POST", path, {}, body)
        except HttpError as error:
            if error.status in (0, 401, 403):  # the API server's, and not the version's
                raise _explained(error, path) from None
            message = f"version {model.version} does not answer: {error}"
            raise StepError(message, where=self._name(model)) from None

    def split(self, shares: Mapping[str, int], number: int) -> None:
        deployments = self._listed("Deployment")
        running = {deployment["metadata"]["labels"][VERSION] for deployment in deployments}
        services = self._services()
        for version in sorted(shares):
            if version not in services or version not in running:
                raise StepError(
                    f"version {version} does not run any more",
                    where=self.name,
                    fix="`rekindle deploy CONFIG` deploys it again",
                )
        if self.place.gateway:
            targets = []
            for version, share in sorted(shares.items()):
                targets.append({"name": services[version], "port": _PORT, "weight": share})
            self._route(targets)
        elif len(shares) > 1:
            raise _no_canary("no gateway is named")
        last_split = self._last_split()
        # the same event again counts on from where it counted first
        if (last_split.get("number"), last_split.get("shares")) != (number, dict(shares)):
            counts = {}
            for uid, pod in self._counted(is_certain=True).items():
                counts[uid] = (pod.restarts, pod.counters)
            last_split = {"number": number, "shares": dict(shares), "from": counts}
        largest = max(shares, key=lambda version: shares[version])
        spec = serving.service({**self.mark.tags, VERSION: largest})
        notes = {SPLIT: json.dumps(last_split)}
        self._have("Service", self.name, spec, self.mark.tags, notes)

    def observe(self) -> Mapping[str, Traffic]:
        """See `Endpoint.observe`; what a pod that has gone counted is not in it."""
        last_split = self._last_split()
        ends = Counter[str]()
        sums = {version: Counter[str]() for version in last_split.get("shares", ())}
        for uid, pod in self._counted(is_certain=False).items():
            restarts_before, counters_before = last_split.get("from", {}).get(uid, (0, {}))
            ends[pod.version] += pod.restarts - restarts_before
            has_restarted = pod.restarts > restarts_before
            if pod.counters is None or (counters_before is None and not has_restarted):
                continue
            since = Counter(pod.counters)
            if pod.restarts == restarts_before:  # else its counters began at zero
                since.subtract(counters_before)
            sums.setdefault(pod.version, Counter()).update(since)
        traffic = {}
        for version, counts in sums.items():
            traffic[version] = Traffic(
                counts["requests"],
                counts["errors"],
                tuple(counts[str(i)] for i in range(len(BOUNDS_MS) + 1)),
                ends[version],
                counts["refused"],
            )
        return traffic

    def retain(self, versions: set[str], number: int) -> None:
        """See `Endpoint.retain`: pods get time to answer
        (`terminationGracePeriodSeconds`)."""
        for kind in (self.kind, "Service"):
            for item in self._listed(kind):
                # none: the Service of all of them
                version = item["metadata"]["labels"].get(VERSION)
                if version is not None and version not in versions:
                    self._delete(kind, item)

    def delete(self) -> None:
        for kind in ("HTTPRoute", "Service", self.kind):
            for item in self._listed(kind):
                self._delete(kind, item)

    def _check(self) -> None:
        """RequestError where something is missing, or another's object has the name of
        ours."""
        place = self.place
        if not place.image:
            raise RequestError(
                "a deployment needs an image",
                where="platforms.kubeflow.image",
                fix="an image with rekindle in it, by digest: `make images` builds rekindle-cpu",
            )
        if not place.artifact_root:
            raise RequestError(
                "a version needs a folder",
                where="platforms.kubeflow.artifact_root",
                fix="set platforms.kubeflow.artifact_root: s3://my-bucket/rekindle",
            )
        if "://" not in place.artifact_root and not place.claim:
            raise RequestError(
                f"pods do not see the folder {place.artifact_root}",
                where="platforms.kubeflow.artifact_root",
                fix="a URI, or name the PersistentVolumeClaim in platforms.kubeflow.claim",
            )
        has_gateway_api = False
        if place.gateway:
            routes = self._ask("GET", self._path("HTTPRoute"), none_for=(404,))
            has_gateway_api = routes is not None
        self._check_kind()
        if self.deploy.canary and not place.gateway:
            raise _no_canary("no gateway is named")
        if place.gateway and not has_gateway_api:
            raise _no_canary("the cluster has no Gateway API (HTTPRoute, v1)")
        kinds = ["Service"]
        if place.gateway:
            kinds.append("HTTPRoute")
        for kind in kinds:
            existing = self._ask("GET", f"{self._path(kind)}/{self.name}", none_for=(404,))
            if existing:
                self._check_owner(kind, existing)

    def _check_kind(self) -> None:
        """RequestError for KServe that is not there, and for versions that the other
        setting of `serving` made."""
        wants_kserve = self.kind == "InferenceService"
        if wants_kserve and self._ask("GET", self._path(self.kind), none_for=(404,)) is None:
            raise RequestError(
                "the cluster has no KServe (InferenceService, v1beta1)",
                where="platforms.kubeflow.serving",
                fix="install it, or leave platforms.kubeflow.serving out",
            )
        for deployment in self._listed("Deployment"):
            is_kserves = "ownerReferences" in deployment["metadata"]
            if is_kserves != wants_kserve:
                other = "Deployment" if wants_kserve else "InferenceService"
                raise RequestError(
                    f"versions of {self.model} run there as {other}",
                    where="platforms.kubeflow.serving",
                    fix="`rekindle deploy delete` with the setting of before ends them; "
                    "deploy again",
                )

    def _route(self, targets: list[Json]) -> None:
        """Share requests by weights, and wait until the Gateway has taken them."""
        spec = self._route_spec(targets)
        # the conditions of each Gateway that has looked at the route
        parents: list[dict[str, tuple[str, str]]] = []
        for _ in polls(ROUTE_SECONDS, self.poll_seconds):
            route = self._have("HTTPRoute", self.name, spec, self.mark.tags)
            parents = []
            for parent in route.get("status", {}).get("parents", []):
                parents.append(serving.conditions(parent, route["metadata"]["generation"]))
            if any(map(_is_taken, parents)):
                return
        why = _refusals(parents) or "it has not answered"
        raise RequestError(
            f"the Gateway {self.place.gateway} does not take the route: {why}",
            where=self.name,
            fix="correct it, then run this again",
        )

    def _route_spec(self, targets: list[Json]) -> Json:
        """The spec of the HTTPRoute to the model, which takes the prefix off the path."""
        namespace, _, name = self.place.gateway.partition("/")
        no_prefix = {"type": "ReplacePrefixMatch", "replacePrefixMatch": "/"}
        rule = {
            "matches": [{"path": {"type": "PathPrefix", "value": self.prefix}}],
            "filters": [{"type": "URLRewrite", "urlRewrite": {"path": no_prefix}}],
            "backendRefs": targets,
        }
        return {"parentRefs": [{"name": name, "namespace": namespace}], "rules": [rule]}

    def _shares(self) -> dict[str, int]:
        """Percent of requests by version, as the route or else the Service has them."""
        if not self.place.gateway:
            service = self._named("Service")
            version = service.get("spec", {}).get("selector", {}).get(VERSION)
            return {version: 100} if version else {}
        route = self._named("HTTPRoute")
        versions = {name: version for version, name in self._services().items()}
        targets = route["spec"]["rules"][0]["backendRefs"] if route else []
        shares = {}
        for target in targets:
            if target["name"] in versions:
                shares[versions[target["name"]]] = target["weight"]
        return shares

    def _services(self) -> dict[str, str]:
        """The name of each version's Service."""
        names = {}
        for service in self._listed("Service"):
            metadata = service["metadata"]
            if VERSION in metadata["labels"]:
                names[metadata["labels"][VERSION]] = metadata["name"]
        return names

    def _last_split(self) -> Json:
        """Number, shares and counters (`from`) of the last split; empty before the
        first."""
        annotations = self._named("Service").get("metadata", {}).get("annotations", {})
        return dict(json.loads(annotations.get(SPLIT, "{}")))

    def _named(self, kind: str) -> Json:
        """The object of the model's name; empty where there is none."""
        return self._ask("GET", f"{self._path(kind)}/{self.name}", none_for=(404,)) or {}

    def _counted(self, *, is_certain: bool) -> dict[str, _PodCounts]:
        """What each pod shows, by its uid. If a pod that is ready does not answer, that
        is an error if the counts have to be certain."""
        counts = {}
        for pod in self._listed("Pod"):
            metadata = pod["metadata"]
            path = f"{self._path('Pod')}/{metadata['name']}:8080/proxy/metrics"
            ready = serving.conditions(pod.get("status", {})).get("Ready", ("",))[0]
            text = ""
            if ready == "True":
                try:
                    text = self._metrics(path)
                except OSError as error:
                    if is_certain:
                        name = metadata["name"]
                        message = f"the counters of the pod {name} cannot be read: {error}"
                        raise UnreachableError(message, where=path, fix=_GRANT) from error
            counters = serving.counters(text) if text else None
            version = metadata["labels"][VERSION]
            counts[metadata["uid"]] = _PodCounts(version, serving.restarts(pod), counters)
        return counts

    def _metrics(self, path: str, tries: int = 3) -> str:
        """The text of a pod's `/metrics`; OSError where no try got it."""
        for _ in range(tries - 1):
            try:
                return "\n".join(self.cluster.lines(path))
            except OSError:
                continue
        return "\n".join(self.cluster.lines(path))

    def _have(
        self,
        kind: str,
        name: str,
        spec: Json,
        labels: Mapping[str, str],
        notes: Mapping[str, str] | None = None,
    ) -> Json:
        """The object with this spec and these annotations, made or changed where it is
        not so."""
        path = self._path(kind)
        annotations = dict(notes or {})
        for _ in range(_MOST_CONFLICTS):
            existing = self._ask("GET", f"{path}/{name}", none_for=(404,))
            if existing is None:
                metadata = {"name": name, "labels": dict(labels), "annotations": annotations}
                body = {
                    "apiVersion": _API[kind],
                    "kind": kind,
                    "metadata": metadata,
                    "spec": spec,
                }
                stored = self._ask("POST", path, body, none_for=(409,))
            else:
                self._check_owner(kind, existing)
                metadata = existing["metadata"]
                existing_annotations = metadata.get("annotations", {})
                if _holds(existing["spec"], spec) and _holds(existing_annotations, annotations):
                    return existing
                metadata["annotations"] = {**existing_annotations, **annotations}
                existing["spec"].update(spec)
                # it holds its resourceVersion: 409 where another process was faster
                stored = self._ask("PUT", f"{path}/{name}", existing, none_for=(404, 409))
            if stored is not None and _holds(stored["spec"], spec):
                return stored
        raise UnreachableError(f"another changes {kind} {name} again and again", where=path)

    def _check_owner(self, kind: str, existing: Json) -> None:
        """RequestError for an object that rekindle did not make for this model."""
        metadata = existing["metadata"]
        resource = f"{kind} {metadata['name']} in {self.place.namespace}"
        self.mark.check(resource, metadata.get("labels"), where="register.model_name")

    def _delete(self, kind: str, item: Json) -> None:
        metadata = item["metadata"]
        body = {
            "propagationPolicy": "Background",
            "preconditions": {"uid": metadata["uid"]},  # no newer object of that name
        }
        self._ask("DELETE", f"{self._path(kind)}/{metadata['name']}", body, none_for=(404, 409))

    def _listed(self, kind: str) -> list[Json]:
        """All of ours, but pods that end, and Services that KServe made."""
        query = {"labelSelector": f"{LABEL}={self.model}"}
        answer = self._ask("GET", self._path(kind), query=query, none_for=(404,)) or {}
        items = answer.get("items") or []
        if kind == "Pod":
            return [item for item in items if "deletionTimestamp" not in item["metadata"]]
        if kind == "Service":
            return [item for item in items if "ownerReferences" not in item["metadata"]]
        return list(items)

    def _path(self, kind: str) -> str:
        api = _API[kind]
        root = f"/apis/{api}" if "/" in api else f"/api/{api}"
        return f"{root}/namespaces/{self.place.namespace}/{kind.lower()}s"

    def _ask(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        query: Mapping[str, str] | None = None,
        none_for: Collection[int] = (),
    ) -> Json | None:
        """The answer of the API server; None for the statuses `none_for`."""
        try:
            return self.cluster.answer(method, path, query or {}, body)
        except HttpError as error:
            if error.status in none_for:
                return None
            raise _explained(error, f"{method} {path}") from None

    def _name(self, model: ServedModel) -> str:
        return serving.named(model.name, f"-{model.deployed_name}")


def _no_canary(why: str) -> RequestError:
    return RequestError(
        f"nothing can share requests: {why}",
        where="deploy.canary",
        fix="set deploy.canary: [], or platforms.kubeflow.gateway to a Gateway of the Gateway API",
    )


def _is_taken(conditions: Mapping[str, tuple[str, str]]) -> bool:
    """Whether a Gateway has accepted a route, and found all that it refers to."""
    states = [conditions.get(kind, ("", ""))[0] for kind in ("Accepted", "ResolvedRefs")]
    return states == ["True", "True"]


def _refusals(parents: list[dict[str, tuple[str, str]]]) -> str:
    """What Gateways have against a route."""
    messages = []
    for conditions in parents:
        for state, message in conditions.values():
            if state == "False":
                messages.append(message)
    return "; ".join(messages)


def _explained(error: HttpError, where: str) -> RequestError | UnreachableError:
    if may_yet_succeed(error):
        return UnreachableError(f"the API server does not answer: {error}", where=where)
    # a quota refuses with 403 as well, and no right helps against it
    fix = _GRANT if error.status == 403 and "quota" not in str(error) else ""
    return RequestError(f"the API server refuses with {error}", where=where, fix=fix)


def _holds(found: object, wanted: object) -> bool:
    """Whether all that is wanted is there, beside what the API server adds."""
    if isinstance(wanted, Mapping):
        present = found if isinstance(found, Mapping) else {}  # the API server drops what is empty
        return all(_holds(present.get(key), value) for key, value in wanted.items())
    if isinstance(wanted, list):
        if not isinstance(found, list) or len(found) != len(wanted):
            return False
        return all(map(_holds, found, wanted))
    return bool(found == wanted)
