"""A real MLflow server, and a proxy in front of it that holds requests back."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from tests.ports import free_port


@contextlib.contextmanager
def mlflow_server(folder: Path, host: str = "127.0.0.1") -> Iterator[str]:
    """Its URL; it keeps its models itself."""
    port = free_port(host)
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--workers=1",
        f"--port={port}",
        f"--host={host}",
        "--allowed-hosts=*",
        f"--backend-store-uri=sqlite:///{folder}/m.db",
        f"--artifacts-destination={folder}/a",
    ]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        text=True,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as server:
        assert server.stderr is not None
        for line in server.stderr:
            if "startup complete" in line:
                break
        with (folder / "log").open("w") as log:
            drain = subprocess.Popen(["cat"], stdin=server.stderr, stdout=log)
            try:
                yield f"http://{host}:{port}"
            finally:
                os.killpg(server.pid, signal.SIGTERM)
                drain.wait()


class Gate:
    """One request, which comes to the proxy and goes on when it is let through."""

    def __init__(self, method: str, part: str, skip: int) -> None:
        self.method, self.part, self.skip = method, part, skip
        self.come, self.open = threading.Event(), threading.Event()
        self.done = threading.Event()

    def stops(self, method: str, path: str) -> bool:
        """Whether this is the request; it has come then."""
        if self.method != method or self.part not in path or self.come.is_set():
            return False
        self.skip -= 1
        if self.skip < 0:
            self.come.set()
        return self.come.is_set()


class Slow:
    """A proxy whose `hold` stops the next request of a kind before the server sees it."""

    def __init__(self, url: str) -> None:
        target, gates = urlsplit(url).netloc, []

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                gate = next((g for g in gates if g.stops(self.command, self.path)), None)
                if gate is not None:
                    assert gate.open.wait(120)
                connection = http.client.HTTPConnection(target, timeout=60)
                connection.request(self.command, self.path, body, dict(self.headers))
                answer = connection.getresponse()
                content = answer.read()
                if gate is not None:
                    gate.done.set()
                with contextlib.suppress(OSError):  # who asked may be gone
                    self.send_response(answer.status)
                    self.send_header("Content-Type", answer.headers.get("Content-Type", ""))
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = pass_on

            def log_message(self, *_: object) -> None:
                """Tests print enough."""

        self._gates = gates
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def hold(self, method: str, part: str, skip: int = 0) -> Gate:
        """Hold the next such request but `skip` until the gate is opened."""
        gate = Gate(method, part, skip)
        self._gates.append(gate)
        return gate

    def close(self) -> None:
        """Let everything through and stop."""
        for gate in self._gates:
            gate.open.set()
        self._server.shutdown()
