"""The least permissions for steps on Azure ML, and whether the workspace, and what lies
around it, has what a config names; each check reads and none changes anything (a registry
hands out its token by POST, which changes nothing).

A refusal to answer, and no answer, are no problem. Authority: the REST references of
Microsoft.MachineLearningServices 2024-04-01 (workspaces, computes),
Microsoft.Authorization 2022-04-01 (permissions of who asks), Data Lake Storage Gen2
2023-11-03, Key Vault 7.4, and azure/acr's AAD-OAuth.md. No workspace has been asked
yet."""

import fnmatch
import logging
import threading
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import urlsplit

from rekindle.errors import Problem, RequestError
from rekindle.http import HttpError
from rekindle.outputs import PlannedStep
from rekindle.platforms import reads
from rekindle.platforms.azureml.client import (
    ARM,
    LOG_IN,
    images,
    steps,
    workspace_path,
)
from rekindle.platforms.azureml.limits import limits
from rekindle.platforms.azureml.section import AzureMLSpec
from rekindle.platforms.checks import Needs, NotChecked, PlatformCheck, about, may, rights
from rekindle.platforms.reads import Image, absent, manifest, read
from rekindle.platforms.submission import Definition
from rekindle.protojson import Json

# versions of the APIs: of the workspace, of permissions, of Key Vault, of Data Lake Storage
_WORKSPACE_API = "2024-04-01"
_PERMISSIONS_API = "2022-04-01"
_VAULT_API = "7.4"
_LAKE_API = "2023-11-03"


def permissions(place: AzureMLSpec, needs: Needs) -> str:
    """The roles that identities need, and what each is for."""
    registry = (place.image or "the registry of the image").partition("/")[0]
    root = place.artifact_root or "the account of artifact_root"
    rows = []
    for role, scope, why in limits()["roles"]:
        rows.append((role, scope.format(registry=registry, root=root), why))
    vaults = sorted({url.partition("/secrets/")[0] for url in place.secrets.values()})
    rows += [("Key Vault Secrets User", vault, "steps read their secrets") for vault in vaults]
    lines = ["The identity of the compute, and who submits, need:"]
    lines += [f"  {role:<30} on {scope}: {why}" for role, scope, why in rows]
    lines.append("The identity of an endpoint needs AcrPull and Storage Blob Data Reader there.")
    return "\n".join(lines)


def checks(
    place: AzureMLSpec, definition: Definition | None, needs: Needs
) -> Iterator[PlatformCheck]:
    if not (place.subscription and place.resource_group and place.workspace):
        return  # which of them is missing is reported elsewhere
    check_of = about("azureml", Subscription(place))
    yield check_of("credentials", "subscription", Subscription.login, early=True, login=True)
    yield check_of("workspace", "workspace", workspace, early=True)
    if needs.deploys:
        yield check_of("you may deploy", "workspace", permitted, "deploy_permissions")
    if needs.publishes:
        yield check_of("you may publish", "workspace", permitted, "publish_permissions")
    if place.artifact_root.startswith("abfs"):
        yield check_of("container", "artifact_root", container, early=True)
    references = set(images(definition)) if definition else set()
    references.add(place.image or "")
    for reference in reads.images(references):
        yield check_of("image", "image", image, reference, early=True)
    for name, step in _largest_steps(definition).items():
        field = "compute" if name == place.compute else "gpu_compute"
        yield check_of("compute", field, cluster, name, step.machines, step.step, early=True)
    for variable, url in sorted(place.secrets.items()):
        yield check_of(f"secret {variable}", f"secrets.{variable}", secret, url)


def _largest_steps(definition: Definition | None) -> dict[str, PlannedStep]:
    """By the name of a cluster, the step that wants most of its nodes."""
    largest: dict[str, PlannedStep] = {}
    for step in steps(definition) if definition else ():
        kind, _, name = step.machine.partition(" ")
        if kind != "cluster":
            continue
        if name not in largest or step.machines > largest[name].machines:
            largest[name] = step
    return largest


