"""What classifiers of texts and of words share: a network of transformers with a head for classes,
and its tokenizer.

From a hub name, a local folder, or an inline config trained from scratch with a WordPiece tokenizer
that `tokenizers` learns from the training split. Batches are padded to their longest text only.
Shapes: B texts, T tokens."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rekindle.spec.model import TokenizerSpec
from rekindle.tasks.base import Settings
from rekindle.tasks.pretrained import (
    TOKENIZER,
    HubTask,
    check_positions,
    check_source,
    configuration,
    fetch_tokenizer,
    save_tokenizer,
)
from rekindle.tasks.wordpiece import SPECIAL_TOKENS, train_wordpiece

if TYPE_CHECKING:
    import pyarrow as pa
    import torch

    from rekindle.spec.model import DataSpec, ModelSpec
    from rekindle.tasks.base import Passes


class EncoderTask(HubTask):
    """A subclass says how examples are encoded, and what texts a tokenizer learns from."""

    def check(self, data: DataSpec, model: ModelSpec) -> None:
        example = "{model_type: distilbert, dim: 128, n_layers: 2, n_heads: 4}"
        check_source(model, example, data.max_length)

    def fit(self, train: Passes, data: DataSpec, model: ModelSpec, assets: Path) -> Settings:
        if isinstance(model.source, str):
            positions = getattr(configuration(model, {}, {}), "max_position_embeddings", None)
            check_positions(positions, data.max_length)
        own = model.tokenizer
        if isinstance(own, str) or (own is None and isinstance(model.source, str)):
            return _fetch_tokenizer(model, data.max_length, assets)

        def texts() -> Iterator[list[str]]:
            return (self.texts(batch) for batch in train())

        return _train_tokenizer(texts, own or TokenizerSpec(), data.max_length, assets)

    @abc.abstractmethod
    def texts(self, batch: pa.RecordBatch) -> list[str]:
        """What a tokenizer is learnt from."""

    def build(
        self, model: ModelSpec, labels: tuple[str, ...], settings: Settings, assets: Path
    ) -> torch.nn.Module:
        import torch
        import transformers

        names = {"num_labels": len(labels), "id2label": dict(enumerate(labels)),
                 "label2id": {label: i for i, label in enumerate(labels)}}  # fmt: skip
        inline = {key: settings[key] for key in ("vocab_size", "pad_token_id")}
        config, kind = configuration(model, inline, names), getattr(transformers, self.head)
        network: torch.nn.Module = kind.from_config(config, dtype=torch.float32)
        return network

    def collate(self, table: pa.Table, settings: Settings) -> dict[str, torch.Tensor]:
        import numpy as np
        import torch

        column = table.column("input_ids").combine_chunks()
        flat = column.flatten().to_numpy(zero_copy_only=False)
        lengths_B = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        shape = (len(table), int(lengths_B.max(initial=1)))
        ids_BT = np.full(shape, settings["pad_token_id"], np.int64)
        mask_BT = np.arange(ids_BT.shape[1])[None, :] < lengths_B[:, None]
        ids_BT[mask_BT] = flat
        return {
            "input_ids": torch.from_numpy(ids_BT),
            "attention_mask": torch.from_numpy(mask_BT.astype(np.int64)),
        }

    def logits(self, network: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        logits: torch.Tensor = network(**inputs).logits
        return logits.float()


def _train_tokenizer(
    texts: Callable[[], Iterator[list[str]]], spec: TokenizerSpec, max_length: int, assets: Path
) -> Settings:
    """A WordPiece vocabulary learnt from the training texts; the same file for the same texts."""
    tokenizer = train_wordpiece(texts, vocab_size=spec.vocab_size, min_frequency=spec.min_frequency)
    tokenizer.enable_truncation(max_length)
    roles = {f"{name.strip('[]').lower()}_token": name for name in SPECIAL_TOKENS}
    save_tokenizer(tokenizer, assets, model_max_length=max_length, **roles)
    pad = tokenizer.token_to_id("[PAD]")
    return {"vocab_size": tokenizer.get_vocab_size(), "pad_token_id": pad}


def _fetch_tokenizer(model: ModelSpec, max_length: int, assets: Path) -> Settings:
    """The tokenizer of a hub name or folder, stored as files that `tokenizers` reads without
    transformers."""
    tokenizer = fetch_tokenizer(model)
    tokenizer.backend_tokenizer.enable_truncation(max_length)
    tokenizer.save_pretrained(assets)
    tokenizer.backend_tokenizer.save(str(assets / TOKENIZER))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return {"vocab_size": len(tokenizer), "pad_token_id": int(pad or 0)}
