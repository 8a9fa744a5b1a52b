"""Faults in real trainings: two ranks on gloo, digits; the rehearsal as users run it; a full disk, a hung rank, missing data."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rekindle.records import RehearsalRecord

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "digits.yaml"


def rekindle(home, *words, timeout=280):
    done = subprocess.run(
        [sys.executable, "-m", "rekindle.cli.main", "run", str(CONFIG), "--home", str(home), "--json",
         "--set", "train.epochs=2", "--set", "train.checkpoint.every=10", *words],
        capture_output=True, text=True, timeout=timeout, cwd=home,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


FAULTS = {
    # fault: attempts, what is said of it
    "kill": (1, "rank 1 was killed by SIGKILL in step 16; restarting all ranks (1 of 3)"),
    "hang": (1, "rank 1 hangs in step 16: no sign of life for"),
    "term": (2, "saved and gave way"),
    "disk-full": (2, "No space left on device"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_rehearsed_fault_changes_no_bit_and_leaves_only_its_record(fault, tmp_path):
    attempts, said = FAULTS[fault]
    code, out, err = rekindle(
        tmp_path, "--rehearse-preemption", f"{fault}@step=16", "--set", "train.hang_seconds=15"
    )
    if "no file system can be mounted" in out:
        pytest.skip(out)
    assert code == 0, err + out
    assert said in err
    record = RehearsalRecord.model_validate_json(out)
    found = record.rehearsal
    assert (found.fault, found.step, record.ranks, record.attempts) == (fault, 16, 2, attempts)
    assert (found.losses_equal, found.weights_equal) == (True, True)
    if fault == "term":  # saved after the step in work, or the one after it
        assert found.resumed_from_step >= 16
        assert found.samples_lost == 0
    else:  # from the last save in the background that was complete
        assert found.resumed_from_step in (0, 10, 20)
        assert found.samples_lost >= (15 - found.resumed_from_step) * 64
    if fault in ("kill", "hang"):
        assert found.samples_lost == (15 - found.resumed_from_step) * 64
    assert [path.name for path in tmp_path.iterdir()] == ["rehearsals"]
    (kept,) = (tmp_path / "rehearsals").iterdir()
    assert RehearsalRecord.read(kept) == record


UNSTEADY = """
import os
import numpy as np
import torch
from rekindle.tasks.image_classification import ImageClassification

class Unsteady(ImageClassification):
    def collate(self, table, settings):
        inputs = super().collate(table, settings)
        noise = np.random.default_rng(int.from_bytes(os.urandom(8), "big")).normal(size=inputs["pixels"].shape)
        return {"pixels": inputs["pixels"] + 1e-3 * torch.from_numpy(noise.astype("f4"))}
"""


@pytest.mark.slow
def test_a_rehearsal_of_a_training_that_differs_each_time_says_so_and_fails(tmp_path):
    task = tmp_path / "unsteady.py"
    task.write_text(UNSTEADY)
    home = tmp_path / "home"
    home.mkdir()
    code, out, err = rekindle(
        home, "--rehearse-preemption", "kill@step=4", "--set", f"task={task}:Unsteady"
    )
    assert code == 1, err + out
    found = RehearsalRecord.model_validate_json(out).rehearsal
    assert (found.losses_equal, found.weights_equal) == (False, False)
    assert (found.resumed_from_step, found.samples_lost) == (0, 3 * 64)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--rehearse-preemption", "melt@step=3"), "one of kill, term, hang, disk-full"),
        (("--rehearse-preemption", "kill@step=3", "--set", f"train.entrypoint={Path(__file__)}"), "needs rekindle's own training loop"),
        (("--rehearse-preemption", "kill@step=3", "--set", "pipeline=nothing.py:none"), "nothing.py"),
    ],
)  # fmt: skip
def test_what_cannot_be_rehearsed_is_refused_before_anything_is_written(words, says, tmp_path):
    code, out, _ = rekindle(tmp_path, *words)
    assert code == 2
    assert says in json.dumps(json.loads(out)["errors"])
    assert list(tmp_path.iterdir()) == []


PREPARE = """
import sys
from pathlib import Path
from rekindle.data.ingest import ingest
from rekindle.data.shard import shard
from rekindle.spec.model import DataSpec, ModelSpec
data = DataSpec(source=sys.argv[1], columns={"text": "text", "label": "label"})
examples, shards = Path(sys.argv[2]) / "examples", Path(sys.argv[2]) / "shards"
print("ingest", flush=True)
ingest(data, "text", "", examples)
print("shard", flush=True)
shard(examples, data, ModelSpec(), "text_classification", shards)
print("done", flush=True)
"""


@pytest.mark.parametrize("step", ["ingest", "shard"])
def test_sigterm_in_data_preparation_ends_it_at_once_with_143_and_leaves_nothing_to_trust(
    step, tmp_path
):
    with (tmp_path / "reviews.csv").open("w") as file:
        file.write("text,label\n")
        for row in range(60_000):
            file.write(
                f"a review of thing number {row} that is neither long nor short,{'good' if row % 3 else 'bad'}\n"
            )
    task = {
        "source": "", "command": ["python3", "-c", PREPARE, str(tmp_path / "reviews.csv"), str(tmp_path)], "args": [], "env": {},
        "executor_input": {"inputs": {"parameterValues": {}, "artifacts": {}},
                           "outputs": {"parameters": {}, "artifacts": {}, "outputFile": str(tmp_path / "out.json")}},
        "run": {}, "outputs": {"parameters": {}, "artifacts": {}}, "work": str(tmp_path), "cwd": str(tmp_path),
        "result": str(tmp_path / "result.json"), "parent": None,
    }  # fmt: skip
    (tmp_path / "task.json").write_text(json.dumps(task))
    shim = subprocess.Popen(
        [sys.executable, "-m", "rekindle.launch.shim", str(tmp_path / "task.json")],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    while shim.stdout.readline().strip() != step:
        assert shim.poll() is None
    folder, mark = {"ingest": ("examples", "summary.json"), "shard": ("shards", "manifest.json")}[
        step
    ]
    while not any((tmp_path / folder).rglob("*.*")):
        assert shim.poll() is None
        time.sleep(0.005)
    family = psutil.Process(shim.pid).children(recursive=True)
    shim.send_signal(signal.SIGTERM)
    assert shim.wait(10) == 143
    assert "done" not in shim.stdout.read()
    assert not [p for p in family if p.is_running()]
    assert not (tmp_path / folder / mark).exists()
    assert re.search(r'"exit_code": 143', (tmp_path / "result.json").read_text())
