"""Causal language models: plain texts, prompts with completions, and chats; any
`AutoModelForCausalLM` of transformers whose scores are a plain matrix product of its last
states.

Decides what a document's tokens are and which of them are targets: of a plain text all
(but the first), of a prompt and a completion, joined as they are, those of the
completion, of a chat those of the assistant's turns. Texts and completions end with the
tokenizer's end-of-text token, answers of a chat as its template ends them (`chat.py`):
the first special token behind an answer stops the writing (`stop_token_ids` of the
settings), and where there is none the end-of-text token is put there. What exceeds
`data.max_length` is cut off. Shapes: B sequences, T tokens, V vocabulary, N documents, F
tokens of all documents joined."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rekindle.errors import DataError, Problem, RequestError, UnsupportedError, first_line
from rekindle.objectives.columns import flattened
from rekindle.spec.model import DataSpec, ModelSpec, TokenizerSpec
from rekindle.tasks import pretrained
from rekindle.tasks.base import REFUSED, Labels, Settings, TokenTask
from rekindle.tasks.chat import TEMPLATE, ChatTemplate, Ending, Span, Turn, template_in

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa
    import tokenizers
    import torch
    from torch.nn import Module
    from transformers import PretrainedConfig

    from rekindle.tasks.base import Columns, Passes

    Ints = npt.NDArray[np.int64]
    Row = tuple[list[int], npt.NDArray[np.uint8], int]

IGNORED = -100
PAD = "<|pad|>"
END = "<|end|>"
SPECIAL_TOKENS = (PAD, END, "<|system|>", "<|user|>", "<|assistant|>")
SMALLEST = 256 + len(SPECIAL_TOKENS)
_TEMPLATE = "chat_template.jinja"
_EXAMPLE = "{model_type: llama, hidden_size: 128, intermediate_size: 352, num_hidden_layers: 2}"


class CausalLM(pretrained.HubTask, TokenTask):
    modality: ClassVar[str] = "document"
    head: ClassVar[str] = "AutoModelForCausalLM"
    _held: tuple[tokenizers.Tokenizer, ChatTemplate | None] | None = None

    def hold(self, settings: Settings, assets: Path) -> None:
        template: ChatTemplate | None = None
        if settings["form"] == "chat":
            source = (assets / _TEMPLATE).read_text(encoding="utf-8")
            template = ChatTemplate(source, settings["special_tokens"])
        self._held = (pretrained.read_tokenizer(assets), template)

    def check(self, data: DataSpec, model: ModelSpec) -> None:
        pretrained.check_source(model, _EXAMPLE, data.max_length)
        tokenizer = model.tokenizer
        if isinstance(tokenizer, TokenizerSpec) and isinstance(model.source, str):
            message = "a tokenizer trained here does not fit the embeddings of a pretrained model"
            fix = "leave it out, or give an inline config as model.source"
            raise RequestError(message, where="model.tokenizer", fix=fix)
        if isinstance(tokenizer, TokenizerSpec) and tokenizer.vocab_size < SMALLEST:
            message = f"{tokenizer.vocab_size} tokens are fewer than the bytes and special tokens"
            fix = f"at least {SMALLEST}"
            raise RequestError(message, where="model.tokenizer.vocab_size", fix=fix)

    def fit(self, train: Passes, data: DataSpec, model: ModelSpec, assets: Path) -> Settings:
        shape = {"form": data.columns.form, "max_length": data.max_length, "packing": data.packing}
        if isinstance(model.tokenizer, str) or isinstance(model.source, str):
            fetched = _fetch_tokenizer(model, assets)
            return {**shape, **_with_endings(fetched, shape, assets)}
        spec = model.tokenizer or TokenizerSpec()
        roles = {"pad_token": PAD, "eos_token": END}
        texts = (_texts_in(batch) for batch in train())
        tokenizer = train_bpe(texts, vocab_size=spec.vocab_size, min_frequency=spec.min_frequency)
        pretrained.save_tokenizer(tokenizer, assets, **roles)
        (assets / _TEMPLATE).write_text(TEMPLATE, encoding="utf-8")
        fitted = {
            "vocab_size": tokenizer.get_vocab_size(),
            "pad_token_id": tokenizer.token_to_id(PAD),
            "eos_token_id": tokenizer.token_to_id(END),
            "special_tokens": roles,
        }
        return {**shape, **_with_endings(fitted, shape, assets)}

    def notices(self, settings: Settings) -> list[str]:
        if not settings.get("ends_added"):
            return []
        end = settings["special_tokens"]["eos_token"]
        notice = "the chat template ends answers with no special token: each answer gets "
        notice += f"`{end}` behind it, and the model learns to write it"
        return [notice]

    def refusals(self, data: DataSpec, model: ModelSpec) -> Callable[[str], str] | None:
        name = model.tokenizer if isinstance(model.tokenizer, str) else model.source
        if data.columns.form != "chat" or not isinstance(name, str):
            return None
        folder = Path(name).expanduser()
        template = template_in(folder) if folder.is_dir() else None
        if template is None:
            return None

        def refusal(document: str) -> str:
            try:
                template.render(json.loads(document))
            except DataError as error:
                return _reason(error)
            return ""

        return refusal

    def encode(self, batch: pa.RecordBatch, settings: Settings, assets: Path) -> Columns:
        import pyarrow as pa

        texts = list[str]()
        spans = list[list[Span]]()
        refusals = list[str | None]()
        for turns in _documents(batch):
            try:
                text, targets = _rendered(turns, settings, assets)
                refusal = None
            except DataError as error:
                text = ""
                targets = []
                refusal = _reason(error)
            texts.append(text)
            spans.append(targets)
            refusals.append(refusal)
        # a chat has its special tokens from the template; other texts get the tokenizer's
        add_special_tokens = settings["form"] != "chat"
        encodings = _tokenizer(assets).encode_batch(texts, add_special_tokens=add_special_tokens)
        all_ids = list[list[int] | None]()
        all_supervised = list["npt.NDArray[np.uint8]"]()
        target_bytes = list[int]()
        for encoding, text, targets in zip(encodings, texts, spans, strict=True):
            ids, supervised, covered = _row(encoding, text, targets, settings)
            # null: nothing to learn from, which leaves the example out
            all_ids.append(ids if supervised.any() else None)
            all_supervised.append(supervised)
            target_bytes.append(covered)
        return {
            "input_ids": pa.array(all_ids, pa.list_(pa.int32())),
            "supervised": pa.array(all_supervised, pa.list_(pa.uint8())),
            "target_bytes": pa.array(target_bytes, pa.int32()),
            REFUSED: pa.array(refusals, pa.string()),
        }

    def build(self, model: ModelSpec, labels: Labels, settings: Settings, assets: Path) -> Module:
        import torch
        from transformers import AutoModelForCausalLM

        inline = {key: settings[key] for key in ("vocab_size", "pad_token_id", "eos_token_id")}
        rows = model.source.get("vocab_size") if isinstance(model.source, dict) else None
        if isinstance(rows, int):  # more rows than tokens make sizes that divide well
            inline["vocab_size"] = max(rows, inline["vocab_size"])
        config = pretrained.configuration(model, {**inline, "bos_token_id": None}, {})
        pretrained.check_positions(_positions(config), settings["max_length"])
        embedded = getattr(config.get_text_config(), "vocab_size", None)
        tokens = settings["vocab_size"]
        if embedded is not None and embedded < tokens:
            message = f"the model knows {embedded} tokens, the tokenizer {tokens}"
            raise RequestError(
                message, where="model.tokenizer", fix="use the model's own tokenizer"
            )
        try:
            network: Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        except (AttributeError, ValueError) as error:
            message = f"transformers builds no causal language model of a {config.model_type}: "
            message += first_line(error)
            fix = "name a model of texts alone, or write a task of your own around it"
            raise UnsupportedError(message, where="model.source", fix=fix) from error
        head = network.get_output_embeddings()  # type: ignore[operator]
        if getattr(head, "bias", None) is not None:
            raise _unsupported(config, "adds a bias to the scores")
        return network

    def collate(
        self,
        table: pa.Table,
        settings: Settings,
        *,
        slots: Ints | None = None,
        rows: Ints | None = None,
        length: int | None = None,
    ) -> dict[str, torch.Tensor]:
        import numpy as np
        import torch

        ids_F, lengths_N = flattened(table, "input_ids")
        supervised_F, _ = flattened(table, "supervised")
        if rows is not None:
            is_filled_F = np.repeat(rows >= 0, lengths_N)
            ids_F = ids_F[is_filled_F]
            supervised_F = supervised_F[is_filled_F]
            lengths_N = np.where(rows >= 0, lengths_N, 0)
        slots_N = np.arange(len(lengths_N)) if slots is None else slots
        starts_N = np.cumsum(lengths_N) - lengths_N
        first_N = np.searchsorted(slots_N, slots_N)  # the first document of the same sequence
        places_N = starts_N - starts_N[first_N]  # where in its sequence a document begins
        needed = int((places_N + lengths_N).max(initial=1))
        if length is not None and length < needed:
            raise ValueError(f"a sequence of {needed} tokens does not fit into {length}")
        position_F = np.arange(len(ids_F)) - np.repeat(starts_N, lengths_N)
        # the next token is a target, and of the same document
        follows_F = np.append((position_F[1:] > 0) & (supervised_F[1:] > 0), False)
        # each column, and what stands in it where there is no token
        columns: dict[str, tuple[Ints, int]] = {
            "input_ids": (ids_F, settings["pad_token_id"]),
            "position_ids": (position_F, 0),
            "documents": (np.repeat(np.arange(len(slots_N)) - first_N + 1, lengths_N), 0),
            "labels": (np.where(follows_F, np.append(ids_F[1:], 0), IGNORED), IGNORED),
        }
        sequence_F = np.repeat(slots_N, lengths_N)
        place_F = position_F + np.repeat(places_N, lengths_N)
        sequences = int(slots_N[-1]) + 1 if len(slots_N) else 0
        inputs = dict[str, torch.Tensor]()
        for name, (values_F, padding) in columns.items():
            array_BT = np.full((sequences, length or needed), padding, np.int64)
            # of no token at all `labels` has one value, which `append` added
            array_BT[sequence_F, place_F] = values_F[: len(position_F)]
            inputs[name] = torch.from_numpy(array_BT)
        return inputs

    def logits(self, network: Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """[B, T, V], float; for sequences of one document each."""
        logits_BTV: torch.Tensor = network(input_ids=inputs["input_ids"], use_cache=False).logits
        return logits_BTV.float()

    def generate(
        self,
        network: Module,
        prompts: list[list[Turn]],
        settings: Settings,
        assets: Path,
        max_new_tokens: int,
    ) -> list[str]:
        import torch

        stops = stop_tokens(settings)
        answers = list[str]()
        for turns in prompts:
            ids = self.prompt_ids(turns, settings, assets)
            room = (_positions(network.config) or 1 << 62) - max_new_tokens
            # the end of a prompt that is too long; of an empty one a token to go on from
            prompt_BT = torch.tensor([ids[-max(1, room) :] or [settings["eos_token_id"]]])
            tokens_BT = network.generate(  # type: ignore[operator]
                input_ids=prompt_BT,
                attention_mask=torch.ones_like(prompt_BT),
                do_sample=False,
                max_new_tokens=max_new_tokens,
                pad_token_id=settings["pad_token_id"],
                eos_token_id=stops,
            )
            written = tokens_BT[0, prompt_BT.shape[1] :].tolist()
            if written and written[-1] in stops:
                written = written[:-1]
            answers.append(self.decoded(written, assets))
        return answers

    def prompt_ids(self, turns: list[Turn], settings: Settings, assets: Path) -> list[int]:
        """Tokens before the answer. Raises DataError for a chat that is refused."""
        tokenizer, template = self._held or (_tokenizer(assets), None)
        ids: list[int]
        if settings["form"] == "chat":
            if template is None:
                template = _template(settings, assets)
            ids = tokenizer.encode(template.prompt(turns), add_special_tokens=False).ids
            return ids
        _, text = turns[-1]
        ids = tokenizer.encode(text, add_special_tokens=True).ids
        # some tokenizers put the end of a text behind it, where the answer is to come
        if ids[-1:] == [settings["eos_token_id"]]:
            ids = ids[:-1]
        return ids

    def decoded(self, ids: list[int], assets: Path) -> str:
        tokenizer = self._held[0] if self._held else _tokenizer(assets)
        return str(tokenizer.decode(ids))


def _reason(refusal: DataError) -> str:
    """A refusal of a chat, as short as its list of rows shows it."""
    return refusal.problems[0].what.removeprefix("the chat template ")


def _documents(batch: pa.RecordBatch) -> Iterator[list[Turn]]:
    for document in batch.column("document").to_pylist():
        yield [(role, content) for role, content in json.loads(document)]


def _texts_in(batch: pa.RecordBatch) -> list[str]:
    texts = list[str]()
    for document in _documents(batch):
        texts += [text for _, text in document]
    return texts


def _rendered(turns: list[Turn], settings: Settings, assets: Path) -> tuple[str, list[Span]]:
    """A document as one text, and which parts of it are targets."""
    if settings["form"] == "chat":
        # settings of models of before have no `answer_ends`
        return _template(settings, assets).render(turns, settings.get("answer_ends"))
    text = "".join(content for _, content in turns)
    _, last = turns[-1]
    return text, [(len(text) - len(last), len(text))]


def _row(encoding: tokenizers.Encoding, text: str, spans: list[Span], settings: Settings) -> Row:
    """Ids, marks of the targets among them,
    and how many bytes of text the targets cover."""
    import numpy as np

    limit = settings["max_length"]
    end = settings["eos_token_id"]
    ids = encoding.ids
    stops = np.fromiter((stop for _, stop in encoding.offsets), np.int64, count=len(ids))
    # a token belongs to the span that it ends in: one across the border is a target, too
    in_spans = [(stops > start) & (stops <= stop) for start, stop in spans]
    supervised = np.zeros(len(ids), np.uint8)
    if in_spans:
        supervised = np.any(in_spans, axis=0).astype(np.uint8)
    if settings["form"] != "chat":
        if ids[-1:] != [end]:
            ids = [*ids, end]
            supervised = np.append(supervised, np.uint8(1))
        supervised[-1] = 1
    ids = ids[:limit]
    supervised = supervised[:limit]
    supervised[:1] = 0  # nothing stands before it that it could be predicted from
    covered = 0
    for (start, _), in_span in zip(spans, in_spans, strict=True):
        targets = np.flatnonzero(in_span[:limit] & supervised[: len(in_span)].astype(bool))
        if len(targets):
            begin = max(start, int(stops[targets[0] - 1]))
            covered += len(text[begin : int(stops[targets[-1]])].encode())
    return ids, supervised, covered


_tokenizer = pretrained.cached_by_tokenizer(pretrained.read_tokenizer)
_source = pretrained.cached_by_tokenizer(
    lambda assets: (assets / _TEMPLATE).read_text(encoding="utf-8")
)


def _template(settings: Settings, assets: Path) -> ChatTemplate:
    return ChatTemplate(_source(assets), settings["special_tokens"])


def train_bpe(
    texts: Iterable[list[str]], *, vocab_size: int, min_frequency: int
) -> tokenizers.Tokenizer:
    """A byte-level tokenizer of at most `vocab_size` (at least `SMALLEST`) tokens: every
    text has tokens and comes back exactly, and the same texts give the same file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=list(SPECIAL_TOKENS),
        # all bytes, so that no text has an unknown token
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # in one pass, batch by batch: the texts are never in memory together
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _fetch_tokenizer(model: ModelSpec, assets: Path) -> Settings:
    tokenizer = pretrained.fetch_tokenizer(model)
    if tokenizer.eos_token_id is None:
        message = "the tokenizer has no token that ends a text"
        fix = "name the tokenizer of a causal language model"
        raise RequestError(message, where="model.tokenizer", fix=fix)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    source = tokenizer.get_chat_template() if tokenizer.chat_template else TEMPLATE
    tokenizer.chat_template = source
    pretrained.save_fetched(tokenizer, assets)
    (assets / _TEMPLATE).write_text(source, encoding="utf-8")
    pad = tokenizer.pad_token_id
    if pad is None:
        pad = tokenizer.eos_token_id
    return {
        "vocab_size": len(tokenizer),
        "pad_token_id": pad,
        "eos_token_id": tokenizer.eos_token_id,
        "special_tokens": special,
    }


