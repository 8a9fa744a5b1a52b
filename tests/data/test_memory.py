"""Memory does not grow with the input: peak of the summed PSS of the process tree, small against
large."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time

import pytest

from tests.bench.bench_shard import sample_pss
from tests.data.corpora import TASKS

CHILD = """
import sys
from pathlib import Path
from rekindle.data.ingest import ingest
from rekindle.data.manifest import open_shards
from rekindle.data.shard import shard
from rekindle.spec.model import DataSpec, ModelSpec

source, out, task = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
data = DataSpec.model_validate({"source": str(source), "columns": {"key": "id", "time": "at"}, "split": {"by": "time"}, "workers": 2})
ingest(data, "text", "", out / "examples")
shard(out / "examples", data, ModelSpec(), task, out / "shards")
"""


def peak_of(folder, megabytes):
    """Peak in MB of a time split, leak search and encoding of so much input."""
    source = folder / "x.jsonl"
    with source.open("w") as file:
        i = 0
        while file.tell() < megabytes * 1_000_000 if i % 1_000 == 0 else True:
            text = f"record {i} " + "words and more words " * 20
            record = {
                "id": i,
                "text": text,
                "label": "ab"[i % 2],
                "at": f"{2000 + i // 12 % 1000}-{i % 12 + 1:02}",
            }
            file.write(json.dumps(record) + "\n")
            i += 1
    command = [sys.executable, "-c", CHILD, str(source), str(folder / "out"), f"{TASKS}:Lengths"]
    with subprocess.Popen(command) as process:
        peak, stop = [0.0], threading.Event()
        sampler = threading.Thread(target=sample_pss, args=(process.pid, peak, stop))
        sampler.start()
        assert process.wait() == 0
        stop.set()
        sampler.join()
    return peak[0] / 1e6


@pytest.mark.slow
def test_eight_times_the_input_needs_no_more_memory(tmp_path):
    (tmp_path / "small").mkdir()
    (tmp_path / "large").mkdir()
    start = time.perf_counter()
    small, large = peak_of(tmp_path / "small", 10), peak_of(tmp_path / "large", 80)
    print(
        f"peak {small:.0f} MB for 10 MB, {large:.0f} MB for 80 MB, in {time.perf_counter() - start:.1f} s"
    )
    assert large < 1.25 * small + 20
    assert large < 500
