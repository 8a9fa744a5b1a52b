"""Rows that must pass, from the config to the registry: a run that misses one is refused, and nothing is trained again for them."""

import json
import random

import pytest

WORDS = {"good": ["great", "fine", "lovely", "superb"], "bad": ["awful", "poor", "broken", "ugly"]}
CONFIG = """\
name: words
task: text_classification
data: {source: rows.jsonl, columns: {text: body, label: verdict}}
model: {source: {model_type: distilbert, dim: 32, n_layers: 1, n_heads: 2, hidden_dim: 32}}
train: {epochs: 4, lr: 3e-3}
evaluate: {must_pass: golden.csv}
"""


@pytest.fixture(scope="module")
def rows(cli):
    """Forty rows that a model of the source can answer; the config and all 600 rows are written."""
    pick = random.Random(0)

    def row():
        label = pick.choice([*WORDS])
        words = [pick.choice([*WORDS[label], "the", "a", "it", "was"]) for _ in range(8)]
        return {"body": " ".join([*words, pick.choice(WORDS[label])]), "verdict": label}

    (cli.folder / "c.yaml").write_text(CONFIG)
    (cli.folder / "rows.jsonl").write_text("".join(json.dumps(row()) + "\n" for _ in range(600)))
    return [row() for _ in range(40)]


def write(cli, rows):
    lines = ["body,verdict", *(f"{row['body']},{row['verdict']}" for row in rows)]
    (cli.folder / "golden.csv").write_text("\n".join(lines) + "\n")


@pytest.mark.slow
def test_a_missed_row_refuses_and_the_corrected_file_promotes_the_same_model(cli, rows, registry):
    other = {"good": "bad", "bad": "good"}[rows[2]["verdict"]]
    write(cli, [*rows[:2], {**rows[2], "verdict": other}, *rows[3:]])
    refused = cli.json("run", "c.yaml")
    assert refused["metrics"]["accuracy"] == 1
    assert not refused["gate"]["promoted"]
    assert refused["gate"]["reason"] == (
        "1 of 40 rows that must pass do not: "
        f"row 3 expected `{other}`, predicted `{rows[2]['verdict']}`"
    )
    assert "rows that must pass" in (cli.folder / refused["card"]).read_text()
    cli("promote", refused["run_id"], "--reason", "it is fine", code=2)
    write(cli, rows)
    promoted = cli.json("run", "c.yaml")
    assert promoted["gate"]["promoted"], promoted["gate"]
    cached = {step["name"]: step["cached"] for step in promoted["steps"]}
    assert cached["finetune"]
    assert not cached["score"]
    assert registry("words")["versions"] == ["1"]
    assert registry("words")["aliases"] == {"champion": "1"}
