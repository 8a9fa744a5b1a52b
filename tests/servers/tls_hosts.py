"""Azure's hosts on this machine: TLS under names of a certificate authority of its own, reached by a
proxy that answers CONNECT, and the endpoint that hands out tokens to containers.

Clients find them as they would find a company's: `environment` names the proxy and the authority.
What is asked of hosts that are not played here is refused and written down."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclasses.dataclass(frozen=True)
class Asked:
    method: str
    host: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]  # names in lower case
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def __str__(self) -> str:
        return f"{self.method} https://{self.host}{self.path}"


@dataclasses.dataclass(frozen=True)
class Answer:
    status: int = 200
    body: Any = None
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Dropped(Exception):
    """The connection ends without an answer."""


class Hosts:
    """Serves `names` (`*.vault.azure.net`) with what `answer` makes of each request."""

    def __init__(
        self, folder: Path, names: tuple[str, ...], answer: Callable[[Asked], Answer]
    ) -> None:
        self.names, self.answer, self.folder = names, answer, folder
        self.strangers: list[str] = []

    @property
    def environment(self) -> dict[str, str]:
        ca = str(self.folder / "ca.pem")
        proxy = f"http://127.0.0.1:{self.proxy.server_address[1]}"
        return {"HTTPS_PROXY": proxy, "SSL_CERT_FILE": ca, "REQUESTS_CA_BUNDLE": ca}

    def knows(self, host: str) -> bool:
        wild = f"*.{host.partition('.')[2]}"
        return host in self.names or wild in self.names

    def __enter__(self) -> Hosts:
        context = _certified(self.folder, self.names)
        hosts = self

        class Tls(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64  # doctor asks everything at once

            def get_request(self) -> tuple[ssl.SSLSocket, Any]:
                connection, address = super().get_request()
                wrapped = context.wrap_socket(
                    connection, server_side=True, do_handshake_on_connect=False
                )
                return wrapped, address

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # a client that went away

        class Ours(_Handler):
            def reply(self, asked: Asked) -> Answer:
                return hosts.answer(asked)

        self.server = Tls(("127.0.0.1", 0), Ours)
        self.proxy = _proxy(self, self.server.server_address[1])
        for server in (self.server, self.proxy):
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for server in (self.proxy, self.server):
            server.shutdown()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    disable_nagle_algorithm = True
    protocol_version = "HTTP/1.1"
    timeout = 60

    def reply(self, asked: Asked) -> Answer:
        raise NotImplementedError

    def any(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        url = urlsplit(self.path)
        asked = Asked(
            self.command,
            self.headers.get("Host", ""),
            url.path,
            dict(parse_qsl(url.query, True)),
            {name.lower(): value for name, value in self.headers.items()},
            self.rfile.read(size),
        )
        try:
            answer = self.reply(asked)
        except Dropped:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        raw = isinstance(answer.body, bytes)
        body = (
            answer.body if raw else b"" if answer.body is None else json.dumps(answer.body).encode()
        )
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if not raw and body:
            self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_PATCH = do_HEAD = any

    def log_message(self, *_: object) -> None:
        pass


def _proxy(hosts: Hosts, port: int) -> ThreadingHTTPServer:
    """Connects clients of any host played here to the one server at `port`."""

    class Proxy(BaseHTTPRequestHandler):
        disable_nagle_algorithm = True

        def do_CONNECT(self) -> None:
            host = self.path.partition(":")[0]
            if not hosts.knows(host):
                hosts.strangers.append(host)
                self.send_error(403)
                return
            with socket.create_connection(("127.0.0.1", port)) as there:
                there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.send_response(200)
                self.end_headers()
                back = threading.Thread(target=_pump, args=(there, self.connection), daemon=True)
                back.start()
                _pump(self.connection, there)
                back.join()
            self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    server = type("Many", (ThreadingHTTPServer,), {"request_queue_size": 64})(
        ("127.0.0.1", 0), Proxy
    )
    server.daemon_threads = True
    return server


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while content := source.recv(1 << 16):
            sink.sendall(content)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def _certified(folder: Path, names: tuple[str, ...]) -> ssl.SSLContext:
    """A server's certificate for `names`; `ca.pem` in `folder` is who vouches for it."""
    now = datetime.datetime.now(datetime.UTC)
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    authority = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "an authority for tests")])
    made = []
    for key, subject, is_authority in zip(
        keys,
        (authority, x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "azure")])),
        (True, False),
        strict=True,
    ):
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(authority)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=30))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(keys[0].public_key()), False
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        )
        if not is_authority:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), False
            )
        certificate = builder.sign(keys[0], hashes.SHA256())
        made.append(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "ca.pem").write_bytes(made[0])
    secret = keys[1].private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "server.pem").write_bytes(secret + made[1])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem")
    return context


@contextlib.contextmanager
def identity(tokens: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The endpoint of managed identities on Azure ML's compute, as an environment; it gives
    `tokens`, by what they are for, to whoever knows its secret."""

    def reply(asked: Asked) -> Answer:
        if (asked.method, asked.path) != ("GET", "/msi/token"):
            return Answer(404, {"error": f"no {asked.method} {asked.path}"})
        if asked.headers.get("secret") != "of-this-container":
            return Answer(401, {"error": "unknown caller"})
        resource = asked.query.get("resource", "")
        if asked.query != {"api-version": "2017-09-01", "resource": resource}:
            return Answer(400, {"error": f"asked with {asked.query}"})
        return _token(tokens, resource)

    with _answering(reply) as url:
        yield {"MSI_ENDPOINT": f"{url}/msi/token", "MSI_SECRET": "of-this-container"}


@contextlib.contextmanager
def on_behalf(tokens: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The same for jobs that act as whoever submitted them."""

    def reply(asked: Asked) -> Answer:
        if (asked.method, asked.path, list(asked.query)) != ("GET", "/obo/token", ["resource"]):
            return Answer(404, {"error": f"no {asked}"})
        return _token(tokens, asked.query["resource"])

    with _answering(reply) as url:
        yield {"OBO_ENDPOINT": f"{url}/obo/token"}


def _token(tokens: Mapping[str, str], resource: str) -> Answer:
    if resource not in tokens:
        return Answer(400, {"error": f"no token for {resource}"})
    until = str(int(time.time()) + 3_600)
    told = {"access_token": tokens[resource], "expires_on": until, "resource": resource}
    return Answer(200, {**told, "token_type": "Bearer"})


@contextlib.contextmanager
def _answering(reply: Callable[[Asked], Answer]) -> Iterator[str]:
    handler = type("Endpoint", (_Handler,), {"reply": lambda _, asked: reply(asked)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
