"""A data set as programs and people leave it: a whole run drops what is bad, and each count is on the card and in the evidence."""

import csv
import io
import json
from pathlib import Path

import pytest

CONFIG = """
name: messy
task: text_classification
data:
  source: exports/*.csv
  columns: {text: body, label: team, key: id, group: customer}
  labels: [billing, delivery, returns]
  delimiter: ";"
  encoding: cp1252
  on_bad_rows: drop
  max_bad_rows: 0.02
  duplicates: folded
  split: {train: 0.6, validation: 0.2, test: 0.2}
  max_length: 32
model:
  source: {model_type: distilbert, dim: 16, n_layers: 1, n_heads: 2, hidden_dim: 32, max_position_embeddings: 32}
  tokenizer: {vocab_size: 300}
train: {epochs: 1, global_batch_size: 32, lr: 1e-3}
evaluate: {floor: {}}
platforms: {local: {ranks: 1}}
"""
TEAMS = ["billing", "delivery", "returns"]


def exports(folder):
    """1,200 rows in three files of CRLF lines: texts of two lines with quotes, delimiters and umlauts; 12 bad rows, 30 copies."""
    rows = [
        {
            "id": f"t{i}",
            "customer": f"c{i % 90}",
            "team": TEAMS[i % 3],
            "body": f'Straße {i}: "{TEAMS[i % 3]}"; – grüße\nzweite Zeile {i % 50} für {i}',
        }
        for i in range(1_200)
    ]
    for i in range(30):  # in capitals, of another customer
        rows[800 + i]["body"] = "  " + rows[i]["body"].replace("Straße", "STRASSE").upper()
    for i in (100, 200, 300, 400):
        rows[i]["body"] = " \t"
    for i in (500, 600, 700):
        rows[i]["team"] = ""
    rows[900]["team"] = "Billing"
    rows[1_000]["body"] = "\udc81 is no letter of cp1252"
    rows[1_100] |= {"body": "", "team": ""}
    for number in range(3):
        text = io.StringIO(newline="")
        table = csv.DictWriter(text, ["id", "customer", "body", "team"], delimiter=";")
        table.writeheader()
        table.writerows(rows[number * 400 : (number + 1) * 400])
        content = text.getvalue() + ("t;c;one;too;many\r\n" if number < 2 else "")
        (folder / f"{number}.csv").write_bytes(content.encode("cp1252", "surrogateescape"))


@pytest.mark.slow
def test_each_count_is_on_the_card_and_in_the_evidence(cli):
    (cli.folder / "exports").mkdir()
    exports(cli.folder / "exports")
    (cli.folder / "c.yaml").write_text(CONFIG)
    cli("doctor", "c.yaml")
    cli(
        "doctor",
        "c.yaml",
        "--set",
        "data.on_bad_rows=refuse",
        "--set",
        "data.max_bad_rows=0.01",
        code=2,
    )
    result = cli.json("run", "c.yaml")
    (bad_rows,) = cli.folder.rglob("artifacts/*ingest*/*/examples/bad_rows.jsonl")
    counts = {
        "malformed": 2,
        "undecodable": 1,
        "empty text": 5,
        "empty label": 4,
        "unknown label": 1,
    }
    listed = [json.loads(line) for line in bad_rows.read_text().splitlines()]
    assert [row["kind"] for row in listed] == [kind for kind, n in counts.items() for _ in range(n)]
    summary = json.loads((bad_rows.parent / "summary.json").read_text())
    (manifest,) = cli.folder.rglob("artifacts/*shard*/*/shards/manifest.json")
    (evidence,) = cli.folder.rglob("artifacts/*evaluate*/*/evidence")
    for path in (bad_rows.parent / "summary.json", manifest, evidence):
        assert json.loads(path.read_text())["bad_rows"] == counts
    assert summary["left_out"] == {"duplicate": 30}
    assert sum(summary["rows"].values()) == 1_200 + 2 - (13 - 1) - 30
    card = Path(result["card"]).read_text()
    for kind, count in {**counts, "duplicate": 30}.items():
        assert f"<dt>Left out: {kind}</dt><dd>{count} rows</dd>" in card
