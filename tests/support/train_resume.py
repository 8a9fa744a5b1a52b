"""What tests share with train/test_resume.py."""

import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from rekindle.data.ingest import ingest
from rekindle.data.shard import shard
from rekindle.launch import heartbeats
from rekindle.launch.process import is_running
from rekindle.launch.rendezvous import Rendezvous
from rekindle.spec.identity import file_sha256
from rekindle.spec.model import DataSpec, ModelSpec, TrainSpec
from rekindle.tasks import load_task
from rekindle.train.history import read_history
from rekindle.train.job import Job, folder_of, working_of
from tests.processes import ranks_of

STEPS = 60


EVERY = 10


TASK = "image_classification"


TRAIN = TrainSpec(steps=STEPS, checkpoint={"every": EVERY, "keep": 2}, lr=1e-3)


CNN = ModelSpec(source={"channels": [32, 64], "hidden": 64, "dropout": 0.3})


GPT2 = ModelSpec(
    source={"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    tokenizer={"vocab_size": 320},
)


DISTILBERT = ModelSpec(
    source={
        "model_type": "distilbert",
        "dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "hidden_dim": 64,
        "max_position_embeddings": 64,
    },
    tokenizer={"vocab_size": 320},
)


LM_STEPS, LM_EVERY = 24, 6


LM_TRAIN = TrainSpec(
    steps=LM_STEPS,
    global_batch_size=16,
    micro_batch_size=4,
    lr=1e-3,
    checkpoint={"every": LM_EVERY, "keep": 9},
)


def written(folder, task, model):
    """Shards of 400 texts of 3 to 40 made-up words, with a class each."""
    made = random.Random(0)
    words = ["".join(made.choices("abcdefgh", k=made.randint(2, 6))) for _ in range(80)]
    rows = [
        {"text": " ".join(made.choices(words, k=made.randint(3, 40))), "label": made.choice("xyz")}
        for _ in range(400)
    ]
    return sharded(folder, rows, task, model)


def sharded(folder, rows, task, model):
    """Shards of rows with a text."""
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataSpec(source=str(folder / "texts.jsonl"), max_length=64)
    ingest(data, load_task(task).modality, "", folder / "examples")
    shard(folder / "examples", data, model, task, folder / "shards")
    return folder / "shards"


@dataclasses.dataclass
class Gang:
    """A job in a folder, and the process that runs it."""

    folder: Path
    shards: Path
    ranks: int = 2
    train: TrainSpec = TRAIN
    task: str = TASK
    model: ModelSpec = CNN
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    root: str = ""  # of checkpoints; by default the folder

    def start(self):
        self.attempt = getattr(self, "attempt", 0) + 1
        self.folder.mkdir(exist_ok=True)
        self.log = self.folder / f"log-{self.attempt}.txt"
        job = Job.of(
            artifact_root=self.root or str(self.folder),
            run_key="key",
            task=self.task,
            shards=str(self.shards),
            output=str(self.folder / f"model-{self.attempt}"),
            history=str(self.folder / f"training-{self.attempt}"),
            init="",
            init_from="base",
            train=self.train,
            model=self.model,
        )
        self.status = Path(job.status)
        job.write(self.folder / "job.json")
        environment = {
            **os.environ,
            **Rendezvous(ranks_per_node=self.ranks).environment(),
            "OMP_NUM_THREADS": "1",
            **self.environment,
        }
        self.process = subprocess.Popen(
            [
                sys.executable,
                str((Path(__file__).parents[1] / "train").joinpath("gang.py")),
                str(self.folder / "job.json"),
            ],
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        STARTED.append(self.process)
        return self

    def until(self, condition, what, pause=0.005):
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if condition():
                return self
            assert self.process.poll() is None, f"{what}\n{self.said}"
            time.sleep(pause)
        raise AssertionError(f"{what} did not happen\n{self.said}")

    def until_step(self, step):
        """Wait until the history has reached `step`."""

        def reached():
            rows = list(read_history(self.checkpoints / "history.jsonl"))
            return rows and rows[-1].step >= step

        return self.until(reached, f"step {step}")

    def until_committed(self):
        """Wait until there is a checkpoint to go on from."""
        return self.until(lambda: next(self.checkpoints.glob("*/manifest.json"), None), "a commit")

    def until_phase(self, phase):
        """Wait until a rank that lives says that it is in this phase."""
        return self.until(
            lambda: any(
                s.phase == phase and is_running(s.pid) for s in heartbeats.read(self.status)
            ),
            phase,
            pause=0,
        )

    def until_saved(self, file):
        """Wait until a save has begun, and has come to this file."""
        before = set(self.checkpoints.glob("step-*"))
        return self.until(
            lambda: any(
                next(folder.glob(file), None)
                for folder in set(self.checkpoints.glob("step-*")) - before
            ),
            file,
            pause=0,
        )

    def kill_ranks(self):
        """Kill all ranks at once, as soon as there are any; what supervises them lives on."""
        killed = []

        def alive():
            killed[:] = [s.pid for s in heartbeats.read(self.status) if is_running(s.pid)]
            return killed

        self.until(alive, "a rank")
        for pid in killed:
            with contextlib.suppress(ProcessLookupError):  # the others are ended at once
                os.kill(pid, signal.SIGKILL)
        return self.until(
            lambda: not any(is_running(pid) for pid in killed), "the death of the ranks"
        )

    def finish(self, code=0):
        assert self.process.wait(400) == code, self.said
        return self

    @property
    def checkpoints(self):
        return working_of(folder_of(self.root or str(self.folder), "checkpoints", "key"))

    @property
    def said(self):
        return self.log.read_text()

    @property
    def weights(self):
        model = self.folder / f"model-{self.attempt}"
        if (model / "model.keras").exists():  # which says when it was saved
            with zipfile.ZipFile(model / "model.keras") as file:
                return file.getinfo("model.weights.h5").CRC
        return file_sha256(model / "model.safetensors")

    @property
    def losses(self):
        rows = read_history(self.folder / f"training-{self.attempt}" / "history.jsonl")
        return [(row.step, row.loss, row.lr, row.grad_norm) for row in rows]

    def workers(self):
        return ranks_of(self.process.pid)


STARTED: list[subprocess.Popen] = []


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
