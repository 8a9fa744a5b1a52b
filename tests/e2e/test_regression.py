"""A number for each text, from one YAML: the shipped repairs, trained, judged by R², served, watched, asked by MLflow."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.ports import free_port
from tests.serve.servers import Running
from tests.support import cli as in_process

CONFIGS = Path(__file__).parents[2] / "configs"
CONFIG = CONFIGS / "repairs.yaml"
SHORT, LONG = (
    "check the saddle of my bike",
    "replace the fork and replace the dynamo of my cargo bike",
)
ASK = """
import json, sys, logging; logging.disable(50)
import mlflow, pandas as pd
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pyfunc.load_model("models:/repairs@champion")
print(model.metadata.signature.outputs.to_json())
print(json.dumps(model.predict(pd.DataFrame({"text": sys.argv[2:]})).value.tolist()))
"""


@pytest.mark.slow
def test_minutes_are_predicted_judged_served_and_watched(cli, registry):
    first = cli.json("run", CONFIG)
    assert first["gate"]["promoted"]
    assert first["metrics"]["r2"] > 0.85
    assert first["metrics"]["mae"] < first["metrics"]["rmse"] < 15
    card = Path(first["card"]).read_text()
    assert "Predicted and true numbers" in card
    assert "Validation accuracy" not in card
    assert "Confusion matrix" not in card
    weaker = cli.json(
        "run",
        CONFIG,
        "--set",
        "train.epochs=1",
        "--set",
        "evaluate.floor={}",
        "--set",
        "evaluate.audit=0.2",
    )
    assert not weaker["gate"]["promoted"]
    assert weaker["gate"]["comparison"]["metric"] == "r2"
    assert weaker["audit"]["rows"] > 20
    assert weaker["audit"]["champion_metrics"]["r2"] > weaker["audit"]["metrics"]["r2"]
    assert weaker["gate"]["comparison"]["upper"] < 0
    assert registry("repairs")["aliases"] == {"champion": "1", "challenger": "2"}

    (cli.folder / "in.jsonl").write_text(
        "".join(json.dumps({"id": text[:3], "text": text}) + "\n" for text in (SHORT, LONG))
    )
    cli("predict", CONFIG, "--input", "in.jsonl", "--output", "out.parquet")
    (part,) = (cli.folder / "out.parquet").glob("*.parquet")
    short, long = pq.read_table(part).column("value").to_pylist()
    assert short < 25
    assert long > 80

    home = cli.folder / ".rekindle"
    words = [sys.executable, "-c", ASK, f"sqlite:///{home / 'mlflow.db'}", SHORT, LONG]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    *_, columns, values = done.stdout.splitlines()
    assert [column["name"] for column in json.loads(columns)] == ["value"]
    assert json.loads(values) == pytest.approx([short, long], rel=1e-4)

    port = free_port()
    watched, labels = cli.folder / "watched.yaml", cli.folder / "late.jsonl"
    watched.write_text(f"extends: {CONFIG}\nmonitor: {{min_rows: 50, labels: {labels}}}\n")
    serve = [
        sys.executable,
        "-m",
        "rekindle.cli.main",
        "serve",
        "watched.yaml",
        "--port",
        str(port),
    ]
    server = Running(serve, port, cli.folder)
    try:
        server.ready()
        rows = [
            json.loads(line) for line in (CONFIGS / "data/repairs.jsonl").read_text().splitlines()
        ]
        asked = [{"id": row["id"], "text": row["text"]} for row in rows if "cargo" in row["text"]][
            :100
        ]
        answer = server.client.post(
            "/predict", json={"instances": [{"text": SHORT}, *asked]}
        ).json()
        assert answer["predictions"][0] == {"value": pytest.approx(short, rel=1e-4)}
        about = server.client.get("/v2/models/repairs").json()
        assert about["outputs"] == [{"name": "value", "datatype": "FP64", "shape": [-1]}]
    finally:
        server.process.terminate()
        server.process.wait(30)
    signals = {}
    for name, times in (("as ever", 1.0), ("slower", 1.8)):
        late = [
            {"id": row["id"], "minutes": times * row["minutes"], "shop": row["shop"]}
            for row in rows
        ]
        late += [{"id": late[0]["id"], "minutes": "soon"}, {"id": late[1]["id"], "minutes": 1e200}]
        labels.write_text("".join(json.dumps(row) + "\n" for row in late))
        table = cli.folder / "late.csv"
        table.write_text(
            "id,minutes,shop\n"
            + "".join(f"{row['id']},{row['minutes']},{row.get('shop', '')}\n" for row in late)
        )
        found = cli.json("monitor", watched, code=3)
        again = cli.json("monitor", watched, "--set", f"monitor.labels={table}", code=3)
        assert [one["now"] for one in again["signals"]] == [one["now"] for one in found["signals"]]
        signals[name] = {one["name"]: one for one in found["signals"]}
    value, right = signals["as ever"]["value"], signals["as ever"]["r2"]
    assert value["alarm"], "cargo bikes take twice as long"
    assert value["now"] > 1.2 * value["before"]
    assert not {"confidence", "prediction", "accuracy"} & signals["as ever"].keys()
    assert right["before"] == pytest.approx(first["metrics"]["r2"])
    assert right["now"] > 0.5
    assert right["rows"] >= 50
    wrong = signals["slower"]["r2"]
    assert wrong["alarm"]
    assert wrong["now"] < right["now"] - 0.3
    assert any(name.startswith("r2:shop=") for name in signals["slower"])


def test_what_a_config_of_numbers_cannot_mean_is_refused_early(tmp_path):
    for setting, said in {
        "evaluate.gate.metric=accuracy": "text_regression has no accuracy",
        "evaluate.floor={rmse: -1}": "it is never negative",
        "data.columns.target=": "repairs.jsonl holds the number to predict",
        "train.class_weights=balanced": "a regression has no classes",
        "train.sampling=balanced": "an example of text_regression has no class",
        "train.label_smoothing=0.1": "a regression has no classes",
        "evaluate.gate.max_churn=0.1": "a regression has no classes to predict",
        "deploy.precision=int8": "a regression has no classes",
        "deploy={shadow: 20, max_disagreement: 0.1}": "a regression has no classes",
        "evaluate.gate={metric: mae, mode: noninferiority}": "mae has the target's unit",
        "evaluate.floor={r2: 1.1}": "cannot be reached",
        "task=text_classification": "`target` is used only by text_regression",
        "data.columns.target=hours": "no column `hours`",
    }.items():
        words = ("run", CONFIG, "--home", tmp_path, "--set", setting)
        refused = in_process.rekindle(*words, check=False)
        assert refused.returncode == 2
        assert said in refused.stderr, (setting, refused.stderr)
    assert not (tmp_path / "runs").exists()
