"""Several values of a field make a grid: what one is, and a real one of 2 x 2 on digits."""

import json
import math
import subprocess
import sys

import pytest

from rekindle.app.grid import GridTraining, best_of, points
from rekindle.errors import RequestError, SpecError, StepError
from rekindle.records import RunRecord, TrainingSummary

REKINDLE = [sys.executable, "-m", "rekindle.cli.main"]
CONFIG = """
name: digits
task: image_classification
data: {source: "sklearn:digits"}
model: {source: {channels: [4], hidden: 8}}
train: {steps: 8, global_batch_size: 64}
platforms: {local: {ranks: 1}}
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG)
    return path


@pytest.mark.parametrize(
    ("overrides", "settings"),
    [
        (["train.lr=1e-3"], [()]),
        (["train.lr=1e-3,3e-3"], [("train.lr=1e-3",), ("train.lr=3e-3",)]),
        (["train.seed=0,1"], [("train.seed=0",), ("train.seed=1",)]),
        (["train.weight_decay=0,1e-2"], [("train.weight_decay=0",), ("train.weight_decay=1e-2",)]),
        (["train.weight_decay=[0, 1]"], [("train.weight_decay=0",), ("train.weight_decay=1",)]),
        (["train.epochs=2,4", "train.steps=null"], [("train.epochs=2",), ("train.epochs=4",)]),
        (["train.lr=[1e-3, 3e-3]"], [("train.lr=0.001",), ("train.lr=0.003",)]),
        (
            ["train.seed=1, 2", "train.steps=4", "train.lr=1e-3,3e-3"],
            [(f"train.seed={s}", f"train.lr={r}") for s in (1, 2) for r in ("1e-3", "3e-3")],
        ),
        # a field that takes a list, and one that takes any text, are no choices
        (["data.slices=[place]", "train.seed=1,2"], [("train.seed=1",), ("train.seed=2",)]),
        (["train.betas=[0.9, 0.95]", "train.seed=1,2"], [("train.seed=1",), ("train.seed=2",)]),
        (["resources.accelerator=H100,A100"], [()]),
        (
            ["train.layout=[{dp: 1}, {shard: 2}]"],
            [('train.layout={"dp": 1}',), ('train.layout={"shard": 2}',)],
        ),
    ],
)
def test_a_grid_has_a_training_for_each_combination(config, overrides, settings):
    found = points(config, overrides)
    assert [point.settings for point in found] == settings
    for point in found:
        assert all(setting in point.spec.origin[1] for setting in point.settings)


@pytest.mark.parametrize(
    ("override", "error", "says"),
    [
        ("train.lr=1e-3,fast", SpecError, "not 'fast'"),
        ("train.lr=1e-3,-1", SpecError, "train.lr"),
        (
            "train.lr=0,001",
            RequestError,
            r"`0,001` would be two trainings, with 0 and with 001\n(.*\n)*.*train.lr=\[0, 001\]",
        ),
        ("train.weight_decay=0,1", RequestError, "as 0.001"),
        ("train.steps=10,000", RequestError, "or 10000"),
        ("train.seed=" + ",".join(map(str, range(101))), RequestError, "a grid of 101"),
    ],
)
def test_a_grid_with_a_wrong_value_is_refused_whole(config, override, error, says):
    with pytest.raises(error, match=says):
        points(config, [override])


@pytest.mark.parametrize(
    "losses", [(math.nan, 0.5, 0.7), (0.5, math.nan, 0.7), (math.inf, 0.5, 0.5)]
)
def test_a_training_whose_loss_is_no_number_is_not_the_best(losses):
    trained = [
        GridTraining(None, None, TrainingSummary.model_construct(validation={"loss": x}))
        for x in losses
    ]
    assert best_of(trained) is trained[losses.index(0.5)]
    with pytest.raises(StepError, match="no training of the grid"):
        best_of([GridTraining(None, None, None)])


def run(config, *words):
    command = [*REKINDLE, "run", config.name, *words]
    return subprocess.run(command, cwd=config.parent, capture_output=True, text=True)


@pytest.mark.slow
def test_a_grid_of_a_pipeline_of_ones_own_is_refused_before_anything_runs(config):
    (config.parent / "p.py").write_text(
        "from kfp import dsl\n\n@dsl.component(base_image='python:3.11')\ndef f(x: int):\n    print(x)\n\n"
        "@dsl.pipeline\ndef p(x: int):\n    f(x=x)\n"
    )
    config.write_text("name: own\npipeline: p.py:p\narguments: {x: 1}\n")
    done = run(config, "--set", "train.seed=1,2")
    assert (done.returncode, (config.parent / ".rekindle").exists()) == (2, False)
    assert "a grid needs the shipped pipeline" in done.stderr


@pytest.mark.slow
def test_the_best_of_a_grid_is_judged_and_the_others_train_only(config):
    words = ("--set", "train.lr=1e-4,1e-2", "--set", "train.seed=1,2", "--json")
    done = run(config, *words)
    assert done.returncode == 0, done.stderr
    grid = json.loads(done.stdout)
    rows = grid["trainings"]
    assert len({tuple(row["settings"]) for row in rows}) == 4
    lowest = min(rows, key=lambda row: row["validation_loss"])
    assert "train.lr=1e-2" in lowest["settings"]
    runs = config.parent / ".rekindle/runs"
    records = {each["run_id"]: RunRecord.read(runs / each["run_id"] / "run.json") for each in rows}
    for number, record in enumerate(records.values()):
        assert list(record.settings) == rows[number]["settings"]
        assert [step.name for step in record.steps] == [
            "fingerprint",
            "ingest",
            "shard",
            "finetune",
        ]
        assert [step.cached for step in record.steps] == [False, number > 0, number > 0, False]
        assert (runs / record.run_id / "card.html").exists()
    best = grid["best"]
    steps = {step["name"]: step["cached"] for step in best["steps"]}
    assert steps["finetune"]
    assert not steps["evaluate"]
    assert best["model"]["version"] == "1"
    whole = RunRecord.read(runs / best["run_id"] / "run.json")
    assert lowest["run_id"] in whole.step("finetune").reason

    ends = (
        "--set",
        "train.lr=1e-2",
        "--set",
        "train.steps=2000",
        "--set",
        "train.max_hours=1e-9,1",
    )
    again = run(config, *ends)  # the first ends when it is looked at; the second goes on
    assert again.returncode == 0, again.stderr
    (failed,) = [
        line for line in again.stdout.splitlines() if "digits-2" in line and " failed " in line
    ]
    assert failed.split()[0] == "1e-9"
