"""A CustomJob of tests/servers/google/vertex.py: its states, and its replicas as real processes."""

from __future__ import annotations

import datetime
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

from google.cloud import aiplatform_v1 as api
from google.protobuf import json_format

from tests.ports import free_port

# a /gcs that no other container sees
MOUNT = ["unshare", "-m", "sh", "-c", 'mkdir -p /gcs && mount --bind "$0" /gcs && exec "$@"']
OVER = ("SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED")


class Job:
    """A CustomJob and its replicas."""

    def __init__(self, service: Any, name: str, proto: Any) -> None:
        self.service, self.name, self.proto = service, name, proto
        self.replicas: list[subprocess.Popen[str]] = []
        self.lines: list[dict[str, str]] = []
        self.changed = threading.Condition()
        self.ending = ""
        self.states = ["QUEUED"]
        proto.name, proto.state = name, api.JobState.JOB_STATE_QUEUED
        proto.create_time = _now()
        self.thread = threading.Thread(target=self.live, daemon=True)
        self.thread.start()

    @property
    def state(self) -> str:
        return self.states[-1]

    def enter(self, state: str, error: str = "") -> None:
        with self.changed:
            if state == "RUNNING":
                self.proto.start_time = _now()
            if state in OVER:
                self.proto.end_time = _now()
            if error:
                self.proto.error = {"code": 3, "message": error}
            self.proto.state = api.JobState[f"JOB_STATE_{state}"]
            self.states.append(state)
            self.changed.notify_all()

    def wait_for(self, *states: str) -> None:
        """Until it is in one of these states."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.state in states, 60), self.states

    def end(self, state: str) -> None:
        """Have it end in this state, from outside: CANCELLED, EXPIRED or FAILED."""
        with self.changed:
            if self.state in OVER or self.ending:
                return
            self.ending = state
            if state == "CANCELLED":
                self.enter("CANCELLING")
            self.changed.notify_all()
        self.tell(signal.SIGTERM)

    def tell(self, number: int) -> None:
        for replica in self.replicas:
            if replica.poll() is None:
                os.killpg(replica.pid, number)

    def take_away(self, rank: int) -> None:
        """The machine of one node is gone, without a word; so the job failed."""
        with self.changed:
            self.ending = "FAILED"
        os.killpg(self.replicas[rank].pid, signal.SIGKILL)

    def live(self) -> None:
        while not self.service.capacity.wait(0.02) and not self.ending:
            pass
        if self.ending:
            self.enter(self.ending)
            return
        self.enter("PENDING")
        self.replicas = list(self.started())
        for rank, replica in enumerate(self.replicas):
            threading.Thread(target=self.read, args=(rank, replica), daemon=True).start()
        with self.changed:
            if not self.ending:
                self.enter("RUNNING")
        if self.ending:  # told before they were there
            self.tell(signal.SIGTERM)
        failed = self.watched()
        self.tell(signal.SIGTERM)
        for replica in self.replicas:
            try:
                replica.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(replica.pid, signal.SIGKILL)
                replica.wait()
        state = self.ending or ("FAILED" if failed else "SUCCEEDED")
        self.enter(state, failed if state == "FAILED" else "")

    def watched(self) -> str:
        """What failed first; nothing if the primary succeeded."""
        while True:
            codes = [replica.poll() for replica in self.replicas]
            bad = next((rank for rank, code in enumerate(codes) if code), None)
            if bad is not None:
                name = f"workerpool1-{bad - 1}" if bad else "workerpool0-0"
                return f"The replica {name} exited with a non-zero status of {codes[bad]}."
            if codes[0] == 0:
                return ""
            threading.Event().wait(0.01)

    def started(self) -> Iterator[subprocess.Popen[str]]:
        pools = json_format.MessageToDict(type(self.proto).pb(self.proto))["jobSpec"][
            "workerPoolSpecs"
        ]
        counts = [int(pool["replicaCount"]) for pool in pools]
        cluster = {
            f"workerpool{i}": [f"127.0.0.1:{free_port()}" for _ in range(count)]
            for i, count in enumerate(counts)
        }
        for i, pool in enumerate(pools):
            container = pool["containerSpec"]
            for index in range(counts[i]):
                spec = {
                    "cluster": cluster,
                    "environment": "cloud",
                    "task": {"type": f"workerpool{i}", "index": index},
                }
                environment = {
                    **self.service.environment(),
                    **{e["name"]: e["value"] for e in container.get("env", [])},
                    "CLUSTER_SPEC": json.dumps(spec),
                    "TF_CONFIG": json.dumps(spec),
                    "CLOUD_ML_JOB_ID": self.name.rpartition("/")[2],
                }
                yield subprocess.Popen(
                    [
                        *MOUNT,
                        str(self.service.folder),
                        *container["command"],
                        *container.get("args", []),
                    ],
                    env=environment,
                    cwd=self.service.folder,
                    start_new_session=True,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )

    def read(self, rank: int, replica: subprocess.Popen[str]) -> None:
        assert replica.stdout is not None
        for line in replica.stdout:
            stamp = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            name = f"workerpool1-{rank - 1}" if rank else "workerpool0-0"
            self.lines.append(
                {
                    "insertId": f"{rank}-{len(self.lines)}",
                    "timestamp": stamp,
                    "task": name,
                    "textPayload": line,
                }
            )


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
