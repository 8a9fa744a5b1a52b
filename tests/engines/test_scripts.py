"""Loops of other libraries as scripts of users, from configs/engines: real torchrun, two ranks on gloo."""

import signal
from pathlib import Path

import pytest

from rekindle.spec.model import TrainSpec
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
