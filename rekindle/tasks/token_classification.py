"""Token classification (named entities, parts of speech) with any `AutoModelForTokenClassification`
of transformers: one tag for each word, predicted at the word's first token.

Texts come as lists of words; the tokenizer cuts each word by itself, as it would cut it within a
text. A word behind `data.max_length` tokens has no place: training leaves it out, scoring counts it
as a word without a prediction. Shapes: B texts, T tokens, C tags."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rekindle.errors import UnsupportedError
from rekindle.records import Objective
from rekindle.tasks.base import Modality, Settings
from rekindle.tasks.encoder import EncoderTask
from rekindle.tasks.pretrained import TOKENIZER, read_tokenizer

if TYPE_CHECKING:
    import pyarrow as pa
    import tokenizers

    from rekindle.spec.model import DataSpec, ModelSpec
    from rekindle.tasks.base import Columns, Passes

NO_PLACE = -1


class TokenClassification(EncoderTask):
    modality: ClassVar[Modality] = "words"
    objective: ClassVar[Objective] = "tags"
    head: ClassVar[str] = "AutoModelForTokenClassification"

    def fit(self, train: Passes, data: DataSpec, model: ModelSpec, assets: Path) -> Settings:
        settings = super().fit(train, data, model, assets)
        _keeping_words_apart(read_tokenizer(assets)).save(str(assets / TOKENIZER))
        return settings

    def texts(self, batch: pa.RecordBatch) -> list[str]:
        return [" ".join(words) for words in _words(batch)]

    def encode(self, batch: pa.RecordBatch, settings: Settings, assets: Path) -> Columns:
        """`input_ids`, and as `places` of each word the position of its first token among them."""
        import pyarrow as pa

        texts = _words(batch)
        encodings = _tokenizer(assets).encode_batch(texts, is_pretokenized=True)
        ids: list[list[int] | None] = []
        places = []
        for words, encoding in zip(texts, encodings, strict=True):
            firsts = [NO_PLACE] * len(words)  # where a word was cut off or has no token
            for position, word in reversed(list(enumerate(encoding.word_ids))):
                if word is not None:
                    firsts[word] = position
            places.append(firsts)
            ids.append(encoding.ids if any(place >= 0 for place in firsts) else None)
        return {
            "input_ids": pa.array(ids, pa.list_(pa.int32())),
            "places": pa.array(places, pa.list_(pa.int32())),
        }


def _words(batch: pa.RecordBatch) -> list[list[str]]:
    return [json.loads(text) for text in batch.column("words").to_pylist()]


_tokenizer = lru_cache(maxsize=4)(read_tokenizer)


def _keeping_words_apart(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The tokenizer, such that a list of words gives the tokens of the text: byte-level BPE and
    SentencePiece mark the space before a word, and by default only before words within a text.

    Raises UnsupportedError where no setting of it does so."""
    state = json.loads(tokenizer.to_str())
    for change in ({}, {"add_prefix_space": True}, {"prepend_scheme": "always"}):
        changed = {**state, "pre_tokenizer": _with(state["pre_tokenizer"], change)}
        candidate = type(tokenizer).from_str(json.dumps(changed))
        split = candidate.encode(["one", "two"], is_pretokenized=True).ids
        if split in (candidate.encode("one two").ids, candidate.encode(" one two").ids):
            return candidate
    raise UnsupportedError(
        "this tokenizer joins words that are given one by one, as if no space was between them",
        where="model.tokenizer",
        fix="name a model with a WordPiece or a byte-level BPE tokenizer, or train one: "
        "`tokenizer: {vocab_size: 4096}`",
    )


def _with(pre_tokenizer: Any, change: dict[str, Any]) -> Any:
    """The settings of a pre-tokenizer, or of those in a sequence, changed where they exist."""
    if not isinstance(pre_tokenizer, dict):
        return pre_tokenizer
    known = {name: value for name, value in change.items() if name in pre_tokenizer}
    inner = [_with(one, change) for one in pre_tokenizer.get("pretokenizers", [])]
    return {**pre_tokenizer, **known, **({"pretokenizers": inner} if inner else {})}