def stop_tokens(settings: Settings) -> list[int]:
    """The tokens that end what a model writes, the end-of-text token first. A model of
    before knows that one only."""
    return list(settings.get("stop_token_ids", [settings["eos_token_id"]]))


def _with_endings(fitted: Settings, shape: Settings, assets: Path) -> Settings:
    """The settings with how answers end: `stop_token_ids`; of chats also `answer_ends`,
    the texts behind answers that hold one, and `ends_added`, whether some answers have
    none."""
    stops = [int(fitted["eos_token_id"])]
    if shape["form"] != "chat":
        return {**fitted, "stop_token_ids": stops}
    tokenizer = pretrained.read_tokenizer(assets)
    source = (assets / _TEMPLATE).read_text(encoding="utf-8")
    try:
        endings = ChatTemplate(source, fitted["special_tokens"]).endings()
    except DataError as error:
        problems = list[Problem]()
        for problem in error.problems:
            problems.append(dataclasses.replace(problem, where="model.tokenizer"))
        raise DataError(problems) from error
    ends = list[str]()
    lacks_stop = False
    for ending in endings:
        stop, text = _stop_in(ending, tokenizer, stops[0])
        if stop is None:
            lacks_stop = True
            continue
        ends.append(text)
        stops.append(stop)
    if lacks_stop:
        _check_end(tokenizer, fitted)
    return {
        **fitted,
        "stop_token_ids": list(dict.fromkeys(stops)),
        "answer_ends": list(dict.fromkeys(ends)),
        "ends_added": lacks_stop,
    }


