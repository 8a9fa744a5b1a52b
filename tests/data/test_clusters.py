"""Ray and Spark write the bytes of one process; `make test-clusters` installs both."""

from __future__ import annotations

import os
import shutil

import pytest

from rekindle.data import files
from rekindle.errors import RequestError
from tests.data.corpora import content, rows, sharded, text_spec, write_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PACKAGES = {"ray": "ray", "spark": "pyspark"}
# Ray gives a machine ten seconds to start; a loaded one takes a minute
os.environ.update(RAY_raylet_start_wait_time_s="300", RAY_gcs_server_request_timeout_seconds="300")


@pytest.fixture(params=PACKAGES)
def executor(request, monkeypatch):
    pytest.importorskip(PACKAGES[request.param], reason="`make test-clusters` installs it")
    if request.param == "spark" and not shutil.which("java"):
        pytest.skip("there is no Java")
    return request.param


def test_a_cluster_writes_the_bytes_of_one_process(tmp_path, monkeypatch, executor):
    monkeypatch.setattr(files, "PIECE_BYTES", 4_096)
    records = rows()
    again = [{**r, "id": f"{r['id']} again", "text": r["text"].upper()} for r in records[:30]]
    source = write_jsonl(tmp_path / "x.jsonl", [*again, *records])
    fields = {
        "columns": {"key": "id", "time": "month"},
        "split": {"by": "time"},
        "shard_rows": 20,
        "duplicates": "folded",
    }
    sharded(text_spec(source, **fields), tmp_path / "one")
    data = text_spec(source, **fields, executor=executor)
    sharded(data, tmp_path / executor, store=str(tmp_path / "store"))
    assert content(tmp_path / executor) == content(tmp_path / "one")
    assert len(list((tmp_path / "store").glob("*/train.arrow"))) > 5


def test_a_cluster_with_other_code_is_refused(tmp_path, monkeypatch, executor):
    monkeypatch.setattr("rekindle.data.executor.source_hash", lambda parts: "f" * 32)
    data = text_spec(write_jsonl(tmp_path / "x.jsonl", rows()), executor=executor)
    with pytest.raises(RequestError, match=r"rekindle's code is [0-9a-e].* and f{32} here"):
        sharded(data, tmp_path / "out", store=str(tmp_path / "store"))
    assert not list(tmp_path.glob("out/examples/*.arrow"))
