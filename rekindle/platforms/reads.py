"""Reads of REST APIs and registries, for questions: a request is repeated once where the second
may succeed.

Authority for images: the OCI distribution specification 1.1, "Pulling manifests"."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from rekindle.http import HttpError, request, retried
from rekindle.platforms.asking import Unasked

Said = HttpError
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


def read(
    url: str, headers: Mapping[str, str] | None = None, *, body: Any = None,
    form: Mapping[str, str] | None = None, method: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What the service says: of a GET, or of a POST of JSON (`body`) or of a form. Said for an
    answer that is an error, Unasked for none."""

    def once() -> dict[str, Any]:
        return request(
            url, headers, body=body, form=form, method=method, timeout_seconds=TIMEOUT_SECONDS
        )

    try:
        return retried(once, (_PAUSE_SECONDS,))
    except Said as error:
        if error.status:
            raise
        raise Unasked(str(error)) from None


def image(reference: str) -> Image | None:
    """The image, if its name says which registry it is in."""
    match = _IMAGE.fullmatch(reference)
    if match is None:
        return None
    return Image(match["host"], match["name"], match["digest"] or match["tag"] or "latest")


def manifest(wanted: Image, headers: Mapping[str, str] | None = None) -> str:
    """What to say of an image that the registry has; otherwise like `read`."""
    found = read(wanted.url, {"Accept": _MANIFESTS, **(headers or {})}, method="HEAD")
    digest = found.get(_DIGEST.lower(), "")
    if not digest or ":" in wanted.version:
        return f"{wanted.name} {wanted.version}"
    return f"{wanted.name} {wanted.version} is {digest} now; better name that digest"
