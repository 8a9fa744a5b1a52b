"""The work that contestants share: examples as shards, starting weights, the loss on what is held
out.

Reviews are the 1,500 of configs/data. Documents are reviews of one category, one after the other,
so many that lengths spread over an order of magnitude."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from rekindle.data.ingest import ingest
from rekindle.data.manifest import Shards, open_shards
from rekindle.data.order import SampleOrder
from rekindle.data.shard import shard
from rekindle.spec.model import DataSpec, ModelSpec, TrainSpec
from rekindle.tasks import load_task
from rekindle.train.job import Job

REVIEWS = Path(__file__).parents[2] / "configs" / "data" / "reviews.jsonl"
SPLIT = {"by": "hash", "train": 0.85, "validation": 0.0, "test": 0.15}
TEXT, TOKENS = "text_classification", "causal_lm"
TEXT_MODEL = {
    "model_type": "distilbert",
    "dim": 256,
    "n_layers": 4,
    "n_heads": 4,
    "hidden_dim": 1024,
    "max_position_embeddings": 128,
}
TOKENS_MODEL = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 1024,
}


@dataclasses.dataclass(frozen=True)
class Work:
    """A task with its shards, and what all contestants train alike."""

    task: str
    folder: Path
    train: TrainSpec
    model: Mapping[str, Any]
    threads: int = 1

    @property
    def shards(self) -> Path:
        return self.folder / "shards"

    def opened(self) -> Shards:
        return open_shards(self.shards)

    def start(self, seed: int) -> Path:
        """A model folder with the weights that all contestants of a pair start from."""
        folder = self.folder / f"start-{seed}"
        if not folder.exists():
            from transformers import AutoTokenizer

            torch.manual_seed(seed)
            network = _built(self.task, self.model, self.opened())
            network.save_pretrained(folder)
            AutoTokenizer.from_pretrained(self.shards / "assets").save_pretrained(folder)
        return folder

    def job(self, seed: int, output: Path, **train: Any) -> Job:
        """Our engine's job of pair `seed`; it leaves the model in `output`/model."""
        spec = self.train.model_dump() | {"seed": seed} | train
        return Job.of(
            artifact_root=str(output),
            run_key="bench",
            task=self.task,
            shards=str(self.shards),
            output=str(output / "model"),
            history=str(output / "history"),
            init="",
            init_from="base",
            model=ModelSpec(source=str(self.start(seed))),
            train=TrainSpec.model_validate(spec),
        )

    @torch.no_grad()
    def held_out(self, model: Path) -> float:
        """Mean cross-entropy of the test split, whoever trained the model."""
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

        table = self.opened().table("test")
        text = self.task == TEXT
        auto = AutoModelForSequenceClassification if text else AutoModelForCausalLM
        network = auto.from_pretrained(model, dtype=torch.float32).eval()
        total = count = 0.0
        for row in table.to_pylist():
            ids_1T = torch.tensor([row["input_ids"]])
            logits = network(input_ids=ids_1T).logits
            wanted = torch.tensor([row["label"]]) if text else ids_1T[0, 1:]
            given = logits if text else logits[0, :-1]
            total += float(F.cross_entropy(given, wanted, reduction="sum"))
            count += len(wanted)
        return total / count


def reviews(folder: Path, **model: float) -> Work:
    """Sentiment of reviews of 24 words on average; `model` changes the network's configuration."""
    data = DataSpec(
        source=str(REVIEWS),
        columns={"text": "text", "label": "label", "key": "id"},
        split=SPLIT,
        max_length=128,
    )
    network = TEXT_MODEL | model
    named = ModelSpec(source=network, tokenizer={"vocab_size": 4000, "min_frequency": 2})
    _prepare(data, named, "text", TEXT, folder)
    train = TrainSpec(
        epochs=2,
        global_batch_size=16,
        lr=2e-4,
        lr_schedule="linear",
        warmup=0.0,
        weight_decay=0.0,
        checkpoint={"every": None},
    )
    return Work(TEXT, folder, train, network, threads=2)


def documents(folder: Path, count: int = 420, longest: int = 1024, shortest: int = 1) -> Work:
    """Language modelling of documents of `shortest` to 16 reviews, several of which fill a sequence
    of `longest` tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "documents.jsonl"
    source.write_text(
        "".join(json.dumps(d) + "\n" for d in _documents(count, longest // 64, shortest))
    )
    data = DataSpec(
        source=str(source),
        columns={"text": "text"},
        split=SPLIT,
        max_length=longest,
    )
    model = ModelSpec(source=TOKENS_MODEL, tokenizer={"vocab_size": 4000, "min_frequency": 2})
    _prepare(data, model, "document", TOKENS, folder)
    train = TrainSpec(
        epochs=1,
        global_batch_size=2,
        lr=1e-3,
        lr_schedule="linear",
        warmup=0.0,
        weight_decay=0.0,
        checkpoint={"every": None},
    )
    return Work(TOKENS, folder, train, TOKENS_MODEL)


def packed_targets(given: Work, seed: int, steps: int) -> list[int]:
    """Supervised tokens of each step where documents are packed."""
    order, targets = packed_order(given, seed), given.opened().targets("train")
    batches = (order.batch(step).rows for step in range(steps))
    return [int(targets[rows[rows >= 0]].sum()) for rows in batches]


def packed_order(given: Work, seed: int) -> SampleOrder:
    """The order in which our engine packs and trains documents."""
    shards = given.opened()
    return shards.order(
        "train",
        global_batch_size=given.train.global_batch_size,
        seed=seed,
        pack_length=int(shards.manifest.settings["max_length"]),
    )


def _documents(count: int, most: int, least: int) -> list[dict[str, str]]:
    texts = [json.loads(line)["text"] for line in REVIEWS.open(encoding="utf-8")]
    draw = random.Random(0)
    made: list[str] = []
    for _ in range(count):
        size = round(math.exp(draw.uniform(0.0, math.log(most))))  # short ones as likely as long
        size = max(size, least)
        made.append(" ".join(draw.choices(texts, k=size)))
    return [{"text": text} for text in dict.fromkeys(made)]


def _prepare(data: DataSpec, model: ModelSpec, modality: str, task: str, folder: Path) -> None:
    if (folder / "shards").exists():
        return
    ingest(data, modality, "", folder / "examples")
    shard(folder / "examples", data, model, task, folder / "shards")


def _built(task: str, model: Mapping[str, Any], shards: Shards) -> Any:
    manifest = shards.manifest
    source = ModelSpec(source=dict(model))
    return load_task(task).build(source, manifest.labels, manifest.settings, shards.assets)
