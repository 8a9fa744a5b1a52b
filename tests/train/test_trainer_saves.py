"""Checkpoints that transformers' Trainer wrote, carried through an object store to a machine that never saw them."""

import json
import uuid
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from rekindle.errors import CheckpointError
from rekindle.storage import storage_of
from rekindle.train.trainer_saves import COMPLETE, CURVE, TrainerSaves


@pytest.fixture(autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def root():
    return f"memory://{uuid.uuid4().hex}"


def machine(folder, root):
    """The checkpoints as one machine sees them."""
    folder.mkdir()
    (folder / "history.jsonl").write_text('{"step": 1}\n')
    return TrainerSaves(
        SimpleNamespace(
            working=folder,
            curve=folder / "history.jsonl",
            checkpoints=root,
            train=SimpleNamespace(checkpoint=SimpleNamespace(keep=2)),
        )
    )


def trained(saves, step):
    """What the Trainer leaves of a step, completed."""
    folder = saves.folder / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "optimizer.pt").write_bytes(bytes([step]))
    saves.complete(step, {"precision": "fp32"})


def test_another_machine_resumes_from_the_newest_complete_one(tmp_path, root):
    first = machine(tmp_path / "first", root)
    assert first.newest() is None
    for step in (1, 2, 3):
        trained(first, step)
    store = storage_of(f"{root}/trainer")
    assert {name.split("/")[0] for name in store.files()} == {"checkpoint-2", "checkpoint-3"}
    store.put("checkpoint-4/optimizer.pt", b"half")
    second = machine(tmp_path / "second", root)
    newest = second.newest()
    assert newest == second.folder / "checkpoint-3"
    assert {path.name for path in newest.iterdir()} == {COMPLETE, CURVE, "optimizer.pt"}
    assert (newest / "optimizer.pt").read_bytes() == b"\3"
    assert second.facts_of(newest) == {"precision": "fp32"}


def test_a_file_that_is_gone_is_named(tmp_path, root):
    trained(machine(tmp_path / "first", root), 1)
    storage_of(f"{root}/trainer").remove_file("checkpoint-1/optimizer.pt")
    with pytest.raises(
        CheckpointError, match=r"optimizer\.pt of the checkpoint checkpoint-1 is gone"
    ):
        machine(tmp_path / "second", root).newest()


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "deep/file"])
def test_a_file_outside_of_the_checkpoint_is_refused(tmp_path, root, name):
    trained(machine(tmp_path / "first", root), 1)
    store = storage_of(f"{root}/trainer")
    body = json.loads(store.read(f"checkpoint-1/{COMPLETE}"))
    store.put(f"checkpoint-1/{COMPLETE}", json.dumps(body | {"files": [name]}).encode())
    with pytest.raises(CheckpointError, match="names a file outside of it"):
        machine(tmp_path / "second", root).newest()
