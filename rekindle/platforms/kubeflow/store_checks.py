"""Which store of artifacts a run on the cluster will have, and whether steps that open it
themselves can.

KFP's launcher reads it in the ConfigMap kfp-launcher of the namespace: the root, and for
each scheme an endpoint and a Secret. The nodes of steps on several nodes know only the
config, so what they lack of that is said with the lines that it takes.

Authority: backend/src/v2/config/{env,s3,minio}.go of kubeflow/pipelines 2.17.0."""

import dataclasses
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import yaml

from rekindle.errors import RequestError, StepError, first_line
from rekindle.platforms.checks import Answer, CurableError, NotChecked
from rekindle.platforms.kubeflow import store
from rekindle.platforms.kubeflow.cluster import ApiServer
from rekindle.platforms.kubeflow.section import KubeflowSpec

_PATH = "platforms.kubeflow"
# of KFP's launcher, where its ConfigMap says nothing
_DEFAULT_ROOT = "minio://mlpipeline/v2/artifacts"
# the Service of that store in KFP's manifests before 2.15, and beside the new one since
_MINIO = "minio-service"


@dataclasses.dataclass(frozen=True)
class StoreSession:
    """How KFP's launcher opens a store: a SessionInfo."""

    endpoint: str
    """Its URL; "" where the scheme says it."""
    region: str
    keys: Mapping[str, str]
    """`SECRET/KEY` of the access key and of the secret key; empty where the environment of
    the pod has them."""


def store_for_nodes(place: KubeflowSpec, cluster: ApiServer) -> str | Answer:
    """Whether nodes can open the store of artifacts."""
    root, providers = _configured(place, cluster)
    scheme, _, path = root.partition("://")
    session = _session(_mapping(providers.get(scheme), f"providers.{scheme}"), path)
    if scheme == "minio":
        return _own_store(place, cluster, root, session)
    if scheme == "s3":
        return _s3(place, root, session)
    return _with_root(place, root, root)


def store_for_reports(place: KubeflowSpec, cluster: ApiServer) -> str | Answer:
    """Where a run's artifacts will lie, for a pipeline whose steps all get them as files."""
    root, _ = _configured(place, cluster)
    return _with_root(place, root, root)


def _configured(place: KubeflowSpec, cluster: ApiServer) -> tuple[str, dict[str, Any]]:
    """The root of the runs' artifacts, and what is known of each scheme."""
    try:
        path = f"/api/v1/namespaces/{place.namespace}/configmaps/kfp-launcher"
        config = cluster.get(path) or {}
    except StepError as error:
        raise NotChecked(error.problems[0].what) from None
    data = config.get("data") or {}
    root = str(place.pipeline_root or data.get("defaultPipelineRoot") or _DEFAULT_ROOT)
    if not root.startswith(store.ROOTS):
        raise _unusable(f"its defaultPipelineRoot is {root!r}, which KFP cannot open")
    try:
        providers = yaml.safe_load(str(data.get("providers") or ""))
    except yaml.YAMLError as error:
        raise _unusable(f"its providers are not YAML: {first_line(error)}") from None
    return root, _mapping(providers, "providers")


def _mapping(value: object, name: str) -> dict[str, Any]:
    """A part of the ConfigMap that has to be a mapping; empty where it is not there.

    KFP's launcher ends where it is something else, and so does each step."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _unusable(f"its {name} should be a mapping, not {value!r:.80}")
    return value


def _unusable(reason: str) -> RequestError:
    return RequestError(
        f"KFP's launcher cannot use the ConfigMap kfp-launcher: {reason}",
        where="configmap kfp-launcher",
        fix="correct it: backend/src/v2/config of kubeflow/pipelines says how it is read",
    )


def _session(provider: Mapping[str, Any], path: str) -> StoreSession | None:
    """What the ConfigMap says of a path in a store of the provider; None where it says
    nothing. As ProvideSessionInfo in s3.go does it."""
    path, _, query = path.partition("?")
    if query:  # goes before what the ConfigMap says, with credentials of the environment
        options = dict(parse_qsl(query))
        is_plain = options.get("disableSSL") == "true"
        return StoreSession(
            _url(options.get("endpoint", ""), is_plain=is_plain), options.get("region", ""), {}
        )
    default = _mapping(provider.get("default"), "default of a provider")
    if not default:
        return None
    bucket, _, prefix = path.partition("/")
    override = {}
    for candidate in provider.get("overrides") or ():
        is_bucket = candidate.get("bucketName") == bucket
        if is_bucket and prefix.startswith(candidate.get("keyPrefix") or ""):
            override = candidate
            break
    values = {**default, **{name: value for name, value in override.items() if value is not None}}
    endpoint = _url(str(values.get("endpoint") or ""), is_plain=bool(values.get("disableSSL")))
    credentials = _mapping(values.get("credentials"), "credentials of a provider")
    reference = _mapping(credentials.get("secretRef"), "secretRef of a provider")
    keys = {}
    if not credentials.get("fromEnv") and reference:
        secret = reference.get("secretName")
        keys = {
            "access": f"{secret}/{reference.get('accessKeyKey')}",
            "secret": f"{secret}/{reference.get('secretKeyKey')}",
        }
    return StoreSession(endpoint, str(values.get("region") or ""), keys)


def _url(endpoint: str, *, is_plain: bool) -> str:
    """An endpoint with the scheme that it is reached by."""
    if not endpoint or "://" in endpoint:
        return endpoint
    return f"http://{endpoint}" if is_plain else f"https://{endpoint}"


def _own_store(
    place: KubeflowSpec, cluster: ApiServer, root: str, session: StoreSession | None
) -> str:
    """KFP's own store, with its endpoint and Secret."""
    settings = {}
    if store.ENDPOINT not in place.secrets:
        endpoint = session.endpoint if session else _endpoint_of_service(place, cluster)
        if endpoint and not _same_place(endpoint, place.store_endpoint):
            settings["store_endpoint"] = endpoint
    secret = place.store_secret
    if session and session.keys:
        secret, _, access_key = session.keys["access"].partition("/")
        secret_key = session.keys["secret"].partition("/")[2]
        are_usual = {store.KEY: access_key, store.SECRET: secret_key} == store.KEYS
        if not are_usual:
            settings |= _unset(place, store.KEY, session.keys["access"])
            settings |= _unset(place, store.SECRET, session.keys["secret"])
        elif secret != place.store_secret and store.KEY not in place.secrets:
            settings["store_secret"] = secret
    if settings:
        raise _lacking(root, settings)
    if store.KEY not in place.secrets:
        _require_secret(place, cluster, secret, root)
    return f"{root}, at {place.store_endpoint}"


