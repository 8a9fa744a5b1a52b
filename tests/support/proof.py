"""Made-up texts of random tokens as shards, for any task of texts."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from rekindle.data.manifest import Shards
from rekindle.objectives import loss_of
from rekindle.records import ShardManifest
from rekindle.tasks import load_task

LABELS = ("a", "b", "c")
VOCABULARY = 96
FIRST_WORD, LAST_WORD = 4, 79  # between special tokens and those of images and sounds
SETTINGS = {
    "pad_token_id": 2,
    "eos_token_id": 1,
    "vocab_size": VOCABULARY,
    "max_length": 48,
    "packing": True,
    "form": "text",
    "target_mean": 0.0,
    "target_std": 1.0,
}


def made_shards(task: str, longest: int = 19) -> Shards:
    """Texts of at most so many tokens."""
    random = np.random.default_rng(0)
    lengths = random.integers(min(5, longest), longest, 24, endpoint=True)
    texts = [random.integers(FIRST_WORD, LAST_WORD + 1, int(size)).tolist() for size in lengths]
    kind = load_task(task)
    labels = LABELS if kind.makes_head else ()
    table = pa.table(
        {
            "id": pa.array([str(row) for row in range(len(texts))]),
            "hash": pa.array([bytes(16)] * len(texts), pa.binary(16)),
            "input_ids": pa.array(texts, pa.list_(pa.int32())),
            **loss_of(kind.objective).invented(random, texts, max(1, len(labels))),
        }
    )
    settings = dict(SETTINGS)
    if kind.makes_head:  # whose tokenizer has it
        del settings["max_length"]
    manifest = ShardManifest(
        task=task, source="random", labels=labels, rows={"train": len(texts)}, settings=settings
    )
    return Shards.of_tables(Path(), manifest, {"train": table})
