"""A deployment in the cluster: a Deployment and a Service a version, and a Service of the model's
name, whose selector is the version that has most requests and whose annotation is the last split.
Shares of a canary are weights of an HTTPRoute of the Gateway API; without one there are none.

With KServe, an InferenceService in the mode RawDeployment makes the Deployment of a version. Its
own canary is not used: until 0.20 that mode ignored it without a word (kserve/kserve#5335), and the
other mode knows the latest revision and the one before alone.

Counts are those of `/metrics` of each pod, less what they were at the split. Whatever is asked of
the API server may be repeated; objects of our names without our label are left alone. Untested
against a real cluster. Authority: apps/v1, v1, gateway.networking.k8s.io/v1;
pkg/apis/serving/v1beta1 and pkg/constants of kserve/kserve (0.16 calls the mode Standard, too)."""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from rekindle.errors import RequestError, StepError, UnreachableError
from rekindle.http import HttpError
from rekindle.platforms.kubeflow import serving
from rekindle.platforms.kubeflow.cluster import Cluster, passing
from rekindle.platforms.kubeflow.serving import LABEL, VERSION
from rekindle.platforms.submission import problems_in, requests_in
from rekindle.serve.messages import BOUNDS_MS, ServedModel, Traffic
from rekindle.serve.staging import stage
from rekindle.spec.deploy import DeploySpec
from rekindle.spec.platforms import KubeflowSpec

SPLIT = "rekindle.dev/split"
ROUTE_SECONDS, PATIENCE_SECONDS = 120.0, 60.0
_PORT, _MOST_CONFLICTS, _PATIENT_POLLS = 80, 10, 4
_API = {
    "Deployment": "apps/v1",
    "Pod": "v1",
    "Service": "v1",
    "HTTPRoute": "gateway.networking.k8s.io/v1",
    "InferenceService": "serving.kserve.io/v1beta1",
}
_LONGEST_SERVICE = 46  # with a hash and KServe's own `-predictor`, a Service may be called so
_MODE = {"serving.kserve.io/deploymentMode": "RawDeployment"}
_GRANT = "grant it: `rekindle doctor --platform kubeflow` prints the Role rekindle-deployer"
_problem, _request = problems_in(__file__), requests_in(__file__)


