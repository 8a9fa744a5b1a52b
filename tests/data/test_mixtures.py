"""Several sources are read as one, and drawn from by their weights."""

from __future__ import annotations

import collections

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image

from rekindle.data.examples import open_examples
from rekindle.data.fingerprint import fingerprint
from rekindle.data.ingest import ingest
from rekindle.data.manifest import open_shards
from rekindle.data.shard import shard
from rekindle.errors import DataError, RequestError, SpecError
from rekindle.spec.load import load_target
from rekindle.spec.model import DataSpec, ModelSpec, TrainSpec
from tests.data.corpora import TASKS, content, write_jsonl

WORDS = ["early", "late", "broken", "fine", "slow", "quick", "red", "blue"]
WINDOW = "2026-02-01T00:00:00/2026-04-01T00:00:00"


def said(source: str, count: int) -> list[tuple[str, str]]:
    random = np.random.default_rng(len(source))
    texts = [f"{source} {i} " + " ".join(random.choice(WORDS, 6)) for i in range(count)]
    return [(text, "ab"[i % 2]) for i, text in enumerate(texts)]


@pytest.fixture
def folder(tmp_path):
    crm = ["body;verdict", *(";".join(row) for row in said("crm", 40))]
    (tmp_path / "crm.csv").write_text("\n".join(crm))
    (tmp_path / "tickets").mkdir()
    for month in (1, 2, 3):
        rows = [{"text": text, "label": label} for text, label in said(f"month{month}", 60)]
        write_jsonl(tmp_path / "tickets" / f"2026-0{month}.jsonl", rows)
    base = [{"text": text, "label": label} for text, label in said("base", 400)]
    pyarrow.parquet.write_table(pa.Table.from_pylist(base), tmp_path / "base.parquet")
    return tmp_path


def mixture(folder, weights=(0.2, 0.5, 0.3), **fields):
    crm, tickets, base = weights or (None,) * 3
    return DataSpec.model_validate(
        {
            "sources": [
                {
                    "source": str(folder / "crm.csv"),
                    "delimiter": ";",
                    "weight": crm,
                    "columns": {"text": "body", "label": "verdict"},
                },
                {"source": str(folder / "tickets" / "{window:%Y-%m}.jsonl"), "weight": tickets},
                {"source": str(folder / "base.parquet"), "weight": base},
            ],
            "window": {"size": "2 months", "every": "1 month"},
            "shard_rows": 20,
            **fields,
        }
    )


def made(data, folder, window=WINDOW, **fields):
    ingest(data, "text", window, folder / "examples", **fields)
    return shard(folder / "examples", data, ModelSpec(), f"{TASKS}:Lengths", folder / "shards")


def texts(folder):
    batches = [
        batch for split in ("train", "validation", "test") for batch in open_examples(folder, split)
    ]
    return [text for batch in batches for text in batch.column("text").to_pylist()]


def test_a_mixture_is_read_windowed_and_drawn_by_its_weights(folder, tmp_path):
    data, task = mixture(folder), f"{TASKS}:Lengths"
    keys = fingerprint(task, data, ModelSpec(), TrainSpec(), champion=None)
    assert (keys.window, keys.files) == (WINDOW, 4)
    manifest = made(data, tmp_path / "a", source=keys.data)
    counts = collections.Counter(text.split()[0] for text in texts(tmp_path / "a" / "examples"))
    assert counts == {"crm": 40, "month2": 60, "month3": 60, "base": 400}
    train = manifest.rows["train"]
    assert sum(one.rows for one in manifest.sources) == train
    assert [one.share for one in manifest.sources] == pytest.approx([0.2, 0.5, 0.3])
    assert manifest.sources[0].epochs == pytest.approx(0.2 * train / manifest.sources[0].rows)
    shards = open_shards(tmp_path / "a" / "shards")
    order = shards.order("train", global_batch_size=8, seed=0)
    rows = np.concatenate([order.batch(step).rows for step in range(order.steps_in_epoch)])
    source = np.repeat(
        [file.source for file in manifest.shards if file.split == "train"],
        [file.rows for file in manifest.shards if file.split == "train"],
    )[rows[rows >= 0]]
    assert np.bincount(source) / train == pytest.approx([0.2, 0.5, 0.3], abs=2 / train)


@pytest.mark.slow
def test_the_bytes_do_not_depend_on_workers_and_a_store(folder, tmp_path):
    data = mixture(folder)
    one = made(data, tmp_path / "a")
    two = made(
        data.model_copy(update={"workers": 2}), tmp_path / "b", store=str(tmp_path / "store")
    )
    assert one == two
    assert content(tmp_path / "a") == content(tmp_path / "b")


@pytest.mark.parametrize(("temperature", "crm"), [(1, 40 / 560), (2, 0.165), (1_000, 1 / 3)])
def test_a_temperature_raises_small_sources(folder, tmp_path, temperature, crm):
    manifest = made(mixture(folder, weights=None, temperature=temperature), tmp_path / "a")
    assert manifest.drawn
    assert manifest.sources[0].share == pytest.approx(crm, abs=0.02)


