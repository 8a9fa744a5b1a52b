"""Learning from a teacher: loss and gradients are those of a few lines of plain torch, one document at a time; the teacher
is neither trained, nor saved, nor exported."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from rekindle.errors import UnsupportedError
from rekindle.objectives import loss_of
from rekindle.objectives.micro import Feed
from rekindle.objectives.tokens import cross_entropy as linear_loss
from rekindle.objectives.tokens import rows_at_once
from rekindle.spec.layout import Layout
from rekindle.spec.model import ModelSpec, TrainSpec
from rekindle.tasks import load_task
from rekindle.train import attention
from rekindle.train.batches import Batches
from rekindle.train.job import Job
from rekindle.train.mesh import Mesh
from rekindle.train.part import Part
from rekindle.train.teacher import goal_of
from tests.plan.traced.fakes import Live
from tests.support.train_layouts import MODELS, NO_DROPOUT, TASKS
from tests.train.differential import PACK, made_shards

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
ONE = Layout()
WARMTH, SHARE = 3.0, 0.7
STUDENTS = {"text": {**MODELS["distilbert"], **NO_DROPOUT["distilbert"]}, "tokens": MODELS["llama"]}
TEACHERS = {
    "text": {**STUDENTS["text"], "dim": 24},
    "tokens": {**MODELS["llama"], "hidden_size": 24},
}


class Lesson:
    """A student, the teacher that the worker makes of a folder, and plain copies of both."""

    def __init__(self, kind, folder, layout=ONE):
        self.task, self.shards = load_task(TASKS[kind]), made_shards(TASKS[kind], packing=True)
        self.student, teacher = (
            self.task.build(
                ModelSpec(source=s[kind]),
                self.shards.manifest.labels,
                self.shards.manifest.settings,
                Path(),
            )
            for s in (STUDENTS, TEACHERS)
        )
        for network in (self.student, teacher):
            torch.manual_seed(1)
            with torch.no_grad():
                for parameter in network.parameters():
                    parameter.normal_(std=0.3)
        teacher.save_pretrained(folder)
        self.mesh = Mesh(layout, CPU)
        job = Job.of(
            artifact_root=str(folder),
            run_key="key",
            task=TASKS[kind],
            shards="",
            output="",
            history="",
            init="",
            init_from="base",
            train=TrainSpec(),
            model=ModelSpec(
                source=STUDENTS[kind],
                teacher={"source": str(folder), "temperature": WARMTH, "weight": SHARE},
            ),
        )
        goal = goal_of(job, self.task, self.shards, self.mesh)
        if kind == "tokens":
            attention.install(self.student, attention.AttentionPeers())
        self.part = Part(loss_of(self.task.objective), self.task, self.student.train(), goal)
        plain = [
            type(network)(type(network.config).from_dict(network.config.to_dict()))
            for network in (self.student, goal.teacher)
        ]
        for copy, network in zip(plain, (self.student, goal.teacher), strict=True):
            copy.load_state_dict(network.state_dict())
        self.plain, self.taught = plain[0].train(), plain[1].eval()

    def batch(self, rows, slots, pack_length=None):
        order = self.shards.order(
            "train", global_batch_size=8, seed=0, by_length=True, pack_length=pack_length
        )
        batches = Batches(
            loss_of(self.task.objective), self.task, self.shards, "train", order, self.mesh, 0
        )
        (batch,) = Feed(CPU, "fp32")([batches.arranged(np.array(rows), np.array(slots))])
        return batch

    def blended(self, ours, theirs, labels):
        """By hand: cross-entropy, and temperature² times the Kullback-Leibler divergence of the teacher's softened
        distribution from ours; both as means."""
        hard = F.cross_entropy(ours, labels)
        p, log_q = F.softmax(theirs / WARMTH, -1), F.log_softmax(ours / WARMTH, -1)
        soft = (p * (p.log() - log_q)).sum(-1).mean()
        return (1 - SHARE) * hard + SHARE * WARMTH**2 * soft

    def same(self, loss, by_hand):
        loss.backward()
        by_hand.backward()
        assert loss.item() == pytest.approx(by_hand.item(), rel=1e-6)
        theirs = dict(self.plain.named_parameters())
        assert theirs
        total = torch.stack([p.grad.norm() for p in theirs.values() if p.grad is not None]).norm()
        for name, parameter in self.student.named_parameters():
            gap = (parameter.grad - theirs[name].grad).norm()
            assert gap <= 1e-5 * theirs[name].grad.norm() + 1e-6 * total, name
        teacher = self.part.goal.teacher
        assert all(p.grad is None for p in teacher.parameters())


def test_texts_with_a_class_learn_from_a_teacher_as_by_hand(tmp_path):
    lesson = Lesson("text", tmp_path)
    rows = [3, 8, 1, 20, 5, -1]
    loss = torch.zeros(())
    # two micro-batches, the second with a row that is none
    for share in (slice(0, 4), slice(4, 6)):
        batch = lesson.batch(rows[share], range(len(rows[share])))
        batch = dataclasses.replace(batch, count=torch.tensor([5.0]))
        loss = loss + lesson.part(micro=batch)[0, 0]
    batch = lesson.batch(rows[:5], range(5))
    with torch.no_grad():
        theirs = lesson.taught(**batch.inputs).logits
    lesson.same(loss, lesson.blended(lesson.plain(**batch.inputs).logits, theirs, batch.labels))


def test_packed_documents_learn_from_a_teacher_as_each_does_alone_by_hand(tmp_path):
    lesson = Lesson("tokens", tmp_path)
    lengths = lesson.shards.lengths("train")
    rows = [row for row in range(37) if lengths[row] <= PACK // 2][:4]
    batch = lesson.batch(rows, [0, 0, 1, 1], pack_length=PACK)
    ours, theirs, labels = [], [], []
    for row in rows:
        alone = lesson.task.collate(
            lesson.shards.take("train", [row]), lesson.shards.manifest.settings
        )
        wanted = alone["labels"][0] != -100
        ours.append(lesson.plain(input_ids=alone["input_ids"]).logits[0, wanted])
        with torch.no_grad():
            theirs.append(lesson.taught(input_ids=alone["input_ids"]).logits[0, wanted])
        labels.append(alone["labels"][0, wanted])
    count = torch.tensor([float(sum(map(len, labels)))])
    result = lesson.part(micro=dataclasses.replace(batch, count=count))
    lesson.same(result[0, 0], lesson.blended(torch.cat(ours), torch.cat(theirs), torch.cat(labels)))
    assert result[0, 2] == count


def test_a_taught_loss_holds_logits_of_a_few_tokens_however_many_there_are(monkeypatch):
    """Heads of 128,256 x 4,096, traced without values with a GPU's pieces."""
    hidden, vocabulary, peaks = 4_096, 128_256, {}
    monkeypatch.setattr(
        linear_loss, "rows_at_once", lambda columns, device: rows_at_once(columns, "cuda")
    )
    for tokens in (2_048, 8_192):
        live = Live()
        with FakeTensorMode():
            states, theirs = (torch.empty(tokens, hidden, dtype=torch.bfloat16) for _ in range(2))
            head = torch.empty(vocabulary, hidden, dtype=torch.bfloat16, requires_grad=True)
            taught = torch.nn.Linear(hidden, vocabulary, bias=False, dtype=torch.bfloat16)
            lesson = linear_loss.Lesson(taught.requires_grad_(False), theirs, WARMTH, SHARE)
            labels, scale = torch.empty(tokens, dtype=torch.int64), torch.empty(())
            with live.counting():
                loss, _ = linear_loss.linear_cross_entropy(
                    states.requires_grad_(), head, labels, scale, lesson=lesson
                )
                loss.backward()
        peaks[tokens] = live.peak
    gradients = (8_192 - 2_048) * hidden * (4 + 2 + 2)  # summed in fp32, narrowed, handed back
    assert peaks[8_192] - peaks[2_048] <= 1.01 * gradients
    head_bytes = vocabulary * hidden * 2
    assert peaks[8_192] <= 5 * head_bytes + 1.25 * 2**30, "two heads, a gradient in fp32, a product"


