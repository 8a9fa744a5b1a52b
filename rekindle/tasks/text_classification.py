"""Text classification with any `AutoModelForSequenceClassification` of transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rekindle.tasks.base import Modality, Settings
from rekindle.tasks.encoder import EncoderTask, WordCache, is_separable
from rekindle.tasks.pretrained import read_tokenizer

if TYPE_CHECKING:
    import pyarrow as pa

    from rekindle.tasks.base import Columns


class TextClassification(EncoderTask):
    modality: ClassVar[Modality] = "text"
    head: ClassVar[str] = "AutoModelForSequenceClassification"

    def texts(self, batch: pa.RecordBatch) -> list[str]:
        found: list[str] = batch.column("text").to_pylist()
        return found

    def encode(self, batch: pa.RecordBatch, settings: Settings, assets: Path) -> Columns:
        import numpy as np
        import pyarrow as pa

        ids = _encoder(assets)(batch.column("text").to_pylist())
        offsets = np.zeros(len(ids) + 1, np.int32)
        np.cumsum([len(row) for row in ids], out=offsets[1:])
        flat = np.fromiter(chain.from_iterable(ids), np.int32, count=int(offsets[-1]))
        return {"input_ids": pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))}


@lru_cache(maxsize=4)
def _encoder(assets: Path) -> Callable[[list[str]], list[list[int]]]:
    """From texts to token ids, as the tokenizer among the assets gives them."""
    tokenizer = read_tokenizer(assets)
    if is_separable(tokenizer):
        return WordCache(tokenizer).encode
    return lambda texts: [row.ids for row in tokenizer.encode_batch_fast(texts)]
