"""Reads of REST APIs and registries, for questions: a request is repeated once where the
second may succeed.

Authority for images: the OCI distribution specification 1.1, "Pulling manifests"."""

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rekindle.errors import Problem, RequestError
from rekindle.http import HttpError, request, retried

TIMEOUT_SECONDS = 8.0
_PAUSE_SECONDS = 0.5
_MANIFESTS = ", ".join(
    (
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    )
)
_IMAGE = re.compile(
    r"(?P<host>[^/]+\.[^/]+|localhost(?::\d+)?|[^/]+:\d+)/(?P<name>[^@:]+)"
    r"(?::(?P<tag>[^@]+))?(?:@(?P<digest>[a-z0-9]+:[0-9a-f]+))?"
)


@dataclasses.dataclass(frozen=True)
class Image:
    """An image by its registry (`host`), repository (`name`), and digest or tag
    (`version`)."""

    host: str
    name: str
    version: str

    @property
    def url(self) -> str:
        """Its manifest."""
        return f"https://{self.host}/v2/{self.name}/manifests/{self.version}"


def read(
    url: str,
    headers: Mapping[str, str] | None = None,
    *,
    body: Any = None,
    form: Mapping[str, str] | None = None,
    method: str | None = None,
) -> dict[str, Any]:
    """What the service says to a GET, or to a POST of JSON (`body`) or of a form;
    HttpError."""
    options = {"body": body, "form": form, "method": method, "timeout_seconds": TIMEOUT_SECONDS}
    return retried(lambda: request(url, headers, **options), (_PAUSE_SECONDS,))


@contextlib.contextmanager
def absent(problem: Problem) -> Iterator[None]:
    """RequestError with this problem for a 404."""
    try:
        yield
    except HttpError as error:
        if error.status != 404:
            raise
        raise RequestError([problem]) from None


def images(references: Iterable[str]) -> list[Image]:
    """The images whose names say which registry they are in, each once."""
    matches = filter(None, map(_IMAGE.fullmatch, sorted({*references})))
    return [Image(m["host"], m["name"], m["digest"] or m["tag"] or "latest") for m in matches]


def manifest(wanted: Image, headers: Mapping[str, str] | None = None, fix: str = "") -> str:
    """A text about an image that the registry has; RequestError with `fix` where it has
    none."""
    message = f"{wanted.host} has no image {wanted.name} {wanted.version}"
    with absent(Problem(message, fix=fix)):
        response_headers = read(
            wanted.url, {"Accept": _MANIFESTS, **(headers or {})}, method="HEAD"
        )
    digest = response_headers.get("docker-content-digest", "")
    if not digest or ":" in wanted.version:
        return f"{wanted.name} {wanted.version}"
    return f"{wanted.name} {wanted.version} is {digest} now; better name that digest"
