"""A client of the Kubernetes API, as far as a launcher, a node and doctor need it: JSON
over HTTP, with the standard library.

A pod logs in with its service account, whose token rotates and is therefore read for each
request. A request that may yet succeed (after no connection, 429, 5xx, or a token that
just ran out) is repeated for `patience_seconds` and no longer. Authority: the conventions
of the Kubernetes API, v1."""

import contextlib
import dataclasses
import http.client
import logging
import os
import re
import ssl
import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Self
from urllib.parse import urlencode, urlsplit

from rekindle.errors import RequestError, StepError
from rekindle.http import HttpError, Stopped, growing, request, retried
from rekindle.protojson import Json

log = logging.getLogger(__name__)

# where Kubernetes mounts a pod's token and the certificates of its API server
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# the address of the API server for pods of its cluster
IN_CLUSTER = "https://kubernetes.default.svc"
_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 10.0
_REQUEST_SECONDS = 30.0
# A log may be silent for hours, so this only frees a connection that is dead; that a job
# has ended is seen by its status, which is polled beside.
_STREAM_SECONDS = 300.0
LONGEST_LINE_BYTES = 1 << 16
_REFUSED_FIXES = {
    403: "grant it; `rekindle doctor --platform kubeflow` prints the least that a run needs",
    404: "install Kubeflow Trainer v2.3 or newer in the cluster",
}

# of a webhook (Kyverno, Gatekeeper), and of a ValidatingAdmissionPolicy
_BY_POLICY = re.compile(r"denied (the )?request")
_BY_QUOTA = "exceeded quota:"
_ANY_JSON = "application/json, */*"
# an object without its content (meta/v1 PartialObjectMetadata)
_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"


class Conflict(Exception):
    """An object of that name exists already."""