class KubeflowEndpoint:
    """The `Endpoint` of the model `model` in the namespace of the config; the cluster is, without
    another one, that of kubectl's context, or the one around us."""

    poll_seconds, sees_latency = 15.0, True

    def __init__(
        self, place: KubeflowSpec, deploy: DeploySpec, model: str, cluster: Cluster | None = None
    ) -> None:
        self.cluster = cluster or Cluster.configured(PATIENCE_SECONDS)
        self.place, self.deploy, self.model, self.name = place, deploy, model, serving.named(model)
        self.kind = "InferenceService" if place.serving == "kserve" else "Deployment"
        self.prefix = f"/{place.namespace}/{self.name}"
        self.address = f"http://{self.name}.{place.namespace}.svc"
        if place.gateway:
            self.address = f"{self.prefix} of the Gateway {place.gateway}"

    def usd_per_day(self) -> tuple[str, float | None]:
        """See `Endpoint.usd_per_day`; what nodes cost is not known. Raises RequestError where the
        config or the cluster does not allow a deployment."""
        self._check()
        on = f" on {self.deploy.machine}" if self.deploy.machine else ""
        return f"{self.deploy.replicas} pod{'s' * (self.deploy.replicas > 1)}{on}", None

    def standing(self) -> Mapping[str, tuple[str, int]]:
        found, shares, alive = dict[str, tuple[str, int]](), self._shares(), self._listed("Pod")
        for one in self._listed("Deployment"):
            version = one["metadata"]["labels"][VERSION]
            state = "failed" if serving.trouble(version, alive)[1] else "starting"
            state = "ready" if serving.complete(one) else state
            state = "stopping" if "deletionTimestamp" in one["metadata"] else state
            found[version] = state, shares.get(version, 0)
        return found

    def create(self, model: ServedModel, number: int) -> None:
        self._check()
        uri, name = stage(model, self.place.artifact_root), self._name(model)
        labels, waits = {LABEL: self.model, VERSION: model.version}, 0
        self._have("Service", name, serving.service(labels), labels)
        wanted = serving.pods(self.place, self.deploy, labels, uri)
        give_up = time.monotonic() + serving.READY_SECONDS
        while not serving.complete(made := self._running(name, wanted, labels)):
            said = serving.conditions(made.get("status", {}))
            refused, message = said.get("ReplicaFailure", ("", ""))
            if refused == "True":
                raise RequestError([_problem("refused_pods", where=name, message=message)])
            why, ended = serving.trouble(model.version, self._listed("Pod"))
            waits = waits + 1 if why else 0
            late = time.monotonic() > give_up
            if ended or late or (waits >= _PATIENT_POLLS and not why.startswith("no node")):
                what = f"version {model.version} did not start: {why}"
                raise StepError(f"{what}{' in time' * (late and not why)}", where=name)
            time.sleep(self.poll_seconds)

    def _running(
        self, name: str, wanted: dict[str, Any], labels: Mapping[str, str]
    ) -> dict[str, Any]:
        """The Deployment of a version as it is, made by us or by KServe; one that is not complete
        where KServe has not made it yet."""
        if self.kind == "Deployment":
            return self._have("Deployment", name, wanted, labels)
        digest = hashlib.sha256(name.encode()).hexdigest()[:6]
        short = serving.named(name[:_LONGEST_SERVICE], f"-{digest}")
        one = self._have("InferenceService", short, serving.predictor(wanted), labels, _MODE)
        seen = one.get("status", {}).get("observedGeneration", 0) >= one["metadata"]["generation"]
        path = f"{self._path('Deployment')}/{short}-predictor"
        made = self._ask("GET", path, known=(404,)) if seen else None
        # KServe's autoscaler sets the number of pods a little later
        spec = {"replicas": wanted["replicas"]}
        return {"metadata": {"generation": 1}, **(made or {}), "spec": spec}

    def ask(self, model: ServedModel, body: dict[str, Any]) -> Any:
        """See `Endpoint.ask`: by the version's own Service, through the API server."""
        path = f"{self._path('Service')}/http:{self._name(model)}:{_PORT}/proxy/predict"
        try:
            return self.cluster.answer("POST", path, {}, body)
        except HttpError as error:
            if error.status in (0, 401, 403):  # the API server's, and not the version's
                raise _explained(error, path) from None
            what = f"version {model.version} does not answer: {error}"
            raise StepError(what, where=self._name(model)) from None

    def split(self, shares: Mapping[str, int], number: int) -> None:
        running = {one["metadata"]["labels"][VERSION] for one in self._listed("Deployment")}
        names = {v: name for v, name in self._services().items() if v in running}
        if missing := sorted(set(shares) - set(names)):
            raise StepError([_problem("not_running", where=self.name, version=missing[0])])
        if self.place.gateway:
            self._route(
                [
                    {"name": names[version], "port": _PORT, "weight": share}
                    for version, share in sorted(shares.items())
                ]
            )
        elif len(shares) > 1:
            raise RequestError([_problem("no_canary", why="no gateway is named")])
        noted = self._noted()
        if (noted.get("number"), noted.get("shares")) != (number, dict(shares)):
            counts = {pod: known[1:] for pod, known in self._counted(certain=True).items()}
            noted = {"number": number, "shares": dict(shares), "from": counts}
        first = max(shares, key=lambda version: shares[version])
        spec = serving.service({LABEL: self.model, VERSION: first})
        self._have("Service", self.name, spec, {LABEL: self.model}, {SPLIT: json.dumps(noted)})

    def observe(self) -> Mapping[str, Traffic]:
        """See `Endpoint.observe`; what a pod that has gone counted is not in it."""
        noted, ends = self._noted(), Counter[str]()
        sums = {version: Counter[str]() for version in noted.get("shares", ())}
        for pod, (version, ended, counts) in self._counted(certain=False).items():
            before, known = noted.get("from", {}).get(pod, (0, {}))
            ends[version] += ended - before
            if counts is not None and (ended > before or known is not None):
                since = Counter(counts)
                since.subtract(known if ended == before else {})
                sums.setdefault(version, Counter()).update(since)
        return {
            version: Traffic(
                got["requests"],
                got["errors"],
                tuple(got[str(i)] for i in range(len(BOUNDS_MS) + 1)),
                ends[version],
                got["refused"],
            )
            for version, got in sums.items()
        }

    def retain(self, versions: set[str], number: int) -> None:
        """See `Endpoint.retain`: pods get time to answer (`terminationGracePeriodSeconds`)."""
        for kind in (self.kind, "Service"):
            for one in self._listed(kind):
                version = one["metadata"]["labels"].get(VERSION)  # none: the Service of all of them
                if version is not None and version not in versions:
                    self._delete(kind, one)

    def delete(self) -> None:
        for kind in ("HTTPRoute", "Service", self.kind):
            for one in self._listed(kind):
                self._delete(kind, one)

    def _check(self) -> None:
        """RequestError where something is missing, or another's object has the name of ours."""
        place = self.place
        if not place.image:
            raise RequestError([_problem("no_image")])
        if not place.artifact_root:
            raise RequestError([_problem("no_folder")])
        if "://" not in place.artifact_root and not place.claim:
            raise RequestError([_problem("no_claim", folder=place.artifact_root)])
        routes = place.gateway and self._ask("GET", self._path("HTTPRoute"), known=(404,))
        self._check_kind()
        if self.deploy.canary and not place.gateway:
            raise RequestError([_problem("no_canary", why="no gateway is named")])
        if place.gateway and routes is None:
            why = "the cluster has no Gateway API (HTTPRoute, v1)"
            raise RequestError([_problem("no_canary", why=why)])
        for kind in ("Service", "HTTPRoute")[: 1 + bool(place.gateway)]:
            if found := self._ask("GET", f"{self._path(kind)}/{self.name}", known=(404,)):
                self._own(kind, found)

    def _check_kind(self) -> None:
        """The same of KServe, and of versions that the other setting made."""
        wanted = self.kind == "InferenceService"
        if wanted and self._ask("GET", self._path(self.kind), known=(404,)) is None:
            raise RequestError([_problem("no_kserve")])
        for one in self._listed("Deployment"):
            if ("ownerReferences" in one["metadata"]) != wanted:
                other = "Deployment" if wanted else "InferenceService"
                raise RequestError([_problem("other_kind", model=self.model, other=other)])

    def _route(self, targets: list[dict[str, Any]]) -> None:
        """Share requests by weights, once the Gateway has taken them."""
        namespace, _, name = self.place.gateway.partition("/")
        about = {"prefix": self.prefix, "targets": targets}
        spec = _request("route", gateway=name, namespace=namespace, **about)
        give_up = time.monotonic() + ROUTE_SECONDS
        while True:
            made = self._have("HTTPRoute", self.name, spec, {LABEL: self.model})
            parents = made.get("status", {}).get("parents", [])
            said = [serving.conditions(one, made["metadata"]["generation"]) for one in parents]
            taken = ("Accepted", "ResolvedRefs")
            if any(all(one.get(kind, ("",))[0] == "True" for kind in taken) for one in said):
                return
            if time.monotonic() > give_up:
                why = (
                    "; ".join(
                        text for one in said for state, text in one.values() if state == "False"
                    )
                    or "it has not answered"
                )
                about = {"gateway": self.place.gateway, "why": why}
                raise RequestError([_problem("no_route", where=self.name, **about)])
            time.sleep(self.poll_seconds)

    def _shares(self) -> dict[str, int]:
        """Percent of requests by version, as the route or else the Service has them."""
        kind = "HTTPRoute" if self.place.gateway else "Service"
        found = self._ask("GET", f"{self._path(kind)}/{self.name}", known=(404,)) or {}
        if not self.place.gateway:
            version = found.get("spec", {}).get("selector", {}).get(VERSION)
            return {version: 100} if version else {}
        names = {name: version for version, name in self._services().items()}
        refs = found["spec"]["rules"][0]["backendRefs"] if found else []
        return {names[one["name"]]: one["weight"] for one in refs if one["name"] in names}

    def _services(self) -> dict[str, str]:
        """The name of each version's Service."""
        found = (one["metadata"] for one in self._listed("Service"))
        return {m["labels"][VERSION]: m["name"] for m in found if VERSION in m["labels"]}

    def _noted(self) -> dict[str, Any]:
        found = self._ask("GET", f"{self._path('Service')}/{self.name}", known=(404,)) or {}
        return dict(json.loads(found.get("metadata", {}).get("annotations", {}).get(SPLIT, "{}")))

    def _counted(self, certain: bool) -> dict[str, tuple[str, int, Counter[str] | None]]:
        """Version, restarts and counters of each pod, by its uid; None where it does not answer,
        which for one that is ready is an error if `certain`."""
        found = dict[str, tuple[str, int, Counter[str] | None]]()
        for pod in self._listed("Pod"):
            meta, text = pod["metadata"], ""
            path = f"{self._path('Pod')}/{meta['name']}:8080/proxy/metrics"
            ready = serving.conditions(pod.get("status", {})).get("Ready", ("",))[0] == "True"
            for last in (False, False, True) if ready else ():
                try:
                    text = "\n".join(self.cluster.lines(path))
                    break
                except OSError as error:
                    if last and certain:
                        what = f"the counters of the pod {meta['name']} cannot be read: {error}"
                        raise UnreachableError(what, where=path, fix=_GRANT) from error
            counts = serving.counters(text) if text else None
            found[meta["uid"]] = meta["labels"][VERSION], serving.restarts(pod), counts
        return found

    def _have(
        self,
        kind: str,
        name: str,
        spec: Mapping[str, Any],
        labels: Mapping[str, str],
        notes: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """The object with this spec and these annotations, made or changed where it is not so."""
        path, notes = self._path(kind), dict(notes or {})
        for _ in range(_MOST_CONFLICTS):
            if (found := self._ask("GET", f"{path}/{name}", known=(404,))) is None:
                meta = {"name": name, "labels": dict(labels), "annotations": notes}
                body = {"apiVersion": _API[kind], "kind": kind, "metadata": meta, "spec": spec}
                made = self._ask("POST", path, body, known=(409,))
            else:
                self._own(kind, found)
                meta = found["metadata"]
                if _holds(found["spec"], spec) and _holds(meta.get("annotations", {}), notes):
                    return found
                meta["annotations"] = {**meta.get("annotations", {}), **notes}
                found["spec"].update(spec)
                made = self._ask("PUT", f"{path}/{name}", found, known=(404, 409))
            if made is not None and _holds(made["spec"], spec):
                return made
        raise UnreachableError(f"another changes {kind} {name} again and again", where=path)

    def _own(self, kind: str, found: Mapping[str, Any]) -> None:
        meta = found["metadata"]
        if meta.get("labels", {}).get(LABEL) != self.model:
            about = {"name": meta["name"], "namespace": self.place.namespace, "model": self.model}
            raise RequestError([_problem("foreign", kind=kind, label=LABEL, **about)])

    def _delete(self, kind: str, found: Mapping[str, Any]) -> None:
        meta = found["metadata"]
        body = {"propagationPolicy": "Background", "preconditions": {"uid": meta["uid"]}}
        self._ask("DELETE", f"{self._path(kind)}/{meta['name']}", body, known=(404, 409))

    def _listed(self, kind: str) -> list[dict[str, Any]]:
        """All of ours, but pods that end, and Services that KServe made."""
        query = {"labelSelector": f"{LABEL}={self.model}"}
        found = self._ask("GET", self._path(kind), query=query, known=(404,)) or {}
        without = {"Pod": "deletionTimestamp", "Service": "ownerReferences"}.get(kind, "")
        return [one for one in found.get("items") or () if without not in one["metadata"]]

    def _path(self, kind: str) -> str:
        api = _API[kind]
        root = f"/apis/{api}" if "/" in api else f"/api/{api}"
        return f"{root}/namespaces/{self.place.namespace}/{kind.lower()}s"

    def _ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        known: Collection[int] = (),
    ) -> dict[str, Any] | None:
        try:
            return self.cluster.answer(method, path, query or {}, body)
        except HttpError as error:
            if error.status in known:
                return None
            raise _explained(error, f"{method} {path}") from None

    def _name(self, model: ServedModel) -> str:
        return serving.named(model.name, f"-v{model.version}-{model.digest[:8]}")


def _explained(error: HttpError, where: str) -> RequestError | UnreachableError:
    if passing(error):
        return UnreachableError(f"the API server does not answer: {error}", where=where)
    fix = _GRANT if error.status == 403 and "quota" not in str(error) else ""
    return RequestError(f"the API server refuses with {error}", where=where, fix=fix)


def _holds(found: Any, wanted: Any) -> bool:
    """Whether all that is wanted is there, beside what the API server adds."""
    if isinstance(wanted, Mapping):
        have = found or {}  # the API server drops what is empty
        return all(_holds(have.get(key), one) for key, one in wanted.items())
    if isinstance(wanted, list):
        same = isinstance(found, list) and len(found) == len(wanted)
        return same and all(map(_holds, found, wanted))
    return bool(found == wanted)
