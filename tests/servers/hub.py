"""A loopback Hugging Face hub: real HTTP in front of a folder `datasets/OWNER/NAME/...` (and
`models/OWNER/NAME/...`).

Serves what `huggingface_hub` and `datasets` ask for: repository info, trees, paths-info, and files
with ranges and ETags. The commit of a repository is a hash of its files, so a changed file is a new
commit; any revision means the newest.

    with HubServer(folder) as hub: subprocess.run([...], env={**os.environ, "HF_ENDPOINT": hub.url})
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

_API = re.compile(
    r"/api/(datasets|models)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?$"
)
_FILE = re.compile(r"/(?:(datasets)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)$")


class HubServer:
    """A hub on a free loopback port; `requests` lists what was asked, as `GET /path`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: list[str] = []
        self.down: set[str] = set()  # files that are answered with 503
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def files(self, kind: str, name: str) -> dict[str, Path]:
        """The files of a repository by their path in it."""
        root = self.folder / kind / name
        return {p.relative_to(root).as_posix(): p for p in sorted(root.rglob("*")) if p.is_file()}

    def commit(self, kind: str, name: str) -> str:
        """The hash that stands for the repository as it is now, 40 hex digits."""
        state = hashlib.sha1()
        for path, file in self.files(kind, name).items():
            state.update(path.encode() + b"\0" + hashlib.sha1(file.read_bytes()).digest())
        return state.hexdigest()


class _Handler(BaseHTTPRequestHandler):
    disable_nagle_algorithm = True
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        """Keep the test output clean; `HubServer.requests` remembers."""

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        path = unquote(url.path)
        self.hub.requests.append(f"{self.command} {path}")
        if match := _API.match(path):
            self._api(match, parse_qs(url.query), body)
        elif match := _FILE.match(path):
            self._file(match[1] or "models", match[2], match[4])
        else:
            self._missing("no such page")

    def _api(self, match: re.Match[str], query: dict[str, list[str]], body: bytes) -> None:
        kind, name, verb, _, rest = match.groups()
        files = self.hub.files(kind, name)
        if not files:
            self._missing("Repository not found", "RepoNotFound")
        elif verb == "tree":
            self._json(self._tree(files, rest or "", recursive=query.get("recursive") == ["True"]))
        elif verb == "paths-info":
            wanted = self._wanted(body)
            self._json(
                [
                    entry
                    for entry in self._tree(files, "", recursive=True)
                    if entry["path"] in wanted
                ]
            )
        else:
            info = {
                "_id": "0",
                "id": name,
                "private": False,
                "gated": False,
                "disabled": False,
                "tags": [],
                "downloads": 0,
                "likes": 0,
                "sha": self.hub.commit(kind, name),
                "siblings": [{"rfilename": path} for path in files],
            }
            self._json(info)

    def _wanted(self, body: bytes) -> list[str]:
        if "json" in (self.headers.get("Content-Type") or ""):
            paths = json.loads(body)["paths"]
            return [paths] if isinstance(paths, str) else list(paths)
        return parse_qs(body.decode()).get("paths", [])

    @staticmethod
    def _tree(files: dict[str, Path], below: str, *, recursive: bool) -> list[dict[str, Any]]:
        prefix = f"{below}/" if below else ""
        entries: dict[str, dict[str, Any]] = {}
        for path, file in files.items():
            if not path.startswith(prefix):
                continue
            parts = path[len(prefix) :].split("/")
            for depth in range(1, len(parts)):
                folder = prefix + "/".join(parts[:depth])
                entries[folder] = {"type": "directory", "path": folder, "size": 0, "oid": "0" * 40}
            content = file.read_bytes()
            entries[path] = {
                "type": "file",
                "path": path,
                "size": len(content),
                "oid": hashlib.sha1(content).hexdigest(),
            }
        shown = (
            entries.values()
            if recursive
            else [e for e in entries.values() if "/" not in e["path"][len(prefix) :]]
        )
        return sorted(shown, key=lambda entry: str(entry["path"]))

    def _file(self, kind: str, name: str, path: str) -> None:
        if path in self.hub.down:
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, b"", {})
            return
        file = self.hub.files(kind, name).get(path)
        if file is None:
            self._missing("Entry not found", "EntryNotFound")
            return
        content = file.read_bytes()
        headers = {
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "X-Repo-Commit": self.hub.commit(kind, name),
            "Accept-Ranges": "bytes",
        }
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if span is None:
            self._send(HTTPStatus.OK, content, headers)
            return
        start, end = int(span[1]), min(int(span[2] or len(content) - 1), len(content) - 1)
        headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
        self._send(HTTPStatus.PARTIAL_CONTENT, content[start : end + 1], headers)

    def _json(self, value: Any) -> None:
        self._send(HTTPStatus.OK, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _missing(self, message: str, code: str = "EntryNotFound") -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message}
        self._send(HTTPStatus.NOT_FOUND, json.dumps({"error": message}).encode(), headers)

    def _send(self, status: HTTPStatus, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