@dataclasses.dataclass(frozen=True)
class ApiServer:
    """An API server, and how this client proves who it is."""

    server: str
    """Its URL."""
    token: str | Path = ""
    """The bearer token, or the file that holds it."""
    authority: str | Path = ""
    """The certificates that the server is verified by, or their file; "": those of the machine."""
    certificate: tuple[Path, Path] | None = None
    """Files of the client's own certificate and its key, where it logs in by one."""
    stopping: threading.Event = dataclasses.field(default_factory=threading.Event)
    """Once it is set, no request is repeated: the next pause raises `Stopped`."""
    patience_seconds: float = 300.0
    """How long a request is repeated."""

    @classmethod
    def in_cluster(
        cls,
        account: Path,
        server: str,
        *,
        stopping: threading.Event | None = None,
        patience_seconds: float = 300.0,
    ) -> Self:
        """The API server of the cluster that this pod runs in; `account` is the folder of
        its service account."""
        return cls(
            server,
            account / "token",
            account / "ca.crt",
            stopping=stopping or threading.Event(),
            patience_seconds=patience_seconds,
        )

    @classmethod
    def configured(cls, patience_seconds: float) -> Self:
        """The API server that kubectl would ask: of the context of KUBECONFIG, of the
        cluster that this pod runs in, or of the current context; RequestError where none
        is there."""
        is_in_a_pod = (ACCOUNT / "token").is_file()
        if is_in_a_pod and not os.environ.get("KUBECONFIG"):
            return cls.in_cluster(ACCOUNT, IN_CLUSTER, patience_seconds=patience_seconds)
        from kubernetes import client, config

        configuration = client.Configuration()
        try:
            config.load_kube_config(
                os.environ.get("KUBECONFIG") or None, client_configuration=configuration
            )
        except config.ConfigException as error:
            raise RequestError(
                f"no cluster is configured: {error}",
                fix="name a context: kubectl config use-context NAME, or set KUBECONFIG",
            ) from error
        token = configuration.get_api_key_with_prefix("authorization") or ""
        certificate = None
        if configuration.cert_file:
            certificate = (Path(configuration.cert_file), Path(configuration.key_file))
        authority = configuration.ssl_ca_cert
        return cls(
            configuration.host,
            token.removeprefix("Bearer "),
            Path(authority) if authority else "",
            certificate,
            patience_seconds=patience_seconds,
        )

    def get(self, path: str, **query: str) -> Json | None:
        """An object, or a list of objects; None if there is none."""
        return self._answer_or_none("GET", path, query, none_for=(404,))

    def exists(self, path: str) -> bool:
        """Whether there is such an object; only its metadata is asked for, so that the values
        of a Secret stay where they are."""
        answer = self._answer_or_none("GET", path, {}, none_for=(404,), accept=_METADATA)
        return answer is not None

    def create(self, path: str, body: Json) -> Json:
        """Create an object; returns it as it was stored.

        Raises Conflict if the name is taken. The object that has it may be this one,
        created by an earlier try whose answer was lost."""
        stored = self._answer_or_none("POST", path, {}, body, none_for=(409,))
        if stored is None:
            raise Conflict
        return stored

    def delete(self, path: str, uid: str) -> bool:
        """Delete the object with this uid; returns whether it was there. A newer object
        of the same name stays."""
        body = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        # 409: the precondition fails, since a newer object has the name
        answer = self._answer_or_none("DELETE", path, {}, body, none_for=(404, 409))
        return answer is not None

    def lines(self, path: str, **query: str) -> Iterator[str]:
        """Lines of a log as they come, until its end; none if there is no such log.

        A line of more than `LONGEST_LINE_BYTES` comes in pieces. OSError if the
        connection ends before the log, or there is none."""
        host = urlsplit(self.server).netloc
        tls = self._tls()
        connection = http.client.HTTPConnection(host, timeout=_STREAM_SECONDS)
        if tls is not None:
            connection = http.client.HTTPSConnection(host, timeout=_STREAM_SECONDS, context=tls)
        with contextlib.closing(connection):
            try:
                connection.request("GET", _target(path, query), headers=self._headers())
                answer = connection.getresponse()
                if answer.status not in (200, 404):
                    raise OSError(f"{answer.status} {answer.reason}")
                if answer.status == 200:
                    yield from _lines_of(answer)
            except http.client.HTTPException as error:
                raise OSError(f"{type(error).__name__}: {error}") from error

    def _answer_or_none(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Json | None = None,
        *,
        none_for: Collection[int],
        accept: str = _ANY_JSON,
    ) -> Json | None:
        """The server's answer; None for the statuses `none_for`. StepError where the
        server refuses otherwise, or did not answer in `patience_seconds`."""
        try:
            return self.answer(method, path, query, body, accept=accept)
        except HttpError as error:
            if error.status in none_for:
                return None
            if isinstance(error, Stopped):
                raise
            if may_yet_succeed(error):
                raise StepError(
                    f"the API server does not answer: {error}",
                    where=f"{method} {self.server}{path}",
                    fix=f"it was asked for {self.patience_seconds:g} s; look at the cluster",
                ) from None
            message = f"the API server refuses with {error}"
            fix = _REFUSED_FIXES.get(error.status, "")
            # these answer 403, too, though no right is missing
            if _BY_POLICY.search(message):
                fix = "a policy of the cluster refuses it for the reason above"
            elif _BY_QUOTA in message:
                fix = "wait until others have ended, or have the quota raised"
            raise StepError(message, where=f"{method} {path}", fix=fix) from None

    def answer(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Json | None = None,
        *,
        accept: str = _ANY_JSON,
    ) -> Json:
        """The server's answer; HttpError where it refuses, or did not answer in
        `patience_seconds`."""
        url = f"{self.server}{_target(path, query)}"

        def once() -> Json:
            return request(
                url,
                self._headers(accept),
                body=body,
                method=method,
                timeout_seconds=_REQUEST_SECONDS,
                tls=self._tls(),
                proxy=False,
            )

        def notice(error: HttpError, pause: float) -> None:
            log.warning("%s %s: %s; again in %.1f s", method, path, error, pause)

        pauses = growing(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS, self.patience_seconds)
        return retried(once, pauses, stop=self.stopping, transient=may_yet_succeed, notice=notice)

    def _tls(self) -> ssl.SSLContext | None:
        """The certificates of both sides; None for plain HTTP."""
        if urlsplit(self.server).scheme == "http":
            return None
        if isinstance(self.authority, Path):
            context = ssl.create_default_context(cafile=str(self.authority))
        else:
            context = ssl.create_default_context(cadata=self.authority or None)
        if self.certificate:
            context.load_cert_chain(*self.certificate)
        return context

    def _headers(self, accept: str = _ANY_JSON) -> dict[str, str]:
        token = self.token
        if isinstance(token, Path):  # read for each request: tokens of accounts rotate
            token = token.read_text().strip()
        headers = {"Accept": accept, "Content-Type": "application/json"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        return headers


def _lines_of(answer: http.client.HTTPResponse) -> Iterator[str]:
    """The lines of a body as they come."""
    unfinished = b""
    # `for line in answer` would take a connection that breaks for the end of the log
    while content := answer.read1(1 << 16):
        *lines, unfinished = (unfinished + content).split(b"\n")
        if len(unfinished) > LONGEST_LINE_BYTES:
            lines.append(unfinished)
            unfinished = b""
        for line in lines:
            yield line.decode(errors="replace")
    if unfinished:
        yield unfinished.decode(errors="replace")


def _target(path: str, query: Mapping[str, str]) -> str:
    return f"{path}?{urlencode(query)}" if query else path


def may_yet_succeed(error: HttpError) -> bool:
    """Whether the same request may yet succeed: also after 401, since tokens rotate."""
    return error.transient or error.status == 401