def test_validation_judges_the_student_alone(tmp_path):
    for kind in STUDENTS:
        lesson = Lesson(kind, tmp_path / kind)
        lesson.part.eval()
        batch = lesson.batch([3], [0], pack_length=PACK if kind == "tokens" else None)
        with torch.no_grad():
            loss = lesson.part(micro=batch)[0, 0]
            inputs = {
                "input_ids": batch.inputs["input_ids"][:, : lesson.shards.lengths("train")[3]]
            }
            logits = lesson.plain.eval()(**inputs).logits
            logits = logits.reshape(-1, logits.shape[-1])
            if kind == "tokens":
                logits = logits[batch.targets]
            alone = F.cross_entropy(logits, batch.labels, reduction="sum")
        assert float(loss) == pytest.approx(float(alone), rel=1e-5)


@pytest.mark.parametrize("axis", ["tp", "pp", "cp"])
def test_a_layout_whose_ranks_see_parts_only_refuses_a_teacher(tmp_path, axis):
    with pytest.raises(UnsupportedError, match="a teacher needs whole examples") as refused:
        Lesson("tokens", tmp_path, Layout(**{axis: 2}))
    assert refused.value.problems[0].fix == "use dp and shard"


def rekindle(folder, **settings):
    """Run the digits with these settings; returns the folder of the model."""
    words = [f"{name.replace('__', '.')}={json.dumps(value)}" for name, value in settings.items()]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "rekindle.cli.main",
            "run",
            str(ROOT / "configs" / "digits.yaml"),
            "--json",
            *(word for setting in words for word in ("--set", setting)),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    key = json.loads(done.stdout)["run_key"]
    descriptions = (folder / ".rekindle").rglob("rekindle.json")
    return next(d.parent for d in descriptions if json.loads(d.read_text())["run_key"] == key)


