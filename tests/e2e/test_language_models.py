"""Language models from one YAML: the shipped chat and the reviews as plain text, trained, judged and
registered."""

import json
from pathlib import Path

import pytest

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.slow
def test_the_assistant_learns_its_answers_and_an_equal_one_is_refused(cli, registry):
    first = cli.json("run", CONFIGS / "chat.yaml", "--home", "chat")
    assert first["gate"]["promoted"]
    assert first["metrics"]["perplexity"] < 1.5
    assert first["metrics"]["token_accuracy"] > 0.9
    card = Path(first["card"]).read_text()
    assert "What it writes" in card
    assert "Confusion" not in card
    again = cli.json("run", CONFIGS / "chat.yaml", "--home", "chat", "--set", "train.epochs=2")
    assert not again["gate"]["promoted"]
    assert again["gate"]["comparison"]["metric"] == "log_loss"
    assert registry("chat", "chat")["aliases"] == {"champion": "1", "challenger": "2"}
    (evidence, *_) = Path(cli.folder / "chat").rglob("artifacts/*evaluate*/*/evidence")
    assert json.loads(evidence.read_text())["samples"]


@pytest.mark.slow
def test_plain_texts_beat_the_frequency_of_their_tokens(cli):
    result = cli.json("run", CONFIGS / "reviews-lm.yaml", "--home", "texts")
    assert result["metrics"]["log_loss"] < 5.4
    assert result["gate"]["promoted"]


@pytest.mark.slow
def test_a_layout_composed_of_proven_pairs_is_checked_or_refused_before_it_trains(cli):
    composed = [
        "platforms.local.ranks=2",
        "train.layout={pp: 2, schedule: interleaved}",
        "train.precision=bf16",
        "model.source.num_hidden_layers=4",
        "train.steps=4",
        "train.epochs=null",
        "evaluate.floor={}",
    ]
    words = [word for setting in composed for word in ("--set", setting)]
    checked = cli.json("run", CONFIGS / "chat.yaml", "--home", "composed", *words)
    (log,) = (cli.folder / "composed" / "runs" / checked["run_id"] / "steps" / "finetune").glob(
        "log.txt"
    )
    assert "two steps of a small network agree with one rank's" in log.read_text()
    refused = cli(
        "run",
        CONFIGS / "chat.yaml",
        "--home",
        "refused",
        *words,
        "--set",
        "train.untested=refuse",
        code=2,
    )
    assert "is refused: no test has trained all of it" in refused.stderr
