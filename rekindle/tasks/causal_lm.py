"""Causal language models: plain texts, prompts with completions, and chats; any
`AutoModelForCausalLM` of transformers whose scores are a plain matrix product of its last states.

Decides what a document's tokens are and which of them are targets: of a plain text all (but the
first), of a prompt and a completion, joined as they are, those of the completion, of a chat those
of the assistant's turns. Texts and completions end with the tokenizer's end-of-text token, answers
of a chat as its template ends them (`chat.py`): the first special token behind an answer stops the
writing (`stop_token_ids` of the settings), and where there is none the end-of-text token is put
there. What exceeds `data.max_length` is cut off. Shapes: B sequences, T tokens, V vocabulary, N
documents, F tokens of all documents joined."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rekindle.errors import DataError, RequestError, UnsupportedError, first_line
from rekindle.spec.model import DataSpec, ModelSpec, TokenizerSpec
from rekindle.tasks import pretrained
from rekindle.tasks.base import REFUSED, Labels, Modality, Settings, TokenTask, flattened
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
PAD, END = "<|pad|>", "<|end|>"
SPECIAL_TOKENS = (PAD, END, "<|system|>", "<|user|>", "<|assistant|>")
SMALLEST = 256 + len(SPECIAL_TOKENS)
_TEMPLATE = "chat_template.jinja"
_EXAMPLE = "{model_type: llama, hidden_size: 128, intermediate_size: 352, num_hidden_layers: 2}"


class CausalLM(pretrained.HubTask, TokenTask):
    modality: ClassVar[Modality] = "document"
    head: ClassVar[str] = "AutoModelForCausalLM"
    _held: tuple[tokenizers.Tokenizer, ChatTemplate | None] | None = None

    def hold(self, settings: Settings, assets: Path) -> None:
        template = None
        if settings["form"] == "chat":
            source = (assets / _TEMPLATE).read_text(encoding="utf-8")
            template = ChatTemplate(source, settings["special_tokens"])
        self._held = pretrained.read_tokenizer(assets), template

    def check(self, data: DataSpec, model: ModelSpec) -> None:
        pretrained.check_source(model, _EXAMPLE, data.max_length)
        tokenizer = model.tokenizer
        if isinstance(tokenizer, TokenizerSpec) and isinstance(model.source, str):
            what = "a tokenizer trained here does not fit the embeddings of a pretrained model"
            fix = "leave it out, or give an inline config as model.source"
            raise RequestError(what, where="model.tokenizer", fix=fix)
        if isinstance(tokenizer, TokenizerSpec) and tokenizer.vocab_size < SMALLEST:
            what = f"{tokenizer.vocab_size} tokens are fewer than the bytes and special tokens"
            fix = f"at least {SMALLEST}"
            raise RequestError(what, where="model.tokenizer.vocab_size", fix=fix)

    def fit(self, train: Passes, data: DataSpec, model: ModelSpec, assets: Path) -> Settings:
        shape = {"form": data.columns.form, "max_length": data.max_length, "packing": data.packing}
        if isinstance(model.tokenizer, str) or isinstance(model.source, str):
            return {**shape, **_ended(_fetch_tokenizer(model, assets), shape, assets)}
        spec, roles = model.tokenizer or TokenizerSpec(), {"pad_token": PAD, "eos_token": END}
        batches = (_documents(batch) for batch in train())
        texts = ([text for document in batch for _, text in document] for batch in batches)
        tokenizer = train_bpe(texts, vocab_size=spec.vocab_size, min_frequency=spec.min_frequency)
        pretrained.save_tokenizer(tokenizer, assets, **roles)
        (assets / _TEMPLATE).write_text(TEMPLATE, encoding="utf-8")
        fitted = {
            "vocab_size": tokenizer.get_vocab_size(),
            "pad_token_id": tokenizer.token_to_id(PAD),
            "eos_token_id": tokenizer.token_to_id(END),
            "special_tokens": roles,
        }
        return {**shape, **_ended(fitted, shape, assets)}

    def notices(self, settings: Settings) -> list[str]:
        if not settings.get("ends_added"):
            return []
        end = settings["special_tokens"]["eos_token"]
        what = "the chat template ends answers with no special token"
        return [f"{what}: each answer gets `{end}` behind it, and the model learns to write it"]

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
                return _why(error)
            return ""

        return refusal

    def encode(self, batch: pa.RecordBatch, settings: Settings, assets: Path) -> Columns:
        import pyarrow as pa

        chat = settings["form"] == "chat"
        rendered, refused = list[tuple[str, list[Span]]](), list[str | None]()
        for turns in _documents(batch):
            try:
                rendered.append(_rendered(turns, settings, assets))
                refused.append(None)
            except DataError as refusal:
                rendered.append(("", []))
                refused.append(_why(refusal))
        texts = [text for text, _ in rendered]
        encoded = _tokenizer(assets).encode_batch(texts, add_special_tokens=not chat)
        pairs = zip(encoded, rendered, strict=True)
        rows = [_row(encoding, text, spans, settings) for encoding, (text, spans) in pairs]
        ids = [ids if supervised.any() else None for ids, supervised, _ in rows]
        return {
            "input_ids": pa.array(ids, pa.list_(pa.int32())),
            "supervised": pa.array([marks for _, marks, _ in rows], pa.list_(pa.uint8())),
            "target_bytes": pa.array([size for _, _, size in rows], pa.int32()),
            REFUSED: pa.array(refused, pa.string()),
        }

    def build(self, model: ModelSpec, labels: Labels, settings: Settings, assets: Path) -> Module:
        import torch
        from transformers import AutoModelForCausalLM

        inline = {key: settings[key] for key in ("vocab_size", "pad_token_id", "eos_token_id")}
        wished = model.source.get("vocab_size") if isinstance(model.source, dict) else None
        if isinstance(wished, int):  # more rows than tokens make sizes that divide well
            inline["vocab_size"] = max(wished, inline["vocab_size"])
        config = pretrained.configuration(model, {**inline, "bos_token_id": None}, {})
        pretrained.check_positions(_positions(config), settings["max_length"])
        known = getattr(config.get_text_config(), "vocab_size", None)
        if known is not None and known < (count := settings["vocab_size"]):
            what = f"the model knows {known} tokens, the tokenizer {count}"
            raise RequestError(what, where="model.tokenizer", fix="use the model's own tokenizer")
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
            kept_F = np.repeat(rows >= 0, lengths_N)
            ids_F, supervised_F = ids_F[kept_F], supervised_F[kept_F]
            lengths_N = np.where(rows >= 0, lengths_N, 0)
        slots_N = np.arange(len(lengths_N)) if slots is None else slots
        starts_N = np.cumsum(lengths_N) - lengths_N
        first_N = np.searchsorted(slots_N, slots_N)
        places_N = starts_N - starts_N[first_N]  # where in its sequence a document begins
        needed = int((places_N + lengths_N).max(initial=1))
        if length is not None and length < needed:
            raise ValueError(f"a sequence of {needed} tokens does not fit into {length}")
        position_F = np.arange(len(ids_F)) - np.repeat(starts_N, lengths_N)
        follows_F = np.append((position_F[1:] > 0) & (supervised_F[1:] > 0), False)
        columns: dict[str, tuple[Ints, int]] = {
            "input_ids": (ids_F, settings["pad_token_id"]),
            "position_ids": (position_F, 0),
            "documents": (np.repeat(np.arange(len(slots_N)) - first_N + 1, lengths_N), 0),
            "labels": (np.where(follows_F, np.append(ids_F[1:], 0), IGNORED), IGNORED),
        }
        at = np.repeat(slots_N, lengths_N), position_F + np.repeat(places_N, lengths_N)
        shape = (int(slots_N[-1]) + 1 if len(slots_N) else 0, length or needed)
        made = {}
        for name, (values_F, padding) in columns.items():
            array_BT = np.full(shape, padding, np.int64)
            array_BT[at] = values_F[: len(position_F)]
            made[name] = torch.from_numpy(array_BT)
        return made

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

        stops, answers = stop_tokens(settings), []
        for turns in prompts:
            ids = self.prompt_ids(turns, settings, assets)
            room = (_positions(network.config) or 1 << 62) - max_new_tokens
            prompt_BT = torch.tensor([ids[-max(1, room) :] or [settings["eos_token_id"]]])
            found_BT = network.generate(  # type: ignore[operator]
                input_ids=prompt_BT,
                attention_mask=torch.ones_like(prompt_BT),
                do_sample=False,
                max_new_tokens=max_new_tokens,
                pad_token_id=settings["pad_token_id"],
                eos_token_id=stops,
            )
            written = found_BT[0, prompt_BT.shape[1] :].tolist()
            if written and written[-1] in stops:
                written = written[:-1]
            answers.append(self.decoded(written, assets))
        return answers

    def prompt_ids(self, turns: list[Turn], settings: Settings, assets: Path) -> list[int]:
        """Tokens before the answer. Raises DataError for a chat that the template refuses."""
        chat, end = settings["form"] == "chat", settings["eos_token_id"]
        tokenizer, template = self._held or (_tokenizer(assets), None)
        if chat and template is None:
            template = _template(settings, assets)
        text = template.prompt(turns) if template else turns[-1][1]
        ids: list[int] = tokenizer.encode(text, add_special_tokens=not chat).ids
        return ids[:-1] if ids[-1:] == [end] and not chat else ids

    def decoded(self, ids: list[int], assets: Path) -> str:
        tokenizer = self._held[0] if self._held else _tokenizer(assets)
        return str(tokenizer.decode(ids))


def _why(refusal: DataError) -> str:
    """A refusal of a chat, as short as its list of rows shows it."""
    return refusal.problems[0].what.removeprefix("the chat template ")


def _documents(batch: pa.RecordBatch) -> Iterator[list[Turn]]:
    for document in batch.column("document").to_pylist():
        yield [(role, content) for role, content in json.loads(document)]


def _rendered(turns: list[Turn], settings: Settings, assets: Path) -> tuple[str, list[Span]]:
    """A document as one text, and which parts of it are targets."""
    if settings["form"] == "chat":  # models of before know no ends
        return _template(settings, assets).render(turns, settings.get("answer_ends"))
    text = "".join(content for _, content in turns)
    return text, [(len(text) - len(turns[-1][1]), len(text))]


def _row(encoding: tokenizers.Encoding, text: str, spans: list[Span], settings: Settings) -> Row:
    """Ids, marks of the targets among them, and the bytes of text that the targets cover."""
    import numpy as np

    limit, end = settings["max_length"], settings["eos_token_id"]
    ids = encoding.ids
    ends = np.fromiter((stop for _, stop in encoding.offsets), np.int64, count=len(ids))
    spanned = [(ends > start) & (ends <= stop) for start, stop in spans]
    supervised = np.zeros(len(ids), np.uint8)
    if spanned:
        supervised = np.any(spanned, axis=0).astype(np.uint8)
    if settings["form"] != "chat":
        if ids[-1:] != [end]:
            ids, supervised = [*ids, end], np.append(supervised, np.uint8(1))
        supervised[-1] = 1
    ids, supervised = ids[:limit], supervised[:limit]
    supervised[:1] = 0
    covered = 0
    for (start, _), inside in zip(spans, spanned, strict=True):
        chosen = np.flatnonzero(inside[:limit] & supervised[: len(inside)].astype(bool))
        if len(chosen):
            begin = max(start, int(ends[chosen[0] - 1]))
            covered += len(text[begin : int(ends[chosen[-1]])].encode())
    return ids, supervised, covered


_tokenizer = pretrained.kept(pretrained.read_tokenizer)
_source = pretrained.kept(lambda assets: (assets / _TEMPLATE).read_text(encoding="utf-8"))


def _template(settings: Settings, assets: Path) -> ChatTemplate:
    return ChatTemplate(_source(assets), settings["special_tokens"])


def train_bpe(
    texts: Iterable[list[str]], *, vocab_size: int, min_frequency: int
) -> tokenizers.Tokenizer:
    """A byte-level tokenizer of at most `vocab_size` (at least `SMALLEST`) tokens: every text has
    tokens and comes back exactly, and the same texts give the same file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _fetch_tokenizer(model: ModelSpec, assets: Path) -> Settings:
    tokenizer = pretrained.fetch_tokenizer(model)
    if tokenizer.eos_token_id is None:
        what = "the tokenizer has no token that ends a text"
        fix = "name the tokenizer of a causal language model"
        raise RequestError(what, where="model.tokenizer", fix=fix)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    source = tokenizer.get_chat_template() if tokenizer.chat_template else TEMPLATE
    tokenizer.chat_template = source
    pretrained.save_fetched(tokenizer, assets)
    (assets / _TEMPLATE).write_text(source, encoding="utf-8")
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    return {
        "vocab_size": len(tokenizer),
        "pad_token_id": end if pad is None else pad,
        "eos_token_id": end,
        "special_tokens": special,
    }