class Subscription:
    """The workspace that `place` names, and the user who is logged in here."""

    def __init__(self, place: AzureMLSpec) -> None:
        self.place = place
        self._credential: Any = None
        self._tokens: dict[str, str] = {}
        self._lock = threading.Lock()

    def login(self) -> str:
        """Checks that a user is logged in, with a token that Azure gave just now."""
        logging.getLogger("azure").setLevel(logging.CRITICAL)  # it says what we say, at length
        try:
            from azure.core.exceptions import AzureError, ClientAuthenticationError
            from azure.identity import DefaultAzureCredential
        except ImportError as error:
            raise RequestError(
                f"{error.name} is not installed here", fix="pip install 'rekindle[azure]'"
            ) from None
        self._credential = DefaultAzureCredential()
        try:
            self.token(ARM)
        except ClientAuthenticationError as error:
            raise RequestError(_reason(error), fix=LOG_IN) from None
        except AzureError as error:
            raise NotChecked(_reason(error)) from None
        return "a token for Azure Resource Manager"

    def token(self, resource: str) -> str:
        """A token for one of Azure's services."""
        with self._lock:
            if resource not in self._tokens:
                access = self._credential.get_token(f"{resource}/.default")
                self._tokens[resource] = str(access.token)
            return self._tokens[resource]

    def bearer(self, resource: str) -> dict[str, str]:
        """The same as a header; NotChecked where that service gives none."""
        try:
            return {"Authorization": f"Bearer {self.token(resource)}"}
        except Exception as error:  # noqa: BLE001 - azure.core's, by many names
            raise NotChecked(_reason(error)) from None

    def get(self, path: str = "", version: str = _WORKSPACE_API) -> Json:
        """What Azure Resource Manager says of a path in the workspace."""
        url = f"{ARM}{workspace_path(self.place)}{path}?api-version={version}"
        return read(url, self.bearer(ARM))


def workspace(subscription: Subscription) -> str:
    """Whether there is such a workspace, and one may look at it."""
    place = subscription.place
    missing = f"there is no workspace {place.workspace} in {place.resource_group}"
    fix = "az ml workspace list; az account set --subscription ID"
    try:
        with absent(Problem(missing, fix=fix)):
            described = subscription.get()
    except HttpError as error:
        if error.status != 403:
            raise
        raise RequestError(f"{missing}, or you may not see it", fix=fix) from None
    return f"{place.workspace} in {described['location']}"


def permitted(subscription: Subscription, table: str) -> str:
    """Whether the roles of who is logged in allow the workspace what a table of the
    catalog lists."""
    name = subscription.place.workspace
    fixes = {}
    for action, role in rights(limits()[table]):
        fixes[action] = f"ask for `{role}` on {name}"
    page = subscription.get("/providers/Microsoft.Authorization/permissions", _PERMISSIONS_API)
    roles = list(page["value"])
    while page.get("nextLink"):
        page = read(page["nextLink"], subscription.bearer(ARM))
        roles += page["value"]
    return may(fixes, [action for action in fixes if not _allow(roles, action)])


def _allow(roles: Iterable[Json], action: str) -> bool:
    """Whether one of the roles allows an action and does not take it away again."""
    for role in roles:
        if _matches(action, role.get("actions")) and not _matches(action, role.get("notActions")):
            return True
    return False


def _matches(action: str, patterns: Iterable[str] | None) -> bool:
    return any(fnmatch.fnmatchcase(action.lower(), p.lower()) for p in patterns or ())


