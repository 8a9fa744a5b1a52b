"""Questions to a workspace of Azure ML, and to what lies around it, about what a config names; each
reads and none changes anything (a registry hands out its token by POST, which changes nothing).

What Azure says plainly is a problem; a refusal to answer, and no answer, are none. Authority: the
REST references of Microsoft.MachineLearningServices 2024-04-01 (workspaces, computes, datastores,
vmSizes, usages) and Microsoft.Authorization 2022-04-01 (permissions), Data Lake Storage Gen2
2023-11-03, Key Vault 7.4, and azure/acr's AAD-OAuth.md. No workspace has been asked yet."""

from __future__ import annotations

import fnmatch
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from rekindle.errors import RequestError
from rekindle.platforms.asking import Question, Unasked
from rekindle.platforms.reads import Image, Said, manifest, read
from rekindle.spec.places import AzureMLSpec

_LOGIN = "az login, or set AZURE_TENANT_ID, AZURE_CLIENT_ID and a secret or certificate"
ARM = "https://management.azure.com"
_PROVIDER = "providers/Microsoft.MachineLearningServices"
_VERSION, _ROLES, _VAULT, _LAKE = "2024-04-01", "2022-04-01", "7.4", "2023-11-03"


def workspace_path(place: AzureMLSpec) -> str:
    """The workspace's name in Azure Resource Manager."""
    group = f"/subscriptions/{place.subscription}/resourceGroups/{place.resource_group}"
    return f"{group}/{_PROVIDER}/workspaces/{place.workspace}"


class Subscription:
    """The workspace that `place` names, and the user who is logged in here.

    What several questions need is read once."""

    def __init__(self, place: AzureMLSpec) -> None:
        self.place = place
        self.root = workspace_path(place)
        self._credential: Any = None
        self._tokens: dict[str, str] = {}
        self._known: dict[str, dict[str, Any]] = {}
        self._lock = threading.RLock()

    def question(
        self, name: str, field: str, ask: Callable[..., str], early: bool, *words: Any
    ) -> Question:
        """`ask(subscription, *words)` as a question: an answer that `ask` does not know what to
        make of leaves it open."""

        def answer() -> str:
            try:
                return ask(self, *words)
            except Said as error:
                raise Unasked(str(error)) from error

        return Question(name, f"platforms.azureml.{field}", answer, early)

    def login(self) -> str:
        """Checks that a user is logged in, with a token that Azure gave just now."""
        logging.getLogger("azure").setLevel(logging.CRITICAL)  # it says what we say, at length
        try:
            from azure.core.exceptions import AzureError, ClientAuthenticationError
            from azure.identity import DefaultAzureCredential
        except ImportError as error:
            fix = "pip install 'rekindle[azure]'"
            raise RequestError(f"{error.name} is not installed here", fix=fix) from None
        self._credential = DefaultAzureCredential()
        try:
            self.token(ARM)
        except ClientAuthenticationError as error:
            raise RequestError(_reason(error), fix=_LOGIN) from None
        except AzureError as error:
            raise Unasked(_reason(error)) from None
        return "a token for Azure Resource Manager"

    def token(self, resource: str) -> str:
        """For one of Azure's services."""
        with self._lock:
            if resource not in self._tokens:
                found = self._credential.get_token(f"{resource}/.default")
                self._tokens[resource] = str(found.token)
            return self._tokens[resource]

    def bearer(self, resource: str) -> dict[str, str]:
        """The same as a header; Unasked where that service gives none."""
        try:
            return {"Authorization": f"Bearer {self.token(resource)}"}
        except Exception as error:  # noqa: BLE001 - azure.core's, by many names
            raise Unasked(_reason(error)) from None

    def get(self, path: str, version: str = _VERSION, more: str = "") -> dict[str, Any]:
        """What Azure Resource Manager says of a path, all pages of it."""
        url = f"{ARM}{path}?api-version={version}{more}"
        with self._lock:
            if url not in self._known:
                found = read(url, self.bearer(ARM))
                while following := found.pop("nextLink", None):
                    page = read(following, self.bearer(ARM))
                    found["value"] += page["value"]
                    found["nextLink"] = page.get("nextLink")
                self._known[url] = found
            return self._known[url]

    def near(self, what: str) -> list[dict[str, Any]]:
        """`vmSizes` or `usages` where the workspace is."""
        location = self.get(self.root)["location"]
        path = f"/subscriptions/{self.place.subscription}/{_PROVIDER}/locations/{location}/{what}"
        found = self.get(path)
        rows: list[dict[str, Any]] = found.get("value") or found.get("amlCompute") or []
        return rows


