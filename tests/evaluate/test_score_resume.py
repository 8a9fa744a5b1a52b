"""A scoring that is told to stop, loses a rank, and is killed goes on each time, and ends with the bytes of one that was left
alone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rekindle.data.examples import SUMMARY, ExamplesSummary, ExamplesWriter, schema_of
from rekindle.launch.rendezvous import Rendezvous
from rekindle.spec.model import DataSpec, ModelSpec
from tests.processes import ranks_of
from tests.support.evaluate_score_layouts import classifier

STEP = Path(__file__).with_name("step.py")
ROWS = 80_000  # ten pieces


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A model of digits, and a test split of random pixels."""
    folder = tmp_path_factory.mktemp("world")
    data = DataSpec.model_validate({"source": "sklearn:digits"})
    spec = ModelSpec.model_validate({"source": {"channels": [4, 6], "hidden": 10}})
    model, _ = classifier("image_classification", folder, data, spec)
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 10, ROWS)
    table = pa.table(
        {
            "id": [f"r{i}" for i in range(ROWS)],
            "hash": [generator.bytes(16) for _ in range(ROWS)],
            "split": ["test"] * ROWS,
            "label": labels.astype(str),
            "image": [generator.bytes(64) for _ in range(ROWS)],
        }
    )
    with ExamplesWriter(folder / "many", schema_of("image", ()), ("test-00000",)) as writer:
        writer.write("test-00000", table)
    summary = ExamplesSummary(
        modality="image", window="", source="", labels=tuple("0123456789"), slices=()
    )
    summary.write(folder / "many" / SUMMARY)
    return model, folder / "many"


class Step:
    """The step as a process, whose scores are kept under `state`."""

    def __init__(self, world, state):
        self.state, self.output = state, state / "out"
        self.log = state / "log.txt"
        state.mkdir(exist_ok=True)
        self.words = [sys.executable, str(STEP), *map(str, world), str(state), str(self.output)]

    def start(self):
        environment = {**os.environ, "PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"}
        with self.log.open("a") as log:
            return subprocess.Popen(
                self.words,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**environment, **Rendezvous(ranks_per_node=2).environment()},
            )

    def pieces(self):
        """When each piece was committed."""
        found = self.state.glob("scores/*/piece-*.parquet")
        return {path.name: path.stat().st_mtime_ns for path in sorted(found)}

    def wait_for_more(self, process, before):
        deadline = time.monotonic() + 120
        while len(self.pieces()) <= len(before):
            assert process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.002)

    def bytes(self):
        return {path.name: path.read_bytes() for path in self.output.iterdir()}


@pytest.mark.slow
def test_a_scoring_goes_on_where_it_was_interrupted(world, tmp_path):
    whole = Step(world, tmp_path / "whole")
    assert whole.start().wait(180) == 0, whole.log.read_text()
    assert len(whole.pieces()) == 10
    broken = Step(world, tmp_path / "broken")

    process, before = broken.start(), broken.pieces()
    broken.wait_for_more(process, before)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75, broken.log.read_text()
    after_term = broken.pieces()
    assert 0 < len(after_term) < 10

    process = broken.start()
    broken.wait_for_more(process, after_term)
    os.kill(ranks_of(process.pid)[1].pid, signal.SIGKILL)
    after_rank = broken.pieces()
    assert len(after_rank) < 9
    broken.wait_for_more(process, after_rank | {"the one in work": 0})
    ranks = ranks_of(process.pid)
    process.kill()
    process.wait()
    after_kill = broken.pieces()
    assert len(after_kill) < 10
    assert not broken.output.exists()
    for rank in ranks:
        rank.wait(30)

    assert broken.start().wait(180) == 0, broken.log.read_text()
    done = broken.pieces()
    assert {name: done[name] for name in after_kill} == after_kill, "no piece is scored twice"
    assert list(done) == list(whole.pieces())
    assert broken.bytes() == whole.bytes()
    log = broken.log.read_text()
    assert "rank 1 was killed by SIGKILL" in log
    assert "pieces are left" in log

    assert broken.start().wait(60) == 0
    assert "all was scored before" in broken.log.read_text()
    assert broken.bytes() == whole.bytes()
