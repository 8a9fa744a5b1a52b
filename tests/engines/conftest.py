"""What the tests of training share."""

import os
import signal

import pytest

from rekindle.data.ingest import ingest
from rekindle.data.shard import shard
from rekindle.spec.model import DataSpec, ModelSpec
from tests.support.train_resume import STARTED


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    """The folder with scikit-learn's digits as shards."""
    folder = tmp_path_factory.mktemp("digits")
    data = DataSpec(source="sklearn:digits")
    ingest(data, "image", "", folder / "examples")
    shard(folder / "examples", data, ModelSpec(), "image_classification", folder / "shards")
    return folder / "shards"


@pytest.fixture(autouse=True)
def nothing_left():
    """Kills what a test of a `Gang` left running."""
    yield
    for process in STARTED:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    STARTED.clear()
