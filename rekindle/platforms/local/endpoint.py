"""A deployment on this machine: a router (serve/router.py), and a server process for each
version, which the router starts.

The router itself is started by the first call that needs it. It does what the file
`wanted.json` says, which only holders of the deployment's lock write. Calls change that
file, and poll the router's status until it shows the change."""

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
from rekindle.platforms.polling import polls
from rekindle.records import write_atomically
from rekindle.serve import messages
from rekindle.serve.messages import VERSION, ServedModel, Status, Traffic, Wanted

READY_SECONDS = 600.0
ROUTER_SECONDS = 60.0  # it imports no model
END_SECONDS = 120.0
_LOOK_SECONDS = 0.1
_LOG = "router.txt"
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8080


class LocalEndpoint:
    """The `Endpoint` in `folder`.

    A deployment that exists keeps its `host` and `port`: RequestError where others are
    asked for. `environment` is added to that of the router. The `number` of methods is that
    of the roll-out's event that they carry out."""

    poll_seconds = 1.0

    def __init__(
        self, folder: Path, host: str | None, port: int | None, environment: Mapping[str, str]
    ) -> None:
        self.folder = folder.resolve()
        self.environment = environment
        wanted: Wanted | None = None
        with contextlib.suppress(FileNotFoundError):
            wanted = Wanted.read(self.folder)
        if wanted and host not in (None, wanted.host):
            raise _fixed_option("host", wanted.host)
        if wanted and port not in (None, wanted.port):
            raise _fixed_option("port", wanted.port)
        self.wanted = wanted or Wanted(0, host or DEFAULT_HOST, port or DEFAULT_PORT, (), {})
        # a router that listens on all interfaces is reached over loopback
        loopback = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - none is bound
        self.host = loopback.get(self.wanted.host, self.wanted.host)
        self.port = self.wanted.port
        shown_host = f"[{self.host}]" if ":" in self.host else self.host
        self.address = f"http://{shown_host}:{self.port}"

    def usd_per_day(self) -> tuple[str, float | None]:
        return "this machine", 0.0

    def standing(self) -> Mapping[str, tuple[str, int]]:
        """See `Endpoint.standing`; empty where the router does not run."""
        router = self.status()
        if router is None:
            return {}
        standing = {}
        for version, status in router.versions.items():
            standing[version] = (status.state, self.wanted.shares.get(version, 0))
        return standing

    def create(self, model: ServedModel, number: int) -> None:
        router = self.status()
        version = router.versions.get(model.version) if router else None
        running = None  # the model that the router has as this version
        other_models = []
        for other in self.wanted.models:
            if other.version == model.version:
                running = other
            else:
                other_models.append(other)
        is_ready = version is not None and version.state == "ready"
        if is_ready and running is not None and running.digest == model.digest:
            if self.wanted.models[-1] != running:  # the last model is the one on trial
                self._want(number, models=(*other_models, running))
            return
        # once it has been without this version, the router starts it again
        if version is not None and version.state == "failed":
            self.retain({other.version for other in other_models}, number)
        self._want(number, models=(*other_models, model))
        for _ in polls(READY_SECONDS, _LOOK_SECONDS):
            version = self._running_router().versions.get(model.version)
            if version is not None and version.state == "ready":
                return
            if version is not None and version.state == "failed":
                raise StepError(f"version {model.version} did not start: {version.reason}")
        message = f"version {model.version} is not ready after {READY_SECONDS:.0f} s"
        raise StepError(message, where=str(self.folder / f"version-{model.version}.txt"))

    def ask(self, model: ServedModel, body: dict[str, Any]) -> Any:
        status, text = self._send("POST", "/predict", {VERSION: model.version}, json.dumps(body))
        if status != 200:
            message = (
                f"version {model.version} does not answer by the router: {status} {text[:300]}"
            )
            raise StepError(message, where=self.address)
        return json.loads(text)

    def split(self, shares: Mapping[str, int], number: int) -> None:
        self._want(number, shares=dict(shares))

    def observe(self) -> Mapping[str, Traffic]:
        versions = self._running_router().versions
        return {name: version.traffic for name, version in versions.items()}

    def retain(self, versions: set[str], number: int) -> None:
        models = [model for model in self.wanted.models if model.version in versions]
        self._want(number, models=tuple(models))

    def delete(self) -> None:
        router = self.status()
        if router:
            os.kill(router.pid, signal.SIGTERM)
            give_up = time.monotonic() + END_SECONDS
            while is_running(router.pid):
                if time.monotonic() > give_up:  # its servers die with it
                    os.kill(router.pid, signal.SIGKILL)
                time.sleep(_LOOK_SECONDS)
        (self.folder / messages.WANTED).unlink(missing_ok=True)
        self.wanted = dataclasses.replace(self.wanted, number=0, models=(), shares={})

    def status(self) -> Status | None:
        """The router's status; None where it does not run, RequestError if another
        program listens there."""
        router: Status | None = None
        try:
            code, text = self._send("GET", messages.STATUS, {})
            if code == 200:
                router = messages.STATUS_JSON.validate_json(text)
        except ConnectionError:
            return None
        except (ValueError, http.client.HTTPException):
            router = None
        if router is None or router.folder != str(self.folder):
            message = f"another program listens at {self.address}"
            raise RequestError(message, where="--port", fix="pass another --port")
        return router

    def _want(self, number: int, **changes: object) -> None:
        """Change what is wanted, and wait until the router has read it."""
        self.wanted = dataclasses.replace(self.wanted, number=number, **changes)  # type: ignore[arg-type]
        text = messages.WANTED_JSON.dump_json(self.wanted).decode()
        write_atomically(self.folder / messages.WANTED, text)
        versions = {model.version for model in self.wanted.models}
        self._until(lambda router: router.number == number and set(router.versions) == versions)

    def _running_router(self) -> Status:
        """The status of the router, which is started where it does not run."""
        return self._until(lambda router: True)

    def _until(self, condition: Callable[[Status], bool]) -> Status:
        """The router's status once the condition holds; starts the router where it does
        not run."""
        process: subprocess.Popen[bytes] | None = None
        log = self.folder / _LOG
        for _ in polls(ROUTER_SECONDS, _LOOK_SECONDS):
            router = self.status()
            if router is not None and condition(router):
                return router
            if router is None and process is None:
                process = self._start(log)
            if process is not None and process.poll() is not None:
                message = f"the router did not start: {log.read_text()[-2_000:].strip()}"
                raise StepError(message, where=str(log))
        message = f"the router does not answer for {ROUTER_SECONDS:.0f} s"
        raise StepError(message, where=str(log))

    def _start(self, log: Path) -> subprocess.Popen[bytes]:
        # -P: not from the current folder, whose files may be called as modules are
        command = [sys.executable, "-P", "-m", "rekindle.serve.router", str(self.folder)]
        with log.open("wb") as file:
            return subprocess.Popen(
                command,
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, **self.environment},
                cwd="/",
            )

    def _send(
        self, method: str, path: str, headers: Mapping[str, str], body: str | None = None
    ) -> tuple[int, str]:
        """Send a request to the router; returns the status and the text of its answer."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, body, dict(headers))
            response = connection.getresponse()
            return response.status, response.read().decode()


def _fixed_option(name: str, value: object) -> RequestError:
    """The error for an option with another value than a running deployment has."""
    fix = "leave the option out, or delete the deployment before"
    return RequestError(f"this deployment has the {name} {value}", where=f"--{name}", fix=fix)