def stop_tokens(settings: Settings) -> list[int]:
    """The tokens that end what a model writes, the end-of-text token first. A model of before knows
    that one only."""
    return list(settings.get("stop_token_ids", [settings["eos_token_id"]]))


def _ended(fitted: Settings, shape: Settings, assets: Path) -> Settings:
    """The settings with how answers end: `stop_token_ids`; of chats also `answer_ends`, the texts
    behind answers that hold one, and `ends_added`, whether some answers have none."""
    stops = [int(fitted["eos_token_id"])]
    if shape["form"] != "chat":
        return {**fitted, "stop_token_ids": stops}
    tokenizer = pretrained.read_tokenizer(assets)
    source = (assets / _TEMPLATE).read_text(encoding="utf-8")
    try:
        endings = ChatTemplate(source, fitted["special_tokens"]).endings()
    except DataError as error:
        problems = [dataclasses.replace(one, where="model.tokenizer") for one in error.problems]
        raise DataError(problems) from error
    ends, lacks = list[str](), False
    for ending in endings:
        stop, text = _stop_in(ending, tokenizer, stops[0])
        if stop is None:
            lacks = True
            continue
        ends.append(text)
        stops.append(stop)
    if lacks:
        _check_end(tokenizer, fitted)
    return {
        **fitted,
        "stop_token_ids": list(dict.fromkeys(stops)),
        "answer_ends": list(dict.fromkeys(ends)),
        "ends_added": lacks,
    }


