"""Cross-entropy of classes, with label smoothing and a teacher: one class for each
example, images or texts, or a tag for each word, predicted at the word's first token.

Texts with a class share a sequence where the network's family says how each gets a
summary of its own, texts with tags where attention can keep them apart. Shapes: B rows, T
tokens of this rank, F tokens of all texts joined, N targets (words with a place), W
words, H hidden, C classes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from torch import nn
from torch.nn import functional as F

from rekindle.families import Modules
from rekindle.tasks.base import flattened
from rekindle.tasks.encoder import TextClassification
from rekindle.train import modules
from rekindle.train.micro import Chosen, Documents, Ints, Micro, Tensors
from rekindle.train.objectives import base
from rekindle.train.objectives.base import Alone, Columns, Objective, Texts

if TYPE_CHECKING:
    from rekindle.tasks.base import Settings
    from rekindle.train.batches import Batches
    from rekindle.train.mesh import Mesh
    from rekindle.train.modelfolder import ModelFolder
    from rekindle.train.part import Part


class Classes(Objective):
    """The cross-entropy of one class for each example."""

    def prepared(self, part: Part) -> bool:
        if not isinstance(part.task, TextClassification):
            return False
        networks = [part.network, *part.teachers]
        for network in networks:
            known = modules.known(network)
            if known is None or known.summary is None:
                return False
        if part.last:
            for network in networks:
                _summarise_each(network, part)
        return True

    def micro(self, batches: Batches, chosen: Chosen, key: int, count: torch.Tensor) -> Micro:
        if batches.joined:
            table, rows = base.by_length(chosen)
            inputs, starts_B, documents = base.joined(table)
            targets = torch.from_numpy(starts_B)
        else:
            table = chosen.table
            rows = chosen.rows
            inputs = batches.task.collate(table, batches.settings)
            documents = None
            targets = None
        return Micro(
            inputs=inputs,
            labels=self.labels(table, batches.settings),
            weights=torch.from_numpy((rows >= 0).astype(np.float64)),
            targets=targets,
            documents=documents,
            key=key,
            count=count,
        )

    def labels(self, table: pa.Table, settings: Settings) -> torch.Tensor:
        """What each row has to be answered with, [B]."""
        return torch.from_numpy(table.column("label").to_numpy().astype(np.int64))

    def alike(self, batches: Batches, micro: list[Micro]) -> list[Micro]:
        """Texts of the same length in all micro-batches of a pipeline."""
        pad = int(batches.settings.get("pad_token_id", 0))
        lengths = [
            each.inputs["input_ids"].shape[1] for each in micro if "input_ids" in each.inputs
        ]
        if batches.joined:
            texts = micro[0].labels.numel()
            length_of_a_text = -(-max(lengths) // texts)
            longest = texts * batches.rounded(length_of_a_text)
            return [_filled(each, longest, pad) for each in micro]
        longest = batches.rounded(max(lengths, default=1))
        return [
            dataclasses.replace(each, inputs=_padded(each.inputs, longest, pad)) for each in micro
        ]

    def loss(self, part: Part, batch: Tensors, micro: Micro) -> torch.Tensor:
        if micro.documents is not None:
            part.documents = len(micro.documents.queries)
        if not part.last:
            return part.hidden(batch)
        part.texts = None if micro.targets is None else len(micro.targets)
        theirs_BC = taught(part, batch)
        logits_BC = base.exact(logits_of(part, batch))
        return self.loss_of(part, logits_BC, theirs_BC, micro)

    def loss_of(
        self, part: Part, logits: torch.Tensor, theirs: torch.Tensor | None, micro: Micro
    ) -> torch.Tensor:
        """[1, 3]: the loss of logits, [B, C], of which `theirs` are the teacher's."""
        assert micro.weights is not None
        return loss_of(part, logits, theirs, micro.labels, micro.weights, micro.count[0])

    def score(self, part: Part, batch: Tensors, micro: Micro) -> torch.Tensor:
        """[B, C]: the logits."""
        return base.exact(logits_of(part, batch)) if part.last else part.hidden(batch)

    def alone(self, model: ModelFolder, table: pa.Table, mesh: Mesh) -> Alone:
        rows = torch.arange(len(table))
        inputs = model.task.collate(table, model.settings)
        return Micro(inputs, labels=rows, count=torch.ones(1), key=0), rows

    def invented(self, random: np.random.Generator, texts: Texts, classes: int) -> Columns:
        return {"label": pa.array(random.integers(0, classes, len(texts)), pa.int32())}