def _endpoint_of_service(place: KubeflowSpec, cluster: ApiServer) -> str:
    """The endpoint of KFP's own store where the one of the config is no Service of the
    cluster, and the one that older releases have is; else ""."""
    host = urlsplit(place.store_endpoint).hostname or ""
    name, _, namespace = host.partition(".")
    services = f"/api/v1/namespaces/{namespace.partition('.')[0]}/services"
    try:
        if not namespace or cluster.exists(f"{services}/{name}"):
            return ""
        if cluster.exists(f"{services}/{_MINIO}"):
            return f"http://{_MINIO}.{namespace}:9000"
    except StepError:  # who may not look at Services is not told
        return ""
    return ""


def _require_secret(place: KubeflowSpec, cluster: ApiServer, secret: str, root: str) -> None:
    try:
        is_there = cluster.exists(f"/api/v1/namespaces/{place.namespace}/secrets/{secret}")
    except StepError as error:
        raise NotChecked(error.problems[0].what) from None
    if not is_there:
        raise RequestError(
            f"the namespace {place.namespace} has no Secret {secret}, with which nodes open {root}",
            where=f"{_PATH}.store_secret",
            fix="name the one that holds `accesskey` and `secretkey` of KFP's own store",
        )


def _s3(place: KubeflowSpec, root: str, session: StoreSession | None) -> str | Answer:
    """A store that speaks S3, at AWS or elsewhere."""
    if session is None:
        text = f"{root}, at AWS: kfp-launcher names no other endpoint, and KFP asks there"
        return _with_root(place, root, text)
    settings = {}
    names_endpoint = {"AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"} & place.secrets.keys()
    is_aws = (urlsplit(session.endpoint).hostname or "").endswith("amazonaws.com")
    if session.endpoint and not is_aws and not names_endpoint:
        if not _same_place(session.endpoint, place.s3_endpoint):
            settings["s3_endpoint"] = session.endpoint
        if session.region and session.region != place.s3_region:
            settings["s3_region"] = session.region
    if session.keys:
        settings |= _unset(place, "AWS_ACCESS_KEY_ID", session.keys["access"])
        settings |= _unset(place, "AWS_SECRET_ACCESS_KEY", session.keys["secret"])
    if settings:
        if not place.pipeline_root:
            settings["pipeline_root"] = root
        raise _lacking(root, settings)
    where = place.s3_endpoint or session.endpoint or "AWS"
    text = f"{root}, at {where}"
    if not session.keys:
        text += f"; {place.node_account} needs the same rights there as {place.service_account}"
    return _with_root(place, root, text)


def _with_root(place: KubeflowSpec, root: str, text: str) -> str | Answer:
    """An answer with the line by which `status` and `report` find artifacts."""
    if place.pipeline_root or root.startswith(store.SCHEME):
        return text
    return Answer(text, {f"{_PATH}.pipeline_root": root})


def _unset(place: KubeflowSpec, env: str, reference: str) -> dict[str, str]:
    """The line for a variable that the config does not have."""
    return {} if env in place.secrets else {f"secrets.{env}": reference}


def _lacking(root: str, settings: Mapping[str, str]) -> CurableError:
    names = ", ".join(f"{_PATH}.{name}" for name in settings)
    return CurableError(
        f"nodes would not open {root} as KFP's launcher does, by the ConfigMap kfp-launcher and "
        "the Services of the cluster",
        {f"{_PATH}.{name}": value for name, value in settings.items()},
        where=names,
        fix="add the lines below, or pass --write",
    )


def _same_place(endpoint: str, other: str) -> bool:
    """Whether two URLs lead to one Service, by its short name or by a longer one."""
    one_url, other_url = urlsplit(endpoint), urlsplit(other)
    names = [
        (url.hostname or "").removesuffix(".cluster.local").removesuffix(".svc")
        for url in (one_url, other_url)
    ]
    return names[0] == names[1] and one_url.port == other_url.port
