"""The Kubernetes API, as far as a launcher, a node and doctor need it: JSON over HTTP, with the
standard library.

A pod speaks to it with its service account, whose token rotates and is therefore read for each
request. What may pass by itself (no connection, 429, 5xx, a token that just ran out) is tried again
for `patience_seconds` and no longer. Authority: the conventions of the Kubernetes API, v1."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import logging
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from rekindle.errors import StepError

log = logging.getLogger(__name__)

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
IN_CLUSTER = "https://kubernetes.default.svc"
_PASSING = frozenset({401, 408, 429, 500, 502, 503, 504})
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 10.0
_REQUEST_SECONDS = 30.0
# A quiet log says nothing for hours; the code that follows the status notices a dead connection.
_STREAM_SECONDS = 300.0


class Conflict(Exception):
    """There is an object of that name already."""


class Stopped(Exception):
    """This process was told to end while it waited."""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """An API server, and how to speak to it: `token` is a text, or a file of one; `authority` a
    file or text of certificates, `certificate` our own with its key. `stopping` interrupts what
    waits."""

    server: str
    token: str | Path = ""
    authority: str | Path = ""
    certificate: tuple[Path, Path] | None = None
    stopping: threading.Event = dataclasses.field(default_factory=threading.Event)
    patience_seconds: float = 300.0

    @classmethod
    def around(cls, account: Path, server: str, **more: Any) -> Cluster:
        """The cluster that this pod runs in."""
        return cls(server, account / "token", account / "ca.crt", **more)

    def get(self, path: str, **query: str) -> dict[str, Any] | None:
        """An object or list; None if there is none."""
        status, answer = self._patiently("GET", path, query)
        return None if status == 404 else answer

    def create(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The object as it was stored. Conflict also if an earlier try got through whose answer was
        lost."""
        status, answer = self._patiently("POST", path, {}, body)
        if status == 409:
            raise Conflict
        if status == 404:
            raise _refused("POST", path, status, answer)
        return answer

    def delete(self, path: str, uid: str) -> bool:
        """Whether there was such an object, with this uid and no newer one of its name."""
        body = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        status, _ = self._patiently("DELETE", path, {}, body)
        return status not in (404, 409)

    def lines(self, path: str, **query: str) -> Iterator[str]:
        """Lines of a log as they come, until its end; none if there is no such log. OSError if the
        connection ends before, or there is none."""
        connection = self._connection(_STREAM_SECONDS)
        with contextlib.closing(connection):
            try:
                connection.request("GET", _target(path, query), headers=self._headers())
                answer = connection.getresponse()
                if answer.status not in (200, 404):
                    raise OSError(f"{answer.status} {answer.reason}")
                rest = b""
                # not `for line in answer`, to which a connection that broke looks like the end
                while answer.status == 200 and (content := answer.read1(1 << 16)):
                    *whole, rest = (rest + content).split(b"\n")
                    yield from (line.decode(errors="replace") for line in whole)
                if rest:
                    yield rest.decode(errors="replace")
            except http.client.HTTPException as error:
                raise OSError(f"{type(error).__name__}: {error}") from error

    def _patiently(
        self, method: str, path: str, query: Mapping[str, str], body: Any = None
    ) -> tuple[int, dict[str, Any]]:
        """The status (2xx, 404 or 409) and the answer; StepError for what a retry cannot solve."""
        deadline, pause = time.monotonic() + self.patience_seconds, _FIRST_PAUSE_SECONDS
        while True:
            try:
                status, answer = self._request(method, path, query, body)
                if status < 300 or status in (404, 409):
                    return status, answer
                if status not in _PASSING:
                    raise _refused(method, path, status, answer)
                trouble = f"{status} {answer.get('message', '')}"
            except (OSError, http.client.HTTPException) as error:
                trouble = f"{type(error).__name__}: {error}"
            if time.monotonic() + pause > deadline:
                raise StepError(
                    f"the API server does not answer: {trouble}",
                    where=f"{method} {self.server}{path}",
                    fix=f"it was asked for {self.patience_seconds:g} s; look at the cluster",
                )
            log.warning("%s %s: %s; again in %.1f s", method, path, trouble, pause)
            if self.stopping.wait(pause):
                raise Stopped
            pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)

    def _request(
        self, method: str, path: str, query: Mapping[str, str], body: Any
    ) -> tuple[int, dict[str, Any]]:
        connection = self._connection(_REQUEST_SECONDS)
        content = None if body is None else json.dumps(body)
        with contextlib.closing(connection):
            connection.request(method, _target(path, query), content, self._headers())
            answer = connection.getresponse()
            text = answer.read()
        try:
            parsed = json.loads(text) if text else {}
        except ValueError:
            parsed = {"message": text[:200].decode(errors="replace")}
        return answer.status, parsed

    def _connection(self, timeout_seconds: float) -> http.client.HTTPConnection:
        place = urlsplit(self.server)
        if place.scheme == "http":
            return http.client.HTTPConnection(place.netloc, timeout=timeout_seconds)
        context = (
            ssl.create_default_context(cafile=str(self.authority))
            if isinstance(self.authority, Path)
            else ssl.create_default_context(cadata=self.authority or None)
        )
        if self.certificate:
            context.load_cert_chain(*self.certificate)
        return http.client.HTTPSConnection(place.netloc, timeout=timeout_seconds, context=context)

    def _headers(self) -> dict[str, str]:
        token = self.token.read_text().strip() if isinstance(self.token, Path) else self.token
        headers = {"Accept": "application/json, */*", "Content-Type": "application/json"}
        return headers | ({"Authorization": f"Bearer {token}"} if token else {})


def _target(path: str, query: Mapping[str, str]) -> str:
    return f"{path}?{urlencode(query)}" if query else path


def _refused(method: str, path: str, status: int, answer: Mapping[str, Any]) -> StepError:
    fix = {
        403: "grant it; `rekindle doctor --platform kubeflow` prints the least that a run needs",
        404: "install Kubeflow Trainer v2.3 or newer in the cluster",
    }
    what = f"the API server refuses with {status}: {answer.get('message', '')}"
    return StepError(what, where=f"{method} {path}", fix=fix.get(status, ""))
