"""Key Vault's REST API, as far as reading a secret goes. What it does not know it refuses.

Authority: learn.microsoft.com/rest/api/keyvault/secrets/get-secret, version 7.4."""

from __future__ import annotations

import re

from tests.servers.tls_hosts import Answer, Asked, Dropped

_PATH = re.compile(r"/secrets/([A-Za-z0-9-]+)(?:/([0-9a-f]{32}))?")


class Vault:
    """One vault's secrets. `faults` come first, one a request: a status, or 0 for a connection that
    breaks."""

    def __init__(self, name: str, token: str, secrets: dict[str, str]) -> None:
        self.host, self.token, self.secrets = f"{name}.vault.azure.net", token, secrets
        self.faults: list[int] = []
        self.asked: list[str] = []
        self.environment: dict[str, str] = {}

    def answer(self, asked: Asked) -> Answer:
        self.asked.append(str(asked))
        if asked.host != self.host:
            return Answer(404, _error("NotFound"))
        if self.faults:
            status = self.faults.pop(0)
            if status == 0:
                raise Dropped
            more = {"Location": "https://elsewhere.vault.azure.net/"} if status == 302 else {}
            return Answer(status, _error("Fault"), more)
        if asked.headers.get("authorization") != f"Bearer {self.token}":
            return Answer(401, _error("Unauthorized"))
        if asked.method != "GET" or asked.query != {"api-version": "7.4"}:
            return Answer(400, _error("BadParameter"))
        match = _PATH.fullmatch(asked.path)
        if match is None or match[1] not in self.secrets:
            return Answer(404, _error("SecretNotFound"))
        version = match[2] or "0" * 32
        url = f"https://{self.host}/secrets/{match[1]}/{version}"
        return Answer(200, {"value": self.secrets[match[1]], "id": url, "attributes": {}})


def _error(code: str) -> dict[str, dict[str, str]]:
    return {"error": {"code": code, "message": f"{code}, says the vault"}}
