"""A deployment on this machine: a router (serve/router.py), and a server process a version.

The router is started when something is asked of it, and follows the file `wanted.json`, which only
holders of the deployment's lock write."""

import contextlib
import dataclasses
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rekindle.errors import RequestError, StepError
from rekindle.launch.process import is_running
from rekindle.records import write_atomically
from rekindle.serve import messages
from rekindle.serve.messages import VERSION, ServedModel, Status, Traffic, Wanted

READY_SECONDS, ROUTER_SECONDS, END_SECONDS = 600.0, 60.0, 120.0
_LOOK_SECONDS = 0.1
_LOG = "router.txt"
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8080


class LocalEndpoint:
    """The `Endpoint` in `folder`. `host` and `port` are those that it has, if there is one, and
    RequestError is raised where others are asked for. `environment` is added to the router's."""

    poll_seconds, sees_latency = 1.0, True

    def __init__(
        self, folder: Path, host: str | None, port: int | None, environment: Mapping[str, str]
    ) -> None:
        self.folder, self.environment = folder.resolve(), environment
        wanted: Wanted | None = None
        with contextlib.suppress(FileNotFoundError):
            wanted = Wanted.read(self.folder)
        for name, asked in {"host": host, "port": port}.items():
            if wanted and asked not in (None, getattr(wanted, name)):
                what = f"this deployment has the {name} {getattr(wanted, name)}"
                fix = "leave the option out, or delete the deployment before"
                raise RequestError(what, where=f"--{name}", fix=fix)
        self.wanted = wanted or Wanted(0, host or DEFAULT_HOST, port or DEFAULT_PORT, (), {})
        at = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.wanted.host, self.wanted.host)  # noqa: S104 - none is bound
        self.host, self.port = at, self.wanted.port
        self.address = f"http://{f'[{at}]' if ':' in at else at}:{self.port}"

    def usd_per_day(self) -> tuple[str, float | None]:
        return "this machine", 0.0

    def standing(self) -> Mapping[str, tuple[str, int]]:
        """See `Endpoint.standing`; nothing where the router does not run."""
        versions, shares = getattr(self.status(), "versions", {}), self.wanted.shares
        return {version: (one.state, shares.get(version, 0)) for version, one in versions.items()}

    def create(self, model: ServedModel, number: int) -> None:
        status = self.status()
        known = status.versions.get(model.version) if status else None
        digests = {other.version: other.digest for other in self.wanted.models}
        others = tuple(other for other in self.wanted.models if other.version != model.version)
        if known and known.state == "ready" and digests.get(model.version) == model.digest:
            running = next(one for one in self.wanted.models if one.version == model.version)
            if self.wanted.models[-1] != running:  # the last one is on trial
                self._want(number, models=(*others, running))
            return
        if known is not None and known.state == "failed":  # it is started again
            self.retain({other.version for other in self.wanted.models} - {model.version}, number)
        self._want(number, models=(*others, model))
        give_up = time.monotonic() + READY_SECONDS
        while (
            found := self._asked().versions.get(model.version)
        ) is None or found.state != "ready":
            if found is not None and found.state == "failed":
                raise StepError(f"version {model.version} did not start: {found.reason}")
            if time.monotonic() > give_up:
                what = f"version {model.version} is not ready after {READY_SECONDS:.0f} s"
                raise StepError(what, where=str(self.folder / f"version-{model.version}.txt"))
            time.sleep(_LOOK_SECONDS)

    def ask(self, model: ServedModel, body: dict[str, Any]) -> Any:
        status, text = self._sent("POST", "/predict", {VERSION: model.version}, json.dumps(body))
        if status != 200:
            what = f"version {model.version} does not answer by the router: {status} {text[:300]}"
            raise StepError(what, where=self.address)
        return json.loads(text)

    def split(self, shares: Mapping[str, int], number: int) -> None:
        self._want(number, shares=dict(shares))

    def observe(self) -> Mapping[str, Traffic]:
        return {version: one.traffic for version, one in self._asked().versions.items()}

    def retain(self, versions: set[str], number: int) -> None:
        self._want(number, models=tuple(m for m in self.wanted.models if m.version in versions))

    def delete(self) -> None:
        if status := self.status():
            os.kill(status.pid, signal.SIGTERM)
            give_up = time.monotonic() + END_SECONDS
            while is_running(status.pid):
                if time.monotonic() > give_up:  # its servers die with it
                    os.kill(status.pid, signal.SIGKILL)
                time.sleep(_LOOK_SECONDS)
        (self.folder / messages.WANTED).unlink(missing_ok=True)
        self.wanted = dataclasses.replace(self.wanted, number=0, models=(), shares={})

    def status(self) -> Status | None:
        """What the router says; None where it does not run, RequestError if another listens."""
        try:
            status, text = self._sent("GET", messages.STATUS, {})
            found = messages.STATUS_JSON.validate_json(text) if status == 200 else None
        except ConnectionError:
            return None
        except (ValueError, http.client.HTTPException):
            found = None
        if found is None or found.folder != str(self.folder):
            what = f"another program listens at {self.address}"
            raise RequestError(what, where="--port", fix="pass another --port")
        return found

    def _want(self, number: int, **changes: object) -> None:
        """Change what is wanted, and wait until the router has read it."""
        self.wanted = dataclasses.replace(self.wanted, number=number, **changes)  # type: ignore[arg-type]
        text = messages.WANTED_JSON.dump_json(self.wanted).decode()
        write_atomically(self.folder / messages.WANTED, text)
        versions = {model.version for model in self.wanted.models}
        self._until(lambda one: one.number == number and set(one.versions) == versions)

    def _asked(self) -> Status:
        return self._until(lambda status: True)

    def _until(self, condition: Callable[[Status], bool]) -> Status:
        """The router's status once the condition holds; starts the router where it does not run."""
        give_up, process, log = time.monotonic() + ROUTER_SECONDS, None, self.folder / _LOG
        while (status := self.status()) is None or not condition(status):
            if time.monotonic() > give_up:
                what = f"the router does not answer for {ROUTER_SECONDS:.0f} s"
                raise StepError(what, where=str(log))
            if status is None and process is None:
                process = self._start(log)
            if process is not None and process.poll() is not None:
                what = f"the router did not start: {log.read_text()[-2_000:].strip()}"
                raise StepError(what, where=str(log))
            time.sleep(_LOOK_SECONDS)
        return status

    def _start(self, log: Path) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-P", "-m", "rekindle.serve.router", str(self.folder)]
        with log.open("wb") as file:
            return subprocess.Popen(
                words,
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, **self.environment},
                cwd="/",
            )

    def _sent(
        self, method: str, path: str, headers: Mapping[str, str], body: str | None = None
    ) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, body, dict(headers))
            response = connection.getresponse()
            return response.status, response.read().decode()
