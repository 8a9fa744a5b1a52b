"""Classifiers of texts and of words: a network of transformers with a head for classes
(`AutoModelForSequenceClassification`, `AutoModelForTokenClassification`), and its
tokenizer.

From a hub name, a local folder, or an inline config trained from scratch with a WordPiece
tokenizer learnt from the training split. Batches are padded to their longest text.
Shapes: B texts, T tokens, F tokens of all texts joined.

Words have one tag each (named entities, parts of speech), predicted at the word's first
token. The tokenizer cuts each word of a list as it would within a text. A word behind
`data.max_length` tokens has no place: training leaves it out, scoring counts it as not
predicted.

`tokenizers` numbers the pieces `##x` of WordPiece in the order of a hash map, another one
in every process. Here each piece gets its number up front, by its character."""

from __future__ import annotations

import abc
import json
import math
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rekindle.errors import DataError, RequestError, UnsupportedError
from rekindle.objectives.columns import flattened
from rekindle.objectives.numbers import SCALE
from rekindle.records import Objective
from rekindle.spec.model import DataSpec, ModelSpec, TokenizerSpec
from rekindle.tasks import pretrained
from rekindle.tasks.base import SAME_NUMBER, Labels, Settings
from rekindle.tasks.pretrained import TOKENIZER, read_tokenizer

if TYPE_CHECKING:
    import pyarrow as pa
    import tokenizers
    import torch
    from torch.nn import Module

    from rekindle.tasks.base import Columns, Passes


