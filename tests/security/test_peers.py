"""What a stranger on a data connection sends as a Python object is not run (C1, H4): torch's object collectives read values only."""

import io
import os
import pickle
import traceback

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.pipelining._utils import _StageForwardMeta, _TensorMeta

from rekindle.errors import CheckpointError
from rekindle.launch.meeting import PlainUnpickler
from rekindle.train.checkpoint import _Outcome
from rekindle.train.dcp import CheckpointWriter, File, Piece, Planner


def read(content):
    return PlainUnpickler(io.BytesIO(content)).load()


class Call:
    def __init__(self, call, *words):
        self.words = call, words

    def __reduce__(self):
        return self.words


ATTACKS = {
    "a command": lambda: Call(os.system, "touch ran"),
    "eval": lambda: Call(eval, "open('ran', 'w')"),
    "a module that is not loaded": lambda: b"\x80\x04\x8c\x0bantigravity\x94\x8c\x01x\x94\x93.",
    "an attribute of an attribute": lambda: b"\x80\x04\x8c\x02os\x94\x8c\x0bpath.exists\x94\x93.",
    "getattr of a module": lambda: Call(getattr, torch.nn.Linear, "forward"),
    "a tensor with storage": lambda: torch.ones(2),
    "a file": lambda: Call(open, "ran", "w"),
}


@pytest.mark.parametrize("what", ATTACKS)
def test_what_would_run_is_refused_and_does_not(what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = ATTACKS[what]()
    content = made if isinstance(made, bytes) else pickle.dumps(made)
    with pytest.raises(pickle.UnpicklingError, match="a rank sent"):
        read(content)
    assert list(tmp_path.iterdir()) == []


def raised(error):
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001 - as torch catches it
        return _wrap_exception(caught)


def values():
    piece = Piece(torch.ones(2, 3), torch.Size([0, 0]), torch.Size([4, 3]))
    items = piece.__create_write_items__("w", piece)
    yield SavePlan(items, storage_data=(0, 24))
    yield WriteResult(MetadataIndex("w", torch.Size([0, 0])), 24, None)
    yield _StageForwardMeta((_TensorMeta(torch.Size([2]), (1,), torch.bfloat16, True),))
    yield File("__0_0.distcp", 24, "ab"), _Outcome(None, 1.5)
    yield {"a": [1, 2.5, "x", None, True, b"y"], "b": {(1, 2)}}


@pytest.mark.parametrize("protocol", [pickle.DEFAULT_PROTOCOL, pickle.HIGHEST_PROTOCOL])
def test_what_ranks_do_send_arrives(protocol):
    for value in values():
        assert read(pickle.dumps(value, protocol)) == value


def test_a_rank_s_failure_arrives_with_its_cause():
    error, stack = read(
        pickle.dumps(raised(CheckpointError("no room", where="s3://b", fix="make some")))
    )
    assert isinstance(stack, traceback.StackSummary)
    assert (str(error), error.problems[0].fix) == (
        "no room\n  where: s3://b\n  fix:   make some",
        "make some",
    )
    failed = read(pickle.dumps(CheckpointException("write", {1: raised(OSError(28, "full"))})))
    assert failed.failures[1][0].errno == 28


def test_an_error_of_a_stores_client_reaches_the_other_ranks_as_one_of_ours():
    class Odd(Exception):
        def __reduce__(self):
            return print, ("called",)  # as botocore's errors name a function

    class Store:
        root = "s3://bucket"

        def write(self, *words):
            raise Odd("slow down")

    piece = Piece(torch.ones(2), torch.Size([0]), torch.Size([2]))
    plan = SavePlan(piece.__create_write_items__("w", piece), storage_data=(0, 8))
    with pytest.raises(CheckpointError, match="Odd: slow down") as caught:
        CheckpointWriter(Store(), "step-1.ab", 1).write_data(plan, Planner())
    error, _ = read(pickle.dumps(_wrap_exception(caught.value)))
    assert "slow down" in str(error)


def test_a_process_that_joins_as_a_rank_reads_so(tmp_path):
    from rekindle.launch import meeting

    before = dist.distributed_c10d._unpickler
    try:
        meeting.join("gloo", store=dist.HashStore(), rank=0, world_size=1)
        everyone = [None]
        with pytest.raises(pickle.UnpicklingError, match="a rank sent"):
            dist.all_gather_object(everyone, Call(os.system, f"touch {tmp_path}/ran"))
        assert not (tmp_path / "ran").exists()
    finally:
        dist.distributed_c10d._unpickler = before
        dist.destroy_process_group()
