"""JSON over HTTP with the standard library: one request, its error, and a bounded retry.

It runs in containers whose image may be any with Python, so it imports nothing else. No
request follows a redirect, since it carries a token, and no error holds more of a
response than its own error message. Authority: RFC 9110 (status codes, Retry-After),
google.rpc.Status, the Status of Kubernetes, the OCI distribution specification and OAuth
2.0 for the shapes of error bodies."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit

TIMEOUT_SECONDS = 20.0
WHOLE = 4  # times a timeout: what a body may take that comes in pieces
MOST_BYTES = 64 << 20  # of a response: far more than a page of any API has
LONGEST_PAUSE_SECONDS = 30.0  # however long a service asks to be left alone
T = TypeVar("T")


class HttpError(Exception):
    """A request that failed: `status` of HTTP, 0 where there was no valid response;
    `code` is the service's own name of the error, `retry_after_seconds` the pause that it
    asks for."""

    def __init__(
        self,
        message: str,
        status: int = 0,
        code: str = "",
        retry_after_seconds: float = 0.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        text = f"HTTP {status}: {message}".rstrip(": ") if status else message
        super().__init__(text)
        self.status = status
        self.code = code
        self.headers = dict(headers or {})
        self.retry_after_seconds = retry_after_seconds

    @property
    def transient(self) -> bool:
        """Whether the same request may yet succeed."""
        return self.status in (0, 408, 429) or self.status >= 500


class Stopped(HttpError):
    """The caller's `stop` was set before a request was repeated."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        return None


def request(
    url: str,
    headers: Mapping[str, str] | None = None,
    *,
    body: object = None,
    form: Mapping[str, str] | None = None,
    method: str | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    tls: ssl.SSLContext | None = None,
    proxy: bool = True,
    parse: bool = True,
) -> dict[str, Any]:
    """The JSON object of a response; of a HEAD its headers, in lower case.

    `body` is sent as JSON, `form` as a form, through the proxy of the environment if
    `proxy`. Without `parse` the body of the response is not looked at. `timeout_seconds`
    is the longest wait for a piece of the response, all of which has to come within
    `WHOLE` times that. HttpError if there is no response, one that is not whole, one with
    an error's status, or one that is not an object."""
    all_headers = {"Accept": "application/json"}
    data = None
    if form is not None:
        all_headers["Content-Type"] = "application/x-www-form-urlencoded"
        data = urlencode(form).encode()
    if body is not None:
        all_headers["Content-Type"] = "application/json"
        data = json.dumps(body).encode()
    all_headers.update(headers or {})
    message = urllib.request.Request(  # noqa: S310 - addresses of services, and of the config
        url, data, all_headers, method=method
    )
    handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
    if not proxy:
        handlers.append(urllib.request.ProxyHandler({}))
    if tls is not None:
        handlers.append(urllib.request.HTTPSHandler(context=tls))
    opener = urllib.request.build_opener(*handlers)
    host = urlsplit(url).netloc
    try:
        with opener.open(message, timeout=timeout_seconds) as response:
            if method == "HEAD" or not parse:
                return {name.lower(): value for name, value in response.headers.items()}
            text = _whole(response, host, time.monotonic() + WHOLE * timeout_seconds)
    except urllib.error.HTTPError as error:
        raise _explained(error) from None
    except (OSError, http.client.HTTPException) as error:  # none, or half a response
        reason = getattr(error, "reason", error) or type(error).__name__
        raise HttpError(f"no answer from {host}: {reason}") from None
    except ValueError:  # `from None`: it quotes the header, and that may be a token
        raise HttpError(f"the request to {host} has a malformed header or address", 400) from None
    return _object_in(bytes(text), host)


