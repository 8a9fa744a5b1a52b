"""The Kubernetes API, as far as a launcher, a node and doctor need it: JSON over HTTP, with the
standard library.

A pod speaks to it with its service account, whose token rotates and is therefore read for each
request. What may pass by itself (no connection, 429, 5xx, a token that just ran out) is tried again
for `patience_seconds` and no longer. Authority: the conventions of the Kubernetes API, v1."""

import contextlib
import dataclasses
import http.client
import logging
import ssl
import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode, urlsplit

from rekindle.errors import RequestError, StepError
from rekindle.http import HttpError, Stopped, growing, request, retried
from rekindle.tables import problems_in

log = logging.getLogger(__name__)

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
IN_CLUSTER = "https://kubernetes.default.svc"
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 10.0
_REQUEST_SECONDS = 30.0
# A quiet log says nothing for hours; the code that follows the status notices a dead connection.
_STREAM_SECONDS = 300.0
LONGEST_LINE = 1 << 16
_problem = problems_in(__file__)


class Conflict(Exception):
    """There is an object of that name already."""


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
    def around(cls, account: Path, server: str, **more: Any) -> Self:
        """The cluster that this pod runs in."""
        return cls(server, account / "token", account / "ca.crt", **more)

    @classmethod
    def configured(cls, patience_seconds: float) -> Self:
        """The cluster of kubectl's current context, or the one around us; RequestError for none."""
        if ACCOUNT.exists():
            return cls.around(ACCOUNT, IN_CLUSTER, patience_seconds=patience_seconds)
        from kubernetes import client, config

        found = client.Configuration()
        try:
            config.load_kube_config(client_configuration=found)
        except config.ConfigException as error:
            raise RequestError([_problem("no_context", error=error)]) from error
        token = found.get_api_key_with_prefix("authorization") or ""
        certificate = (Path(found.cert_file), Path(found.key_file)) if found.cert_file else None
        authority = Path(found.ssl_ca_cert) if found.ssl_ca_cert else ""
        words = (found.host, token.removeprefix("Bearer "), authority, certificate)
        return cls(*words, patience_seconds=patience_seconds)

    def get(self, path: str, **query: str) -> dict[str, Any] | None:
        """An object or list; None if there is none."""
        return self._patiently("GET", path, query, known=(404,))

    def create(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The object as it was stored. Conflict also after an earlier try whose answer was lost."""
        if (made := self._patiently("POST", path, {}, body, known=(409,))) is None:
            raise Conflict
        return made

    def delete(self, path: str, uid: str) -> bool:
        """Whether there was such an object, with this uid and no newer one of its name."""
        body = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        return self._patiently("DELETE", path, {}, body, known=(404, 409)) is not None

    def lines(self, path: str, **query: str) -> Iterator[str]:
        """Lines of a log as they come, until its end; none if there is no such log. A line that is
        longer than `LONGEST_LINE` comes in pieces. OSError if the connection ends before, or there
        is none."""
        host, tls = urlsplit(self.server).netloc, self._tls()
        connection = http.client.HTTPConnection(host, timeout=_STREAM_SECONDS)
        if tls is not None:
            connection = http.client.HTTPSConnection(host, timeout=_STREAM_SECONDS, context=tls)
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
                    if len(rest) > LONGEST_LINE:
                        whole, rest = [*whole, rest], b""
                    yield from (line.decode(errors="replace") for line in whole)
                if rest:
                    yield rest.decode(errors="replace")
            except http.client.HTTPException as error:
                raise OSError(f"{type(error).__name__}: {error}") from error

    def _patiently(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Any = None,
        *,
        known: Collection[int],
    ) -> dict[str, Any] | None:
        """The answer; None for a `known` status, StepError for others and where no retry helped."""
        try:
            return self.answer(method, path, query, body)
        except HttpError as error:
            if error.status in known:
                return None
            if isinstance(error, Stopped):
                raise
            where, name = f"{method} {self.server}{path}", "silent"
            if not passing(error):
                name = str(error.status) if error.status in (403, 404) else "refused"
                where = f"{method} {path}"
            about = {"error": error, "seconds": self.patience_seconds}
            raise StepError([_problem(name, where=where, **about)]) from None

    def answer(
        self, method: str, path: str, query: Mapping[str, str], body: Any = None
    ) -> dict[str, Any]:
        """The answer; HttpError where the server refuses, or no retry helped."""
        url = f"{self.server}{_target(path, query)}"

        def once() -> dict[str, Any]:
            return request(
                url,
                self._headers(),
                body=body,
                method=method,
                timeout_seconds=_REQUEST_SECONDS,
                tls=self._tls(),
                proxy=False,
            )

        def notice(error: HttpError, pause: float) -> None:
            log.warning("%s %s: %s; again in %.1f s", method, path, error, pause)

        pauses = growing(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS, self.patience_seconds)
        return retried(once, pauses, stop=self.stopping, transient=passing, notice=notice)

    def _tls(self) -> ssl.SSLContext | None:
        """How the server is verified and this client proves who it is; None for plain HTTP."""
        if urlsplit(self.server).scheme == "http":
            return None
        known = self.authority
        trust = {"cafile": str(known)} if isinstance(known, Path) else {"cadata": known or None}
        context = ssl.create_default_context(**trust)
        if self.certificate:
            context.load_cert_chain(*self.certificate)
        return context

    def _headers(self) -> dict[str, str]:
        token = self.token.read_text().strip() if isinstance(self.token, Path) else self.token
        headers = {"Accept": "application/json, */*", "Content-Type": "application/json"}
        return headers | ({"Authorization": f"Bearer {token}"} if token else {})


def _target(path: str, query: Mapping[str, str]) -> str:
    return f"{path}?{urlencode(query)}" if query else path


def passing(error: HttpError) -> bool:
    """Whether the same request may yet succeed: also after 401, for tokens rotate."""
    return error.transient or error.status == 401
