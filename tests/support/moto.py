"""AWS as moto plays it, with an S3 that tests of every platform keep their artifacts in."""

from __future__ import annotations

import collections
import functools
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

KEYS = {"aws_access_key_id": "x", "aws_secret_access_key": "x", "region_name": "us-east-1"}


@functools.cache
def can_mount() -> bool:
    """Whether this machine lets us give a job a /opt/ml of its own: root, and `unshare`."""
    if os.geteuid() != 0 or not shutil.which("unshare"):
        return False
    try_it = 'mkdir -p /opt/ml && mount --bind "$0" /opt/ml'
    unshare = ["unshare", "--mount", "--pid", "--fork", "--mount-proc"]
    done = subprocess.run([*unshare, "sh", "-c", try_it, "/tmp"], capture_output=True)
    return done.returncode == 0


@pytest.fixture(scope="module")
def aws() -> Iterator[str]:
    """URL of a fresh moto_server, where jobs can be given folders of their own."""
    if not can_mount():
        pytest.skip("this machine lets us mount no /opt/ml")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        url = next(
            m[0] for line in server.stderr if (m := re.search(r"http://127\.0\.0\.1:\d+", line))
        )
        rest = server.stderr  # a full pipe would stop it
        threading.Thread(target=lambda: collections.deque(rest, maxlen=0), daemon=True).start()
        yield url
        server.kill()


@pytest.fixture(scope="module")
def s3(aws: str) -> Any:
    """A client of a fresh S3 with the bucket `lake`."""
    boto3 = pytest.importorskip("boto3", reason="boto3 is a developer's dependency")
    client = boto3.client("s3", endpoint_url=aws, **KEYS)
    region = {"LocationConstraint": "eu-central-1"}
    client.create_bucket(Bucket="lake", CreateBucketConfiguration=region)
    return client
