"""The least permissions of runs on Kubeflow, and whether KFP's API, registries that allow
anonymous pulls, and the cluster that kubectl speaks to have what a config names.

The cluster is that of kubectl's current context, or the one around us. kubeconfigs hold
certificates, tokens and commands that fetch one; the `kubernetes` package, which KFP's
SDK brings, reads them. Each check reads and none changes anything.

Authority: KFP's v2beta1 healthz and experiments; the Docker registry's token
specification for anonymous pulls; Kubeflow Trainer's v1alpha1."""

import functools
import re
from collections.abc import Callable, Iterator
from urllib.parse import quote, urlencode

from rekindle.errors import RequestError, StepError
from rekindle.http import HttpError
from rekindle.platforms import reads
from rekindle.platforms.checks import (
    Answer,
    CurableError,
    Needs,
    NotChecked,
    PlatformCheck,
    about,
)
from rekindle.platforms.feature_checks import numbers_of
from rekindle.platforms.kubeflow import cluster_checks, store_checks
from rekindle.platforms.kubeflow.client import images, spec_of, token_of, trainers
from rekindle.platforms.kubeflow.cluster import ApiServer
from rekindle.platforms.kubeflow.quota_checks import NodeDemand, demand_of, quota
from rekindle.platforms.kubeflow.section import KubeflowSpec
from rekindle.platforms.reads import Image, manifest, read
from rekindle.platforms.submission import Definition
from rekindle.protojson import Json

# WWW-Authenticate: realm="https://...",service="...",scope="..."
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')
_PATIENCE_SECONDS = 3.0
_DEPLOYER = "rekindle-deployer"  # the Role of who deploys


def permissions(place: KubeflowSpec, needs: Needs) -> str:
    """The least that the service accounts of runs and of nodes need, as a manifest to
    apply."""
    text = (cluster_checks.MANIFESTS / "rbac.yaml").read_text(encoding="utf-8")
    text = text.replace("namespace: kubeflow", f"namespace: {place.namespace}")
    if needs.deploys_in_steps:
        # the launcher's Role, to the account of the steps
        _, launcher_role, *_ = text.split("---\n")
        text += "---\n" + launcher_role.replace("name: rekindle\n", f"name: {_DEPLOYER}\n")
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
    yield from _checks_of_cluster(place, definition, needs)


def _checks_of_cluster(
    place: KubeflowSpec, definition: Definition | None, needs: Needs
) -> Iterator[PlatformCheck]:
    """What the cluster itself is asked, for a definition or for any."""
    ask = functools.partial(_question, place)
    demands: list[NodeDemand] = []
    if definition is not None:
        jobs = trainers(spec_of(definition))
        demands = [demand_of(path, trainer) for path, trainer in jobs.items()]
    is_distributed = definition is None or bool(demands)
    manifest = permissions(place, needs)
    folder = f"namespace {place.namespace}"
    yield ask("accounts", folder, cluster_checks.accounts, is_distributed=is_distributed)
    for name in sorted({reference.partition("/")[0] for reference in place.secrets.values()}):
        yield ask("secret", f"secret {name}", cluster_checks.secret, name)
    yield ask("retries", "workflow-controller-configmap", cluster_checks.argo)
    if is_distributed:
        runtime = f"clustertrainingruntime {place.runtime}"
        yield ask("rights", folder, cluster_checks.rights, manifest)
        yield ask("runtime", runtime, cluster_checks.runtime)
        yield ask("store", "the store of artifacts", store_checks.store_for_nodes)
        yield ask("quota", folder, quota, demands)
        yield ask("mesh", folder, cluster_checks.mesh)
        if place.queue:
            yield ask("queue", "platforms.kubeflow.queue", cluster_checks.queue)
    else:
        yield ask("store", "the store of artifacts", store_checks.store_for_reports)
    if needs.deploys:
        yield ask("deploying", folder, cluster_checks.own_rights, manifest, _DEPLOYER)
    if place.gateway:
        yield ask("gateway", place.gateway, cluster_checks.gateway)


def _question(
    place: KubeflowSpec,
    name: str,
    where: str,
    check: Callable[..., str | Answer],
    *args: object,
    **options: object,
) -> PlatformCheck:
    """A check of the cluster that kubectl speaks to."""

    def ask() -> str | Answer:
        return check(place, ApiServer.configured(_PATIENCE_SECONDS), *args, **options)

    return PlatformCheck(name, where, ask)


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
        _refuse_no_profile(health, place)
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
        if error.status in (200, 404, 405):  # something else answers there, or a login
            raise RequestError(
                f"{host} is not the API of Kubeflow Pipelines, or wants a login: {error}",
                fix="name the address that ends before /apis, such as "
                "https://example.com/pipeline, and a token in platforms.kubeflow.token",
            ) from None
        raise NotChecked(str(error)) from error
    version = str(health.get("tag_name") or "")
    _refuse_older(version, place)
    description = f"{host}, KFP {version}" if version else host
    if "multi_user" in health:
        description += ", for several users" if health["multi_user"] else ", for one user"
    return description


def _refuse_no_profile(health: Json, place: KubeflowSpec) -> None:
    """RequestError where the server is for several users, whose runs live in their profiles,
    and the config names none."""
    if health.get("multi_user") and place.namespace == "kubeflow":
        raise RequestError(
            f"{place.host} is for several users: runs live in the namespaces of their profiles",
            where="platforms.kubeflow.namespace",
            fix="name yours; `kubectl get profiles` lists them",
        )


def _refuse_older(version: str, place: KubeflowSpec) -> None:
    """RequestError where the server is older than the config says it is: it would leave out
    what it does not know.

    A server that was built from a branch has no release for a name, and is believed."""
    if not re.fullmatch(r"\d+(\.\d+)+", version):
        return
    if numbers_of(version) < numbers_of(place.version):
        raise CurableError(
            f"{place.host} runs Kubeflow Pipelines {version}, and the config says {place.version}",
            {"platforms.kubeflow.version": version},
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
