"""Causal language models: plain texts, prompts with completions, and chats; any
`AutoModelForCausalLM` of transformers whose scores are a plain matrix product of its last states.

Decides what a document's tokens are and which of them are targets: of a plain text all (but the
first), of a prompt and a completion, joined as they are, those of the completion, of a chat those
of the assistant's turns. Texts and completions end with the tokenizer's end-of-text token, chats as
their template ends them (`chat.py`). What exceeds `data.max_length` is cut off. Shapes: B
sequences, T tokens, V vocabulary, N documents, F tokens of all documents joined."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rekindle.errors import RequestError, UnsupportedError
from rekindle.spec.model import DataSpec, ModelSpec, TokenizerSpec
from rekindle.tasks import pretrained
from rekindle.tasks.base import Labels, Modality, Settings, TokenTask, flattened
from rekindle.tasks.chat import TEMPLATE, ChatTemplate, Span, Turn

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
# what some architectures do to the scores behind the last matrix product
_SCALES = ("final_logit_softcapping", "logits_scaling", "logit_scale")


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
            return {**shape, **_fetch_tokenizer(model, assets)}
        spec, roles = model.tokenizer or TokenizerSpec(), {"pad_token": PAD, "eos_token": END}
        batches = (_documents(batch) for batch in train())
        texts = ([text for document in batch for _, text in document] for batch in batches)
        tokenizer = train_bpe(texts, vocab_size=spec.vocab_size, min_frequency=spec.min_frequency)
        pretrained.save_tokenizer(tokenizer, assets, **roles)
        (assets / _TEMPLATE).write_text(TEMPLATE, encoding="utf-8")
        return {
            **shape, "vocab_size": tokenizer.get_vocab_size(),
            "pad_token_id": tokenizer.token_to_id(PAD), "eos_token_id": tokenizer.token_to_id(END),
            "special_tokens": roles,
        }  # fmt: skip

    def encode(self, batch: pa.RecordBatch, settings: Settings, assets: Path) -> Columns:
        import pyarrow as pa

        chat = settings["form"] == "chat"
        rendered = [_rendered(d, settings, assets) for d in _documents(batch)]
        texts = [text for text, _ in rendered]
        encoded = _tokenizer(assets).encode_batch(texts, add_special_tokens=not chat)
        pairs = zip(encoded, rendered, strict=True)
        rows = [_row(encoding, text, spans, settings) for encoding, (text, spans) in pairs]
        ids = [ids if supervised.any() else None for ids, supervised, _ in rows]
        return {
            "input_ids": pa.array(ids, pa.list_(pa.int32())),
            "supervised": pa.array([marks for _, marks, _ in rows], pa.list_(pa.uint8())),
            "target_bytes": pa.array([size for _, _, size in rows], pa.int32()),
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
        if config.vocab_size < (count := settings["vocab_size"]):
            what = f"the model knows {config.vocab_size} tokens, the tokenizer {count}"
            raise RequestError(what, where="model.tokenizer", fix="use the model's own tokenizer")
        for name in _SCALES:
            if getattr(config, name, None) not in (None, 1, 1.0):
                raise _unsupported(config, f"changes the scores ({name})")
        network: Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        head = network.get_output_embeddings()  # type: ignore[operator]
        if getattr(head, "bias", None) is not None:
            raise _unsupported(config, "adds a bias to the scores")
        return network

    def collate(
        self, table: pa.Table, settings: Settings, *, slots: Ints | None = None,
        rows: Ints | None = None, length: int | None = None,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
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
        self, network: Module, prompts: list[list[Turn]], settings: Settings, assets: Path,
        max_new_tokens: int,
    ) -> list[str]:  # fmt: skip
        import torch

        end, answers = settings["eos_token_id"], []
        for turns in prompts:
            ids = self.prompt_ids(turns, settings, assets)
            room = (_positions(network.config) or 1 << 62) - max_new_tokens
            prompt_BT = torch.tensor([ids[-max(1, room) :] or [end]])
            found_BT = network.generate(  # type: ignore[operator]
                input_ids=prompt_BT, attention_mask=torch.ones_like(prompt_BT), do_sample=False,
                max_new_tokens=max_new_tokens, pad_token_id=settings["pad_token_id"],
                eos_token_id=end,
            )  # fmt: skip
            answers.append(self.decoded(found_BT[0, prompt_BT.shape[1] :].tolist(), assets))
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


def _documents(batch: pa.RecordBatch) -> Iterator[list[Turn]]:
    for document in batch.column("document").to_pylist():
        yield [(role, content) for role, content in json.loads(document)]


def _rendered(turns: list[Turn], settings: Settings, assets: Path) -> tuple[str, list[Span]]:
    """A document as one text, and which parts of it are targets."""
    if settings["form"] == "chat":
        return _template(settings, assets).render(turns)
    text = "".join(content for _, content in turns)
    return text, [(len(text) - len(turns[-1][1]), len(text))]


def _row(encoding: tokenizers.Encoding, text: str, spans: list[Span], settings: Settings) -> Row:
    """Ids, marks of the targets among them, and the bytes of text that the targets cover."""
    import numpy as np

    limit, end = settings["max_length"], settings["eos_token_id"]
    ids = encoding.ids
    ends = np.fromiter((stop for _, stop in encoding.offsets), np.int64, count=len(ids))
    spanned = [(ends > start) & (ends <= stop) for start, stop in spans]
    supervised = np.any(spanned, axis=0).astype(np.uint8) if ids else np.zeros(0, np.uint8)
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
        vocab_size=vocab_size, min_frequency=min_frequency, special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
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
        "vocab_size": len(tokenizer), "pad_token_id": end if pad is None else pad,
        "eos_token_id": end, "special_tokens": special,
    }  # fmt: skip


def _positions(config: Any) -> int | None:
    return getattr(config, "max_position_embeddings", None)


def _unsupported(config: PretrainedConfig, what: str) -> UnsupportedError:
    what = f"{config.model_type} {what}, which the chunked loss does not compute"
    fix = "use a Llama, Mistral, Qwen or GPT-2 architecture"
    return UnsupportedError(what, where="model.source", fix=fix)
