"""What the tests of training share."""

import pytest

from rekindle.data.ingest import ingest
from rekindle.data.shard import shard
from rekindle.spec.model import DataSpec, ModelSpec


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    """The folder with scikit-learn's digits as shards."""
    folder = tmp_path_factory.mktemp("digits")
    data = DataSpec(source="sklearn:digits")
    ingest(data, "image", "", folder / "examples")
    shard(folder / "examples", data, ModelSpec(), "image_classification", folder / "shards")
    return folder / "shards"