def cluster(subscription: Subscription, name: str, count: int, step: str) -> str:
    """Whether there is such a cluster, of as many nodes as the step wants."""
    missing = Problem(
        f"the workspace has no compute {name}",
        fix="az ml compute list, or leave it empty for serverless machines",
    )
    with absent(missing):
        compute = subscription.get(f"/computes/{name}")["properties"]
    kind = compute["computeType"]
    if kind != "AmlCompute":
        raise RequestError(
            f"{name} is a {kind}, no cluster",
            fix="az ml compute create --type AmlCompute",
        )
    properties = compute["properties"]
    most = properties["scaleSettings"]["maxNodeCount"]
    if most < count:
        raise RequestError(
            f"the step {step} wants {count} nodes, the cluster {name} has {most} at most",
            fix=f"az ml compute update --name {name} --max-instances {count}",
        )
    tier = properties.get("vmPriority", "Dedicated")
    return f"{name}: up to {most} x {properties['vmSize']}, {tier}"


def container(subscription: Subscription) -> str:
    """Whether the container of artifact_root is there, in a tenant of ours."""
    root = urlsplit(subscription.place.artifact_root)
    name = root.username or ""
    host = root.hostname or ""
    account = host.split(".")[0]
    headers = {
        **subscription.bearer("https://storage.azure.com"),
        "x-ms-version": _LAKE_API,
    }
    missing = Problem(
        f"{host} has no container {name}",
        fix=f"az storage container create --name {name} --account-name {account}",
    )
    try:
        with absent(missing):
            read(f"https://{host}/{name}?resource=filesystem", headers, method="HEAD")
    except HttpError as error:
        # a refusal concerns the run only where its steps act as who asks here
        acts_as_user = subscription.place.identity == "user"
        if error.status != 401 and not (error.status == 403 and acts_as_user):
            raise
        raise RequestError(
            f"the container {name} of {host} belongs to another tenant, or you may not read it",
            fix="name one of yours, or ask for `Storage Blob Data Contributor` on its account",
        ) from None
    return f"{name} of {host}"


def image(subscription: Subscription, reference: Image) -> str:
    """Whether the registry has the image;
    others than Azure's are not asked with a token."""
    host = reference.host
    if not host.endswith(".azurecr.io"):
        raise NotChecked(f"{host} is not a registry of Azure")
    login = {
        "grant_type": "access_token",
        "service": host,
        "access_token": subscription.bearer(ARM)["Authorization"].removeprefix("Bearer "),
    }
    exchanged = read(f"https://{host}/oauth2/exchange", form=login)
    scope = {
        "grant_type": "refresh_token",
        "service": host,
        "refresh_token": exchanged["refresh_token"],
        "scope": f"repository:{reference.name}:pull",
    }
    token = read(f"https://{host}/oauth2/token", form=scope)["access_token"]
    registry = host.partition(".")[0]
    fix = f"push it: az acr build, or az acr repository show-manifests --name {registry}"
    return manifest(reference, {"Authorization": f"Bearer {token}"}, fix)


def secret(subscription: Subscription, url: str) -> str:
    """Whether the vault has the secret:
    its versions are listed, its value is not read."""
    vault, _, path = url.partition("/secrets/")
    name, _, version = path.partition("/")
    versions_url = f"{vault}/secrets/{name}/versions?maxresults=25&api-version={_VAULT_API}"
    listed = read(versions_url, subscription.bearer("https://vault.azure.net"))
    versions = [row["id"].rpartition("/")[2] for row in listed.get("value", [])]
    if version in versions or (versions and not version):
        return url
    if listed.get("nextLink"):
        raise NotChecked(f"it is not among the first {len(versions)} versions")
    vault_name = vault.removeprefix("https://").split(".")[0]
    raise RequestError(
        f"there is no secret {url}",
        fix=f"az keyvault secret list --vault-name {vault_name}",
    )


def _reason(error: Exception) -> str:
    """The line with Entra's own number of the error, or else the first of many."""
    text = str(getattr(error, "message", "") or error).strip()
    lines = text.splitlines() or [type(error).__name__]
    for line in lines:
        if "AADSTS" in line:
            return line.strip()[:300]
    return lines[0][:300]
