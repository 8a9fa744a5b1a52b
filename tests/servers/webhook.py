"""A webhook as Slack's is, for tests of what `notify` sends."""

import contextlib
import http.server
import json
import threading


class Webhook(http.server.ThreadingHTTPServer):
    """Answers with the statuses that are left, then with `ok`."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.paths: list[str] = []
        self.statuses: list[int] = []
        self.pause = threading.Event()
        self.pause.set()
        super().__init__(("127.0.0.1", 0), _Answer)


class _Answer(http.server.BaseHTTPRequestHandler):
    server: Webhook

    def do_POST(self) -> None:
        assert self.server.pause.wait(60)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        if status == 200:
            assert self.headers["Content-Type"] == "application/json"
            told = json.loads(body)
            assert list(told) == ["text"]
            self.server.told.append(told["text"])
            self.server.paths.append(self.path)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def webhook():
    """One that listens, and its address."""
    with Webhook() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server, f"http://127.0.0.1:{server.server_port}/services/s3cr3t-t0ken"
        server.shutdown()
        thread.join()
