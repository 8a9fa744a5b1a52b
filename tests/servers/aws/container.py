"""The container contract of SageMaker: real processes with a /opt/ml of their own.

A host is a process in its own mount and process namespaces: it is process 1 there, sees its own
/opt/ml, an empty scratch folder, the names of its peers in /etc/hosts, and no environment but what
it is given. Inputs come from S3 and outputs go back (a moto_server)."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

GRACE_SECONDS = 120  # API_StoppingCondition: SIGTERM, then so long
_START = (
    'mkdir -p /opt/ml /tmp/rekindle && mount --bind "$0" /opt/ml && '
    'mount --bind "$0.hosts" /etc/hosts && mount -t tmpfs tmpfs /tmp/rekindle && exec "$@"'
)


class Failed(Exception):
    """A step failed; the text is the job's exit message, then the end of its log."""


@dataclasses.dataclass
class Host:
    """One machine of a job."""

    name: str
    root: Path
    process: subprocess.Popen[bytes]
    failed: bool = False  # by itself, not because it was stopped

    @property
    def log(self) -> str:
        """What it printed so far."""
        return Path(f"{self.root}.log").read_text(errors="replace")

    def send(self, number: int) -> None:
        """A signal to the container's first process."""
        pid = self.process.pid
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            os.kill(int(children[0]), number)
        except (OSError, IndexError):
            return  # it is gone

    def told(self, file: str) -> str:
        """Its exit message, from the file that the contract has for it."""
        path = self.root / "output" / file
        return path.read_text() if path.exists() else f"exit code {self.process.returncode}"


def start(
    root: Path,
    name: str,
    peers: Sequence[str],
    words: Sequence[str],
    environment: Mapping[str, str],
) -> Host:
    """Start `words` on a host whose /opt/ml is `root`."""
    # an address of their own: jobs of other tests have the same names and ports at the same time
    number = zlib.crc32(str(root.parent).encode())
    address = f"127.{1 + number % 254}.{number >> 8 & 255}.{number >> 16 & 255}"
    Path(f"{root}.hosts").write_text(f"127.0.0.1 localhost\n{address} {' '.join(peers)}\n")
    (root / "input" / "config").mkdir(parents=True, exist_ok=True)
    resources = {"current_host": name, "hosts": list(peers), "network_interface_name": "lo"}
    for folder in ("config", "input/config"):  # of Processing, of Training
        (root / folder).mkdir(exist_ok=True)
        (root / folder / "resourceconfig.json").write_text(json.dumps(resources))
    (root / "output").mkdir(exist_ok=True)
    words = [sys.executable if word == "python3" else word for word in words]
    unshare = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
    with Path(f"{root}.log").open("wb") as log:
        process = subprocess.Popen(
            [*unshare, "sh", "-c", _START, str(root), *words],
            env={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", **environment},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    return Host(name, root, process)


def wait(hosts: Sequence[Host], seconds: float, interrupted: Callable[[], bool]) -> bool:
    """Wait until all hosts ended, or the first one failed and the others were stopped; True if they
    were taken away before."""
    end = time.monotonic() + seconds
    while any(host.process.poll() is None for host in hosts):
        if interrupted():
            stop(hosts)
            return True
        for host in hosts:
            host.failed = bool(host.process.poll())
        if any(host.failed for host in hosts) or time.monotonic() > end:
            stop(hosts)
            break
        time.sleep(0.02)
    return False


def stop(hosts: Sequence[Host]) -> None:
    """End them as the service does: SIGTERM, and SIGKILL for who is still there after its time."""
    for host in hosts:
        host.send(signal.SIGTERM)
    end = time.monotonic() + GRACE_SECONDS
    for host in hosts:
        try:
            host.process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            host.process.kill()
            host.process.wait()


def inside(root: Path, path: str) -> Path:
    """A place of the container as we see it."""
    assert path.startswith("/opt/ml/"), path
    return root / path.removeprefix("/opt/ml/")


def read(s3: Any, uri: str) -> bytes:
    """An object's content."""
    bucket, key = _split(uri)
    content: bytes = s3.get_object(Bucket=bucket, Key=key)["Body"].read()
    return content


def download(s3: Any, uri: str, folder: Path) -> None:
    """Everything under the URI, as S3Prefix means it; there has to be something."""
    bucket, key = _split(uri)
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=key)
    found = [item["Key"] for page in pages for item in page.get("Contents", [])]
    assert found, f"nothing at {uri}"
    for name in found:
        relative = name.removeprefix(key).lstrip("/") or Path(name).name
        (folder / relative).parent.mkdir(parents=True, exist_ok=True)
        s3.download_file(bucket, name, str(folder / relative))


def upload(s3: Any, folder: Path, uri: str) -> set[str]:
    """Every file under the folder; their names."""
    bucket, key = _split(uri)
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    for name in names:
        s3.upload_file(str(folder / name), bucket, f"{key}/{name}")
    return names


def _split(uri: str) -> tuple[str, str]:
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key
