"""How well a language model predicts the targets of held-out texts, and what it writes itself.

Every text counts once, alone in its sequence. Texts of like length share a batch, padded on the
right, which a causal model never looks at; scores of the whole vocabulary exist for a few positions
at a time. Shapes: N texts, B of them in a batch, T tokens, H hidden, V vocabulary, F targets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from rekindle.evaluate.scores import TokenScores
from rekindle.launch.events import emit
from rekindle.records import Sample
from rekindle.tasks import TokenTask
from rekindle.train import families
from rekindle.train.modelfolder import ModelFolder

IGNORED = -100
TOKENS_AT_ONCE = 1 << 14
LOGITS_AT_ONCE = 1 << 24
SAMPLES, SAMPLE_TOKENS, SAMPLE_CHARACTERS = 3, 32, 500
_OPENING_WORDS = 6


def encode(model: ModelFolder, rows: pa.Table) -> pa.Table:
    """The texts as the model's tokenizer cuts them; `input_ids` is null for one without a
    target."""
    batches = rows.combine_chunks().to_batches()
    batch = batches[0] if batches else pa.RecordBatch.from_pylist([], rows.schema)
    return pa.table(model.task.encode(batch, model.settings, model.path))


@torch.inference_mode()
def score(model: ModelFolder, encoded: pa.Table, who: str) -> TokenScores:
    """The model's scores on texts that all have a target."""
    task = model.task
    assert isinstance(task, TokenTask)
    network = model.network()
    sums_N3 = torch.zeros(len(encoded), 3, dtype=torch.float64)
    counts_V = np.zeros(0, np.int64)
    done = 0
    for part in _batches(encoded):
        inputs = task.collate(encoded.take(pa.array(part)), model.settings)
        chosen_BT = inputs["labels"] != IGNORED
        labels_F = inputs["labels"][chosen_BT]
        found_F3 = _predicted(model, network, inputs, chosen_BT)
        sums_N3.index_add_(0, torch.from_numpy(part)[chosen_BT.nonzero()[:, 0]], found_F3)
        counts_V = _added(counts_V, np.bincount(labels_F.numpy()))
        done += len(part)
        emit("progress", step=done, steps=len(encoded), unit=f"{who}: example")
    nats_N, right_N, targets_N = sums_N3.numpy().T
    shares = counts_V[counts_V > 0] / max(1, counts_V.sum())
    bytes_N = encoded.column("target_bytes").to_numpy().astype(np.float64)
    return TokenScores(nats_N, right_N, targets_N, bytes_N, float(-(shares * np.log(shares)).sum()))


def samples(model: ModelFolder, rows: pa.Table) -> tuple[Sample, ...]:
    """What the model makes of the beginnings of a few texts, and how these really go on."""
    task = model.task
    assert isinstance(task, TokenTask)
    documents = [json.loads(d) for d in rows.column("document").slice(0, SAMPLES).to_pylist()]
    openings = [_opening([(role, content) for role, content in turns]) for turns in documents]
    written = task.generate(
        model.network(), [turns for turns, _ in openings], model.settings, model.path, SAMPLE_TOKENS
    )
    return tuple(
        Sample(prompt=turns[-1][1][-SAMPLE_CHARACTERS:], generated=text, expected=expected)
        for (turns, expected), text in zip(openings, written, strict=True)
    )


def _opening(turns: list[tuple[str, str]]) -> tuple[list[tuple[str, str]], str]:
    """A document up to where the model goes on, and what follows there."""
    role, content = turns[0]
    if role == "text":
        words = content.split(" ")
        cut = min(_OPENING_WORDS, max(1, len(words) // 2))
        return [(role, " ".join(words[:cut]))], " ".join(words[cut:])[:SAMPLE_CHARACTERS]
    last = max(i for i, (role, _) in enumerate(turns) if role in ("assistant", "completion"))
    return turns[:last], turns[last][1][:SAMPLE_CHARACTERS]


def _batches(encoded: pa.Table) -> Iterator[np.ndarray]:
    """Row numbers, the shortest texts first, as many as fit into `TOKENS_AT_ONCE` once padded."""
    lengths_N = pc.list_value_length(encoded.column("input_ids")).to_numpy()
    order_N = np.argsort(lengths_N, kind="stable")
    start = 0
    while start < len(order_N):
        stop = start + 1
        while stop < len(order_N) and (
            (stop + 1 - start) * lengths_N[order_N[stop]] <= TOKENS_AT_ONCE
        ):
            stop += 1
        yield order_N[start:stop]
        start = stop


def _predicted(
    model: ModelFolder, network: torch.nn.Module, inputs: dict[str, torch.Tensor],
    chosen_BT: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """[F, 3]: of each target the loss in nats, 1 where it was predicted right, and 1."""
    head: Any
    if hasattr(network, "get_output_embeddings"):
        body = families.backbone(network)
        hidden_BTH = body(input_ids=inputs["input_ids"], use_cache=False).last_hidden_state
        states_F = hidden_BTH[chosen_BT]
        head = network.get_output_embeddings()  # type: ignore[operator]
    else:
        states_F, head = model.task.logits(network, inputs)[chosen_BT], torch.nn.Identity()
    at_once = max(1, LOGITS_AT_ONCE // model.settings["vocab_size"])
    found = []
    labels_F = inputs["labels"][chosen_BT]
    for start in range(0, len(labels_F), at_once):
        labels = labels_F[start : start + at_once]
        logits_FV = head(states_F[start : start + at_once]).float()
        nats_F = torch.nn.functional.cross_entropy(logits_FV, labels, reduction="none").double()
        right_F = (logits_FV.argmax(-1) == labels).double()
        found.append(torch.stack([nats_F, right_F, torch.ones_like(nats_F)], 1))
    return torch.cat(found)


def _added(one_V: np.ndarray, other_V: np.ndarray) -> np.ndarray:
    """Counts added up, of which either may be shorter."""
    total = np.zeros(max(len(one_V), len(other_V)), np.int64)
    total[: len(one_V)] += one_V
    total[: len(other_V)] += other_V
    return total