def _stop_in(ending: Ending, tokenizer: tokenizers.Tokenizer, end: int) -> tuple[int | None, str]:
    """The first special token of an ending, or where it has none the first that was added to the
    vocabulary (a model may stop at one that is not marked as special); and the text of its whole
    tokens."""
    added = tokenizer.get_added_tokens_decoder()
    encoding = tokenizer.encode(ending.text, add_special_tokens=False)
    special, others, stop = list[int](), list[int](), ending.start
    for token, (first, last) in zip(encoding.ids, encoding.offsets, strict=True):
        if first < ending.start or last > ending.end:
            continue
        stop = max(stop, last)
        known = added.get(token)
        # an unknown character becomes a special token, too, whose name is not what stands there
        if known is None or ending.text[first:last].strip() != known.content.strip():
            continue
        if known.special or token == end:
            special.append(token)
        elif known.content.strip():
            others.append(token)
    return next(iter(special + others), None), ending.text[ending.start : stop]


def _check_end(tokenizer: tokenizers.Tokenizer, fitted: Settings) -> None:
    """RequestError for a tokenizer that does not read its end-of-text token in a text."""
    name, end = fitted["special_tokens"]["eos_token"], fitted["eos_token_id"]
    if tokenizer.encode(f"a{name}", add_special_tokens=False).ids[-1:] != [end]:
        what = "the chat template ends answers with no special token, and the tokenizer does not "
        what += f"read its own, `{name}`, in a text"
        fix = "name a tokenizer whose chat template ends answers, or that has it as an added token"
        raise RequestError(what, where="model.tokenizer", fix=fix)


def _positions(config: Any) -> int | None:
    return getattr(config, "max_position_embeddings", None)


def _unsupported(config: PretrainedConfig, what: str) -> UnsupportedError:
    what = f"{config.model_type} {what}, which the chunked loss does not compute"
    fix = "use a Llama, Mistral, Qwen or GPT-2 architecture"
    return UnsupportedError(what, where="model.source", fix=fix)
