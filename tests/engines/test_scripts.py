"""Loops of other libraries as scripts of users, from configs/engines: real torchrun, two ranks on gloo."""

import dataclasses
import importlib.util
import signal
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from rekindle.data.manifest import open_shards
from rekindle.spec.model import ModelSpec, TrainSpec
from rekindle.tasks import load_task
from tests.support.train_resume import DISTILBERT, Gang, written

SCRIPTS = Path(__file__).parents[2] / "configs" / "engines"


@pytest.mark.slow
def test_accelerate_stops_when_asked_and_goes_on_to_the_same_bits(tmp_path):
    pytest.importorskip("accelerate", reason="the extra `trainer` is not installed")
    texts = written(tmp_path, "text_classification", DISTILBERT)

    def gang(name):
        train = TrainSpec(entrypoint=str(SCRIPTS / "own_accelerate.py"), lr=1e-3)
        return Gang(
            tmp_path / name, texts, train=train, task="text_classification", model=DISTILBERT
        )

    whole = gang("whole").start().finish()
    assert '"step": 40, "steps": 40' in whole.said
    stopped = gang("stopped").start()
    stopped.until(lambda: '"step": 25,' in stopped.said, "step 25")
    stopped.process.send_signal(signal.SIGTERM)
    stopped.finish(75)
    resumed = stopped.start().finish()
    assert '"step": 25,' not in resumed.said, "nothing was trained again"
    assert '"step": 40, "steps": 40' in resumed.said
    assert resumed.weights == whole.weights


LLAMA = ModelSpec(
    source={
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    },
    tokenizer={"vocab_size": 320},
)
SMALL = ModelSpec(source={"channels": [8, 16], "hidden": 32, "dropout": 0.0})


def needs(package, name):
    """One of the scripts whose package a machine may lack."""
    absent = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(absent, reason=f"{name} is not installed")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "task", "model", "ranks", "banner", "kill_at", "stop_at"),
    [
        pytest.param(
            "own_horovod.py",
            "text_classification",
            DISTILBERT,
            2,
            "",
            22,
            30,
            marks=needs("horovod", "Horovod"),
            id="horovod",
        ),
        pytest.param(
            "own_keras.py",
            "image_classification",
            SMALL,
            1,
            "MirroredStrategy on 2 devices",
            3,
            5,
            marks=needs("tensorflow", "TensorFlow"),
            id="keras",
        ),
        pytest.param(
            "own_multiworker.py",
            "image_classification",
            SMALL,
            2,
            "MultiWorkerMirroredStrategy of 2 workers",
            3,
            5,
            marks=needs("tensorflow", "TensorFlow"),
            id="multiworker",
        ),
        pytest.param(
            "own_megatron.py",
            "causal_lm",
            LLAMA,
            2,
            "megatron-core on 2 ranks",
            22,
            45,
            marks=needs("megatron", "megatron-core"),
            id="megatron",
        ),
    ],
)
def test_a_rank_is_killed_and_all_are_stopped_and_end_with_the_same_bits(
    tmp_path, shards, script, task, model, ranks, banner, kill_at, stop_at
):
    """What one rank loses all take up again. Under MirroredStrategy one process has two replicas."""
    data = shards if task == "image_classification" else written(tmp_path, task, model)
    path = str(SCRIPTS / script)

    def gang(name):
        train = TrainSpec(entrypoint=path, lr=1e-3)
        return Gang(tmp_path / name, data, ranks=ranks, train=train, task=task, model=model)

    whole = gang("whole").start().finish()
    assert banner in whole.said
    stopped = gang("stopped").start()
    stopped.until(lambda: f'"step": {kill_at},' in stopped.said, f"step {kill_at}")
    family = psutil.Process(stopped.process.pid).children(recursive=True)
    found = [p for p in family if p.cmdline()[2:] == [path]]
    assert len(found) == ranks
    found[-1].kill()
    stopped.until(lambda: "restarting all ranks (1 of 3)" in stopped.said, "the restart")
    stopped.until(lambda: f'"step": {stop_at},' in stopped.said, f"step {stop_at}")
    stopped.process.send_signal(signal.SIGTERM)
    stopped.finish(75)
    resumed = stopped.start().finish()
    assert f'"step": {stop_at},' not in resumed.said, "nothing was trained again"
    assert resumed.weights == whole.weights


