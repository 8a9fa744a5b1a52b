"""Loops of other libraries as scripts of users, from configs/engines: real torchrun, two ranks on gloo."""

import importlib.util
import signal
from pathlib import Path

import psutil
import pytest

from rekindle.spec.model import ModelSpec, TrainSpec
from tests.support.train_resume import DISTILBERT, Gang, written

SCRIPTS = Path(__file__).parents[2] / "configs" / "engines"


@pytest.mark.slow
def test_accelerate_stops_when_asked_and_goes_on_to_the_same_bits(tmp_path):
    pytest.importorskip("accelerate", reason="the extra `trainer` is not installed")
    texts = written(tmp_path, "text_classification", DISTILBERT)

    def gang(name):
        train = TrainSpec(entrypoint=str(SCRIPTS / "own_accelerate.py"), lr=1e-3)
        return Gang(tmp_path / name, texts, train=train, task="text_classification", model=DISTILBERT)  # fmt: skip

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


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not built")
def test_horovod_is_killed_and_stopped_and_ends_with_the_same_bits(tmp_path):
    texts = written(tmp_path, "text_classification", DISTILBERT)
    script = str(SCRIPTS / "own_horovod.py")

    def gang(name):
        train = TrainSpec(entrypoint=script, lr=1e-3)
        return Gang(tmp_path / name, texts, train=train, task="text_classification", model=DISTILBERT)  # fmt: skip

    whole = gang("whole").start().finish()
    assert '"step": 40, "steps": 40' in whole.said
    stopped = gang("stopped").start()
    stopped.until(lambda: '"step": 22,' in stopped.said, "step 22")
    family = psutil.Process(stopped.process.pid).children(recursive=True)
    ranks = [p for p in family if p.cmdline()[2:] == [script]]
    assert len(ranks) == 2
    ranks[1].kill()
    stopped.until(lambda: "restarting all ranks (1 of 3)" in stopped.said, "the restart")
    stopped.until(lambda: stopped.said.count('"step": 30,') == 1, "step 30")
    stopped.process.send_signal(signal.SIGTERM)
    stopped.finish(75)
    resumed = stopped.start().finish()
    assert '"step": 30,' not in resumed.said, "nothing was trained again"
    assert '"step": 40, "steps": 40' in resumed.said
    assert resumed.weights == whole.weights


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)
def test_keras_under_mirrored_strategy_is_killed_and_stopped_and_ends_with_the_same_bits(
    tmp_path, shards
):
    """Two replicas in one process; the script itself holds the exported network's scores against those of Keras."""
    model = ModelSpec(source={"channels": [8, 16], "hidden": 32, "dropout": 0.0})

    def gang(name):
        train = TrainSpec(entrypoint=str(SCRIPTS / "own_keras.py"), lr=2e-3)
        return Gang(
            tmp_path / name, shards, ranks=1, train=train, task="image_classification", model=model
        )

    whole = gang("whole").start().finish()
    assert "MirroredStrategy on 2 devices" in whole.said
    stopped = gang("stopped").start()
    stopped.until(lambda: '"step": 3,' in stopped.said, "the third epoch")
    family = psutil.Process(stopped.process.pid).children(recursive=True)
    (rank,) = (p for p in family if p.cmdline()[2:] == [str(SCRIPTS / "own_keras.py")])
    rank.kill()
    stopped.until(lambda: '"step": 5,' in stopped.said, "the fifth epoch")
    assert "restarting all ranks (1 of 3)" in stopped.said
    stopped.process.send_signal(signal.SIGTERM)
    stopped.finish(75)
    resumed = stopped.start().finish()
    assert '"step": 3,' not in resumed.said, "nothing was trained again"
    assert resumed.weights == whole.weights


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)
def test_workers_of_tensorflow_are_killed_and_stopped_and_end_with_the_same_bits(tmp_path, shards):
    """Two processes under MultiWorkerMirroredStrategy; what one of them loses, both take up again."""
    model = ModelSpec(source={"channels": [8, 16], "hidden": 32, "dropout": 0.0})
    script = str(SCRIPTS / "own_multiworker.py")

    def gang(name):
        train = TrainSpec(entrypoint=script, lr=2e-3)
        return Gang(tmp_path / name, shards, train=train, task="image_classification", model=model)

    whole = gang("whole").start().finish()
    assert "MultiWorkerMirroredStrategy of 2 workers" in whole.said
    stopped = gang("stopped").start()
    stopped.until(lambda: '"step": 3,' in stopped.said, "the third epoch")
    family = psutil.Process(stopped.process.pid).children(recursive=True)
    ranks = [p for p in family if p.cmdline()[2:] == [script]]
    assert len(ranks) == 2
    ranks[1].kill()
    stopped.until(lambda: '"step": 5,' in stopped.said, "the fifth epoch")
    assert "restarting all ranks (1 of 3)" in stopped.said
    stopped.process.send_signal(signal.SIGTERM)
    stopped.finish(75)
    resumed = stopped.start().finish()
    assert '"step": 3,' not in resumed.said, "nothing was trained again"
    assert resumed.weights == whole.weights


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_ray_train_is_killed_and_stopped_and_ends_with_the_same_bits(tmp_path):
    """Two workers of Ray, started by one process of ours; what Ray started goes with it."""
    texts = written(tmp_path, "text_classification", DISTILBERT)

    def gang(name):
        train = TrainSpec(entrypoint=str(SCRIPTS / "own_ray.py"), lr=1e-3)
        return Gang(tmp_path / name, texts, ranks=1, train=train, task="text_classification", model=DISTILBERT)  # fmt: skip

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