class EncoderTask(pretrained.HubTask):
    """A subclass says how examples are encoded,
    and which texts a tokenizer learns from."""

    makes_head: ClassVar[bool] = True
    problem_type: ClassVar[str | None] = None
    """What transformers calls the problem, in the configuration that is exported."""

    def check(self, data: DataSpec, model: ModelSpec) -> None:
        example = "{model_type: distilbert, dim: 128, n_layers: 2, n_heads: 4}"
        pretrained.check_source(model, example, data.max_length)

    def fit(self, train: Passes, data: DataSpec, model: ModelSpec, assets: Path) -> Settings:
        if isinstance(model.source, str):
            config = pretrained.configuration(model, {}, {})
            positions = getattr(config, "max_position_embeddings", None)
            pretrained.check_positions(positions, data.max_length)
        own = model.tokenizer
        if isinstance(own, str) or (own is None and isinstance(model.source, str)):
            fetched = pretrained.fetch_tokenizer(model)
            fetched.backend_tokenizer.enable_truncation(data.max_length)
            pretrained.save_fetched(fetched, assets)
            # decoders such as GPT-2 have no token for padding
            pad = fetched.pad_token_id
            if pad is None:
                pad = fetched.eos_token_id
            return {"vocab_size": len(fetched), "pad_token_id": int(pad or 0)}
        spec = own or TokenizerSpec()
        tokenizer = train_wordpiece(
            lambda: (self.texts(batch) for batch in train()),
            vocab_size=spec.vocab_size,
            min_frequency=spec.min_frequency,
        )
        tokenizer.enable_truncation(data.max_length)
        roles = {f"{name.strip('[]').lower()}_token": name for name in SPECIAL_TOKENS}
        pretrained.save_tokenizer(tokenizer, assets, model_max_length=data.max_length, **roles)
        pad = tokenizer.token_to_id("[PAD]")
        return {"vocab_size": tokenizer.get_vocab_size(), "pad_token_id": pad}

    @abc.abstractmethod
    def texts(self, batch: pa.RecordBatch) -> list[str]:
        """What a tokenizer is learnt from."""

    def build(self, model: ModelSpec, labels: Labels, settings: Settings, assets: Path) -> Module:
        import torch
        import transformers

        # the base's own `problem_type` may be another
        # one: pipelines would apply a sigmoid
        names = {
            "num_labels": len(labels),
            "id2label": dict(enumerate(labels)),
            "label2id": {label: i for i, label in enumerate(labels)},
            "problem_type": self.problem_type,
        }
        inline = {key: settings[key] for key in ("vocab_size", "pad_token_id")}
        config = pretrained.configuration(model, inline, names)
        embedded = getattr(config, "vocab_size", None)
        tokens = settings["vocab_size"]
        if isinstance(embedded, int) and embedded < tokens:
            message = f"the model knows {embedded} tokens, the tokenizer {tokens}"
            fix = "use the model's own tokenizer, or a model whose embeddings were resized for it"
            raise RequestError(message, where="model.tokenizer", fix=fix)
        # a decoder finds the last token of a text by it
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = settings["pad_token_id"]
        kind = getattr(transformers, self.head)
        network: Module = kind.from_config(config, dtype=torch.float32)
        return network

    def collate(self, table: pa.Table, settings: Settings) -> dict[str, torch.Tensor]:
        import numpy as np
        import torch

        ids_F, lengths_B = flattened(table, "input_ids")
        shape = (len(table), int(lengths_B.max(initial=1)))
        ids_BT = np.full(shape, settings["pad_token_id"], np.int64)
        mask_BT = np.arange(ids_BT.shape[1])[None, :] < lengths_B[:, None]
        ids_BT[mask_BT] = ids_F
        mask = torch.from_numpy(mask_BT.astype(np.int64))
        return {"input_ids": torch.from_numpy(ids_BT), "attention_mask": mask}

    def logits(self, network: Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        logits: torch.Tensor = network(**inputs).logits
        return logits.float()


SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_MOST_WORDS = 1 << 17  # that a cache holds
# the parts of a tokenizer that look at one word at a time
_SEPARABLE = {
    "normalizer": "BertNormalizer",
    "pre_tokenizer": "BertPreTokenizer",
    "model": "WordPiece",
}


def train_wordpiece(
    texts: Callable[[], Iterable[list[str]]], *, vocab_size: int, min_frequency: int
) -> tokenizers.Tokenizer:
    """A lower-casing WordPiece tokenizer; each call of `texts` starts a new pass."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    learner = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # noqa: S106 - no password
    learner.normalizer = normalizers.BertNormalizer(lowercase=True)
    learner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    fixed = [*SPECIAL_TOKENS, *_continuing_pieces(learner, texts())]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=fixed,
        show_progress=False,
    )
    learner.train_from_iterator(texts(), trainer)
    # the learner takes the fixed pieces for special
    # tokens; a tokenizer of its vocabulary does not
    model = models.WordPiece(vocab=learner.get_vocab(), unk_token="[UNK]")  # noqa: S106 - a token of text
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = learner.normalizer
    tokenizer.pre_tokenizer = learner.pre_tokenizer
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    ends = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=ends
    )
    return tokenizer


def is_separable(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether no part of the tokenizer looks across a space,
    as BERT's and plain tokens."""
    state = json.loads(tokenizer.to_str())
    types = {name: (state[name] or {}).get("type") for name in _SEPARABLE}
    if types != _SEPARABLE or state["padding"]:
        return False
    # special tokens are put around a text, and what is too long is cut off at its end
    frame = (state["post_processor"] or {}).get("type")
    direction = (state["truncation"] or {"direction": "Right"})["direction"]
    if frame not in ("TemplateProcessing", "BertProcessing") or direction != "Right":
        return False
    return not any(_looks_across_a_space(token) for token in state["added_tokens"])


def _looks_across_a_space(added_token: Mapping[str, Any]) -> bool:
    looks_around = ("single_word", "lstrip", "rstrip")
    return " " in added_token["content"] or any(added_token[name] for name in looks_around)


class WordCache:
    """`cache.encode(texts)` gives the ids of `encode_batch`, each different word
    tokenized once: exactly those where nothing looks across a space (`is_separable`)."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._bare = type(tokenizer).from_str(tokenizer.to_str())
        self._bare.no_truncation()
        # what is put around any text, by the ids of one letter
        bare = self._bare.encode("a", add_special_tokens=False).ids
        framed = self._bare.encode("a", add_special_tokens=True).ids
        start = next(i for i in range(len(framed)) if framed[i : i + len(bare)] == bare)
        self._before = framed[:start]
        self._after = framed[start + len(bare) :]
        self._room: int | None = None  # for ids of words; None: no bound
        if tokenizer.truncation:
            frame = len(self._before) + len(self._after)
            self._room = tokenizer.truncation["max_length"] - frame
        self._ids: dict[str, list[int]] = {}

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, cut to the most that fit,
        with the special tokens around them."""
        words = [text.split(" ") for text in texts]
        # emptied rather than aged: frequent words are soon there again
        if len(self._ids) > _MOST_WORDS:
            self._ids.clear()
        new = [word for word in set(chain.from_iterable(words)) if word not in self._ids]
        encodings = self._bare.encode_batch_fast(new, add_special_tokens=False)
        for word, encoding in zip(new, encodings, strict=True):
            self._ids[word] = encoding.ids
        rows = list[list[int]]()
        for words_of_text in words:
            # by `map`, as a loop over words takes most of the time that the cache saves
            ids = list(chain.from_iterable(map(self._ids.__getitem__, words_of_text)))
            rows.append([*self._before, *ids[: self._room], *self._after])
        return rows


def _continuing_pieces(tokenizer: tokenizers.Tokenizer, texts: Iterable[list[str]]) -> list[str]:
    """`##x` for each character of the texts that can stand within a word, in order."""
    characters = set[str]()
    for batch in texts:
        for text in batch:
            characters.update(text)
    within_words = set[str]()
    for character in characters:
        # normalised, a character may become several, or none
        normal = tokenizer.normalizer.normalize_str(f"a{character}a")
        words = tokenizer.pre_tokenizer.pre_tokenize_str(normal)
        if len(words) == 1:
            word, _ = words[0]
            within_words.update(word[1:-1])
    return [f"##{character}" for character in sorted(within_words)]


class TextClassification(EncoderTask):
    modality: ClassVar[str] = "text"
    shares_sequences: ClassVar[bool] = True
    head: ClassVar[str] = "AutoModelForSequenceClassification"
    problem_type: ClassVar[str | None] = "single_label_classification"
    _held: Callable[[list[str]], list[list[int]]] | None = None

    def hold(self, settings: Settings, assets: Path) -> None:
        self._held = _read_encoder(assets)

    def texts(self, batch: pa.RecordBatch) -> list[str]:
        texts: list[str] = batch.column("text").to_pylist()
        return texts

    def encode(self, batch: pa.RecordBatch, settings: Settings, assets: Path) -> Columns:
        import numpy as np
        import pyarrow as pa

        encoder = self._held or _encoder(assets)
        ids = encoder(batch.column("text").to_pylist())
        offsets = np.cumsum([0, *map(len, ids)], dtype=np.int32)
        flat = np.fromiter(chain.from_iterable(ids), np.int32, count=int(offsets[-1]))
        return {"input_ids": pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))}


