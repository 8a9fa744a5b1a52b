"""Tasks of a user's own, named as `tests/data/own_task.py:Class`: a learnt word list, and ones that
misbehave."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa

from rekindle.tasks.base import Task


class Words(Task):
    """Words as numbers, in the order of a tokenizer that `tokenizers` learns from the training
    split."""

    modality = "text"

    def fit(self, train, data, model, assets: Path):
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer = trainers.WordLevelTrainer(special_tokens=["[UNK]"], show_progress=False)
        tokenizer.train_from_iterator(
            (batch.column("text").to_pylist() for batch in train()), trainer
        )
        tokenizer.save(str(assets / "tokenizer.json"))
        return {"vocab_size": tokenizer.get_vocab_size()}

    def encode(self, batch, settings, assets: Path):
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(assets / "tokenizer.json"))
        rows = [row.ids for row in tokenizer.encode_batch_fast(batch.column("text").to_pylist())]
        return {"input_ids": pa.array(rows, pa.list_(pa.int32()))}

    build = collate = logits = save = load = None


class Lengths(Words):
    """No tokenizer: the number of bytes of each text."""

    def fit(self, train, data, model, assets):
        return {}

    def encode(self, batch, settings, assets):
        return {"length": pa.compute.binary_length(batch.column("text"))}


class Talkative(Lengths):
    def encode(self, batch, settings, assets):
        print("a task may print", flush=True)
        os.write(1, b"even so\n")
        return super().encode(batch, settings, assets)


class Modules(Lengths):
    """Says which heavy modules its worker holds."""

    def encode(self, batch, settings, assets):
        heavy = sorted({"torch", "transformers", "datasets", "kfp", "sklearn"} & set(sys.modules))
        return {"modules": pa.array([json.dumps(heavy)] * len(batch))}


class Failing(Lengths):
    def encode(self, batch, settings, assets):
        if "needle" in batch.column("text").to_pylist():
            raise ZeroDivisionError("the needle")
        return super().encode(batch, settings, assets)


class Killed(Lengths):
    def encode(self, batch, settings, assets):
        os.kill(os.getpid(), signal.SIGKILL)


class Pixels(Task):
    modality = "image"

    def encode(self, batch, settings, assets):
        assert np.prod(settings["image_shape"]) == len(batch.column("image")[0].as_py())
        return {"pixels": batch.column("image")}

    build = collate = logits = save = load = None
