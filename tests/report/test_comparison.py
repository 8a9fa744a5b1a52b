"""Runs side by side: what differs is listed, models are compared as the gate does it, and what cannot be compared is said."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rekindle
from rekindle.evaluate.compare import compare
from rekindle.evaluate.evaluate import evaluate
from rekindle.outputs import Compared
from rekindle.records import Contender, RunRecord, Scores, StepRecord
from rekindle.report import comparison
from rekindle.report.ledger import ledger
from rekindle.spec.model import DataSpec, EvaluateSpec, GateSpec
from tests.report.homes import Home, fingerprint, manifest, spec
from tests.support import cli as in_process

LABELS = ("bad", "good")
ROWS = 200


@dataclasses.dataclass
class Model:
    """What a model answers: right for that share of the rows, which a seed picks."""

    right: float
    seed: int = 0
    rows: int = ROWS


def run(
    home: Home, run_id: str, model: Model, tokens: int = 0, audit: float = 0.0, **settings: object
) -> RunRecord:
    """A run whose steps left their records as real ones do."""
    random = np.random.default_rng(5)
    truth = random.integers(0, 2, model.rows)
    answers = np.where(
        np.random.default_rng(model.seed).random(model.rows) < model.right, truth, 1 - truth
    )
    folder = home.root / "runs" / run_id / "artifacts" / "score"
    hashes = [hashlib.sha256(f"{model.rows}-{i}".encode()).digest()[:16] for i in range(model.rows)]
    record = Scores(
        objective="tokens" if tokens else "classes",
        candidate=Contender(
            run_key=run_id,
            digest="d",
            scores="s",
            precision="fp32",
            labels=() if tokens else LABELS,
            unigram_nats=9.0 if tokens else None,
        ),
        rows=model.rows,
        excluded=0,
        examples=hashlib.sha256(b"".join(hashes)).hexdigest(),
    )
    scored = home.artifact(run_id, "score", "scores", record)
    logits = [{"logits": [4.0, 0.0] if answer == 0 else [0.0, 4.0]} for answer in answers]
    if tokens:
        logits = [
            {"nats": 1.0 + answer, "right": 1, "targets": tokens, "target_bytes": 9}
            for answer in answers
        ]
    table = pa.table({"label": [LABELS[i] for i in truth], "candidate": logits, "hash": hashes})
    pq.write_table(table, folder / "scores.parquet")
    evidence = evaluate(EvaluateSpec(audit=audit), DataSpec(source="-"), folder)
    found = {"score": scored, "evaluate": home.artifact(run_id, "evaluate", "evidence", evidence)}
    found["fingerprint"] = home.artifact(run_id, "fingerprint", "fingerprint", fingerprint("x.csv"))
    rows = {"train": 1000, "validation": 100, "test": model.rows}
    found["shard"] = home.artifact(
        run_id, "shard", "shards", manifest("text_classification", "x.csv", LABELS, rows)
    )
    given = spec("tickets", "text_classification", "x.csv")
    given["train"] = {**given["train"], **settings}
    given["evaluate"] = {**given.get("evaluate", {}), "audit": audit}
    steps = tuple(
        StepRecord(name=name, status="succeeded", seconds=1.0, artifacts={"output": a})
        for name, a in found.items()
    )
    return home.run(
        run_id=run_id,
        name="tickets",
        status="succeeded",
        started_at="2026-11-21T09:08:00Z",
        seconds=30.0,
        spec=given,
        steps=steps,
    )


def cli(home: Path, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    asked = ("compare", *words, "--home", home)
    done = in_process.rekindle(*asked, env={"NO_COLOR": "1"}, check=False)
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    built = Home(folder)
    run(built, "tickets-1", Model(0.7))
    run(built, "tickets-2", Model(0.95, seed=1), epochs=20, lr=0.001)
    run(built, "tickets-3", Model(0.9, seed=2, rows=150))
    bare = run(built, "tickets-4", Model(0.7))
    (folder / "runs/tickets-4/artifacts/score/scores.parquet").unlink()
    bare.write(folder / "runs/tickets-4/run.json")
    return folder


def test_models_are_compared_as_the_gate_compares_them(home):
    found = rekindle.compare("tickets-1", "tickets-2", home=home).found
    assert found.notes == ()
    scores = [_scores(home, name) for name in ("tickets-1", "tickets-2")]
    expected = compare(GateSpec(), "accuracy", scores[1], scores[0])
    metrics = {metric.name: metric for metric in found.metrics}
    assert metrics["accuracy"].changes == (None, expected)
    assert expected.lower > 0.1
    loss = metrics["log_loss"]
    assert loss.values[1] < loss.values[0]
    assert loss.changes[1].estimate > 0, "more is better, whatever the metric"


def test_rows_that_decide_nothing_do_not_decide_which_model_is_better(tmp_path):
    built = Home(tmp_path)
    run(built, "a", Model(0.7), audit=0.4)
    run(built, "b", Model(0.9, seed=1), audit=0.4)
    run(built, "c", Model(0.9, seed=1))
    found = rekindle.compare("a", "b", home=tmp_path).found
    accuracy = next(metric for metric in found.metrics if metric.name == "accuracy")
    before, now = accuracy.values
    assert accuracy.changes[1].estimate == pytest.approx(now - before)
    assert found.notes == ()
    listed = {entry.run_id: entry.summary["audit"] for entry in ledger(tmp_path).entries}
    assert 0 < listed["a"]["rows"] < ROWS / 2
    assert listed["a"]["metrics"]["accuracy"] == pytest.approx(0.7, abs=0.15)
    assert listed["c"] is None
    other = rekindle.compare("a", "c", home=tmp_path).found
    assert other.notes == ("c was judged on other examples than a.",)


def test_answers_that_change_are_counted(home):
    found = rekindle.compare("tickets-1", "tickets-2", home=home).found
    truth = np.random.default_rng(5).integers(0, 2, ROWS)
    before, after = (
        scores.answers()[0] for scores in (_scores(home, f"tickets-{n}") for n in (1, 2))
    )
    expected = {
        "churn": (before != after).mean(),
        "churn_fixed": ((before != truth) & (after == truth)).sum(),
        "churn_broken": ((before == truth) & (after != truth)).sum(),
    }
    metrics = {metric.name: metric.values for metric in found.metrics}
    assert {name: metrics[name] for name in expected} == {
        name: (None, pytest.approx(value)) for name, value in expected.items()
    }
    assert "churn_broken" in cli(home, "tickets-1", "tickets-2").stdout
    others = rekindle.compare("tickets-1", "tickets-3", home=home).found
    assert not [metric for metric in others.metrics if "churn" in metric.name]


def _scores(home, name):
    from rekindle.evaluate.evaluate import candidate_scores

    return candidate_scores(home / "runs" / name / "artifacts" / "score", 0.0, "")[0]


def test_only_what_differs_in_the_configs_is_listed(home):
    found = rekindle.compare("tickets-1", "tickets-2", home=home).found
    assert {fact.name: fact.values for fact in found.settings} == {
        "train.epochs": (12, 20),
        "train.lr": (0.003, 0.001),
    }
    assert found.data == ()


def test_models_judged_on_other_rows_are_not_compared_and_that_is_said(home):
    found = rekindle.compare("tickets-1", "tickets-3", home=home).found
    assert found.notes == ("tickets-3 was judged on other examples than tickets-1.",)
    assert all(change is None for metric in found.metrics for change in metric.changes)
    assert [metric.values[1] for metric in found.metrics if metric.name == "accuracy"] == [
        pytest.approx(0.9, abs=0.08)
    ]
    assert {fact.name for fact in found.data} == {"test rows", "examples"}


def test_the_same_rows_with_other_labels_are_not_compared(tmp_path):
    built = Home(tmp_path)
    run(built, "a", Model(0.7))
    run(built, "b", Model(0.95, seed=1))
    path = tmp_path / "runs/b/artifacts/score/scores.parquet"
    rows = pq.read_table(path)
    labels = rows["label"].to_pylist()
    other = ["good" if labels[0] == "bad" else "bad", *labels[1:]]
    pq.write_table(rows.set_column(0, "label", [other]), path)
    found = rekindle.compare("a", "b", home=tmp_path).found
    assert found.notes == ("b was judged on other labels or classes than a.",)
    assert all(change is None for metric in found.metrics for change in metric.changes)


def test_language_models_with_other_tokens_are_compared_in_bits_per_byte_only(tmp_path):
    built = Home(tmp_path)
    for name, targets in (("a", 10), ("b", 4), ("c", 10)):
        run(built, name, Model(0.7), tokens=targets)
    found = rekindle.compare("a", "b", "c", home=tmp_path).found
    assert found.notes == (
        "b was judged on other tokens than a; only bits_per_byte compares them.",
    )
    changes = {metric.name: metric.changes for metric in found.metrics}
    assert [name for name, of in changes.items() if of[1] is not None] == ["bits_per_byte"]
    assert all(of[2] is not None for of in changes.values())


def test_what_a_training_took_is_told_from_one_of_the_cache_and_from_none(tmp_path):
    built = Home(tmp_path)
    for name, status, cached in (
        ("a", "succeeded", False),
        ("b", "succeeded", True),
        ("c", "pending", False),
    ):
        built.run(
            run_id=name,
            name="x",
            status="failed",
            started_at="2026-11-21T09:08:00Z",
            spec={},
            steps=(StepRecord(name="finetune", status=status, seconds=7.0, cached=cached),),
        )
    found = rekindle.compare("a", "b", "c", home=tmp_path).found
    assert [one.training_seconds for one in found.runs] == [7.0, 0.0, None]
    (line,) = [text for text in comparison.lines(found) if text.startswith("training")]
    assert re.split(" {2,}", line) == ["training", "7.0 s", "from the cache", "–"]


def test_scores_that_are_gone_cost_the_interval_and_nothing_else(home):
    found = rekindle.compare("tickets-1", "tickets-4", home=home).found
    assert len(found.notes) == 1
    assert "the scores of tickets-4 cannot be read" in found.notes[0]
    assert all(value is not None for metric in found.metrics for value in metric.values)


def test_the_terminal_shows_tables_that_cut_nothing(home):
    shown = cli(home, "tickets-1", "tickets-2", "tickets-3").stdout
    lines = shown.splitlines()
    assert lines[0].split() == ["run", "tickets-1", "tickets-2", "tickets-3"]
    assert any(line.split()[:1] == ["accuracy"] for line in lines)
    assert any("] worse" in line or "] better" in line for line in lines), (
        "what is certain is marked"
    )
    assert any(line.split() == ["train.lr", "0.003", "0.001", "0.003"] for line in lines)
    assert lines[-1] == "note: tickets-3 was judged on other examples than tickets-1."


def test_json_is_the_whole_comparison_and_the_page_holds_it_with_both_curves(home, tmp_path):
    page = tmp_path / "sub" / "c.html"
    done = cli(home, "tickets-1", "tickets-2", "--json", "--html", str(page))
    found = Compared.model_validate_json(done.stdout)
    assert found == rekindle.compare("tickets-1", "tickets-2", home=home).found
    text = page.read_text(encoding="utf-8")
    assert "2 runs compared" in text
    assert "train.lr" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tickets-1"], "1 run cannot be compared"),
        (["tickets-1", "tickets-1"], "`tickets-1` is named twice"),
        (["tickets-1", "nothing"], "there is no run `nothing`"),
        (["tickets", "tickets-1"], "`tickets` matches 4 runs, the newest first:"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(home, words, said):
    assert said in cli(home, *words, code=2).stderr


def test_a_notebook_shows_what_differs(home, monkeypatch):
    monkeypatch.setenv("REKINDLE_HOME", str(home))  # as the commands do
    runs = rekindle.runs()
    assert [run.id for run in runs] == [run.id for run in rekindle.runs(home=home)] != []
    compared = rekindle.compare(*runs[:2], home=home)
    assert "train.epochs" in repr(compared)
    assert "<pre>" in compared._repr_html_()


def test_runs_without_any_record_are_still_side_by_side(tmp_path):
    home = Home(tmp_path)
    for name in ("a", "b"):
        home.run(
            run_id=name,
            name="x",
            status="failed",
            started_at="2026-11-21T09:08:00Z",
            spec={"pipeline": name},
        )
    found = rekindle.compare("a", "b", home=tmp_path).found
    assert found.metrics == ()
    assert found.notes == ("a was not evaluated.",)
    assert "no run was evaluated" in repr(rekindle.compare("a", "b", home=tmp_path))
    assert json.loads(cli(tmp_path, "a", "b", "--json").stdout)["settings"] == [
        {"name": "pipeline", "values": ["a", "b"]}
    ]
