"""Pods of launchers, which are processes of the run that argo.py plays, and what a kubelet does to them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rekindle.platforms.kubeflow.compile import LAUNCHER


def limit(pod: Any, wanted: Any) -> None:
    """What becomes of a pod that gets a deadline which is over: its container is killed, and it has
    failed. Nothing else of a pod can be changed here."""
    if wanted["spec"].get("activeDeadlineSeconds") is None:
        return
    for process in _processes_of(pod["metadata"]["name"]):
        os.kill(process, signal.SIGKILL)
    ended = {"exitCode": 128 + signal.SIGKILL}
    pod["status"] = {
        "phase": "Failed",
        "reason": "DeadlineExceeded",
        "containerStatuses": [{"name": "main", "state": {"terminated": ended}}],
    }


def _processes_of(pod: str) -> Iterator[int]:
    """The launchers among the processes of this machine that have the name of the pod."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            words = (folder / "cmdline").read_bytes().split(b"\0")
            variables = (folder / "environ").read_bytes().split(b"\0")
            is_launcher = [word.decode() for word in words[1:3]] == list(LAUNCHER[1:])
            if is_launcher and f"KFP_POD_NAME={pod}".encode() in variables:
                yield int(folder.name)