def workspace(there: Subscription) -> str:
    """Whether there is such a workspace, and one may look at it."""
    place = there.place
    try:
        found = there.get(there.root)
    except Said as error:
        if error.status not in (403, 404):
            raise
        what = f"there is no workspace {place.workspace} in {place.resource_group}"
        if error.status == 403:
            what += ", or you may not see it"
        fix = "az ml workspace list; az account set --subscription ID"
        raise RequestError(what, fix=fix) from None
    return f"{place.workspace} in {found['location']}"


def may(there: Subscription, action: str) -> str:
    """Whether who is logged in may do something in the workspace."""
    path = f"{there.root}/providers/Microsoft.Authorization/permissions"
    found = there.get(path, _ROLES)["value"]
    if not any(
        _matches(one.get("actions"), action) and not _matches(one.get("notActions"), action)
        for one in found
    ):
        fix = "ask for the role `AzureML Data Scientist` on the workspace"
        raise RequestError(f"you may not {action}", fix=fix)
    return action


def datastore(there: Subscription) -> str:
    """Whether the workspace has a place for artifacts."""
    found = there.get(f"{there.root}/datastores", more="&isDefault=true")["value"]
    if not found:
        fix = "az ml datastore create; set one as the default in the studio"
        raise RequestError("the workspace has no default datastore", fix=fix)
    kept = found[0]["properties"]
    return f"{found[0]['name']}: {kept.get('containerName', '')} of {kept.get('accountName', '')}"


def cluster(there: Subscription, name: str, count: int, step: str) -> str:
    """Whether there is such a cluster, of as many nodes as the step wants."""
    try:
        found = there.get(f"{there.root}/computes/{name}")["properties"]
    except Said as error:
        if error.status != 404:
            raise
        fix = "az ml compute list, or leave it empty for serverless machines"
        raise RequestError(f"the workspace has no compute {name}", fix=fix) from None
    if found["computeType"] != "AmlCompute":
        fix = "az ml compute create --type AmlCompute"
        raise RequestError(f"{name} is a {found['computeType']}, no cluster", fix=fix)
    kept = found["properties"]
    most = kept["scaleSettings"]["maxNodeCount"]
    if most < count:
        raise RequestError(
            f"the step {step} wants {count} nodes, the cluster {name} has {most} at most",
            fix=f"az ml compute update --name {name} --max-instances {count}",
        )
    return f"{name}: up to {most} x {kept['vmSize']}, {kept.get('vmPriority', 'Dedicated')}"


def machine(there: Subscription, size: str, count: int, spot: bool, step: str) -> str:
    """Whether there is such a size where the workspace is, and the quota for it."""
    place, sizes = there.get(there.root)["location"], there.near("vmSizes")
    found = next((one for one in sizes if one["name"].lower() == size.lower()), None)
    if found is None:
        fix = f"az ml compute list-sizes --location {place}, or another region"
        raise RequestError(f"{place} has no machines of the size {size}", fix=fix)
    if spot and not found.get("lowPriorityCapable", True):
        fix = "take machines that are not taken away: resources.spot: false"
        raise RequestError(f"{size} is not there as a spot machine", fix=fix)
    needed = int(found["vCPUs"]) * count
    usage = _usage(there.near("usages"), "TotalLowPriorityCores" if spot else found["family"])
    if usage is None:
        raise Unasked(f"nothing is said of the quota for {size}")
    limit, used = int(usage["limit"]), int(usage["currentValue"])
    if 0 <= limit < used + needed:
        name = usage["name"]["value"]
        raise RequestError(
            f"the step {step} wants {needed} vCPUs ({count} x {size}); {name} has {limit - used} "
            f"of {limit} left in {place}",
            fix="ask for more: https://ml.azure.com/quota, or wait until others end",
        )
    return f"{count} x {size}: {needed} vCPUs of {'no limit' if limit < 0 else limit - used}"


