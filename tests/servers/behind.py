"""The container behind an endpoint that is played: where a test names one, the body of a request goes to it as it came, and
the service makes its answer of what the container says."""

from __future__ import annotations

from collections.abc import Mapping

import httpx

_PASSED = ("content-type", "accept")


def answered(url: str, body: bytes, headers: Mapping[str, str]) -> httpx.Response:
    """What the container answers at `url`; no header of the client but these reaches it."""
    passed = {name: headers[name] for name in _PASSED if headers.get(name)}
    return httpx.post(url, content=body, headers=passed, timeout=60, trust_env=False)
