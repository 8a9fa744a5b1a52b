"""Where memory ran out is named by the plan's term, with the setting that makes it smaller. Real failures to allocate."""

import errno
from pathlib import Path

import pytest
import torch
from torch import nn

from rekindle.objectives import loss_of
from rekindle.objectives.loss import Goal
from rekindle.objectives.micro import Micro
from rekindle.objectives.tokens.cross_entropy import linear_cross_entropy
from rekindle.tasks.image_classification import ImageClassification
from rekindle.train import vitals, weights
from rekindle.train.dcp import pieces_of
from rekindle.train.part import Part
from rekindle.train.snapshot import Snapshot
from rekindle.train.vitals import explain

HUGE = 1 << 44  # more than any machine has, in values


def endless(*shape):
    """A tensor of any size that takes no memory until something copies it."""
    return torch.zeros(1).expand(shape)


def logits():
    linear_cross_entropy(
        torch.zeros(8, 4), endless(HUGE, 4), torch.zeros(8, dtype=torch.int64), torch.tensor(1.0)
    )


def parameters():
    network = nn.Module()
    network.weight = nn.Parameter(endless(HUGE))
    weights.transform(network, lambda value: value.clone())


def copies_for_a_checkpoint():
    Snapshot().take(pieces_of({"a": endless(HUGE)}))


class Greedy(ImageClassification):
    def logits(self, network, batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def a_teacher():
    a_task_of_a_users(Goal(teacher=nn.Linear(2, 2)))


def a_task_of_a_users(goal=Goal()):  # noqa: B008 - frozen
    part = Part(loss_of(Greedy().objective), Greedy(), nn.Sequential(nn.Linear(2, 2)), goal)
    one = torch.ones(1, dtype=torch.float64)
    micro = Micro(
        {"pixels": torch.ones(1, 2)}, torch.zeros(1, dtype=torch.int64), one, 0, weights=one
    )
    part(micro=micro)


PLACES = {
    logits: ("logits", "divide the vocabulary (train.layout.tp)"),
    parameters: ("parameters", "train adapters (model.lora)"),
    copies_for_a_checkpoint: ("copies for a checkpoint", "raise the container's memory limit"),
    a_task_of_a_users: ("logits", "lower train.micro_batch_size"),
    a_teacher: ("teacher", "take a smaller model.teacher"),
}


@pytest.mark.parametrize("fails", PLACES, ids=lambda call: call.__name__)
def test_the_term_that_ran_out_is_named_with_the_setting_that_helps(fails):
    term, fix = PLACES[fails]
    with pytest.raises((RuntimeError, OSError)) as failure:
        fails()
    problem = explain(failure.value, {"parameters": 15 << 30, "optimizer": 30 << 30})
    assert problem.what.startswith(f"out of memory for {term} (")
    assert problem.what.endswith("; this rank holds parameters 15.0 GiB, optimizer 30.0 GiB")
    assert fix in problem.fix


def test_what_ran_out_elsewhere_is_told_without_a_term():
    problem = explain(MemoryError())
    assert problem.what == "out of memory (MemoryError)"
    assert "train.layout.shard" in problem.fix


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (OSError(errno.ENOMEM, "no"), True),
        (OSError(errno.EIO, "no"), False),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
        (RuntimeError("an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_only_missing_memory_is_called_so(error, is_one):
    assert vitals.is_out_of_memory(error) is is_one


def test_every_term_has_a_setting_that_helps():
    assert {term for _, _, term in vitals._PLACES} == set(vitals.FIXES)
    library = Path(vitals.__file__).parents[1]
    files = [file for folder in vitals._ENGINE for file in folder.rglob("*.py")]
    for name, functions, _ in vitals._PLACES:
        (file,) = [file for file in files if file.as_posix().endswith(f"/{name}")]
        assert all(f"def {function}(" in file.read_text() for function in functions), name
    losses = {f"{file.parent.name}/loss.py" for file in library.glob("objectives/*/loss.py")}
    assert losses <= {name for name, _, _ in vitals._PLACES}