def container(there: Subscription) -> str:
    """Whether the container of artifact_root is there, in a tenant of ours."""
    found = urlsplit(there.place.artifact_root)
    name, host = found.username or "", found.hostname or ""
    headers = {**there.bearer("https://storage.azure.com"), "x-ms-version": _LAKE}
    try:
        read(f"https://{host}/{name}?resource=filesystem", headers, method="HEAD")
    except Said as error:
        if error.status == 404:
            fix = f"az storage container create --name {name} --account-name {host.split('.')[0]}"
            raise RequestError(f"{host} has no container {name}", fix=fix) from None
        if error.status == 401 or (error.status == 403 and there.place.identity == "user"):
            raise RequestError(
                f"the container {name} of {host} belongs to another tenant, or you may not read it",
                fix="name one of yours, or ask for `Storage Blob Data Contributor` on its account",
            ) from None
        raise
    return f"{name} of {host}"


def image(there: Subscription, wanted: Image) -> str:
    """Whether the registry has the image; others than Azure's are not asked with a token."""
    host = wanted.host
    if not host.endswith(".azurecr.io"):
        raise Unasked(f"{host} is not a registry of Azure")
    who = {"grant_type": "access_token", "service": host, "access_token": there.token(ARM)}
    refresh = read(f"https://{host}/oauth2/exchange", form=who)["refresh_token"]
    scope = {
        "grant_type": "refresh_token", "service": host, "refresh_token": refresh,
        "scope": f"repository:{wanted.name}:pull",
    }  # fmt: skip
    token = read(f"https://{host}/oauth2/token", form=scope)["access_token"]
    try:
        return manifest(wanted, {"Authorization": f"Bearer {token}"})
    except Said as error:
        if error.status != 404:
            raise
        registry = host.partition(".")[0]
        fix = f"push it: az acr build, or az acr repository show-manifests --name {registry}"
        what = f"{host} has no image {wanted.name} {wanted.version}"
        raise RequestError(what, fix=fix) from None


def secret(there: Subscription, url: str) -> str:
    """Whether the vault has the secret: its versions are listed, its value is not read."""
    vault, _, rest = url.partition("/secrets/")
    name, _, version = rest.partition("/")
    asked = f"{vault}/secrets/{name}/versions?maxresults=25&api-version={_VAULT}"
    listed = read(asked, there.bearer("https://vault.azure.net"))
    found = [one["id"].rpartition("/")[2] for one in listed.get("value", [])]
    if not found or (version and version not in found and not listed.get("nextLink")):
        fix = f"az keyvault secret list --vault-name {vault.removeprefix('https://').split('.')[0]}"
        raise RequestError(f"there is no secret {url}", fix=fix)
    return url


def _usage(rows: Iterable[Mapping[str, Any]], name: str) -> Mapping[str, Any] | None:
    return next((one for one in rows if one["name"]["value"].lower() == name.lower()), None)


def _matches(patterns: Iterable[str] | None, action: str) -> bool:
    return any(fnmatch.fnmatchcase(action.lower(), one.lower()) for one in patterns or ())


def _reason(error: Exception) -> str:
    """What Entra says by its number, or the first of many lines."""
    text = str(getattr(error, "message", "") or error).strip()
    lines = text.splitlines() or [type(error).__name__]
    return next((line.strip() for line in lines if "AADSTS" in line), lines[0])[:300]