@pytest.mark.slow
@needs("megatron", "megatron-core")
def test_megatron_trains_as_transformers_does_and_goes_on_with_another_number_of_ranks(tmp_path):
    data, path = written(tmp_path, "causal_lm", LLAMA), str(SCRIPTS / "own_megatron.py")
    train = TrainSpec(entrypoint=path, lr=1e-3)
    two = Gang(tmp_path / "gang", data, train=train, task="causal_lm", model=LLAMA)
    two.start().until(lambda: '"step": 30,' in two.said, "step 30")
    two.process.send_signal(signal.SIGTERM)
    two.finish(75)
    one = dataclasses.replace(two, ranks=1).start().finish()
    assert "megatron-core on 1 ranks" in one.said
    assert '"step": 30,' not in one.said, "nothing was trained again"
    trained = load_file(one.folder / "model-1" / "model.safetensors")

    opened, task = open_shards(data), load_task("causal_lm")
    settings, table = opened.manifest.settings, opened.table("train")
    torch.manual_seed(train.seed)
    network = task.build(LLAMA, (), settings, opened.assets)
    optimizer = torch.optim.AdamW(network.parameters(), lr=train.lr)
    each = table.num_rows // 8
    for step in range(2 * each):
        epoch, turn = divmod(step, each)
        chance = torch.Generator().manual_seed(train.seed * 1000 + epoch)
        rows = torch.randperm(table.num_rows, generator=chance)[turn * 8 : (turn + 1) * 8]
        given = task.collate(table.take(rows.numpy()), settings)
        scores = network(input_ids=given["input_ids"], position_ids=given["position_ids"]).logits
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), given["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    theirs = network.state_dict()
    assert theirs.keys() == trained.keys()
    assert max(float((theirs[name] - trained[name]).abs().max()) for name in theirs) < 1e-5


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_ray_train_is_killed_and_stopped_and_ends_with_the_same_bits(tmp_path):
    """Two workers of Ray, started by one process of ours; what Ray started goes with it."""
    texts = written(tmp_path, "text_classification", DISTILBERT)

    def gang(name):
        train = TrainSpec(entrypoint=str(SCRIPTS / "own_ray.py"), lr=1e-3)
        return Gang(
            tmp_path / name,
            texts,
            ranks=1,
            train=train,
            task="text_classification",
            model=DISTILBERT,
        )

    whole = gang("whole").start().finish()
    assert '"step": 40, ' in whole.said
    stopped = gang("stopped").start()
    stopped.until(lambda: '"step": 12,' in stopped.said, "step 12")
    family = psutil.Process(stopped.process.pid).children(recursive=True)
    (driver,) = (p for p in family if p.cmdline()[2:] == [str(SCRIPTS / "own_ray.py")])
    ray = [p for p in driver.children(recursive=True) if p.name() in ("raylet", "gcs_server")]
    assert ray
    driver.kill()
    stopped.until(lambda: "restarting all ranks (1 of 3)" in stopped.said, "a restart")
    psutil.wait_procs(ray, 30)
    assert not [p for p in ray if p.is_running()], "a killed driver leaves no Ray behind"
    stopped.until(lambda: '"step": 25,' in stopped.said, "step 25")
    stopped.process.send_signal(signal.SIGTERM)
    stopped.finish(75)
    resumed = stopped.start().finish()
    assert '"step": 20,' not in resumed.said, "nothing was trained again"
    assert resumed.weights == whole.weights
