"""The least permissions of runs on Kubeflow, and whether KFP's API, registries that allow
anonymous pulls, and the cluster that kubectl speaks to have what a config names.

The cluster is that of kubectl's current context, or the one around us. kubeconfigs hold
certificates, tokens and commands that fetch one; the `kubernetes` package, which KFP's
SDK brings, reads them. Each check reads and none changes anything.

Authority: KFP's v2beta1 healthz and experiments; the Docker registry's token
specification for anonymous pulls; Kubeflow Trainer's v1alpha1."""

import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urlencode

import yaml

from rekindle.errors import RequestError, StepError
from rekindle.http import HttpError
from rekindle.platforms import reads
from rekindle.platforms.checks import Needs, NotChecked, PlatformCheck, about
from rekindle.platforms.feature_checks import numbers_of
from rekindle.platforms.kubeflow.client import images, spec_of, token_of, trainers
from rekindle.platforms.kubeflow.cluster import ApiServer
from rekindle.platforms.kubeflow.section import KubeflowSpec
from rekindle.platforms.kubeflow.store import SCHEME
from rekindle.platforms.reads import Image, manifest, read
from rekindle.platforms.submission import Definition

_MANIFESTS = Path(__file__).with_name("manifests")
# WWW-Authenticate: realm="https://...",service="...",scope="..."
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')
_TRAINER = "/apis/trainer.kubeflow.org/v1alpha1/clustertrainingruntimes"
_PATIENCE_SECONDS = 3.0
# of KFP's launcher, where its ConfigMap says nothing (backend/src/v2/config/env.go)
_DEFAULT_ROOT = "minio://mlpipeline/v2/artifacts"


def permissions(place: KubeflowSpec, needs: Needs) -> str:
    """The least that the service accounts of runs and of nodes need, as a manifest to
    apply."""
    text = (_MANIFESTS / "rbac.yaml").read_text(encoding="utf-8")
    text = text.replace("namespace: kubeflow", f"namespace: {place.namespace}")
    if needs.deploys_in_steps:
        # the launcher's Role, to the account of the steps
        _, launcher_role, *_ = text.split("---\n")
        text += "---\n" + launcher_role.replace("name: rekindle\n", "name: rekindle-deployer\n")
    text = text.replace("name: pipeline-runner\n", f"name: {place.service_account}\n")
    return text.replace("name: rekindle-node\n", f"name: {place.node_account}\n")


def checks(
    place: KubeflowSpec, definition: Definition | None, needs: Needs
) -> Iterator[PlatformCheck]:
    ask = about("kubeflow", place)
    if place.host:
        yield ask("API", "host", api, early=True)
    references = {place.image or ""}
    if definition:
        references |= images(definition)
    for reference in reads.images(references):
        yield ask("image", "image", image, reference)
    yield PlatformCheck(
        "cluster", "kubectl's context", functools.partial(cluster, place), login=True
    )
    if definition is None or trainers(spec_of(definition)):
        name = f"clustertrainingruntime {place.runtime}"
        yield PlatformCheck("runtime", name, functools.partial(runtime, place))
        yield PlatformCheck("store", "the store of artifacts", functools.partial(store, place))
    if place.gateway:
        yield PlatformCheck("gateway", place.gateway, functools.partial(gateway, place))


def api(place: KubeflowSpec) -> str:
    """Whether `host` is KFP's API, and the token is enough to look at its namespace."""
    host = place.host.rstrip("/")
    token = token_of(place)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    query = {"page_size": "1"}
    if place.namespace != "kubeflow":
        query["namespace"] = place.namespace
    try:
        health = read(f"{host}/apis/v2beta1/healthz", headers)
        read(f"{host}/apis/v2beta1/experiments?{urlencode(query)}", headers)
    except HttpError as error:
        # a proxy before KFP redirects to its login
        if error.status in (301, 302, 303, 307, 308, 401, 403):
            user = "the token" if token else "a user without a token"
            why = "has no right there" if error.status == 403 else "is not known there"
            raise RequestError(
                f"{user} {why}: {error}",
                where="platforms.kubeflow.token",
                fix="export a token that is good, and set platforms.kubeflow.token: env:KFP_TOKEN",
            ) from None
        if error.status in (200, 404, 405):  # something else answers there
            raise RequestError(
                f"{host} is not the API of Kubeflow Pipelines",
                fix="name the address that ends before /apis, such as https://example.com/pipeline",
            ) from None
        raise NotChecked(str(error)) from error
    version = str(health.get("tag_name") or "")
    _refuse_older(version, place)
    description = f"{host}, KFP {version}" if version else host
    if "multi_user" in health:
        description += ", for several users" if health["multi_user"] else ", for one user"
    return description


def _refuse_older(version: str, place: KubeflowSpec) -> None:
    """RequestError where the server is older than the config says it is: it would leave out
    what it does not know.

    A server that was built from a branch has no release for a name, and is believed."""
    if not re.fullmatch(r"\d+(\.\d+)+", version):
        return
    if numbers_of(version) < numbers_of(place.version):
        raise RequestError(
            f"{place.host} runs Kubeflow Pipelines {version}, and the config says {place.version}",
            where="platforms.kubeflow.version",
            fix=f"set platforms.kubeflow.version: {version}",
        )


