"""The card of a language model: perplexity, slices and samples, and nothing about classes."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.records import Check, Evidence, Sample, Slice
from rekindle.report.card import render_card
from tests.report.homes import Home, began, digest, manifest, spec, steps

RUN_ID = "20261121-160000-lm-7777"
METRICS = {"log_loss": 1.5, "perplexity": 4.4817, "token_accuracy": 0.61, "bits_per_byte": 0.72}


@pytest.fixture
def card(tmp_path: Path) -> str:
    slices = tuple(
        Slice(column="topic", value=value, rows=40, candidate={**METRICS, "log_loss": loss})
        for value, loss in (("hours", 1.2), ("price", 1.9))
    )
    evidence = Evidence(
        run_key=digest("lm"),
        promote=True,
        reason="first model",
        rows=80,
        excluded=3,
        checks=(Check(name="beats_unigram", passed=True, detail="it does", value=1.5),),
        metrics=METRICS,
        slices=slices,
        examples=digest("examples"),
        samples=(Sample(prompt="<b>When?", generated="At 7\x1b[31m & \x00late", expected="At 8"),),
    )
    home = Home(tmp_path)
    shards = manifest("causal_lm", "chat.jsonl", (), {"train": 300, "test": 80}, tokens=40)
    left_out = {"dropped": {"train": 4}, "bad_rows": {"empty turn": 1_234}}
    shards = shards.model_copy(update=left_out)
    artifacts = {
        "shard": home.artifact(RUN_ID, "shard", "shards", shards),
        "evaluate": home.artifact(RUN_ID, "evaluate", "evidence", evidence),
    }
    run = home.run(
        run_id=RUN_ID,
        name="lm",
        status="succeeded",
        started_at=began(RUN_ID),
        spec=spec("lm", "causal_lm", "chat.jsonl", metric=None),
        steps=steps(home, RUN_ID, artifacts, {"shard": 1.0, "evaluate": 2.0}),
    )
    return render_card(tmp_path, run).read_text()


def test_perplexity_leads_and_no_class_is_mentioned(card: str) -> None:
    assert "Log loss, held out" in card
    assert "bits per byte" in card
    assert "4.4817" in card
    for word in ("Confusion matrix", "Calibration", "Balance of the classes"):
        assert word not in card


def test_samples_are_shown_as_text(card: str) -> None:
    assert "What it writes" in card
    assert "&lt;b&gt;When?" in card
    assert "At 7 &amp; late" in card


def test_slices_go_by_the_loss_the_worst_first(card: str) -> None:
    assert "Log loss by group" in card
    assert card.index("price") < card.index("hours")


def test_texts_that_were_left_out_are_counted(card: str) -> None:
    assert "4 with nothing to learn from" in card
    assert "<dt>Left out: empty turn</dt><dd>1,234 rows</dd>" in card
    assert "or has nothing to predict in them" in card
