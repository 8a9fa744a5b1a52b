"""The least permissions for steps on Azure ML, and whether the workspace, and what lies around it,
has what a config names; each check reads and none changes anything (a registry hands out its token
by POST, which changes nothing).

A refusal to answer, and no answer, are no problem. Authority: the REST references of
Microsoft.MachineLearningServices 2024-04-01 (workspaces, computes), Microsoft.Authorization
2022-04-01 (permissions of who asks), Data Lake Storage Gen2 2023-11-03, Key Vault 7.4, and
azure/acr's AAD-OAuth.md. No workspace has been asked yet."""

import fnmatch
import logging
import threading
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from rekindle.catalog.tables import limits
from rekindle.errors import RequestError
from rekindle.http import HttpError
from rekindle.outputs import PlannedStep
from rekindle.platforms import reads
from rekindle.platforms.azureml.client import ARM, images, steps, workspace_path
from rekindle.platforms.checks import Check, Needs, NotChecked, about, may, rights
from rekindle.platforms.reads import Image, absent, manifest, read
from rekindle.platforms.submission import Definition, problems_in
from rekindle.spec.platforms import AzureMLSpec

_RIGHTS = "2022-04-01"
_VERSION, _VAULT, _LAKE = "2024-04-01", "7.4", "2023-11-03"
_problem = problems_in(__file__)


def permissions(place: AzureMLSpec, needs: Needs) -> str:
    """Roles, and what each is for."""
    registry = (place.image or "the registry of the image").partition("/")[0]
    about = {"registry": registry, "root": place.artifact_root or "the account of artifact_root"}
    rows = [(role, at.format(**about), why) for role, at, why in limits("azureml")["roles"]]
    vaults = sorted({url.partition("/secrets/")[0] for url in place.secrets.values()})
    rows += [("Key Vault Secrets User", vault, "steps read their secrets") for vault in vaults]
    lines = [f"  {role:<30} on {where}: {why}" for role, where, why in rows]
    end = "The identity of an endpoint needs AcrPull and Storage Blob Data Reader there."
    return "\n".join(["The identity of the compute, and who submits, need:", *lines, end])


def checks(place: AzureMLSpec, definition: Definition | None, needs: Needs) -> Iterator[Check]:
    if not (place.subscription and place.resource_group and place.workspace):
        return  # which of them is missing is reported elsewhere
    ask = about("azureml", Subscription(place))
    yield ask("credentials", "subscription", Subscription.login, early=True, login=True)
    yield ask("workspace", "workspace", workspace, early=True)
    for use, is_asked in (("deploy", needs.deploys), ("publish", needs.publishes)):
        if is_asked:
            yield ask(f"you may {use}", "workspace", permitted, f"{use}_permissions")
    if place.artifact_root.startswith("abfs"):
        yield ask("container", "artifact_root", container, early=True)
    for wanted in reads.images({place.image or "", *(images(definition) if definition else ())}):
        yield ask("image", "image", image, wanted, early=True)
    # by the name of a cluster, the step that wants most of its nodes
    largest = dict[str, PlannedStep]()
    for step in steps(definition) if definition else ():
        kind, _, name = step.machine.partition(" ")
        if kind == "cluster" and (name not in largest or step.machines > largest[name].machines):
            largest[name] = step
    for name, most in largest.items():
        field = "compute" if name == place.compute else "gpu_compute"
        yield ask("compute", field, cluster, name, most.machines, most.step, early=True)
    for variable, url in sorted(place.secrets.items()):
        yield ask(f"secret {variable}", f"secrets.{variable}", secret, url)


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
            raise RequestError([_problem("no_package", name=error.name)]) from None
        self._credential = DefaultAzureCredential()
        try:
            self.token(ARM)
        except ClientAuthenticationError as error:
            raise RequestError([_problem("login", what=_reason(error))]) from None
        except AzureError as error:
            raise NotChecked(_reason(error)) from None
        return "a token for Azure Resource Manager"

    def token(self, resource: str) -> str:
        """For one of Azure's services."""
        with self._lock:
            if resource not in self._tokens:
                found = self._credential.get_token(f"{resource}/.default")
                self._tokens[resource] = str(found.token)
            return self._tokens[resource]

    def bearer(self, resource: str) -> dict[str, str]:
        """The same as a header; NotChecked where that service gives none."""
        try:
            return {"Authorization": f"Bearer {self.token(resource)}"}
        except Exception as error:  # noqa: BLE001 - azure.core's, by many names
            raise NotChecked(_reason(error)) from None

    def get(self, path: str = "", version: str = _VERSION) -> dict[str, Any]:
        """What Azure Resource Manager says of a path in the workspace."""
        url = f"{ARM}{workspace_path(self.place)}{path}?api-version={version}"
        return read(url, self.bearer(ARM))


