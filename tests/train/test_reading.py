"""A training whose shards stay in an object store, with less disk than they need, computes what one does that has them in a folder."""

import contextlib
import dataclasses
import json
import os
import random
import tempfile
import uuid
from pathlib import Path

import fsspec
import psutil
import pytest

from rekindle.data.ingest import ingest
from rekindle.data.shard import shard
from rekindle.spec.model import DataSpec, ModelSpec, TrainSpec
from rekindle.tasks import load_task
from rekindle.train.history import read_history
from rekindle.train.modelfolder import TRAINED_ON
from tests.support.s3 import s3_server
from tests.support.train_resume import DISTILBERT, GPT2, Gang

TRAIN = TrainSpec(
    epochs=1.25,
    global_batch_size=2,
    micro_batch_size=1,
    lr=1e-3,
    checkpoint={"every": 50, "keep": 2},
)


@pytest.fixture(scope="module")
def lake():
    server, reaches = s3_server()
    before = dict(os.environ)
    os.environ.update(reaches)
    fsspec.config.conf["s3"] = {"skip_instance_cache": True}
    yield
    os.environ.clear()
    os.environ.update(before)
    del fsspec.config.conf["s3"]
    server.kill()
    server.wait()


def examples(folder, task):
    made = random.Random(0)
    words = ["".join(made.choices("abcdefgh", k=made.randint(2, 6))) for _ in range(80)]
    rows = [
        {"text": " ".join(made.choices(words, k=made.randint(3, 40))), "label": made.choice("xyz")}
        for _ in range(500)
    ]
    folder.mkdir(parents=True)
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataSpec(source=str(folder / "texts.jsonl"))
    ingest(data, load_task(task).modality, "", folder / "examples")
    return folder / "examples"


@dataclasses.dataclass
class Made:
    """Shards in a folder, and the same ones in a store, in windows of a fifth."""

    folder: Path
    task: str
    model: ModelSpec
    disk: float = 0.75  # of all

    def __post_init__(self):
        self.root = f"s3://lake/{uuid.uuid4().hex}"
        self.examples = examples(self.folder / "data", self.task)
        whole = self.shard("whole")
        self.bytes = sum(file.bytes for file in whole.shards)
        windows = {"shuffle_gb": self.bytes / 5e9}
        self.here = self.shard("here", **windows)
        self.away = self.shard(
            "away", store=f"{self.root}/pieces", disk_gb=self.disk * self.bytes / 1e9, **windows
        )

    def shard(self, name, store="", **fields):
        data = DataSpec(source="x", max_length=64, shard_rows=10, **fields)
        return shard(self.examples, data, self.model, self.task, self.folder / name, store=store)

    def gang(self, name, disk=None):
        one = Gang(
            self.folder / f"run-{name}",
            self.folder / name,
            task=self.task,
            model=self.model,
            train=TRAIN,
        )
        if disk:
            one.root, one.environment = self.root, {"TMPDIR": str(disk)}
        return one


@pytest.fixture
def disk(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "disk"))
    return tmp_path / "disk"


def on_disk(disk):
    size = 0
    for path in disk.glob(f"rekindle-{os.getuid()}/key-shards/*"):
        with contextlib.suppress(FileNotFoundError):
            size += path.stat().st_size
    return size


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "model"), [("text_classification", DISTILBERT), ("causal_lm", GPT2)]
)
def test_less_disk_than_data_changes_no_bit(tmp_path, disk, lake, task, model):
    made = Made(tmp_path / "made", task, model)
    whole = made.gang("here").start().finish()
    assert [path.name for path in (made.folder / "away").iterdir() if path.suffix == ".arrow"] == []
    one, most = made.gang("away", disk).start(), 0
    for until in (30, 185):

        def reached(until=until):
            nonlocal most
            most = max(most, on_disk(disk))
            rows = list(read_history(one.checkpoints / "history.jsonl"))
            return rows and rows[-1].step >= until

        one.until(reached, f"step {until}")
        workers = one.workers()
        one.process.kill()
        psutil.wait_procs(workers, timeout=20)
        one.process.wait()
        one.start()
    one.finish()
    assert 0.3 * made.bytes < most <= 0.75 * made.bytes
    assert on_disk(disk) == 0
    assert (one.losses, one.weights) == (whole.losses, whole.weights)
    known = [
        (run.folder / f"model-{run.attempt}" / TRAINED_ON).read_bytes() for run in (one, whole)
    ]
    assert known[0] == known[1]


@pytest.mark.slow
def test_too_little_disk_is_said(tmp_path, disk, lake):
    made = Made(tmp_path / "made", "text_classification", DISTILBERT, disk=0.3)
    small = made.gang("away", disk).start().finish(1)
    assert "shards that are read at a time, and in the next window, have" in small.said
    assert "raise data.disk_gb" in small.said
