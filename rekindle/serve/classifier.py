"""Classes, tags and numbers of instances, in batches of like length. Shapes: B instances,
C classes."""

import contextlib
import logging
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from rekindle.data.manifest import row_tokens
from rekindle.errors import RequestError
from rekindle.modalities import load_modality
from rekindle.modalities.base import Written
from rekindle.objectives import answers_of
from rekindle.serve.int8 import in_int8
from rekindle.serve.work import (
    Answer,
    Event,
    Model,
    PendingInstance,
    RefusedError,
    failure_of,
    not_finite,
)
from rekindle.tasks.pretrained import read_tokenizer
from rekindle.train.modelfolder import TOKENIZER, ModelFolder

log = logging.getLogger(__name__)

# of a batch, padded
MOST_ROWS = 32
MOST_TOKENS = 1 << 14
State = tuple[int, int, int, int]
"""Of a file: its inode, its size, and when it and its inode were last changed, in ns."""


class Classifier(Model):
    """Answers everything in the turn that brings it: several batches' worth, so that they
    can be of like length."""

    room = 4 * MOST_ROWS

    def __init__(self, opened: ModelFolder, device: torch.device, precision: str = "") -> None:
        self.opened = opened
        self.shaper = answers_of(opened.task.objective)
        self.watched = states_in(opened.path) if reads_at_requests(opened) else None
        self.network, self.device = network_in(opened, device, precision)
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.get_default_dtype()
        file = opened.path / TOKENIZER
        modality = load_modality(opened.task.modality)
        self.most: int | None = None  # tokens of a text
        if file.is_file() and isinstance(modality, Written):
            self.modality = modality
            self.cutter = read_tokenizer(opened.path)
            self.most = (self.cutter.truncation or {}).get("max_length")
            # to see how long a text is, it has to be cut into all its tokens
            self.cutter.no_truncation()

    @torch.inference_mode()
    def turn(self, new: list[PendingInstance]) -> list[Event]:
        """The answers to all."""
        task = self.opened.task
        settings = self.opened.settings
        path = self.opened.path
        error: Exception | None = None
        try:
            rows = task.encode_raw([work.content for work in new], settings, path)
            lengths_B = row_tokens(rows)
            longer = self._longer(new, lengths_B)
        except Exception as raised:  # noqa: BLE001 - these fail, the server goes on
            error = raised
        if self.watched is not None and changed_since(path, self.watched):
            # what the task has just read may be another
            # model's: nothing is answered any more
            self.broken = True
            log.error("the files in %s changed while they were served", path)
            changed = RefusedError(500, "the files of the model changed", "changed")
            return [(work, changed) for work in new]
        if error is not None:
            return self._retry_alone(new, error)
        events: list[Event] = []
        for batch in _batches(lengths_B):
            works = [new[i] for i in batch]
            try:
                table = rows.take(pa.array(batch)) if len(batch) > 1 else rows.slice(batch[0], 1)
                answers = self._answers_to(table, [i in longer for i in batch])
            except Exception as raised:  # noqa: BLE001 - these fail, the server goes on
                events += self._retry_alone(works, raised)
            else:
                events += zip(works, answers, strict=True)
        return events

    def _retry_alone(self, works: list[PendingInstance], error: Exception) -> list[Event]:
        """The answers to works that failed together, each tried alone, so that one
        client's instance does not fail those of others. `turn_with_retry` goes on where
        memory was short."""
        failure = failure_of(error)
        if len(works) == 1 or failure.reason == "out_of_memory":
            return [(work, failure) for work in works]
        events: list[Event] = []
        for work in works:
            events += self.turn([work])
        return events

    def _answers_to(self, table: pa.Table, cut: list[bool]) -> list[Answer]:
        """The answer to each encoded row; `cut` says which texts are too long."""
        task = self.opened.task
        inputs = dict[str, torch.Tensor]()
        for name, tensor in task.collate(table, self.opened.settings).items():
            # token ids and masks keep their type: only
            # what is multiplied with weights has theirs
            dtype = self.dtype if tensor.is_floating_point() else None
            inputs[name] = tensor.to(self.device, dtype)
        outputs = task.logits(self.network, inputs).double().cpu().numpy()
        settings = self.opened.settings
        predictions = self.shaper.of_outputs(outputs, table, self.opened.labels, settings)
        answers = list[Answer]()
        for prediction, is_cut in zip(predictions, cut, strict=True):
            if prediction is None:
                answers.append(not_finite())
                continue
            if is_cut:
                prediction["truncated"] = True
            answers.append(prediction)
        return answers

    def _longer(self, works: list[PendingInstance], lengths_B: np.ndarray) -> set[int]:
        """Which texts have more tokens than a text can
        have: looked for among those that have as many."""
        # an answer to words says itself which of them are cut off
        if self.most is None or self.opened.task.kind.label == "class of each word":
            return set()
        rows = list[int]()
        texts = list[str]()
        for i in np.flatnonzero(lengths_B >= self.most).tolist():
            for text in self.modality.texts(works[i].content):
                rows.append(i)
                texts.append(text)
        encodings = self.cutter.encode_batch_fast(texts)
        return {i for i, ids in zip(rows, encodings, strict=True) if len(ids) > self.most}