@pytest.mark.slow
def test_a_small_network_learns_from_a_trained_one_alone_and_the_teacher_goes_nowhere(tmp_path):
    from torch.distributed.checkpoint import FileSystemReader

    made = rekindle(tmp_path, train__epochs=5, evaluate__floor={})
    teacher = shutil.copytree(made, tmp_path / "teacher")
    before = np.union1d(np.load(teacher / "trained_on.npy"), np.array([7, 9], np.uint64))
    np.save(teacher / "trained_on.npy", before)
    settings = {
        "model__source": {"channels": [8, 12], "hidden": 24, "dropout": 0.1},
        "train__epochs": 8,
        "evaluate__floor": {},
        "train__checkpoint__every": 20,
        "train__layout": {"shard": 2},
    }
    taught = rekindle(
        tmp_path, **settings, model__teacher={"source": str(teacher), "weight": 1.0}
    )  # of the labels it sees nothing
    task = load_task("image_classification")
    small, large = (dict(task.load(folder).named_parameters()) for folder in (taught, teacher))
    assert small.keys() == large.keys()
    assert all(small[n].shape != large[n].shape for n in small if n.endswith("weight"))
    key = json.loads((taught / "rekindle.json").read_text())["run_key"]
    saves = list((tmp_path / ".rekindle").glob(f"checkpoints/{key}/step-*"))
    assert saves
    for save in saves:
        held = FileSystemReader(save).read_metadata().state_dict_metadata
        model = {n: tuple(v.size) for n, v in held.items() if n.startswith("model.")}
        assert model == {f"model.{n}": tuple(p.shape) for n, p in small.items()}
    training = next(
        found
        for path in (tmp_path / ".rekindle").rglob("training.json")
        if (found := json.loads(path.read_text()))["run_key"] == key
    )
    assert training["validation"]["accuracy"] > 0.8
    assert np.array_equal(np.load(taught / "trained_on.npy"), before)
    assert json.loads((taught / "rekindle.json").read_text())["precision"] == "fp32"
