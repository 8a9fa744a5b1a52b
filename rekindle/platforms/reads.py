"""Reads of REST APIs and registries, for questions: JSON over HTTP with the standard library, by
the proxy and the certificates that the environment names.

A call is tried twice where the second may succeed. Nothing is followed elsewhere, since it carries
a token. Authority for images: the OCI distribution specification 1.1, "Pulling manifests"."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit

from rekindle.errors import RequestError
from rekindle.platforms.asking import Unasked

TIMEOUT_SECONDS = 8.0
_PAUSE_SECONDS = 0.5
_DIGEST = "Docker-Content-Digest"
_MANIFESTS = ", ".join((
    "application/vnd.oci.image.index.v1+json", "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
))  # fmt: skip
_IMAGE = re.compile(
    r"(?P<host>[^/]+\.[^/]+|localhost(?::\d+)?|[^/]+:\d+)/(?P<name>[^@:]+)"
    r"(?::(?P<tag>[^@]+))?(?:@(?P<digest>[a-z0-9]+:[0-9a-f]+))?"
)


class Said(Unasked):
    """An answer that is no: HTTP's `status`, the service's own `code`, and its first line."""

    def __init__(self, status: int, code: str, message: str, headers: Mapping[str, str]) -> None:
        super().__init__(f"HTTP {status}: {message}".rstrip(": "))
        self.status, self.code, self.headers = status, code, headers


@dataclasses.dataclass(frozen=True)
class Image:
    """An image by its registry (`host`), repository (`name`), and digest or tag (`version`)."""

    host: str
    name: str
    version: str

    @property
    def url(self) -> str:
        """Its manifest."""
        return f"https://{self.host}/v2/{self.name}/manifests/{self.version}"


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def read(
    url: str, headers: Mapping[str, str] | None = None, *, body: Any = None,
    form: Mapping[str, str] | None = None, method: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What the service says: of a GET, or of a POST of JSON (`body`) or of a form. Said for an
    answer that is no, Unasked for none."""
    data = urlencode(form).encode() if form is not None else None
    kind = {"Content-Type": "application/x-www-form-urlencoded"} if form is not None else {}
    if body is not None:
        data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(  # noqa: S310 - addresses of services, and of the config
        url, data, {"Accept": "application/json", **kind, **(headers or {})}, method=method
    )
    try:
        return _answer(request)
    except Unasked as error:
        if isinstance(error, Said) and error.status != 429 and error.status < 500:
            raise
        time.sleep(_PAUSE_SECONDS)
        return _answer(request)


@contextlib.contextmanager
def absent(what: str, fix: str, *statuses: int) -> Iterator[None]:
    """RequestError of `what` and `fix` for a 404, and for answers of the other `statuses`."""
    try:
        yield
    except Said as error:
        if error.status not in (404, *statuses):
            raise
        raise RequestError(what, fix=fix) from None


def images(references: Iterable[str]) -> list[Image]:
    """The images whose names say which registry they are in, each once."""
    matches = (_IMAGE.fullmatch(reference) for reference in sorted({*references}))
    return [
        Image(match["host"], match["name"], match["digest"] or match["tag"] or "latest")
        for match in matches
        if match
    ]


def manifest(wanted: Image, headers: Mapping[str, str] | None = None, fix: str = "") -> str:
    """A text about an image that the registry has; RequestError with `fix` where it has none."""
    with absent(f"{wanted.host} has no image {wanted.name} {wanted.version}", fix):
        found = read(wanted.url, {"Accept": _MANIFESTS, **(headers or {})}, method="HEAD")
    digest = found.get(_DIGEST.lower(), "")
    if not digest or ":" in wanted.version:
        return f"{wanted.name} {wanted.version}"
    return f"{wanted.name} {wanted.version} is {digest} now; better name that digest"


def _answer(request: urllib.request.Request) -> dict[str, Any]:
    opener = urllib.request.build_opener(_Stay)
    try:
        with opener.open(request, timeout=TIMEOUT_SECONDS) as response:
            text = response.read()
    except urllib.error.HTTPError as error:
        code, message = _explained(error)
        raise Said(error.code, code, message, dict(error.headers.items())) from None
    except (OSError, http.client.HTTPException) as error:
        host, reason = urlsplit(request.full_url).netloc, getattr(error, "reason", error)
        raise Unasked(f"no answer from {host}: {reason}") from None
    if not text:  # of a HEAD
        return {name.lower(): value for name, value in response.headers.items()}
    try:
        told = json.loads(text)
    except ValueError:
        raise Said(200, "", "the answer is not valid JSON", {}) from None
    return told if isinstance(told, dict) else {"value": told}


def _explained(error: urllib.error.HTTPError) -> tuple[str, str]:
    """Code and first line of an error, as Google's, Azure's and registries' bodies have them."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        told = json.loads(error.read())
        found = told["errors"][0] if "errors" in told else told["error"]
        if isinstance(found, str):  # KFP's, and OAuth's
            return found, str(told.get("message") or found).splitlines()[0]
        reasons = [one["reason"] for one in found.get("details") or () if "reason" in one]
        code = next(iter(reasons), "") or found.get("status") or found.get("code") or ""
        return str(code), str(found.get("message", "")).splitlines()[0]
    return "", str(error.reason)
