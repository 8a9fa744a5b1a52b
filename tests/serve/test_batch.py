"""`rekindle predict`: a file in, predictions with ids out, in parts that survive a kill -9."""

import base64
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest

from rekindle.records import Evidence
from rekindle.serve import batch
from rekindle.spec.load import load_target
from rekindle.spec.model import DataSpec, RegisterSpec
from tests.serve import models

pytestmark = pytest.mark.slow

CONFIG = """
name: tickets
task: text_classification
data: {source: train.jsonl, columns: {text: body, key: id}, max_length: 32}
model: {source: {model_type: distilbert}, tokenizer: {vocab_size: 200}}
train: {lr: 1e-3}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("batch")
    (folder / "tickets.yaml").write_text(CONFIG)
    models.champion(folder / "home", models.made(folder / "made", "text"))
    rows = [
        {"id": f"t{i}", "body": models.TEXTS[i % 8] + " again" * (i % 5)} for i in range(20_500)
    ]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:8]))
    return folder


def words(place, source, output, *more):
    return [
        sys.executable,
        "-m",
        "rekindle.cli.main",
        "predict",
        "tickets.yaml",
        "--home",
        "home",
        "--input",
        source,
        "--output",
        output,
        *more,
    ]


def predict(place, source, output, *more, code=0):
    done = subprocess.run(
        words(place, source, output, *more),
        cwd=place,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_each_row_gets_its_prediction_under_its_id(place):
    told = json.loads(predict(place, "few.jsonl", "few.parquet", "--json").stdout)
    assert (told["rows"], told["parts"], told["version"]) == (8, 1, "1")
    table = pq.read_table(place / "few.parquet")
    rows = Evidence.read(place / "made" / "evidence.json").smoke.rows
    assert table.column("id").to_pylist() == [f"t{i}" for i in range(8)]
    assert table.column("label").to_pylist()[0] == rows[0].answer["label"]
    assert table.column("probability").to_pylist()[0] == pytest.approx(
        rows[0].answer["probability"], abs=1e-5
    )
    predict(place, "few.jsonl", "few.jsonl.out.jsonl")
    lines = (place / "few.jsonl.out.jsonl" / "part-00000.jsonl").read_text().splitlines()
    assert [json.loads(line)["label"] for line in lines] == table.column("label").to_pylist()


def test_a_killed_command_goes_on_and_ends_with_the_same_bytes(place):
    whole = place / "whole.parquet"
    predict(place, "in.jsonl", whole.name)
    parts = sorted(path.name for path in whole.glob("part-*"))
    assert len(parts) == 21
    begun = place / "begun.parquet"
    process = subprocess.Popen(
        words(place, "in.jsonl", begun.name),
        cwd=place,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    give_up = time.monotonic() + 120
    while len(list(begun.glob("part-*.parquet"))) < 3:
        assert process.poll() is None
        assert time.monotonic() < give_up
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    left = {path.name: path.stat().st_mtime_ns for path in begun.glob("part-*.parquet")}
    assert 3 <= len(left) < 21
    assert not (begun / "_predictions.json").exists()
    told = json.loads(predict(place, "in.jsonl", begun.name, "--json").stdout)
    assert (told["rows"], told["parts"], told["parts_before"]) == (20_500, 21, len(left))
    assert {name: (begun / name).stat().st_mtime_ns for name in left} == left
    assert [(begun / n).read_bytes() for n in parts] == [(whole / n).read_bytes() for n in parts]
    assert pq.read_table(begun).num_rows == 20_500


def test_a_folder_of_images_needs_no_classes(tmp_path):
    models.champion(tmp_path / "home", models.made(tmp_path / "made", "image"))
    config = CONFIG.replace("text_classification", "image_classification").replace(", key: id", "")
    lines = [line for line in config.splitlines() if not line.startswith("model")]
    (tmp_path / "tickets.yaml").write_text("\n".join(lines) + "\n")
    (tmp_path / "new").mkdir()
    for i, (content, _) in enumerate(models.contents("image")):
        (tmp_path / "new" / f"{i}.png").write_bytes(base64.b64decode(content))
    predict(tmp_path, "new", "out.parquet")
    found = pq.read_table(tmp_path / "out.parquet")
    rows = Evidence.read(tmp_path / "made" / "evidence.json").smoke.rows
    assert found.column("id").to_pylist() == [f"{i}.png" for i in range(6)]
    assert found.column("label").to_pylist() == [row.answer["label"] for row in rows]
    names = [json.dumps({"image": f"new/{i}.png"}) + "\n" for i in range(6)]
    (tmp_path / "names.jsonl").write_text("".join(names))
    predict(tmp_path, "names.jsonl", "named.parquet")
    named = pq.read_table(tmp_path / "named.parquet")
    assert named.column("label").equals(found.column("label"))


def test_an_output_of_something_else_is_left_alone(place):
    predict(place, "few.jsonl", "mine.parquet")
    before = {path.name: path.read_bytes() for path in (place / "mine.parquet").iterdir()}
    done = predict(place, "in.jsonl", "mine.parquet", code=2)
    assert "mine.parquet holds predictions of another input, model or config" in done.stderr
    assert {path.name: path.read_bytes() for path in (place / "mine.parquet").iterdir()} == before


def test_predictions_of_a_config_that_was_corrected_are_not_taken_for_those_of_it_now(place):
    predict(place, "few.jsonl", "coded.jsonl")
    config = (place / "tickets.yaml").read_text()
    try:
        (place / "tickets.yaml").write_text(
            config.replace("source: train", "encoding: cp1252, source: train")
        )
        done = predict(place, "few.jsonl", "coded.jsonl", code=2)
        assert "holds predictions of another input, model or config" in done.stderr
        (place / "tickets.yaml").write_text(config.replace(", key: id", ""))
        (place / "renamed.jsonl").write_bytes((place / "few.jsonl").read_bytes())
        predict(place, "few.jsonl", "named.jsonl")
        done = predict(place, "renamed.jsonl", "named.jsonl", code=2)
        assert "holds predictions of another input, model or config" in done.stderr
    finally:
        (place / "tickets.yaml").write_text(config)


@pytest.mark.parametrize(
    ("lines", "code", "said"),
    [
        (['{"id": null, "body": "a"}'], 1, "key"),
        (['{"id": 1, "text": "a"}'], 1, "there is no column `body`"),
        (
            ['{"id": 1, "body": "a"}', '{"id": 2, "body": " "}'],
            1,
            "bad.jsonl:2, `body`: a text that is not empty is needed",
        ),
        (['{"id": 1, "body": "a"}', "{"], 1, "1 row that cannot be parsed"),
    ],
    ids=["key", "column", "blank", "half"],
)
def test_rows_that_cannot_be_read_are_named(place, lines, code, said):
    (place / "bad.jsonl").write_text("\n".join(lines) + "\n")
    output = f"bad{abs(hash(said))}.jsonl"
    done = predict(place, "bad.jsonl", output, code=code)
    assert said in done.stderr
    assert not list((place / output).glob("part-*"))
    (place / "bad.jsonl").write_text(
        '{"id": 1, "body": "a"}\n'
    )  # corrected, the same command goes on
    predict(place, "bad.jsonl", output)


def test_what_is_no_output_and_what_is_no_home_are_wrong_requests(place, tmp_path):
    assert "end it with .parquet or .jsonl" in predict(place, "few.jsonl", "out.csv", code=2).stderr
    done = predict(place, "nowhere.jsonl", "x.jsonl", code=1)
    assert "nowhere.jsonl names no file\n  where: --input\n" in done.stderr
    assert not (place / "x.jsonl").exists()
    done = predict(place, "few.jsonl", "x.jsonl", "--home", str(tmp_path), code=2)
    assert "there is no registry" in done.stderr
    assert not (tmp_path / "mlflow.db").exists()


def test_files_that_are_not_those_that_were_registered_are_not_loaded(place, tmp_path):
    (tmp_path / "tickets.yaml").write_text(CONFIG)
    models.champion(tmp_path / "home", models.made(tmp_path / "made", "text"))
    (weights,) = (tmp_path / "home" / "mlartifacts").rglob("model.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    batch = ["predict", "tickets.yaml", "--input", str(place / "few.jsonl"), "--output", "y.jsonl"]
    for verb in (["serve", "tickets.yaml", "--port", "0"], batch):
        done = subprocess.run(
            [sys.executable, "-m", "rekindle.cli.main", *verb, "--home", "home"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 2, done.stdout + done.stderr
        assert "are not those that were registered" in done.stderr
    assert not (tmp_path / "y.jsonl").exists()


def test_a_step_of_a_pipeline_predicts_and_goes_on(place):
    """The component, by `rekindle run` of a pipeline that has nothing else."""
    (place / "nightly.py").write_text("""