def network_in(
    opened: ModelFolder, device: torch.device, precision: str
) -> tuple[torch.nn.Module, torch.device]:
    """The network in this precision, and where it is: in int8 on the CPU. RequestError
    for a precision that a model of Keras was not saved in."""
    if precision and opened.of_keras:
        message = f"a model of Keras computes as it was saved, not in {precision}"
        raise RequestError(message, where="deploy.precision", fix="leave it out")
    network = opened.network()
    _bring_into_memory(network)
    if precision == "int8":
        return in_int8(network), torch.device("cpu")
    network = network.to(device)
    if precision == "bf16":
        network = network.bfloat16()
    return network, device


@torch.no_grad()
def _bring_into_memory(network: torch.nn.Module) -> None:
    """Copy what lies in a mapped file: safetensors gives tensors whose pages are read
    from the checkpoint when they are first needed, and show what is written into it.
    Tensors that share their bytes still do."""
    copies = dict[tuple[int, torch.Size, tuple[int, ...], torch.dtype], torch.Tensor]()
    for tensor in [*network.parameters(), *network.buffers()]:
        if tensor.device.type != "cpu":
            continue
        same = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if same not in copies:
            copies[same] = tensor.data.clone()
        tensor.data = copies[same]


def reads_at_requests(opened: ModelFolder) -> bool:
    """Whether a task of a user's may read files of the folder when it encodes: unless the
    class that defines `encode`, or one derived from it, says by `hold` that it keeps
    them."""
    classes = type(opened.task).__mro__
    # the order of the classes is from the task's own to the base, which has both
    encodes = next(i for i, defining in enumerate(classes) if "encode" in vars(defining))
    holds = next(i for i, defining in enumerate(classes) if "hold" in vars(defining))
    return opened.own_task and holds > encodes


def changed_since(folder: Path, before: Mapping[str, State]) -> bool:
    """Whether a file of the folder was written, replaced or added since `states_in` was
    called. One that is gone gives no other answer: a task that reads it gets an error."""
    return any(before.get(name) != state for name, state in states_in(folder).items())


def states_in(folder: Path) -> dict[str, State]:
    """Of each file in the folder, what changes where it is written or replaced."""
    states = dict[str, State]()
    for file in sorted(folder.rglob("*")):
        with contextlib.suppress(FileNotFoundError):  # it goes just now
            status = file.stat()
            if stat.S_ISREG(status.st_mode):
                # ctime tells of a file whose mtime was set back
                state = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
                states[str(file)] = state
    return states


def _batches(lengths_B: np.ndarray) -> Iterator[list[int]]:
    """Instances of like length, shorter ones first,
    as many as a padded batch may have."""
    batch: list[int] = []
    for i in np.argsort(lengths_B, kind="stable").tolist():
        # sorted by length: this one is the longest so far, to which all would be padded
        padded_tokens = (len(batch) + 1) * lengths_B[i]
        if batch and (len(batch) == MOST_ROWS or padded_tokens > MOST_TOKENS):
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
