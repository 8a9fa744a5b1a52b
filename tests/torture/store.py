"""Rounds of a training whose checkpoints lie in an object store (moto speaks S3's protocol)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import psutil

from rekindle.data.ingest import ingest
from rekindle.data.shard import shard
from rekindle.launch.rendezvous import Rendezvous
from rekindle.spec.model import DataSpec, ModelSpec, TrainSpec
from rekindle.train.job import Job
from tests.torture import chaos
from tests.torture.chaos import Chaos
from tests.torture.light import DISTURBED
from tests.torture.oracle import Failure, nothing_left

ROOT = Path(__file__).parents[2]
MOST_SECONDS = 1_200.0


class Training(subprocess.Popen[bytes]):
    """One attempt at the training, on a machine whose temporary folder is `machine`."""

    def __init__(self, machine: Path, root: str, shards: Path, environment: dict[str, str]) -> None:
        machine.mkdir(exist_ok=True)
        self.folder = machine / uuid.uuid4().hex[:8]
        self.folder.mkdir()
        tempfile.tempdir = str(machine)
        job = Job.of(
            artifact_root=root,
            run_key="key",
            task="image_classification",
            shards=str(shards),
            output=str(self.folder / "model"),
            history=str(self.folder / "training"),
            init="",
            init_from="base",
            train=TrainSpec(steps=60, lr=1e-3, checkpoint={"every": 10}),
            model=ModelSpec(source={"channels": [8, 16], "hidden": 32, "dropout": 0.1}),
        )
        tempfile.tempdir = None
        job.write(self.folder / "job.json")
        self.log = self.folder / "log.txt"
        with self.log.open("wb") as log:
            super().__init__(
                [sys.executable, "-m", "tests.train.gang", str(self.folder / "job.json")],
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={
                    **os.environ,
                    **Rendezvous(ranks_per_node=2).environment(),
                    **environment,
                    "OMP_NUM_THREADS": "1",
                    "TMPDIR": str(machine),
                    "PYTHONPATH": str(ROOT),
                },
            )

    def ended(self, codes: tuple[int, ...]) -> str:
        """The hash of the weights, if it was to succeed; a Failure where it did not end so."""
        try:
            code = self.wait(MOST_SECONDS)
        except subprocess.TimeoutExpired:
            raise Failure(f"a training hangs: {self.log.read_text()[-2000:]}") from None
        if code not in codes:
            raise Failure(f"a training ended with {code}: {self.log.read_text()[-3000:]}")
        weights = self.folder / "model" / "model.safetensors"
        return hashlib.sha256(weights.read_bytes()).hexdigest() if codes == (0,) else ""


class Store:
    """Rounds in a folder, held against a training with checkpoints on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.shards = folder, folder / "digits" / "shards"
        data = DataSpec(source="sklearn:digits")
        ingest(data, "image", "", folder / "digits" / "examples")
        shard(
            folder / "digits" / "examples", data, ModelSpec(), "image_classification", self.shards
        )
        began = time.monotonic()
        whole = Training(folder / "whole-training", str(folder / "local"), self.shards, {})
        self.weights = whole.ended((0,))
        self.seconds = time.monotonic() - began

    def round(self, seed: int, mishaps: Chaos) -> Path:
        """One round; its folder."""
        mishaps.log.append("store")
        place = self.folder / f"store-{seed}"
        place.mkdir()
        with served() as (environment, server, lake):
            for _ in range(mishaps.random.randint(1, 2)):
                child = self._start(place, environment, mishaps)
                mishaps.counts["runs"] += 1
                if mishaps.random.random() < 0.4:
                    self._hold_up(server, child, mishaps)
                mishaps.disturb(child, self.seconds)
                child.ended(DISTURBED)
                nothing_left(place)
            if mishaps.random.random() < 0.4:
                damage(lake, mishaps)
            began = time.monotonic()
            several = [self._start(place, environment, mishaps)]
            if mishaps.random.random() < 0.3:
                mishaps.counts["concurrent runs"] += 2
                several.append(self._start(place, environment, mishaps))
            found = {child.ended((0,)) for child in several}
            mishaps.counts.recoveries.append(time.monotonic() - began)
            if found != {self.weights}:
                raise Failure("the weights are not those of the undisturbed training")
        return place

    def _start(self, place: Path, environment: dict[str, str], mishaps: Chaos) -> Training:
        machine = place / f"machine-{mishaps.random.choice('ab')}"
        return Training(machine, "s3://lake/run", self.shards, environment)

    def _hold_up(self, server: psutil.Process, child: Training, mishaps: Chaos) -> None:
        time.sleep(mishaps.random.uniform(0, self.seconds / 2))
        mishaps.did("stores held up")
        chaos.send(server, signal.SIGSTOP)
        time.sleep(mishaps.random.uniform(0.2, 3.0))
        chaos.send(server, signal.SIGCONT)
        child.poll()


def damage(lake: Any, mishaps: Chaos, prefix: str = "") -> None:
    """A bit of an object flips, or an object is gone."""
    listed = lake.list_objects_v2(Bucket="lake", Prefix=prefix).get("Contents", [])
    names = sorted(one["Key"] for one in listed)
    for name in mishaps.random.sample(names, min(2, len(names))):
        mishaps.did("files damaged", name)
        content = bytearray(lake.get_object(Bucket="lake", Key=name)["Body"].read())
        if content and mishaps.random.random() < 0.7:
            content[mishaps.random.randrange(len(content))] ^= 1
            lake.put_object(Bucket="lake", Key=name, Body=bytes(content))
        else:
            lake.delete_object(Bucket="lake", Key=name)


@contextlib.contextmanager
def served() -> Iterator[tuple[dict[str, str], psutil.Process, Any]]:
    """An object store: the environment that finds it, its process, and a client."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        lines = iter(server.stderr)
        url = next(m[0] for line in lines if (m := re.search(r"http://127\.0\.0\.1:\d+", line)))
        drain = subprocess.Popen(["cat"], stdin=server.stderr, stdout=subprocess.DEVNULL)
        environment = {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
        }
        lake = boto3.client(
            "s3",
            endpoint_url=url,
            aws_access_key_id="x",
            aws_secret_access_key="x",
            region_name="us-east-1",
        )
        lake.create_bucket(Bucket="lake")
        try:
            yield environment, psutil.Process(server.pid), lake
        finally:
            server.kill()
            drain.wait()
