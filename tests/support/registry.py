"""A registry that a pipeline on any platform can reach."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers.mlflow_server import mlflow_server


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of an MLflow server that keeps models itself."""
    # 127.0.0.1 is refused: no cloud reaches it
    with mlflow_server(tmp_path_factory.mktemp("mlflow"), host="127.0.0.2") as url:
        yield url
