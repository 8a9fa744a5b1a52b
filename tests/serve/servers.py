"""Server processes, and how tests ask them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from pydantic import TypeAdapter

from rekindle.serve.messages import ServedModel, ServeJob
from tests.ports import free_port

PATIENCE_SECONDS = 240  # a machine that is busy with other things starts a server slowly


class Running:
    """A server process of a test; its output is in `log`."""

    def __init__(
        self, words: list[str], port: int, folder: Path, session: bool = False, **environment: str
    ) -> None:
        self.url, self.log = f"http://127.0.0.1:{port}", folder / "server.txt"
        self.process = subprocess.Popen(
            words,
            cwd=folder,
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            start_new_session=session,
        )
        self.client = httpx.Client(base_url=self.url, timeout=60)

    @classmethod
    def of(
        cls,
        model: ServedModel,
        smoke: bool = True,
        port: int = 0,
        session: bool = False,
        program: Sequence[str] = ("-m", "rekindle.serve"),
    ) -> Running:
        """The server of a model, without the command line."""
        port, folder = port or free_port(), Path(model.path).parent
        job = ServeJob(
            model=model,
            host="127.0.0.1",
            port=port,
            health_route="/h",
            predict_route="/p",
            smoke=smoke,
        )
        text = TypeAdapter(ServeJob).dump_json(job).decode()
        return cls([sys.executable, *program, text], port, folder, session)

    def until(self, condition: Callable[[], Any]) -> Any:
        """What the condition comes to once it holds; a server that ended first fails the test."""
        give_up = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < give_up:
            with contextlib.suppress(httpx.TransportError):
                if found := condition():
                    return found
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)
        raise AssertionError(f"waited in vain\n{self.log.read_text()}")

    def ready(self) -> Running:
        self.until(lambda: self.client.get("/health/ready").status_code == 200)
        return self

    def live(self) -> Running:
        self.until(lambda: self.client.get("/health/live").status_code == 200)
        return self

    def ended(self) -> int:
        return self.process.wait(PATIENCE_SECONDS)

    def predict(self, *values: Any, column: str = "body", **more: Any) -> httpx.Response:
        body = {"instances": [{column: value} for value in values], **more}
        return self.client.post("/predict", json=body)

    def figure(self, name: str) -> float:
        """The value of a line of /metrics; 0 where it is not there yet."""
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.client.close()


@contextlib.contextmanager
def running(model: ServedModel, smoke: bool = True) -> Iterator[Running]:
    """A server that is ready."""
    server = Running.of(model, smoke)
    try:
        yield server.ready()
    finally:
        server.stop()


@contextlib.contextmanager
def contained(folder: Path, **environment: str) -> Iterator[Running]:
    """What a container of a platform runs, with the platform's variables; it is ready."""
    words, port = [sys.executable, "-P", "-m", "rekindle.serve.container"], free_port()
    server = Running(words, port, folder, AIP_HTTP_PORT=str(port), **environment)
    try:
        yield server.ready()
    finally:
        server.stop()
