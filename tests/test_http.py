"""One request, its error and its retry, against a real server."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rekindle.http import HttpError, growing, request, retried


class Service:
    """Answers each request with the next of `answers`: status, headers, body."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, dict[str, str], bytes]] = []
        self.asked: list[tuple[str, str, dict[str, str], bytes]] = []
        service = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                asked = (self.command, self.path, dict(self.headers), self.rfile.read(length))
                service.asked.append(asked)
                status, headers, body = service.answers.pop(0)
                if not status:  # hang up
                    self.close_connection = True
                    return
                self.send_response(status)
                for name, value in ({"Content-Length": str(len(body))} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = do_DELETE = do_HEAD = answer

            def log_message(self, *_: Any) -> None:
                """Quiet."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def says(self, status: int, content: object = None, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content or {}).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.answers.append((status, named, body))


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.server.shutdown()


def failed(service: Service, **more: Any) -> HttpError:
    with pytest.raises(HttpError) as caught:
        request(f"{service.url}/x", **more)
    return caught.value


def test_an_object_comes_back_and_json_and_forms_are_sent(service: Service) -> None:
    for content in ({"a": 1}, {"b": 2}, {"c": 3}, [4]):
        service.says(200, content)
    assert request(f"{service.url}/x", {"Authorization": "Bearer t"}) == {"a": 1}
    assert request(f"{service.url}/x", body={"k": None}) == {"b": 2}
    assert request(f"{service.url}/x", form={"k": "v w"}) == {"c": 3}
    assert request(f"{service.url}/x", method="DELETE", body={}) == {"value": [4]}
    methods = [(method, body) for method, _, _, body in service.asked]
    assert methods == [
        ("GET", b""),
        ("POST", b'{"k": null}'),
        ("POST", b"k=v+w"),
        ("DELETE", b"{}"),
    ]
    assert service.asked[0][2]["Authorization"] == "Bearer t"


def test_of_a_head_the_headers_come_back(service: Service) -> None:
    service.says(200, b"", Docker_Content_Digest="sha256:1")
    assert request(f"{service.url}/x", method="HEAD")["docker-content-digest"] == "sha256:1"


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        (
            {"error": {"code": 429, "status": "RESOURCE_EXHAUSTED", "message": "no\nmore"}},
            "RESOURCE_EXHAUSTED",
            "no",
        ),
        (
            {"error": {"message": "m", "details": [{"@type": "t"}, {"reason": "API_DISABLED"}]}},
            "API_DISABLED",
            "m",
        ),
        (
            {"kind": "Status", "reason": "Forbidden", "message": "m", "details": {"name": "n"}},
            "Forbidden",
            "m",
        ),
        ({"errors": [{"code": "DENIED", "message": "m"}]}, "DENIED", "m"),
        ({"error": "invalid_grant", "message": "m"}, "invalid_grant", "m"),
        ({"error": "just this"}, "just this", "just this"),
        (b"<html>", "", "Too Many Requests"),
        ([1], "", "Too Many Requests"),
        (b"[" * 200_000, "", "Too Many Requests"),
    ],
    ids=[
        "google",
        "google's details",
        "kubernetes",
        "registry",
        "oauth",
        "kfp",
        "html",
        "list",
        "deep",
    ],
)
def test_an_error_has_the_code_and_the_first_line_of_its_message(
    body: Any, code: str, message: str, service: Service
) -> None:
    service.says(429, body, Retry_After="7")
    error = failed(service)
    assert (error.status, error.code, str(error)) == (429, code, f"HTTP 429: {message}")
    assert error.retry_after_seconds == 7.0


def test_what_may_pass_is_transient_and_what_is_refused_is_not(service: Service) -> None:
    for status in (0, 408, 429, 500, 503):
        service.says(status)
        assert failed(service).transient, status
    for status in (302, 400, 401, 403, 404, 409):
        service.says(status)
        assert not failed(service).transient, status


def test_a_broken_answer_is_an_error_that_does_not_quote_it(service: Service) -> None:
    service.says(200, b'{"value": "hunter2"', Content_Length="19")
    service.says(200, b'{"value": "hunter2"', Content_Length="400")
    service.says(200, b'{"value": "hunter2", "deep": ' + b"[" * 200_000)
    for _ in range(3):
        error = failed(service)
        assert error.status == 0
        assert "hunter2" not in str(error)


def test_an_endless_answer_is_cut_off(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rekindle.http.MOST_BYTES", 1_000)
    service.says(200, {"a": "x" * 2_000})
    assert "more than 1,000 bytes" in str(failed(service))


def test_a_call_is_repeated_while_it_may_succeed(service: Service) -> None:
    for status in (503, 0, 429):
        service.says(status)
    service.says(200, {"done": True})
    notices: list[str] = []
    found = retried(
        lambda: request(f"{service.url}/x"),
        (0.0,) * 3,
        notice=lambda error, pause: notices.append(f"{error.status} {pause}"),
    )
    assert found == {"done": True}
    assert notices == ["503 0.0", "0 0.0", "429 0.0"]


def test_a_call_is_not_repeated_when_it_is_refused_or_the_pauses_are_over(service: Service) -> None:
    service.says(403)
    with pytest.raises(HttpError, match="403"):
        retried(lambda: request(f"{service.url}/x"), (0.0,) * 3)
    assert len(service.asked) == 1
    for _ in range(3):
        service.says(503)
    with pytest.raises(HttpError, match="503"):
        retried(lambda: request(f"{service.url}/x"), (0.0,) * 2)
    assert len(service.asked) == 4


class Recorded(threading.Event):
    """An event that is never waited for: it records for how long."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waited.append(timeout)
        return False


def test_a_service_may_ask_for_a_longer_pause_within_a_limit(service: Service) -> None:
    for wait in ("5", "3600", "Wed, 21 Oct 2026 07:28:00 GMT"):
        service.says(429, Retry_After=wait)
    service.says(200)
    stop = Recorded()
    retried(lambda: request(f"{service.url}/x"), (1.0, 3.0, 9.0), stop=stop)
    assert stop.waited == [5.0, 30.0, 9.0]


def test_a_pause_ends_when_the_caller_stops(service: Service) -> None:
    service.says(503)
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    began = time.monotonic()
    with pytest.raises(HttpError, match="503"):
        retried(lambda: request(f"{service.url}/x"), (60.0,), stop=stop)
    assert time.monotonic() - began < 30
    assert len(service.asked) == 1


def test_pauses_double_to_a_limit_and_end_within_their_time() -> None:
    pauses = growing(1.0, 4.0, 1e6)
    assert [next(pauses) for _ in range(4)] == [1.0, 2.0, 4.0, 4.0]
    assert list(growing(1.0, 4.0, 0.5)) == []


@pytest.mark.parametrize("body", [b"", b"{}", b'{"items": [1'])
def test_a_response_that_is_cut_off_is_not_an_empty_one(service, body):
    service.says(200, body, Content_Length=str(len(body) + 7))
    with pytest.raises(HttpError, match="ended early") as caught:
        request(service.url)
    assert caught.value.transient


def test_a_response_without_a_body_is_empty_only_where_it_says_so(service):
    service.says(204, b"")
    service.says(200, b"", Content_Length="0")
    assert request(service.url, method="DELETE") == {}
    assert request(service.url) == {}
    service.says(200, b"", Content_Length="0", Transfer_Encoding="identity")
    assert request(service.url) == {}


def raw_server(answer: bytes) -> str:
    """A server that sends these bytes and hangs up."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_a_body_that_ends_with_the_connection_has_to_hold_something():
    assert request(raw_server(b"HTTP/1.0 200 OK\r\n\r\n{}")) == {}
    with pytest.raises(HttpError, match="ended early"):
        request(raw_server(b"HTTP/1.0 200 OK\r\n\r\n"))
    assert (
        request(raw_server(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")) == {}
    )


@pytest.mark.parametrize("body", [b"5\r\n{}", b"zz\r\n", b"5\r\nabc"])
def test_an_error_whose_body_is_broken_is_still_that_error(body):
    head = b"HTTP/1.1 503 Busy\r\nTransfer-Encoding: chunked\r\n\r\n"
    with pytest.raises(HttpError, match="HTTP 503: Busy") as caught:
        request(raw_server(head + body))
    assert caught.value.transient


@pytest.mark.parametrize("token", ["abc-secret\nX: y", "abc-secret\u2028"])
def test_a_token_that_no_header_can_hold_is_not_shown(service, token):
    with pytest.raises(HttpError, match="malformed header") as caught:
        request(service.url, {"Authorization": f"Bearer {token}"})
    assert "secret" not in str(caught.value)
    assert caught.value.__suppress_context__
    assert not caught.value.transient


def test_a_body_that_drips_ends_at_a_deadline():
    listening, over = socket.create_server(("127.0.0.1", 0)), threading.Event()

    def serve() -> None:
        connection, _ = listening.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            while not over.wait(0.05):
                connection.sendall(b" ")

    threading.Thread(target=serve, daemon=True).start()
    began = time.monotonic()
    with pytest.raises(HttpError, match="takes too long"):
        request(f"http://127.0.0.1:{listening.getsockname()[1]}", timeout_seconds=0.2)
    over.set()
    assert time.monotonic() - began < 10