def test_without_weights_each_row_counts_once(folder, tmp_path):
    manifest = made(mixture(folder, weights=None), tmp_path / "a")
    assert not manifest.drawn
    assert [one.epochs for one in manifest.sources] == pytest.approx([1, 1, 1])


def test_a_source_that_has_nothing_to_train_on_is_named(folder, tmp_path):
    (folder / "crm.csv").write_text("body;verdict\nonly one;a\n")
    data = mixture(folder, split={"train": 0.1, "validation": 0.1, "test": 0.8})
    with pytest.raises(DataError, match=r"crm.csv has no example in the split train"):
        made(data, tmp_path / "a")


def test_a_column_that_one_source_lacks_is_named_with_the_source(folder, tmp_path):
    (folder / "crm.csv").write_text("body;kind\nfine;a\n")
    with pytest.raises(DataError, match=r"crm.csv") as caught:
        made(mixture(folder), tmp_path / "a")
    assert "verdict" in str(caught.value)


def test_a_split_by_time_has_one_cut_for_all_sources(tmp_path):
    old = [
        {"text": f"old {i}", "label": "ab"[i % 2], "at": f"2025-01-{i % 28 + 1:02}"}
        for i in range(80)
    ]
    new = [
        {"text": f"new {i}", "label": "ab"[i % 2], "at": f"2026-01-{i % 28 + 1:02}"}
        for i in range(20)
    ]
    sources = [
        {"source": str(write_jsonl(tmp_path / f"{name}.jsonl", rows))}
        for name, rows in (("old", old), ("new", new))
    ]
    data = DataSpec.model_validate(
        {"sources": sources, "columns": {"time": "at"}, "split": {"by": "time"}}
    )
    ingest(data, "text", "", tmp_path / "examples")
    for split, first in (("train", "old"), ("test", "new")):
        for batch in open_examples(tmp_path / "examples", split):
            assert {text.split()[0] for text in batch.column("text").to_pylist()} == {first}


@pytest.mark.parametrize("by", ["key", "group"])
def test_copies_that_keys_of_sources_divide_are_refused(tmp_path, by):
    same = [{"text": f"the same {i}", "label": "ab"[i % 2]} for i in range(60)]
    sources = [
        {
            "source": str(
                write_jsonl(
                    tmp_path / f"{name}.jsonl",
                    [{**row, "of": f"{name}{i}"} for i, row in enumerate(same)],
                )
            ),
            "columns": {by: "of"},
        }
        for name in "ab"
    ]
    data = DataSpec.model_validate({"sources": sources})
    with pytest.raises(DataError, match=r"more than one split"):
        ingest(data, "text", "", tmp_path / "examples")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("data.source=x.csv", "has both `source` and `sources`"),
        ("data.sources=[]", "names no source"),
        (
            "data.sources=[{source: a.csv, weight: 1}, {source: b.csv}]",
            "some of the sources have a",
        ),
        ("data.temperature=2", "shares follow from it where data.sources have no weights"),
        ("train.sampling=balanced", "the sources are drawn by weight"),
        ("train.engine=trainer", "draws rows itself"),
        ("data.window={size: 1 month}", "put {window} into one of data.sources"),
        ("data.sources=[{source: a.csv, weight: 0}]", "greater than 0"),
        ("data.sources=[{source: a.csv, weight: .inf}]", "less than or equal to 1000000"),
    ],
)
def test_contradictions_are_refused(tmp_path, change, says):
    (tmp_path / "c.yaml").write_text(
        "name: mixed\ntask: text_classification\ndata:\n  sources:\n"
        "    - {source: a.csv, weight: 1}\n    - {source: b.csv, weight: 2}\n"
    )
    fine = load_target(tmp_path / "c.yaml")
    assert [part.source for part in fine.data.parts] == [
        str(tmp_path / name) for name in ("a.csv", "b.csv")
    ]
    with pytest.raises((SpecError, RequestError)) as caught:
        load_target(tmp_path / "c.yaml", [change])
    assert says in str(caught.value)


def test_beside_a_bundled_source_the_window_still_chooses_files(tmp_path):
    for month in (1, 2, 3):
        for i in range(60):
            path = tmp_path / f"2026-0{month}" / str(i % 10) / f"{month}-{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8), 4 * i + month).save(path)
    sources = [{"source": "sklearn:digits"}, {"source": f"{tmp_path}/{{window:%Y-%m}}/*/*.png"}]
    data = DataSpec.model_validate({"sources": sources, "window": {"size": "2 months"}})
    seen = fingerprint("image_classification", data, ModelSpec(), TrainSpec(), champion=None)
    summary = ingest(data, "image", seen.window, tmp_path / "out", source=seen.data)
    assert sum(summary.rows.values()) == 1_797 + 2 * 60