class TextRegression(TextClassification):
    """Predicts a number. The network learns it in standard deviations from the mean of
    the training split; both are kept in its configuration, as `target_mean` and
    `target_std`."""

    objective: ClassVar[Objective] = "numbers"
    problem_type: ClassVar[str | None] = "regression"

    def fit(self, train: Passes, data: DataSpec, model: ModelSpec, assets: Path) -> Settings:
        import numpy as np

        settings = super().fit(train, data, model, assets)
        values_N = np.concatenate([np.asarray(batch.column("label")) for batch in train()])
        mean = float(values_N.mean())
        deviation = float(values_N.std())
        # of equal numbers rounding may leave a deviation; a NaN compares as false, too
        if not 1e-12 * abs(mean) < deviation < math.inf:
            message = f"{SAME_NUMBER}, or numbers beyond all bounds"
            raise DataError(message, where="data.columns.target", fix="name another column")
        return {**settings, **dict(zip(SCALE, (mean, deviation), strict=True))}

    def build(self, model: ModelSpec, labels: Labels, settings: Settings, assets: Path) -> Module:
        network = super().build(model, ("target",), settings, assets)
        config: Any = network.config
        config.update({name: settings[name] for name in SCALE})
        return network


def _read_encoder(assets: Path) -> Callable[[list[str]], list[list[int]]]:
    """From texts to token ids, as the tokenizer among the assets gives them."""
    tokenizer = read_tokenizer(assets)
    if is_separable(tokenizer):
        return WordCache(tokenizer).encode
    return lambda texts: [row.ids for row in tokenizer.encode_batch_fast(texts)]


