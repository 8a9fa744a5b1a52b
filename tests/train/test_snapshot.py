"""The copies of a checkpoint: what they need of the host is known before the first one is made, and given back."""

import pytest
import torch
import torch.distributed as dist

from rekindle.errors import CheckpointError
from rekindle.launch import process
from rekindle.train.dcp import pieces_of
from rekindle.train.snapshot import Pinned, Snapshot, check_host_memory, snapshot_bytes


class CudaRuntime:
    """torch's binding of CUDA's runtime, for a driver that pins `most` bytes."""

    def __init__(self, most):
        self.most, self.registered, self.calls = most, {}, []

    def cudaHostRegister(self, start, size, flags):
        self.calls.append("register")
        if size > self.most:
            return 2
        self.registered[start] = size
        return 0

    def cudaHostUnregister(self, start):
        self.calls.append("unregister")
        del self.registered[start]
        return 0


def test_pinned_memory_is_given_back_once():
    cuda = CudaRuntime(1 << 20)
    pinned = Pinned(4096, 1 << 16, cuda)
    assert cuda.registered == {4096: 1 << 16}
    pinned.release()
    pinned.release()
    assert cuda.registered == {}
    assert cuda.calls == ["register", "unregister"]


def test_memory_that_could_not_be_pinned_is_not_given_back(caplog):
    cuda = CudaRuntime(10)
    Pinned(4096, 1 << 16, cuda).release()
    assert cuda.calls == ["register"]
    assert "cannot pin 65536 bytes" in caplog.text


def test_a_snapshot_of_other_tensors_gives_the_memory_of_the_first_back():
    snapshot, cuda = Snapshot(), CudaRuntime(1 << 20)
    first = snapshot.take(pieces_of({"a": torch.ones(3)}))
    snapshot.pinned = Pinned(4096, 12, cuda)
    assert torch.equal(first["a"].local, torch.ones(3))
    second = snapshot.take(pieces_of({"a": torch.ones(4)}))
    assert cuda.calls == ["register", "unregister"]
    assert torch.equal(second["a"].local, torch.ones(4))


def test_a_checkpoint_that_the_host_cannot_hold_is_refused_before_the_first_save():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        check_host_memory(pieces_of({"model": {"w": torch.empty(1000, 1000)}}))
        left = process.available_bytes()
        large = {"model": {"w": torch.empty(left, dtype=torch.float32, device="meta")}}
        assert snapshot_bytes(pieces_of(large)) == pytest.approx(4 * left, abs=64)
        with pytest.raises(CheckpointError) as refused:
            check_host_memory(pieces_of(large))
    finally:
        dist.destroy_process_group()
    (problem,) = refused.value.problems
    assert "GiB of host memory for the copies of 1 ranks on one machine" in problem.what
    assert problem.where == "train.checkpoint"
    assert "raise the container's memory limit" in problem.fix
