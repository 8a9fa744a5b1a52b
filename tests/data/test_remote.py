"""The same steps on an object store: a real S3 protocol, spoken by moto over loopback HTTP."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import fsspec
import pytest

from rekindle.data.files import locate
from rekindle.data.fingerprint import fingerprint
from rekindle.errors import DataError
from rekindle.spec.model import ModelSpec, TrainSpec
from tests.data.corpora import TASKS, content, ingested, rows, text_spec, write_jsonl

pytest.importorskip(
    "moto", reason="moto[server] is a developer's dependency; `make install` brings it"
)


@pytest.fixture
def bucket(monkeypatch):
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        url = next(
            m[0] for line in server.stderr if (m := re.search(r"http://127\.0\.0\.1:\d+", line))
        )
        for name, value in {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        store = fsspec.filesystem("s3", skip_instance_cache=True)
        store.clear_instance_cache()  # other tests of this process had stores of their own
        store.mkdir("lake")
        yield "s3://lake"
        store.clear_instance_cache()
        server.terminate()


def test_a_bucket_is_read_like_a_folder(tmp_path, bucket):
    for month in (1, 2, 3):
        local = write_jsonl(tmp_path / f"d/2026-0{month}/x.jsonl", rows()[month::4])
        fsspec.filesystem("s3").put(str(local), f"{bucket}/d/2026-0{month}/x.jsonl")
    found = {}
    for root in (f"{bucket}/d", tmp_path / "d"):
        data = text_spec(
            f"{root}/{{window}}/*.jsonl", window={"size": "2 months", "every": "1 month"}
        )
        taken = fingerprint(f"{TASKS}:Words", data, ModelSpec(), TrainSpec(), champion=None)
        ingested(data, tmp_path / "out", taken.window)
        found[str(root)[:2]] = (taken, content(tmp_path / "out"))
    remote, local = found.values()
    assert remote == local
    assert remote[0].files == 2
    assert os.environ["AWS_ENDPOINT_URL"].startswith("http://127.0.0.1")


def test_a_store_without_credentials_is_told_with_what_to_check(bucket, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    fsspec.filesystem("s3").clear_instance_cache()
    with pytest.raises(DataError, match=r"cannot list s3://lake/.*: Unable to locate credentials"):
        locate(text_spec(f"{bucket}/d/x.jsonl"))