def _padded(inputs: Tensors, length: int, pad: int) -> Tensors:
    """With sequences of this length; what has none, such as pixels, stays as it is."""
    values = {"input_ids": pad, "attention_mask": 0, "position_ids": 0}
    padded = dict(inputs)
    for name, value in values.items():
        if name in padded:
            missing = length - padded[name].shape[1]
            padded[name] = F.pad(padded[name], (0, missing), value=value)
    return padded


def _filled(micro: Micro, length: int, pad: int) -> Micro:
    """Joined texts, and behind them one more whose result is dropped."""
    assert micro.documents is not None
    room = length - micro.inputs["input_ids"].shape[1]
    if not room:
        return micro
    # in pieces no longer than a text may be: attention costs their square
    longest = max(micro.documents.queries)
    fillings = [longest] * (room // longest)
    if room % longest:
        fillings.append(room % longest)
    documents = Documents.of_texts([*micro.documents.queries, *fillings])
    inputs = _padded(micro.inputs, length, pad)
    return dataclasses.replace(micro, inputs=inputs, documents=documents)


def _summarise_each(network: nn.Module, part: Part) -> None:
    """Have transformers' own summary of the first token made of each joined text.

    In front of it [1, documents, H] becomes [texts, 1, H]. Documents behind the texts
    fill a pipeline's sequence."""
    known = modules.required(network, "summary")
    body = modules.backbone(network)

    def texts_of(hidden_BTH: torch.Tensor) -> torch.Tensor:
        if part.texts is None:
            return hidden_BTH
        if hidden_BTH.shape[1] != part.documents:
            raise RuntimeError(f"{hidden_BTH.shape[1]} summaries of {part.documents} documents")
        return hidden_BTH[0, : part.texts, None]

    def before(module: nn.Module, args: Any) -> Any:
        return (texts_of(args[0]), *args[1:])

    def behind(module: nn.Module, args: Any, output: Any) -> Any:
        output["last_hidden_state"] = texts_of(output["last_hidden_state"])
        return output

    _compute_only_firsts(modules.blocks(network)[-1][1], known)
    if known.summary:
        body.get_submodule(known.summary).register_forward_pre_hook(before)
    else:
        body.register_forward_hook(behind)


def _compute_only_firsts(block: nn.Module, known: Modules) -> None:
    """Have the last block compute, behind its attention, each joined text's first token
    alone.

    [1, T, H] becomes [1, documents, H]. The documents are those of attention's own
    arguments, which are right where a block computes its activations again, too."""
    documents: list[Documents | None] = [None]

    def keep_documents(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        documents[0] = kwargs.get("documents")

    def keep_firsts(module: nn.Module, args: tuple[torch.Tensor, ...]) -> Any:
        if documents[0] is None:
            return args
        firsts = documents[0].starts[:-1]
        return tuple(x_BTH.index_select(1, firsts) for x_BTH in args)

    block.get_submodule(known.attention).register_forward_pre_hook(keep_documents, with_kwargs=True)
    block.get_submodule(known.behind).register_forward_pre_hook(keep_firsts)


def logits_of(part: Part, batch: Tensors) -> torch.Tensor:
    """What the task's network scores, on the last stage."""
    if part.first or hasattr(part.network, "config"):
        return part.task.logits(part.network, batch)
    return part.network(batch["inputs_embeds"])  # type: ignore[no-any-return]


def taught(part: Part, batch: Tensors) -> torch.Tensor | None:
    """The teacher's logits, before the student's forward pass makes its activations."""
    if not (part.teachers and part.training):
        return None
    with torch.no_grad():
        return part.task.logits(part.teachers[0], batch)


def loss_of(
    part: Part,
    logits_NC: torch.Tensor,
    theirs_NC: torch.Tensor | None,
    labels_N: torch.Tensor,
    weights_N: torch.Tensor,
    count: torch.Tensor,
) -> torch.Tensor:
    """[1, 3]: a share of the mean loss over `count` targets, right predictions, targets."""
    class_weights_C = None
    smoothing = 0.0
    if part.training:  # a validation loss is the plain one
        smoothing = part.goal.label_smoothing
        if part.goal.class_weights is not None:
            class_weights_C = part.goal.class_weights.to(logits_NC.dtype)
    losses_N = F.cross_entropy(
        logits_NC,
        labels_N,
        reduction="none",
        weight=class_weights_C,
        label_smoothing=smoothing,
    )
    weights_N = weights_N.to(logits_NC.dtype)
    loss = (losses_N * weights_N).sum() / count
    if theirs_NC is not None:
        temperature = part.goal.temperature
        share = part.goal.teacher_weight
        divergence_N = F.kl_div(
            F.log_softmax(logits_NC / temperature, -1),
            F.log_softmax(theirs_NC.to(logits_NC.dtype) / temperature, -1),
            reduction="none",
            log_target=True,
        ).sum(-1)
        divergence = (divergence_N * weights_N).sum() / count
        loss = (1 - share) * loss + share * temperature**2 * divergence
    right = ((logits_NC.argmax(-1) == labels_N) * weights_N).sum()
    return base.row(loss, right.to(loss.dtype), weights_N.sum())


class Tags(Objective):
    """The cross-entropy of a tag for each word."""

    def prepared(self, part: Part) -> bool:
        networks = [part.network, *part.teachers]
        return all(modules.known(network) is not None for network in networks)

    def micro(self, batches: Batches, chosen: Chosen, key: int, count: torch.Tensor) -> Micro:
        if batches.joined:
            table, rows = base.by_length(chosen)
            inputs, starts_B, documents = base.joined(table)
        else:
            table = chosen.table
            rows = chosen.rows
            inputs = batches.task.collate(table, batches.settings)
            starts_B = np.arange(len(table)) * inputs["input_ids"].shape[1]
            documents = None
        _, words_B = flattened(table, "places")
        real_W = np.repeat(rows >= 0, words_B)
        words_N, targets_N = _targets(table, starts_B, real_W)
        labels_W, _ = flattened(table, "label")
        return Micro(
            inputs=inputs,
            labels=torch.from_numpy(labels_W[words_N].astype(np.int64)),
            targets=torch.from_numpy(targets_N),
            documents=documents,
            key=key,
            count=count,
        )

    def loss(self, part: Part, batch: Tensors, micro: Micro) -> torch.Tensor:
        theirs_BTC = taught(part, batch)
        theirs_NC = None if theirs_BTC is None else base.of_targets(theirs_BTC, micro)
        logits_NC = base.exact(base.of_targets(logits_of(part, batch), micro))
        weights_N = torch.ones_like(micro.labels)
        return loss_of(part, logits_NC, theirs_NC, micro.labels, weights_N, micro.count[0])

    def score(self, part: Part, batch: Tensors, micro: Micro) -> torch.Tensor:
        """[N, C]: the logits."""
        return base.exact(base.of_targets(logits_of(part, batch), micro))

    def alone(self, model: ModelFolder, table: pa.Table, mesh: Mesh) -> Alone:
        inputs = model.task.collate(table, model.settings)
        starts_B = np.arange(len(table)) * inputs["input_ids"].shape[1]
        words, targets = map(torch.from_numpy, _targets(table, starts_B))
        return Micro(inputs, labels=words, count=torch.ones(1), key=0, targets=targets), words

    def places(self, encoded: pa.Table) -> Ints:
        return np.append(np.int64(0), np.cumsum(flattened(encoded, "places")[1]))

    def invented(self, random: np.random.Generator, texts: Texts, classes: int) -> Columns:
        """Each token is a word."""
        tags = [random.integers(0, classes, len(text)).tolist() for text in texts]
        places = [list(range(len(text))) for text in texts]
        numbers = pa.list_(pa.int32())
        return {"label": pa.array(tags, numbers), "places": pa.array(places, numbers)}


def _targets(
    table: pa.Table, starts_B: Ints, real_W: np.ndarray | bool = True
) -> tuple[Ints, Ints]:
    """Which words of all texts have a place, and where it is among the flattened tokens."""
    places_W, words_B = flattened(table, "places")
    words_N = np.flatnonzero((places_W >= 0) & real_W)
    return words_N, (np.repeat(starts_B, words_B) + places_W)[words_N]