_encoder = pretrained.cached_by_tokenizer(_read_encoder)

NO_PLACE = -1


class TokenClassification(EncoderTask):
    modality: ClassVar[str] = "words"
    objective: ClassVar[Objective] = "tags"
    head: ClassVar[str] = "AutoModelForTokenClassification"
    _held: tokenizers.Tokenizer | None = None

    def hold(self, settings: Settings, assets: Path) -> None:
        self._held = read_tokenizer(assets)

    def fit(self, train: Passes, data: DataSpec, model: ModelSpec, assets: Path) -> Settings:
        settings = super().fit(train, data, model, assets)
        tokenizer = _keeping_words_apart(read_tokenizer(assets))
        tokenizer.save(str(assets / TOKENIZER))
        return settings

    def texts(self, batch: pa.RecordBatch) -> list[str]:
        return [" ".join(words) for words in _words(batch)]

    def encode(self, batch: pa.RecordBatch, settings: Settings, assets: Path) -> Columns:
        """`input_ids`, and as `places` the position
        of each word's first token among them."""
        import pyarrow as pa

        texts = _words(batch)
        tokenizer = self._held or _tokenizer(assets)
        encodings = tokenizer.encode_batch(texts, is_pretokenized=True)
        ids: list[list[int] | None] = []
        places: list[list[int]] = []
        for words, encoding in zip(texts, encodings, strict=True):
            first_tokens = [NO_PLACE] * len(words)  # where a word was cut off or has no token
            # backwards: the first token of a word is the last to be put there
            for position, word in reversed(list(enumerate(encoding.word_ids))):
                if word is not None:
                    first_tokens[word] = position
            places.append(first_tokens)
            has_place = any(place >= 0 for place in first_tokens)
            ids.append(encoding.ids if has_place else None)
        kind = pa.list_(pa.int32())
        return {"input_ids": pa.array(ids, kind), "places": pa.array(places, kind)}


def _words(batch: pa.RecordBatch) -> list[list[str]]:
    return [json.loads(text) for text in batch.column("words").to_pylist()]


_tokenizer = pretrained.cached_by_tokenizer(read_tokenizer)


def _keeping_words_apart(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The tokenizer, such that a list of words gives the tokens of the text: byte-level
    BPE marks the space before a word. Raises UnsupportedError where no setting of it does
    so."""
    state = json.loads(tokenizer.to_str())
    # as it is, as byte-level BPE names the setting, and as SentencePiece's Metaspace does
    for change in ({}, {"add_prefix_space": True}, {"prepend_scheme": "always"}):
        changed = {**state, "pre_tokenizer": _changed(state["pre_tokenizer"], change)}
        candidate = type(tokenizer).from_str(json.dumps(changed))
        split = candidate.encode(["one", "two"], is_pretokenized=True).ids
        if split in (candidate.encode("one two").ids, candidate.encode(" one two").ids):
            return candidate
    message = (
        "this tokenizer joins words that are given one by one, as if no space was between them"
    )
    fix = "name a model with a WordPiece or a byte-level BPE tokenizer, or train one: "
    fix += "`tokenizer: {vocab_size: 4096}`"
    raise UnsupportedError(message, where="model.tokenizer", fix=fix)


def _changed(pre_tokenizer: Any, change: dict[str, Any]) -> Any:
    """The settings of a pre-tokenizer, and of those in it, changed where they exist."""
    if not isinstance(pre_tokenizer, dict):
        return pre_tokenizer
    changed = dict(pre_tokenizer)
    for name, value in change.items():
        if name in pre_tokenizer:
            changed[name] = value
    inner = [_changed(part, change) for part in pre_tokenizer.get("pretokenizers", [])]
    if inner:
        changed["pretokenizers"] = inner
    return changed
