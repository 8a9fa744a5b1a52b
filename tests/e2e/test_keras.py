"""A network that a script trains with Keras, from the data to a version that is served, without TensorFlow."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits

from rekindle.errors import RequestError
from rekindle.serve.load import model_for
from rekindle.train.modelfolder import open_model
from tests.ports import free_port
from tests.serve.servers import Running

SCRIPT = """
import json, os, sys
from pathlib import Path
os.environ["KERAS_BACKEND"] = "torch"
import keras
sys.path.append({examples!r})
from keras_network import arrays, network
from rekindle.data.manifest import open_shards
from rekindle.tasks import load_task

job = json.loads(Path(os.environ["REKINDLE_JOB"]).read_text())
keras.utils.set_random_seed(job["train"]["seed"])
shards = open_shards(job["shards"])
shape, labels = shards.manifest.settings["image_shape"], shards.manifest.labels
model = network(job["model"]["source"], shape, len(labels))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=keras.optimizers.Adam(job["train"]["lr"]), loss=loss)
model.fit(*arrays(shards, load_task(job["task"])), batch_size=64, epochs=4, verbose=0)
file = Path(job["output"]) / "model.keras"
keras.Sequential([*model.layers, keras.layers.Softmax()]).save(file)
print("parameters", model.count_params(), flush=True)
"""
CONFIG = """
name: digits-keras
task: image_classification
data: {source: "sklearn:digits"}
model: {source: {channels: [16, 32], hidden: 64, dropout: 0.1}}
train: {entrypoint: train.py, lr: 3e-3}
evaluate: {floor: {accuracy: 0.9}}
platforms: {local: {ranks: 1}}
"""
ASK = """
import json, sys, logging; logging.disable(50)
import mlflow, numpy as np
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pyfunc.load_model("models:/digits-keras@champion")
pixels = np.array(json.loads(sys.argv[2]), np.uint8)[..., None]
print(model.predict(pixels).label.tolist())
"""


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("keras") is None, reason="the extra `keras` is not installed"
)
def test_a_keras_model_is_judged_registered_and_served(cli, registry):
    examples = str(Path(__file__).parents[2] / "configs" / "engines")
    (cli.folder / "train.py").write_text(SCRIPT.format(examples=examples))
    (cli.folder / "digits.yaml").write_text(CONFIG)
    first = cli.json("run", "digits.yaml")
    assert first["gate"]["promoted"], first["gate"]
    assert first["metrics"]["accuracy"] > 0.9
    assert registry("digits-keras")["aliases"]["champion"] == "1"
    card = Path(first["card"]).read_text()
    assert "Confusion matrix" in card
    # the champion is scored again on the rows of a candidate's
    second = cli.json("run", "digits.yaml", "--set", "train.seed=2")
    assert second["gate"]["comparison"]["metric"] == "accuracy"
    assert abs(second["gate"]["comparison"]["estimate"]) < 0.1

    digits = load_digits()
    pixels = (digits.images[:40] * 255 / 16).round().astype("uint8")
    rows = [{"id": str(i), "image": image.tolist()} for i, image in enumerate(pixels)]
    uri = f"sqlite:///{cli.folder / '.rekindle' / 'mlflow.db'}"
    words = [sys.executable, "-c", ASK, uri, json.dumps(pixels.tolist())]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    labels = json.loads(done.stdout.splitlines()[-1].replace("'", '"'))
    right = sum(int(a) == b for a, b in zip(labels, digits.target[:40], strict=True))
    assert right >= 36

    port = free_port()
    words = ["rekindle.cli.main", "serve", "digits.yaml", "--port", str(port)]
    server = Running([sys.executable, "-m", *words], port, cli.folder)
    try:
        server.ready()
        answer = server.client.post("/predict", json={"instances": rows}).json()
        assert [one["label"] for one in answer["predictions"]] == labels
    finally:
        server.process.terminate()
        server.process.wait(30)
    model = next((cli.folder / ".rekindle").rglob("model.keras")).parent
    with pytest.raises(
        RequestError, match="a model of Keras computes as it was saved, not in bf16"
    ):
        model_for(open_model(model), torch.device("cpu"), "bf16")
    more = ("--set", "train.entrypoint=null", "--set", "model.init_from=champion")
    assert "holds a model of Keras" in cli("run", "digits.yaml", *more, code=1).stderr