def _object_in(text: bytes, host: str) -> dict[str, Any]:
    """The object of a body; HttpError where it holds none."""
    try:
        answer = json.loads(text or b"{}")
    except (ValueError, RecursionError):  # `from None`: the text may hold a secret
        if text.lstrip().startswith(b"<"):  # of a login before the service: no retry helps
            raise HttpError(f"{host} answers with a page of HTML", 200) from None
        raise HttpError(f"the answer of {host} is not valid JSON") from None
    return answer if isinstance(answer, dict) else {"value": answer}


def _whole(response: http.client.HTTPResponse, host: str, deadline: float) -> bytearray:
    """The body; HttpError for one that is cut off, too long, or not there at the deadline."""
    length = response.length  # asked first: reading counts it down
    chunked = response.chunked
    text = bytearray()
    # `read1` returns what one read of the socket gives, so that the deadline is looked at
    # while a body trickles in; it takes a connection that closed early for the end
    while piece := response.read1(1 << 16):
        text += piece
        if len(text) > MOST_BYTES:
            raise HttpError(f"the answer of {host} has more than {MOST_BYTES:,} bytes")
        if time.monotonic() > deadline:
            raise HttpError(f"the answer of {host} takes too long")
    may_be_empty = length == 0 or chunked or response.status == http.client.NO_CONTENT
    is_empty = not text and not may_be_empty
    if is_empty or (length or 0) > len(text):
        raise HttpError(f"the answer of {host} ended early")
    return text


def growing(first: float, longest: float, seconds: float) -> Iterator[float]:
    """Pauses in seconds, each twice the last and at most `longest`, within `seconds` from now."""
    end = time.monotonic() + seconds

    def pauses() -> Iterator[float]:
        pause = first
        while time.monotonic() + pause <= end:
            yield pause
            pause = min(2 * pause, longest)

    return pauses()


def retried(
    call: Callable[[], T],
    pauses: Iterable[float],
    *,
    stop: threading.Event | None = None,
    transient: Callable[[HttpError], bool] = lambda error: error.transient,
    notice: Callable[[HttpError, float], object] = lambda error, pause: None,
) -> T:
    """What `call` returns, which is repeated after each of `pauses` while its error is
    `transient`.

    `stop` ends a pause and all repetition, by Stopped; `notice` gets each error and the
    pause after it."""
    remaining_pauses = iter(pauses)
    stop = stop or threading.Event()
    while True:
        try:
            return call()
        except HttpError as error:
            pause = next(remaining_pauses, None)
            if pause is None or not transient(error):
                raise
            pause = min(max(pause, error.retry_after_seconds), LONGEST_PAUSE_SECONDS)
            if not stop.is_set():
                notice(error, pause)
            if stop.wait(pause):
                raise Stopped(str(error)) from None


def _explained(error: urllib.error.HTTPError) -> HttpError:
    """With the code and the first line of the message that the body has."""
    code = ""
    message = str(error.reason)
    # whatever a proxy or a service sends instead, the status stays
    with contextlib.suppress(
        OSError,
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        AttributeError,
        RecursionError,
        http.client.HTTPException,
    ):
        body = json.loads(error.read(MOST_BYTES))
        if "errors" in body:  # a registry of images
            explanation = body["errors"][0]
        else:
            explanation = body.get("error", body)
        if isinstance(explanation, str):  # KFP's, and OAuth's
            explanation = {"code": explanation, "message": body.get("message") or explanation}
        code = _own_name(explanation)
        message = str(explanation.get("message", "")).splitlines()[0]
    wait = error.headers.get("Retry-After", "")
    seconds = float(wait) if wait.isdecimal() else 0.0
    return HttpError(message, error.code, code, seconds, dict(error.headers.items()))


def _own_name(explanation: Mapping[str, Any]) -> str:
    """The service's own name of an error, the most precise that there is; "" for none."""
    details = explanation.get("details")
    names = []
    # a list for google.rpc.Status; Kubernetes has a mapping there, with other things
    if isinstance(details, list):
        names += [detail["reason"] for detail in details if "reason" in detail]
    names += [explanation.get(key) for key in ("status", "code", "reason")]
    return str(next(filter(None, names), ""))
