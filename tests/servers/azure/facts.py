"""What lies around a workspace of Azure ML, as doctor asks: the workspace itself, a container of Data
Lake Storage, a registry, a vault, and Entra's token endpoint for who logs in with a secret.

It answers questions only; uploads, jobs and schedules are rest.py's. A question it does not know is a
404 and stands in `refused`. Authority: the REST references named in the code that asks."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qsl

from tests.servers.azure import rest as azure_rest
from tests.servers.azure.history import DISCOVERY
from tests.servers.azure.rest import TENANT, Workspace, token_for
from tests.servers.tls_hosts import Answer, Asked, Dropped

HOSTS = (
    *azure_rest.HOSTS,
    "*.dfs.core.windows.net",
    "*.azurecr.io",
    "*.vault.azure.net",
    "login.microsoftonline.com",
)
STORAGE, VAULT = "https://storage.azure.com", "https://vault.azure.net"
RESOURCES = (*azure_rest.RESOURCES, STORAGE, VAULT)
RIGHTS = "/providers/Microsoft.Authorization/permissions"
DIGEST = "sha256:" + "0" * 64


class Refused(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        self.status, self.code, self.message = status, code, message


class Facts:
    """The surroundings of `workspace`; tests change what there is. `errors` are answered in place of
    calls that begin so: HTTP's status, 0 for none; `login` is what Entra says of a secret."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace, self.root = workspace, workspace.root
        workspace.around = self
        self.there = True
        self.containers: dict[str, int] = {"acc/lake": 200}
        self.images = {"train": [DIGEST]}
        self.secrets: dict[str, list[str]] = {}
        self.login: dict[str, Any] | None = None
        self.errors: dict[str, int] = {}
        # of who asks, one a page: as AzureML Data Scientist and Monitoring Reader have them
        inside = "Microsoft.MachineLearningServices/workspaces"
        self.roles: list[dict[str, Any]] = [
            {
                "actions": [f"{inside}/*/{verb}" for verb in ("read", "action", "delete", "write")],
                "notActions": [f"{inside}/delete", f"{inside}/computes/*/write"],
                "dataActions": [],
            },
            {"actions": ["*/read"], "notActions": [], "dataActions": []},
        ]
        self.calls: list[str] = []
        self.refused: list[str] = []

    def answer(self, asked: Asked) -> Answer:
        if asked.host == "login.microsoftonline.com":
            return self.entra(asked)
        call = f"{asked.method} {asked.host}{asked.path}"
        theirs = (".blob.core.windows.net", ".api.azureml.ms", azure_rest.SUFFIX)
        here = (self.root, f"{self.root}{RIGHTS}")
        inside = asked.host == "management.azure.com" and asked.path not in here
        if asked.host.endswith(theirs) or inside:
            return self.workspace.answer(asked)
        self.calls.append(call)
        for begin, status in self.errors.items():
            if call.startswith(begin):
                if status == 0:
                    raise Dropped
                return _error(status, "Fault", "as the test wants it")
        try:
            return self.found(asked)
        except Refused as error:
            self.refused.append(f"{call}: {error.message}")
            return _error(error.status, error.code, error.message)

    def found(self, asked: Asked) -> Answer:
        if asked.host.endswith(".dfs.core.windows.net"):
            _check_token(asked, STORAGE)
            account, name = asked.host.partition(".")[0], asked.path.strip("/")
            assert (asked.method, asked.query) == ("HEAD", {"resource": "filesystem"})
            return Answer(self.containers.get(f"{account}/{name}", 404))
        if asked.host.endswith(".azurecr.io"):
            return self.registry(asked)
        if asked.host.endswith(".vault.azure.net"):
            _check_token(asked, VAULT)
            match = re.fullmatch(r"/secrets/([\w-]+)/versions", asked.path)
            if asked.method != "GET" or not match:
                raise Refused(404, "NotFound", "doctor reads no values")
            ids = [
                f"https://{asked.host}/secrets/{match[1]}/{v}"
                for v in self.secrets.get(match[1], [])
            ]
            return Answer(200, {"value": [{"id": one} for one in ids]})
        _check_token(asked, azure_rest.RESOURCES[0])
        assert asked.query["api-version"]
        if asked.path.endswith(RIGHTS):
            return self.rights(asked)
        return Answer(200, self.get_workspace())

    def rights(self, asked: Asked) -> Answer:
        """What the roles of who asks allow."""
        if (asked.method, asked.query["api-version"]) != ("GET", "2022-04-01"):
            raise Refused(400, "InvalidResourceType", f"{asked.method} {asked.query}")
        at = int(asked.query.get("$skip", 0))
        page: dict[str, Any] = {"value": self.roles[at : at + 1]}
        if at + 1 < len(self.roles):
            query = f"api-version=2022-04-01&$skip={at + 1}"
            page["nextLink"] = f"https://{asked.host}{asked.path}?{query}"
        return Answer(200, page)

    def get_workspace(self) -> Any:
        if not self.there:
            raise Refused(404, "ResourceNotFound", "there is no such workspace")
        return {
            **self.workspace.resource("", {"friendlyName": "forge", "discoveryUrl": DISCOVERY}),
            "location": "westeurope",
        }

    def registry(self, asked: Asked) -> Answer:
        form = dict(parse_qsl(asked.body.decode()))
        if (asked.method, asked.path) == ("POST", "/oauth2/exchange"):
            assert form["access_token"] == token_for(azure_rest.RESOURCES[0])
            return Answer(200, {"refresh_token": "of-the-registry"})
        if (asked.method, asked.path) == ("POST", "/oauth2/token"):
            assert form["refresh_token"] == "of-the-registry"
            return Answer(200, {"access_token": form["scope"]})
        match = re.fullmatch(r"/v2/(\S+)/manifests/(\S+)", asked.path)
        if asked.method != "HEAD" or not match or match[2] not in self.images.get(match[1], ()):
            raise Refused(404, "MANIFEST_UNKNOWN", "manifest unknown")
        assert asked.headers["authorization"] == f"Bearer repository:{match[1]}:pull"
        return Answer(200)

    def entra(self, asked: Asked) -> Answer:
        base = f"https://login.microsoftonline.com/{TENANT}"
        if asked.path.endswith("/token"):
            return Answer(401, self.login)
        if "discovery" in asked.path:
            return Answer(
                200,
                {
                    "tenant_discovery_endpoint": f"{base}/v2.0/.well-known/openid-configuration",
                    "metadata": [],
                },
            )
        return Answer(
            200,
            {
                "token_endpoint": f"{base}/oauth2/v2.0/token",
                "issuer": f"{base}/v2.0",
                "authorization_endpoint": f"{base}/oauth2/v2.0/authorize",
            },
        )


def _check_token(asked: Asked, resource: str) -> None:
    if asked.headers.get("authorization") != f"Bearer {token_for(resource)}":
        raise Refused(401, "InvalidAuthenticationToken", f"no token for {resource}")


def _error(status: int, code: str, message: str) -> Answer:
    return Answer(status, {"error": {"code": code, "message": message}})