from kfp import dsl
from components.batch_predict import batch_predict


@dsl.component(base_image="python:3.11")
def told(rows: int, version: str):
    print(f"{rows} rows of version {version}")


@dsl.pipeline(name="nightly")
def nightly(data: str, register: str, root: str, source: str, output: str):
    done = batch_predict(
        name="tickets", task="text_classification", data=data, register=register, artifact_root=root,
        source=source, output=output,
    )
    done.set_caching_options(False)
    told(rows=done.outputs["rows"], version=done.outputs["version"])
""")
    spec = load_target(place / "tickets.yaml")
    arguments = {
        "data": spec.data.model_dump_json(),
        "register": RegisterSpec().model_dump_json(),
        "root": str(place / "home"),
        "source": str(place / "few.jsonl"),
        "output": str(place / "step.parquet"),
    }
    config = {"name": "nightly", "pipeline": "nightly.py:nightly", "arguments": arguments}
    (place / "nightly.yaml").write_text(json.dumps(config))
    for _ in range(2):
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "rekindle.cli.main",
                "run",
                "nightly.yaml",
                "--home",
                "runs",
                "--json",
            ],
            cwd=place,
            capture_output=True,
            text=True,
            timeout=240,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert pq.read_table(place / "step.parquet").column("id").to_pylist() == [
            f"t{i}" for i in range(8)
        ]
    logs = "".join(path.read_text() for path in (place / "runs").rglob("log.txt"))
    assert "8 rows of version 1" in logs


def test_chats_that_were_trained_on_are_answered_anew(tmp_path):
    model = models.made(tmp_path / "made", "chat")
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    asked = [[{"role": role, "content": text} for role, text in chat[:1]] for chat in models.CHATS]
    ended = [[*turns, {"role": "assistant", "content": "x"}] for turns in asked]
    shared = [[{"from": names[t["role"]], "value": t["content"]} for t in turns] for turns in ended]
    data = DataSpec.model_validate({"source": "x", "columns": {"messages": "messages"}})
    written = []
    for number, chats in enumerate((asked, ended, shared)):
        path, output = tmp_path / f"{number}.jsonl", tmp_path / f"{number}-out.jsonl"
        path.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in chats))
        batch.predict(models.again(model), data, str(path), str(output), lambda *_: None)
        lines = (output / "part-00000.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        written.append([row["text"] for row in rows])
    assert written[0] == written[1] == written[2]


def test_an_input_below_the_instruction_is_part_of_the_prompt(tmp_path):
    made = models.made(tmp_path / "made", "text-lm")
    told = json.loads((tmp_path / "made/model/rekindle.json").read_text())
    told["settings"]["form"] = "completion"
    (tmp_path / "made/model/rekindle.json").write_text(json.dumps(told))
    instructions = [
        {"instruction": text[:9], "input": ["", text[9:15]][i % 2], "output": "x"}
        for i, text in enumerate(models.TEXTS)
    ]
    prompts = [
        {"prompt": row["instruction"] + f"\n\n{row['input']}" * bool(row["input"])}
        for row in instructions
    ]
    written = {}
    for name, rows, columns in (
        (
            "alpaca",
            instructions,
            {"prompt": "instruction", "input": "input", "completion": "output"},
        ),
        ("plain", prompts, {"prompt": "prompt", "completion": "answer"}),
    ):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = DataSpec.model_validate({"source": "x", "columns": columns})
        served = dataclasses.replace(models.again(made), columns=data.columns)
        output = tmp_path / f"{name}-out.jsonl"
        batch.predict(served, data, str(path), str(output), lambda *_: None)
        lines = (output / "part-00000.jsonl").read_text().splitlines()
        written[name] = [json.loads(line)["text"] for line in lines]
    assert written["alpaca"] == written["plain"]
    assert len(written["plain"]) == len(models.TEXTS)
