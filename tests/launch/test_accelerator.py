"""What ranks on GPUs are started with; the options are those of this torch."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.run import parse_args

from rekindle.launch import process
from rekindle.launch.rendezvous import Rendezvous
from rekindle.launch.worker_group import GroupStart, argv
from rekindle.train.rank import connect


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, {}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, {}),
        ({"PYTORCH_HIP_ALLOC_CONF": ""}, {}),
    ],
)
def test_the_allocator_grows_its_segments_unless_the_user_has_set_it(environment, told):
    assert process.allocator(environment) == told


def test_torchrun_takes_the_option_that_binds_ranks_to_the_processors_beside_their_gpu():
    bound = argv(["train.py"], Rendezvous(), GroupStart(0), is_bound=True)
    assert parse_args(bound).numa_binding == "node"
    assert parse_args(argv(["train.py"], Rendezvous(), GroupStart(0))).numa_binding is None


def test_ranks_are_bound_where_there_are_several_nodes_and_numactl(tmp_path, monkeypatch):
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "numactl").write_text("#!/bin/sh\n")
    (tools / "numactl").chmod(0o755)
    nodes = tmp_path / "nodes"
    (nodes / "node0").mkdir(parents=True)
    monkeypatch.setenv("PATH", str(tools))
    assert not process.can_bind(nodes)
    (nodes / "node1").mkdir()
    assert process.can_bind(nodes)
    monkeypatch.setenv("PATH", "/nowhere")
    assert not process.can_bind(nodes)


def test_ranks_on_gpus_join_with_their_device_so_that_communicators_are_made_before_the_first_step(
    monkeypatch,
):
    """What torch is asked for; there is no GPU here to join with."""
    asked = []
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", asked.append)
    monkeypatch.setattr(dist, "init_process_group", lambda *a, **more: asked.append((a, more)))
    device = torch.device("cuda", 3)
    assert connect() == device
    assert asked == [device, (("cuda:nccl,cpu:gloo",), {"device_id": device})]
