"""Google's REST APIs from inside a container: a token of the account that it runs as, and calls
that are repeated where that is safe.

Repeated, with growing pauses and for a bounded time, are reads and what may be said twice (cancel):
after 429, 5xx and broken connections. `create` is never repeated here: whether it took effect is
for the caller to find out. Standard library only, for it runs on nodes whose image is anybody's.
Authority: cloud.google.com/compute/docs/metadata/querying-metadata, google.rpc.Status.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

TIMEOUT_SECONDS = 20.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 30.0
_TOKEN = "/computeMetadata/v1/instance/service-accounts/default/token"  # noqa: S105 - a path


class RestError(Exception):
    """A call failed for good. `status` is that of HTTP, 0 if there was no answer; `transient` says
    that the same call may yet succeed."""

    def __init__(self, message: str, status: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.status, self.reason = status, reason

    @property
    def transient(self) -> bool:
        return self.status in (0, 408, 429) or self.status >= 500


@dataclasses.dataclass(frozen=True)
class Places:
    """Where the APIs are: the public ones, or, for tests, all of them at `endpoint`."""

    region: str = ""
    endpoint: str = ""
    metadata: str = "metadata.google.internal"

    def url(self, service: str) -> str:
        """Of `aiplatform`, `secretmanager` or `logging`."""
        regional = f"{self.region}-" if service == "aiplatform" else ""
        return self.endpoint or f"https://{regional}{service}.googleapis.com"


def places(region: str, environment: Mapping[str, str] = os.environ) -> Places:
    """Google's, unless the environment says otherwise: GCE_METADATA_HOST is what Google's own
    libraries read, REKINDLE_GOOGLE_ENDPOINT is ours."""
    host = environment.get("GCE_METADATA_HOST", Places.metadata)
    return Places(region, environment.get("REKINDLE_GOOGLE_ENDPOINT", ""), host)


class Google:
    """Calls as the account of this container. `stop` ends the wait between repetitions early."""

    def __init__(self, where: Places, stop: threading.Event | None = None) -> None:
        self.where, self.stop = where, stop or threading.Event()
        self._token, self._until = "", 0.0

    def get(
        self, service: str, path: str, query: Mapping[str, str] | None = None, patience: float = 300
    ) -> dict[str, Any]:
        """The answer, after at most `patience` seconds of repetitions."""
        url = f"{self.where.url(service)}{path}" + (f"?{urlencode(query)}" if query else "")
        return self._repeated(url, None, patience)

    def post(self, service: str, path: str, body: Any, patience: float = 300) -> dict[str, Any]:
        """The same for a POST that may be said twice."""
        return self._repeated(f"{self.where.url(service)}{path}", body, patience)

    def create(self, service: str, path: str, body: Any) -> dict[str, Any]:
        """One POST; a `transient` RestError leaves open whether it took effect."""
        return self._call(f"{self.where.url(service)}{path}", body)

    def _repeated(self, url: str, body: Any, patience: float) -> dict[str, Any]:
        end, pause = time.monotonic() + patience, _FIRST_PAUSE_SECONDS
        while True:
            try:
                return self._call(url, body)
            except RestError as error:
                if error.status == 401 and self._token:
                    self._token = ""  # it may have run out early; one more, with a fresh one
                elif not error.transient or time.monotonic() + pause > end or self.stop.is_set():
                    raise
                else:
                    self.stop.wait(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _call(self, url: str, body: Any) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self._bearer()}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        return _answer(urllib.request.Request(url, data, headers))  # noqa: S310 - our own address

    def _bearer(self) -> str:
        if not self._token or time.monotonic() > self._until:
            url = f"http://{self.where.metadata}{_TOKEN}"
            told = _answer(urllib.request.Request(url, headers={"Metadata-Flavor": "Google"}))
            self._token = str(told["access_token"])
            self._until = time.monotonic() + max(0, int(told["expires_in"]) - 60)
        return self._token


def secrets(google: Google, references: Mapping[str, str]) -> dict[str, str]:
    """The values of secrets by the name of their variable; RestError with the name of the first
    that cannot be read, and never with a value."""
    found = {}
    for variable, name in references.items():
        try:
            told = google.get("secretmanager", f"/v1/{name}:access", patience=60)
        except RestError as error:
            raise RestError(f"{variable}: {error}", error.status, error.reason) from None
        found[variable] = base64.b64decode(told["payload"]["data"]).decode()
    return found


class _Stay(urllib.request.HTTPRedirectHandler):
    """Follows nothing: the token is for the address that was asked."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _answer(request: urllib.request.Request) -> dict[str, Any]:
    opener = urllib.request.build_opener(_Stay)
    try:
        with opener.open(request, timeout=TIMEOUT_SECONDS) as response:
            told: dict[str, Any] = json.loads(response.read() or b"{}")
            return told
    except urllib.error.HTTPError as error:
        message, reason = _status(error)
        raise RestError(f"HTTP {error.code}: {message}", error.code, reason) from None
    except (OSError, ValueError, http.client.HTTPException) as error:  # none, or half an answer
        host = request.host
        raise RestError(f"no answer from {host}: {getattr(error, 'reason', error)}") from None


def _status(error: urllib.error.HTTPError) -> tuple[str, str]:
    """Message and status (`RESOURCE_EXHAUSTED`) of google.rpc.Status."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        told = json.loads(error.read())["error"]
        return str(told["message"]), str(told.get("status", ""))
    return str(error.reason), ""
