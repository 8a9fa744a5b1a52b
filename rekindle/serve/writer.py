"""What a language model writes, for several instances at once, token by token.

Instances join and leave between two tokens: keys and values of those under way are padded
on the left to the longest. Each gets the tokens that it would get alone: the most
probable ones, as the task's own `generate` writes, or drawn by its seed. Shapes: B
instances, T tokens, V vocabulary."""

import dataclasses
import math
from typing import Any

import torch
from torch.nn import functional as F
from transformers import DynamicCache

from rekindle.errors import DataError
from rekindle.serve.classifier import network_in
from rekindle.serve.work import (
    Event,
    Model,
    PendingInstance,
    Prediction,
    RefusedError,
    failure_of,
    not_finite,
)
from rekindle.tasks.causal_lm import CausalLM, stop_tokens
from rekindle.train.modelfolder import ModelFolder

MOST_ROWS = 16


@dataclasses.dataclass(eq=False)
class TextUnderWay:
    """An instance under way: its prompt, and what is written."""

    work: PendingInstance
    prompt: list[int]
    limit: int
    cut: bool
    draw: torch.Generator
    written: list[int] = dataclasses.field(default_factory=list)


class LanguageModel(Model):
    """Begins and ends what is written in up to `positions` tokens, prompt included."""

    def __init__(self, opened: ModelFolder, task: CausalLM, positions: int | None) -> None:
        self.opened = opened
        self.task = task
        self.positions = positions or 1 << 62
        self.stops = stop_tokens(opened.settings)

    def text(self, work: PendingInstance) -> TextUnderWay:
        """An instance that begins. A prompt that leaves no room is cut off in front, to
        half of the positions at least. Raises RekindleError for a chat that the template
        refuses."""
        ids = self.task.prompt_ids(work.content, self.opened.settings, self.opened.path)
        length = work.options.max_new_tokens
        most_kept = self.positions - min(length, self.positions // 2)
        # a network needs one token at least to go
        # on from: of an empty prompt, a stop token
        prompt = ids[-most_kept:] or self.stops[:1]
        seed = work.options.seed
        if seed is None:
            seed = work.seed
        draw = torch.Generator()
        draw.manual_seed(seed)
        limit = min(length, self.positions - len(prompt))
        return TextUnderWay(work, prompt, limit, len(prompt) < len(ids), draw)

    def prediction(self, text: TextUnderWay) -> Prediction:
        """The answer of a text that is whole."""
        is_stopped = bool(text.written) and text.written[-1] in self.stops
        ids = text.written[:-1] if is_stopped else text.written
        prediction: Prediction = {
            "text": self.decoded(ids),
            "prompt_tokens": len(text.prompt),
            "tokens": len(text.written),
            "finish_reason": "stop" if is_stopped else "length",
        }
        if text.cut:
            prediction["truncated"] = True
        return prediction

    def decoded(self, ids: list[int]) -> str:
        """The text of tokens."""
        return self.task.decoded(ids, self.opened.path)

    def begin_texts(self, new: list[PendingInstance], events: list[Event]) -> list[TextUnderWay]:
        """The texts of new instances; for those that cannot begin, `events` gets why."""
        texts = list[TextUnderWay]()
        for work in new:
            try:
                texts.append(self.text(work))
            except DataError as error:  # a chat that the template refuses
                events.append((work, RefusedError(400, error.problems[0].what)))
            except Exception as error:  # noqa: BLE001 - this one fails, the others begin
                events.append((work, failure_of(error)))
        return texts


class Writer(LanguageModel):
    """Each turn writes one token of each instance."""

    def __init__(
        self, opened: ModelFolder, task: CausalLM, device: torch.device, precision: str = ""
    ) -> None:
        self.network: Any
        self.network, self.device = network_in(opened, device, precision)
        positions = getattr(self.network.config, "max_position_embeddings", None)
        super().__init__(opened, task, positions)
        self.pad = opened.settings["pad_token_id"]
        self.mask_BT: Any = None
        self.cache: Any = None
        self._keep([])

    @torch.inference_mode()
    def turn(self, new: list[PendingInstance]) -> list[Event]:
        """The next token of the texts under way, the first of new ones."""
        events: list[Event] = []
        try:
            self._drop_others([not text.work.gone for text in self.texts])
            if self.texts:
                last_B1 = torch.tensor([[text.written[-1]] for text in self.texts])
                self.mask_BT = F.pad(self.mask_BT, (0, 1), value=1)
                logits_BV = self._forward(last_B1, self.mask_BT, self.cache)
                self._drop_others(self._add_tokens(self.texts, logits_BV, events))
        except Exception as error:  # noqa: BLE001 - these fail, the server goes on
            events += [(text.work, failure_of(error)) for text in self.texts]
            self._keep([])
        texts = self.begin_texts(new, events)
        try:
            if texts:
                self._prefill(texts, events)
        except Exception as error:  # noqa: BLE001 - these fail, the server goes on
            events += [(text.work, failure_of(error)) for text in texts]
            self._drop_others([text not in texts for text in self.texts])
        return events

    def _prefill(self, texts: list[TextUnderWay], events: list[Event]) -> None:
        """Run the prompts through the network, and write the first token of each."""
        longest = max(len(text.prompt) for text in texts)
        rows = list[list[int]]()
        for text in texts:
            padding = [self.pad] * (longest - len(text.prompt))
            rows.append(padding + text.prompt)
        lengths_B1 = torch.tensor([[len(text.prompt)] for text in texts], device=self.device)
        mask_BT = (torch.arange(longest, device=self.device) >= longest - lengths_B1).long()
        cache = DynamicCache()
        logits_BV = self._forward(torch.tensor(rows), mask_BT, cache)
        stays_before = [True] * len(self.texts)
        # joined before their tokens are added: what fails there is dropped as under way
        self._join(texts, mask_BT, cache)
        self._drop_others(stays_before + self._add_tokens(texts, logits_BV, events))

    def _forward(self, ids_BT: torch.Tensor, mask_BT: torch.Tensor, cache: Any) -> torch.Tensor:
        """[B, V], float64, on the host: the scores of what follows."""
        # positions are counted from the first token
        # that is no padding, as for the text alone
        positions_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)[:, -ids_BT.shape[1] :]
        result = self.network(
            input_ids=ids_BT.to(self.device),
            attention_mask=mask_BT,
            position_ids=positions_BT,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits_BV: torch.Tensor = result.logits[:, -1].double().cpu()
        return logits_BV

    def _add_tokens(
        self, texts: list[TextUnderWay], logits_BV: torch.Tensor, events: list[Event]
    ) -> list[bool]:
        """Write the next token of each text; returns whether it goes on behind it."""
        stays = list[bool]()
        for text, logits_V in zip(texts, logits_BV, strict=True):
            if not math.isfinite(float(logits_V.max())):
                events.append((text.work, not_finite()))
                stays.append(False)
                continue
            token = int(logits_V.argmax())
            temperature = text.work.options.temperature
            if temperature > 0:
                odds_V = torch.softmax(logits_V / max(temperature, 0.01), -1)
                token = int(torch.multinomial(odds_V, 1, generator=text.draw))
            text.written.append(token)
            is_stop = token in self.stops
            if not is_stop:
                events.append((text.work, token))
            goes_on = not is_stop and len(text.written) < text.limit
            stays.append(goes_on)
            if not goes_on:
                events.append((text.work, self.prediction(text)))
        return stays

    def _join(self, texts: list[TextUnderWay], mask_BT: torch.Tensor, cache: Any) -> None:
        """Put new texts below those under way."""
        if self.texts:
            width = max(self.mask_BT.shape[1], mask_BT.shape[1])
            old_padding = width - self.mask_BT.shape[1]
            new_padding = width - mask_BT.shape[1]
            old_mask_BT = F.pad(self.mask_BT, (old_padding, 0))
            new_mask_BT = F.pad(mask_BT, (new_padding, 0))
            mask_BT = torch.cat([old_mask_BT, new_mask_BT])
            for old_layer, new_layer in zip(self.cache.layers, cache.layers, strict=True):
                for name in ("keys", "values"):
                    # [B, heads, T, width]: the last dim but one is that of tokens
                    old = F.pad(getattr(old_layer, name), (0, 0, old_padding, 0))
                    new = F.pad(getattr(new_layer, name), (0, 0, new_padding, 0))
                    setattr(new_layer, name, torch.cat([old, new]))
        self._keep([*self.texts, *texts], mask_BT, cache)

    def _drop_others(self, stays: list[bool]) -> None:
        """Keep the texts that stay, without the padding that none of them needs."""
        if all(stays):
            return
        if not any(stays):
            self._keep([])
            return
        stays_B = torch.tensor(stays, device=self.device)
        mask_BT = self.mask_BT[stays_B]
        first = int(mask_BT.any(0).int().argmax())
        for layer in self.cache.layers:
            layer.keys = layer.keys[stays_B, :, first:]
            layer.values = layer.values[stays_B, :, first:]
        texts = [text for text, stay in zip(self.texts, stays, strict=True) if stay]
        self._keep(texts, mask_BT[:, first:], self.cache)

    def _keep(self, texts: list[TextUnderWay], mask_BT: Any = None, cache: Any = None) -> None:
        self.texts = texts
        self.mask_BT = mask_BT
        self.cache = cache
        self.room = MOST_ROWS - len(texts)
        self.busy = bool(texts)