def _stop_in(ending: Ending, tokenizer: tokenizers.Tokenizer, end: int) -> tuple[int | None, str]:
    """The first special token of an ending, or where it has none the first that was added
    to the vocabulary (a model may stop at one that is not marked as special); and the
    text of its whole tokens."""
    added = tokenizer.get_added_tokens_decoder()
    encoding = tokenizer.encode(ending.text, add_special_tokens=False)
    special_tokens = list[int]()
    other_tokens = list[int]()
    stop = ending.start
    for token, (first, last) in zip(encoding.ids, encoding.offsets, strict=True):
        if first < ending.start or last > ending.end:
            continue
        stop = max(stop, last)
        added_token = added.get(token)
        if added_token is None:
            continue
        name = added_token.content.strip()
        # an unknown character becomes a special token,
        # too, whose name is not what stands there
        if ending.text[first:last].strip() != name:
            continue
        if added_token.special or token == end:
            special_tokens.append(token)
        elif name:
            other_tokens.append(token)
    return next(iter(special_tokens + other_tokens), None), ending.text[ending.start : stop]


def _check_end(tokenizer: tokenizers.Tokenizer, fitted: Settings) -> None:
    """RequestError for a tokenizer that does not read its end-of-text token in a text."""
    name = fitted["special_tokens"]["eos_token"]
    end = fitted["eos_token_id"]
    if tokenizer.encode(f"a{name}", add_special_tokens=False).ids[-1:] != [end]:
        message = (
            "the chat template ends answers with no special token, and the tokenizer does not "
        )
        message += f"read its own, `{name}`, in a text"
        fix = "name a tokenizer whose chat template ends answers, or that has it as an added token"
        raise RequestError(message, where="model.tokenizer", fix=fix)


def _positions(config: Any) -> int | None:
    """The most tokens of a text; None of architectures that have no such bound."""
    return getattr(config, "max_position_embeddings", None)


def _unsupported(config: PretrainedConfig, trait: str) -> UnsupportedError:
    message = f"{config.model_type} {trait}, which the chunked loss does not compute"
    fix = "use a Llama, Mistral, Qwen or GPT-2 architecture"
    return UnsupportedError(message, where="model.source", fix=fix)
