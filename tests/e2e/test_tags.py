"""Words with a tag each from one YAML: the shipped messages, trained, judged by entities, registered, asked by MLflow."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CONFIGS = Path(__file__).parents[2] / "configs"
ASK = """
import json, sys, logging; logging.disable(50)
import mlflow, pandas as pd
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pyfunc.load_model("models:/orders@champion")
words = ["My", "name", "is", "Grace", "Stone", ",", "I", "live", "in", "Den", "Haag", "."]
long = ["please"] * 60
found = model.predict(pd.DataFrame({"words": [words, long]}))
print(json.dumps([list(found.tags.iloc[0]), [float(p) for p in found.probabilities.iloc[0]], list(found.tags.iloc[1])]))
"""


@pytest.mark.slow
def test_messages_are_tagged_and_a_shorter_training_is_no_better(cli, registry):
    first = cli.json("run", CONFIGS / "orders.yaml")
    assert first["gate"]["promoted"]
    assert first["metrics"]["entity_f1"] > 0.85
    assert first["metrics"]["token_accuracy"] > 0.95
    card = Path(first["card"]).read_text()
    assert "Entity f1" in card
    assert "Confusion matrix" in card
    again = cli.json(
        "run", CONFIGS / "orders.yaml", "--set", "train.epochs=1", "--set", "evaluate.floor={}"
    )
    assert not again["gate"]["promoted"]
    assert again["gate"]["comparison"]["metric"] == "entity_f1"
    assert again["gate"]["comparison"]["upper"] < 0
    assert registry("orders")["aliases"] == {"champion": "1", "challenger": "2"}

    uri = f"sqlite:///{cli.folder / '.rekindle' / 'mlflow.db'}"
    done = subprocess.run(
        [sys.executable, "-c", ASK, uri], capture_output=True, text=True, check=True
    )
    tags, probabilities, long = json.loads(done.stdout.splitlines()[-1])
    expected = ["O", "O", "O", "B-PERSON", "I-PERSON", "O", "O", "O", "O", "B-CITY", "I-CITY", "O"]
    assert sum(a == b for a, b in zip(tags, expected, strict=True)) >= 11, tags
    assert all(0.2 < p <= 1 for p in probabilities)
    assert long.count("O") > 40
    assert long[46:] == [None] * 14, "behind data.max_length"


@pytest.mark.slow
def test_a_champion_of_other_tags_is_not_compared(cli):
    short = ["--set", "train.epochs=1", "--set", "evaluate.floor={}", "--home", "other"]
    cli.json("run", CONFIGS / "orders.yaml", *short, "--set", "evaluate.gate.metric=token_accuracy")
    words = (CONFIGS / "data/orders.jsonl").read_text().replace("-DAY", "-DATE")
    (cli.folder / "dates.jsonl").write_text(words)
    result = cli.json(
        "run", CONFIGS / "orders.yaml", *short, "--set", f"data.source={cli.folder / 'dates.jsonl'}"
    )
    assert not result["gate"]["promoted"]
    assert "the champion knows the classes" in result["gate"]["reason"]


@pytest.mark.slow
def test_what_a_config_of_tags_cannot_mean_is_refused_early(cli):
    for setting, said in {
        "evaluate.gate.metric=accuracy": "token_classification has no accuracy",
        "data.columns.messages=chat": "`messages` is used only by causal_lm",
        "train.layout={tp: 2}": "is refused: no test has trained tp here",
    }.items():
        refused = cli("run", CONFIGS / "orders.yaml", "--home", "refused", "--set", setting, code=2)
        assert said in refused.stderr, refused.stderr
    assert not (cli.folder / "refused" / "runs").exists()