def workspace(there: Subscription) -> str:
    """Whether there is such a workspace, and one may look at it."""
    place = there.place
    try:
        with absent(_problem("no_workspace", place=place)):
            found = there.get()
    except HttpError as error:
        if error.status != 403:
            raise
        raise RequestError([_problem("unseen_workspace", place=place)]) from None
    return f"{place.workspace} in {found['location']}"


def permitted(there: Subscription, rows: str) -> str:
    """Whether the roles of who is logged in allow these rows of the catalog in the workspace."""
    here, asked = there.place.workspace, rights(limits("azureml")[rows])
    fixes = {action: f"ask for `{role}` on {here}" for action, role in asked}
    listed = there.get("/providers/Microsoft.Authorization/permissions", _RIGHTS)
    roles = list(listed["value"])
    while listed.get("nextLink"):
        listed = read(listed["nextLink"], there.bearer(ARM))
        roles += listed["value"]
    return may(fixes, [one for one in fixes if not any(_allows(role, one) for role in roles)])


def _allows(role: Mapping[str, Any], action: str) -> bool:
    def fits(kind: str) -> bool:
        return any(fnmatch.fnmatchcase(action.lower(), one.lower()) for one in role.get(kind) or ())

    return fits("actions") and not fits("notActions")


def cluster(there: Subscription, name: str, count: int, step: str) -> str:
    """Whether there is such a cluster, of as many nodes as the step wants."""
    with absent(_problem("no_compute", name=name)):
        found = there.get(f"/computes/{name}")["properties"]
    if found["computeType"] != "AmlCompute":
        raise RequestError([_problem("no_cluster", name=name, kind=found["computeType"])])
    kept = found["properties"]
    most = kept["scaleSettings"]["maxNodeCount"]
    if most < count:
        wrong = _problem("small_cluster", name=name, step=step, count=count, most=most)
        raise RequestError([wrong])
    return f"{name}: up to {most} x {kept['vmSize']}, {kept.get('vmPriority', 'Dedicated')}"


def container(there: Subscription) -> str:
    """Whether the container of artifact_root is there, in a tenant of ours."""
    found = urlsplit(there.place.artifact_root)
    name, host = found.username or "", found.hostname or ""
    headers = {**there.bearer("https://storage.azure.com"), "x-ms-version": _LAKE}
    about = {"name": name, "host": host}
    try:
        with absent(_problem("no_container", account=host.split(".")[0], **about)):
            read(f"https://{host}/{name}?resource=filesystem", headers, method="HEAD")
    except HttpError as error:
        if error.status != 401 and not (error.status == 403 and there.place.identity == "user"):
            raise
        raise RequestError([_problem("foreign_container", **about)]) from None
    return f"{name} of {host}"


def image(there: Subscription, wanted: Image) -> str:
    """Whether the registry has the image; others than Azure's are not asked with a token."""
    host = wanted.host
    if not host.endswith(".azurecr.io"):
        raise NotChecked(f"{host} is not a registry of Azure")
    token = there.bearer(ARM)["Authorization"].removeprefix("Bearer ")
    who = {"grant_type": "access_token", "service": host, "access_token": token}
    refresh = read(f"https://{host}/oauth2/exchange", form=who)["refresh_token"]
    scope = {
        "grant_type": "refresh_token",
        "service": host,
        "refresh_token": refresh,
        "scope": f"repository:{wanted.name}:pull",
    }
    token = read(f"https://{host}/oauth2/token", form=scope)["access_token"]
    registry = host.partition(".")[0]
    fix = f"push it: az acr build, or az acr repository show-manifests --name {registry}"
    return manifest(wanted, {"Authorization": f"Bearer {token}"}, fix)


def secret(there: Subscription, url: str) -> str:
    """Whether the vault has the secret: its versions are listed, its value is not read."""
    vault, _, rest = url.partition("/secrets/")
    name, _, version = rest.partition("/")
    asked = f"{vault}/secrets/{name}/versions?maxresults=25&api-version={_VAULT}"
    listed = read(asked, there.bearer("https://vault.azure.net"))
    found = [one["id"].rpartition("/")[2] for one in listed.get("value", [])]
    if version in found or (found and not version):
        return url
    if listed.get("nextLink"):
        raise NotChecked(f"it is not among the first {len(found)} versions")
    named = vault.removeprefix("https://").split(".")[0]
    raise RequestError([_problem("no_secret", url=url, vault=named)])


def _reason(error: Exception) -> str:
    """What Entra says by its number, or the first of many lines."""
    text = str(getattr(error, "message", "") or error).strip()
    lines = text.splitlines() or [type(error).__name__]
    return next((line.strip() for line in lines if "AADSTS" in line), lines[0])[:300]