def image(place: KubeflowSpec, reference: Image) -> str:
    """Whether the registry has the image, if it allows anonymous pulls."""
    fix = "push it, then name its digest"
    try:
        try:
            return manifest(reference, fix=fix)
        except HttpError as error:
            headers = {name.lower(): value for name, value in error.headers.items()}
            challenge = headers.get("www-authenticate", "")
            if error.status != 401 or not challenge.startswith("Bearer "):
                raise
            headers = {"Authorization": f"Bearer {_anonymous_token(challenge)}"}
            return manifest(reference, headers, fix)
    except HttpError as error:
        raise NotChecked(f"{reference.host} does not allow anonymous pulls: {error}") from error


def cluster(place: KubeflowSpec) -> str:
    """Whether the cluster of kubectl's context answers the user.

    Without such a context KFP's API alone is enough."""
    try:
        configured = ApiServer.configured(_PATIENCE_SECONDS)
    except RequestError as error:
        if place.host:
            raise NotChecked(error.problems[0].what) from None
        raise
    try:
        version = configured.get("/version") or {}
    except StepError as error:
        raise RequestError(error.problems) from error
    return f"{configured.server} {version.get('gitVersion', '')}".rstrip()


def runtime(place: KubeflowSpec) -> str:
    """Whether Kubeflow Trainer is installed, with the runtime that the config names."""
    configured = ApiServer.configured(_PATIENCE_SECONDS)
    if configured.get(_TRAINER) is None:
        raise RequestError(
            "the cluster has no Kubeflow Trainer v2",
            where=configured.server,
            fix="install Kubeflow Trainer v2.3: kubectl apply --server-side -k "
            "https://github.com/kubeflow/trainer.git/manifests/overlays/manager?ref=v2.3.0",
        )
    if configured.get(f"{_TRAINER}/{place.runtime}") is None:
        file = shlex.quote(str(_MANIFESTS / "runtime.yaml"))
        message = f"the cluster has no ClusterTrainingRuntime {place.runtime}"
        raise RequestError(message, fix=f"kubectl apply -f {file}")
    return place.runtime


def store(place: KubeflowSpec) -> str:
    """Whether the nodes of steps on several nodes can open the store of artifacts, as far as
    the ConfigMap and the Secret of KFP's own launcher say."""
    configured = ApiServer.configured(_PATIENCE_SECONDS)
    base = f"/api/v1/namespaces/{place.namespace}"
    try:
        config = configured.get(f"{base}/configmaps/kfp-launcher") or {}
        data = config.get("data") or {}
        root = place.pipeline_root or data.get("defaultPipelineRoot") or _DEFAULT_ROOT
        secret = None
        if root.startswith(SCHEME):
            secret = configured.get(f"{base}/secrets/{place.store_secret}")
    except StepError as error:
        raise NotChecked(error.problems[0].what) from None
    if root.startswith(SCHEME):
        if secret is None:
            raise RequestError(
                f"the namespace {place.namespace} has no Secret {place.store_secret}, with which "
                f"nodes open {root}",
                where="platforms.kubeflow.store_secret",
                fix="name the one that holds `accesskey` and `secretkey` of KFP's own store",
            )
        return f"{root}, at {place.store_endpoint}"
    scheme = root.partition("://")[0]
    providers = yaml.safe_load(data.get("providers") or "") or {}
    if scheme == "s3" and "s3" not in providers:
        return f"{root}, at AWS: kfp-launcher names no other endpoint, and KFP asks there"
    if not place.pipeline_root:
        return f"{root}; set platforms.kubeflow.pipeline_root to it, for `report` to read it"
    return root


def gateway(place: KubeflowSpec) -> str:
    """Whether the cluster has the Gateway that shares requests among Deployments."""
    namespace, _, name = place.gateway.partition("/")
    path = f"/apis/gateway.networking.k8s.io/v1/namespaces/{namespace}/gateways/{name}"
    if ApiServer.configured(_PATIENCE_SECONDS).get(path) is None:
        raise RequestError(
            f"the cluster has no Gateway {place.gateway} of the Gateway API v1",
            fix="make it, or leave platforms.kubeflow.gateway out and set deploy.canary: []",
        )
    return f"{place.gateway}, for versions that are Deployments"


def _anonymous_token(challenge: str) -> str:
    """The token that a registry's challenge leads to, without a login."""
    parameters = dict(_CHALLENGE.findall(challenge))
    realm = parameters.pop("realm", "")
    if not realm.startswith("https://"):
        raise NotChecked("the registry wants a login")
    query = "&".join(f"{name}={quote(value)}" for name, value in parameters.items())
    answer = read(f"{realm}?{query}")
    # registries use one name or the other
    return str(answer.get("token") or answer.get("access_token") or "")
