"""Golden rows: a candidate has to predict each as it is labelled, by the code that predicts the test split, or it is refused."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from rekindle.data.examples import open_examples
from rekindle.data.ingest import ingest
from rekindle.data.manifest import open_shards
from rekindle.data.shard import shard
from rekindle.errors import DataError, RequestError
from rekindle.evaluate.evaluate import evaluate
from rekindle.objectives.classes.scores import ClassScores
from rekindle.objectives.tags.scores import TagScores
from rekindle.records import Scores
from rekindle.spec.model import DataSpec, EvaluateSpec, GoldenRows, ModelSpec, MustPass
from rekindle.tasks import load_task
from rekindle.train import score as step
from tests.data import dialogues, tagged
from tests.data.corpora import write_jsonl
from tests.evaluate.scoring import scored
from tests.support.evaluate_scores import model_of

BERT = {"model_type": "distilbert", "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16}
TEXTS = ModelSpec.model_validate({"source": BERT, "tokenizer": {"vocab_size": 300}})
PIXELS = ModelSpec.model_validate({"source": {"channels": [2, 2], "hidden": 4, "dropout": 0.0}})


def reviews(folder: Path) -> DataSpec:
    rows = [
        {"body": f"text {i} of {i * i}", "team": "abc"[i % 3], "product": "x"} for i in range(300)
    ]
    columns = {"text": "body", "label": "team"}
    source = write_jsonl(folder / "x.jsonl", rows)
    return DataSpec.model_validate(
        {"source": str(source), "columns": columns, "slices": ["product"]}
    )


def words(folder: Path) -> DataSpec:
    return tagged.source(folder, split={"train": 0.5, "validation": 0.2, "test": 0.3})


def images(folder: Path) -> DataSpec:
    random = np.random.default_rng(0)
    rows = [{"image": random.integers(0, 256, (8, 8)).tolist(), "label": i % 2} for i in range(120)]
    return DataSpec(source=str(write_jsonl(folder / "x.jsonl", rows)))


KINDS = {
    "text_classification": (reviews, TEXTS),
    "token_classification": (words, TEXTS),
    "image_classification": (images, PIXELS),
}


class World:
    """A source, an untrained model of it, and what is scored of that."""

    def __init__(self, root: Path, task: str, change=lambda network: None) -> None:
        self.root, make = root, KINDS[task][0]
        self.data = make(root)
        model = KINDS[task][1]
        ingest(self.data, load_task(task).modality, "", root / "examples")
        shard(root / "examples", self.data, model, task, root / "shards")
        self.model = model_of(task, model, open_shards(root / "shards"), root / "model", 0, change)
        self.lines = [json.loads(line) for line in (root / "x.jsonl").read_text().splitlines()]
        self.names = self.data.columns

    def golden(self, count: int = 12) -> list[dict[str, object]]:
        """Rows of the test split as the source has them, each labelled as the model answers it."""
        found = scored(self.root / "state", self.model, self.root / "examples")
        record, rows = Scores.read(found / "scores.json"), pq.read_table(found / "scores.parquet")
        kind = TagScores if record.objective == "tags" else ClassScores
        contender = record.candidate
        answers = [contender.labels[i] for i in kind.of(rows, "candidate", contender).answers()[0]]
        ids = [
            row
            for batch in open_examples(self.root / "examples", "test", "id")
            for row in batch.column(0).to_pylist()
        ]
        by_id = {str(row.get("id", f"x.jsonl:{i + 1}")): row for i, row in enumerate(self.lines)}
        chosen = [dict(by_id[one]) for one in ids[:count]]
        for row in chosen:
            row.pop("product", None)
            width = len(row["tokens"]) if "tokens" in row else 1
            mine, answers = answers[:width], answers[width:]
            row[self.names.label] = mine if "tokens" in row else mine[0]
        return chosen

    def predicted(self, words: list[str]) -> list[str]:
        """The tags of a text of its own, those of words that are cut off as the first one is."""
        rows = MustPass(
            rows=GoldenRows(
                format="jsonl", content=jsonl([{"tokens": words, "tags": ["O"] * len(words)}])
            ),
            data=self.data,
        )
        found = scored(self.root / "state", self.model, self.root / "examples", must_pass=rows)
        logits = pq.read_table(found / "must_pass.parquet").column("logits")[0].as_py()
        labels = Scores.read(found / "scores.json").candidate.labels
        return [labels[i] for i in np.array(logits).reshape(len(words), -1).argmax(1)]

    def judged(self, golden: str, kind: str = "jsonl", spec: GoldenRows | None = None):
        asked = GoldenRows(format=kind, content=golden)
        must_pass = MustPass(rows=asked, data=self.data)
        scores = scored(
            self.root / "state", self.model, self.root / "examples", must_pass=must_pass
        )
        found = evaluate(EvaluateSpec(must_pass=spec or asked), DataSpec(source="-"), scores)
        (check,) = [check for check in found.checks if check.name == "must_pass"]
        return found, check


def jsonl(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture(scope="module", params=KINDS)
def world(request, tmp_path_factory):
    return World(tmp_path_factory.mktemp("world"), request.param)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return World(tmp_path_factory.mktemp("texts"), "text_classification")


def test_rows_are_predicted_as_the_same_rows_of_the_test_split(world):
    rows, label = world.golden(), world.names.label
    found, check = world.judged(jsonl(rows))
    assert (check.passed, check.detail) == (True, "all 12 rows that must pass do")
    labels = sorted(
        {row for line in world.lines for row in np.ravel(line[label]).tolist()}, key=str
    )
    other = next(one for one in map(str, labels) if one != str(np.ravel(rows[2][label])[-1]))
    answered = rows[2][label]
    rows[2][label] = [*answered[:-1], other] if isinstance(answered, list) else other
    found, check = world.judged(jsonl(rows))
    expected, predicted = (np.ravel(one).tolist()[-1] for one in (rows[2][label], answered))
    assert check.detail == (
        f"1 of 12 rows that must pass do not: row 3 expected `{expected}`, predicted `{predicted}`"
    )
    assert (check.value, check.threshold, check.passed, found.promote) == (1, 0, False, False)
    assert check.detail in found.reason


def test_ten_rows_are_named_and_the_rest_counted_also_of_classes_that_no_model_knows(texts):
    rows = [{**row, "team": "unheard of"} for row in texts.golden(15)]
    _, check = texts.judged(jsonl(rows))
    assert check.detail.startswith(
        "15 of 15 rows that must pass do not: row 1 expected `unheard of`"
    )
    assert "row 10 " in check.detail
    assert check.detail.endswith("; and 5 more")


def test_a_csv_of_the_same_rows_is_judged_alike(texts):
    rows = texts.golden()
    stream = io.StringIO()
    writer = csv.DictWriter(stream, ["team", "body"])
    writer.writeheader()
    writer.writerows({"team": row["team"], "body": row["body"]} for row in rows)
    assert texts.judged(stream.getvalue(), "csv")[1].passed


def test_nothing_is_scored_twice_and_scores_of_other_rows_do_not_count(texts):
    rows = texts.golden()
    texts.judged(jsonl(rows))
    kept = sorted(texts.root.rglob("must_pass-*.parquet"))
    times = [path.stat().st_mtime_ns for path in kept]
    assert kept
    texts.judged(jsonl(rows))
    assert [path.stat().st_mtime_ns for path in kept] == times
    others = GoldenRows(format="jsonl", content=jsonl(rows[:3]))
    found, check = texts.judged(jsonl(rows), spec=others)
    assert not found.promote
    assert check.detail == "the rows that must pass were not scored; run the step `score` again"


def test_the_step_knows_what_is_left_and_hands_no_more_over_than_was_asked(texts):
    rows = MustPass(
        rows=GoldenRows(format="jsonl", content=jsonl(texts.golden(5))), data=texts.data
    )
    known = (
        texts.model,
        None,
        "",
        "",
        texts.root / "examples",
        step.TrainSpec(),
        str(texts.root / "state"),
    )
    assert step._is_scored(step.job_of(*known))
    assert not step._is_scored(step.job_of(*known, must_pass=rows))
    output = scored(texts.root / "state", texts.model, texts.root / "examples", must_pass=rows)
    assert step._is_scored(step.job_of(*known, must_pass=rows))
    assert len(pq.read_table(output / "must_pass.parquet")) == 5


def test_what_is_not_a_number_is_no_answer(tmp_path):
    def spoil(network):
        for weights in network.parameters():
            weights.fill_(math.nan)

    spoilt = World(tmp_path, "text_classification", spoil)
    _, check = spoilt.judged(jsonl({"body": "text 1 of 1", "team": team} for team in "abc"))
    assert check.value == 3
    assert "row 1 expected `a`, predicted `–`" in check.detail


def test_a_word_that_the_model_cuts_off_has_no_answer(tmp_path):
    """All tags have the same logits there; the first one is none that was predicted."""
    tagger = World(tmp_path, "token_classification")
    row = {"tokens": [f"word{i}" for i in range(600)], "tags": [tagged.TAGS[0]] * 600}
    _, check = tagger.judged(jsonl([row]))
    assert not check.passed
    assert " expected `B-CITY`, predicted `" in check.detail
    row = {"tokens": row["tokens"], "tags": tagger.predicted(row["tokens"])}
    assert tagger.judged(jsonl([row]))[1].detail.endswith("expected `B-CITY`, predicted `–`")


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ('{"body": "x"}\n', "there is no column `team`"),
        ("\n", "the file holds no rows"),
        ("{\n", "1 row that cannot be parsed"),
    ],
)
def test_rows_that_cannot_be_read_stop_the_step(texts, content, what):
    with pytest.raises(DataError, match=what):
        texts.judged(content)


def test_a_language_model_of_a_user_s_own_is_told_at_the_step(tmp_path):
    data, model = dialogues.source(tmp_path, "chat"), dialogues.model(400)
    shards = dialogues.sharded(tmp_path, data, model)
    folder = model_of("causal_lm", model, shards, tmp_path / "model", 0)
    golden = MustPass(rows=GoldenRows(format="jsonl", content="{}\n"), data=data)
    with pytest.raises(RequestError, match="no classes to predict"):
        scored(tmp_path / "state", folder, tmp_path / "examples", must_pass=golden)
