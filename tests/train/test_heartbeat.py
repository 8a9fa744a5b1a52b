"""Long work of a start sends heartbeats for every piece of it, and only of a start."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from rekindle.data.manifest import open_shards
from rekindle.launch import heartbeats
from rekindle.launch.heartbeats import HeartbeatFile
from rekindle.spec import heartbeat
from rekindle.spec.identity import file_sha256
from rekindle.spec.model import CheckpointSpec
from rekindle.train import checkpoint, weights
from tests.servers.hub import HubServer


@pytest.fixture
def beats():
    """Grows by one for each beat."""
    heard = []
    heartbeat.connect(lambda: heard.append(1))
    yield heard
    heartbeat._listeners.pop()


def test_every_megabyte_of_a_hash_is_a_beat(tmp_path, beats):
    (tmp_path / "file").write_bytes(bytes(5 << 20))
    file_sha256(tmp_path / "file")
    assert len(beats) == 5


def test_shards_that_are_opened_and_weights_that_are_filled_beat(shards, beats):
    open_shards(shards)
    assert len(beats) >= len(list(shards.glob("*.arrow")))
    beats.clear()
    with weights.deferred() as recorder:
        network = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    source = weights.WeightSource(network, recorder, seed=0)
    weights.transform(network, torch.empty_like)
    real = network.to_empty(device="cpu")
    weights.fill([real], source, {})
    assert len(beats) == 4


def test_a_checkpoint_that_is_checked_and_read_beats(tmp_path, beats):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        tensors = {"a": torch.ones(3), "b": torch.ones(2, 2)}
        saver = checkpoint.Checkpointer(tmp_path, CheckpointSpec(), "key")
        saver.save(1, tensors, {})
        saver.wait()
        beats.clear()
        found = checkpoint.newest(tmp_path, "key")
        assert len(beats) >= len(found.files)
        beats.clear()
        checkpoint.load(found, tensors)
        assert len(beats) >= len(tensors)
    finally:
        dist.destroy_process_group()


DOWNLOAD = """
import json
from rekindle.spec import heartbeat
from rekindle.spec.model import ModelSpec
from rekindle.tasks import load_task
heard = []
heartbeat.connect(lambda: heard.append(1))
folder = load_task("causal_lm").weights(ModelSpec(source="acme/model"))
print(json.dumps([len(heard), (folder / "model.safetensors").stat().st_size]))
"""


@pytest.mark.slow
def test_a_download_beats(tmp_path):
    repository, size = tmp_path / "hub" / "models" / "acme" / "model", 30 << 20
    repository.mkdir(parents=True)
    (repository / "model.safetensors").write_bytes(bytes(size))
    with HubServer(tmp_path / "hub") as hub:
        environment = {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_DISABLE_XET": "1",
        }
        done = subprocess.run(
            [sys.executable, "-c", DOWNLOAD],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    heard, stored = json.loads(done.stdout.splitlines()[-1])
    assert stored == size
    assert heard > 2


def test_a_thread_in_the_background_does_not_hide_that_a_step_hangs(tmp_path):
    file = HeartbeatFile(tmp_path, 0, 1)
    times = []
    for phase in ("start", "warm-up", "step", "validation", "save", "finish"):
        file.beat(3, phase)
        (before,) = heartbeats.read(tmp_path)
        file.go_on()
        (after,) = heartbeats.read(tmp_path)
        assert (after.step, after.phase) == (3, phase)
        times.append((phase, after.time > before.time))
    assert [phase for phase, later in times if later] == ["start", "finish"]
