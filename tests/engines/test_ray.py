"""A loop of Ray Train as a script of a user, from configs/engines: a real cluster on this machine, two workers. Run by
`make test-clusters`."""

import os
import signal
from pathlib import Path

import pytest

from rekindle.spec.model import TrainSpec
from tests.support.train_resume import DISTILBERT, Gang, written

SCRIPT = Path(__file__).parents[2] / "configs" / "engines" / "own_ray.py"
# Ray gives a machine ten seconds to start; a loaded one takes a minute
SLOW = {"RAY_raylet_start_wait_time_s": "300", "RAY_gcs_server_request_timeout_seconds": "300"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ray_train_stops_when_asked_and_goes_on_to_the_same_bits(tmp_path):
    pytest.importorskip("ray", reason="`make test-clusters` installs it")
    assert "RAY_ADDRESS" not in os.environ
    texts = written(tmp_path, "text_classification", DISTILBERT)

    def gang(name):
        train = TrainSpec(entrypoint=str(SCRIPT), lr=1e-3)
        return Gang(
            tmp_path / name, texts, ranks=1, train=train, task="text_classification", model=DISTILBERT, environment=SLOW,
        )  # fmt: skip

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
