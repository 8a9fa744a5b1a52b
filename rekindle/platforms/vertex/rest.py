"""Google's REST APIs from inside a container: a token of the account that it runs as, and
calls that are repeated where that is safe.

Repeated, with growing pauses and for a bounded time, are reads and what may be said twice
(cancel): after 429, 5xx and broken connections. `create` is never repeated here: whether
it took effect is for the caller to find out. Standard library only, for it runs on nodes
with any image. Authority: cloud.google.com/compute/docs/metadata/querying-metadata,
google.rpc.Status."""

from __future__ import annotations

import base64
import dataclasses
import os
import threading
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from rekindle.http import LONGEST_PAUSE_SECONDS, HttpError, growing, request, retried

_FIRST_PAUSE_SECONDS = 0.5
_TOKEN = "/computeMetadata/v1/instance/service-accounts/default/token"  # noqa: S105 - a path


class VertexSecretError(Exception):
    """A secret cannot be read; the text names its variable."""


@dataclasses.dataclass(frozen=True)
class Places:
    """Where the APIs are: the public ones, or, for tests, all of them at `endpoint`."""

    region: str = ""
    endpoint: str = ""
    metadata: str = "metadata.google.internal"

    def url(self, service: str) -> str:
        """The address of `aiplatform`, `secretmanager` or `logging`."""
        regional = f"{self.region}-" if service == "aiplatform" else ""
        return self.endpoint or f"https://{regional}{service}.googleapis.com"


def places(region: str, environment: Mapping[str, str] = os.environ) -> Places:
    """Google's, but for GCE_METADATA_HOST (Google's own) and REKINDLE_GOOGLE_ENDPOINT
    (ours)."""
    host = environment.get("GCE_METADATA_HOST", Places.metadata)
    return Places(region, environment.get("REKINDLE_GOOGLE_ENDPOINT", ""), host)


class Google:
    """Calls as the account of this container.
    `stop` ends the wait between repetitions early."""

    def __init__(self, where: Places, stop: threading.Event | None = None) -> None:
        self.where = where
        self.stop = stop or threading.Event()
        self._token = ""
        self._until = 0.0  # when the token is renewed, by the monotonic clock

    def get(
        self,
        service: str,
        path: str,
        query: Mapping[str, str] | None = None,
        patience: float = 300,
    ) -> dict[str, Any]:
        """The answer, after at most `patience` seconds of repetitions."""
        url = f"{self.where.url(service)}{path}"
        if query:
            url += f"?{urlencode(query)}"
        return self._repeated(url, None, patience)

    def post(self, service: str, path: str, body: object, patience: float = 300) -> dict[str, Any]:
        """The same for a POST that may be said twice."""
        return self._repeated(f"{self.where.url(service)}{path}", body, patience)

    def create(self, service: str, path: str, body: object) -> dict[str, Any]:
        """One POST; a `transient` HttpError leaves open whether it took effect."""
        return self._call(f"{self.where.url(service)}{path}", body)

    def _repeated(self, url: str, body: object, patience: float) -> dict[str, Any]:
        pauses = growing(_FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, patience)
        return retried(lambda: self._call(url, body), pauses, stop=self.stop)

    def _call(self, url: str, body: object) -> dict[str, Any]:
        token_before = self._token
        try:
            return request(url, self._authorized(), body=body)
        except HttpError as error:
            # with a new token, 401 is the answer
            if error.status != 401 or self._token != token_before:
                raise
        self._token = ""  # it ran out early; once more, with a new one
        return request(url, self._authorized(), body=body)

    def _authorized(self) -> dict[str, str]:
        if not self._token or time.monotonic() > self._until:
            url = f"http://{self.where.metadata}{_TOKEN}"
            response = request(url, {"Metadata-Flavor": "Google"})
            self._token = str(response["access_token"])
            self._until = time.monotonic() + max(0, int(response["expires_in"]) - 60)
        return {"Authorization": f"Bearer {self._token}"}


def secrets(google: Google, references: Mapping[str, str]) -> dict[str, str]:
    """The values of secrets by variable;
    VertexSecretError names the first unreadable one, no value."""
    values = {}
    for variable, name in references.items():
        try:
            response = google.get("secretmanager", f"/v1/{name}:access", patience=60)
        except HttpError as error:
            raise VertexSecretError(f"{variable}: {error}") from None
        values[variable] = base64.b64decode(response["payload"]["data"]).decode()
    return values
