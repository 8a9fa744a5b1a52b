"""What a training proves on the model that it is given, before the first step.

Every belief of the engine about an architecture is asked of the architecture itself, on
the weights, the layout, the device and the precision of this training, in seconds:

weights    every parameter and saved buffer is in the checkpoint (`stored.match`, while it loads);
           heads that the task makes new are named
forward    the loss that the engine computes (body, head, the scale of its scores) is the loss that
           the architecture's own forward gives. Once as it is, and once with the output layer's
           weights times 32, where a cap of scores shows which small ones would hide; and no state
           of a language model depends on a token behind it
packing    with other tokens in the first of three documents of a sequence, the states of the others
           keep every bit, and they are near those that they have in sequences of their own
left out   what an optimizer or fp8 treats as it treats biases; routers.py has a loss of routers

A layout that cuts the network has no whole to ask: there `forward` takes a small network
of the same architecture and configuration on rank 0 (`compare.SmallNetwork`). Networks of
a user's own have no authority to ask.

All ranks call each function alike. What is found goes into the training's record, and so
onto the card; a difference in `forward` is refused, documents that see each other are not
packed."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist

from rekindle.data.manifest import Shards
from rekindle.errors import RekindleError, StepError, UnsupportedError, first_line
from rekindle.launch.events import emit
from rekindle.objectives import loss_of
from rekindle.objectives.micro import Micro
from rekindle.records import ShardManifest
from rekindle.spec.layout import Layout
from rekindle.spec.model import TrainSpec
from rekindle.tasks.base import Settings, Task
from rekindle.train import modules
from rekindle.train.batches import TRAIN, Batches
from rekindle.train.evaluation import Evaluation
from rekindle.train.mesh import Mesh
from rekindle.train.part import Part
from rekindle.train.parts import Parts, autocast
from rekindle.train.stored import Match, counted
from rekindle.train.vitals import is_out_of_memory

FORWARD_TOLERANCE = {"fp64": 1e-7, "fp32": 1e-4, "fp16": 5e-3, "bf16": 2e-2, "fp8": 1e-1}
"""Of two losses, relatively. In half precision the two round states and scores at other places."""
PACKED_TOLERANCE = {"fp64": 1e-7, "fp32": 1e-4, "fp16": 2e-2, "bf16": 5e-2, "fp8": 2e-1}
"""Of states in one sequence and in sequences of their own: norm of the difference,
relatively. A wrong position changes them by about themselves."""
LOUDER = 32.0  # a power of two: weights that are multiplied and divided by it keep their bits
PROBE_TOKENS = 32
DOCUMENTS = 3
OUT_OF_MEMORY = "the probe ran out of memory"
_KNOWN_ROWS = 16  # whose tokens are used


@dataclasses.dataclass(frozen=True)
class Packing:
    """Whether documents share sequences, and what was found."""

    packs: bool
    finding: str = ""
    """In words; empty where nothing is packed anyway."""


def describe_weights(match: Match | None) -> str:
    """What of the network is in the checkpoint; a notice about what is not. Rank 0 calls it."""
    if match is None:
        return ""
    total = len(match.copied) + len(match.joined)
    finding = f"all {total} tensors of the network are in the checkpoint"
    if match.fresh:
        finding = f"{total} tensors are in the checkpoint; new, and trained from random values: "
        finding += counted(match.fresh)
        emit(
            "notice",
            text=f"the checkpoint has no {counted(match.fresh)}: trained from random values",
        )
    if match.unused:
        emit("notice", text=f"the network has no use for {counted(match.unused)} of the checkpoint")
        finding += f"; not used: {counted(match.unused)}"
    return finding


def describe_left_out(parts: Parts, train: TrainSpec) -> str:
    """How much of the network the optimizer or fp8 treats as it treats biases; "" for nothing."""
    linear: set[str] = set()
    for stage in parts.stages:
        linear |= modules.matrices(stage.part.network)
    sizes = {name: parameter.numel() for name, parameter in parts.parameters()}
    stacked = []
    for name, parameter in parts.parameters():
        if parameter.ndim > 2 and name not in linear:  # experts, one behind the other
            stacked.append(name)
    methods: list[str] = []
    if train.optimizer != "adamw":
        methods.append(train.optimizer)
    if train.precision == "fp8":
        methods.append("fp8")
    if not stacked or not methods or not hasattr(parts.network, "config"):
        return ""
    share = sum(sizes[name] for name in stacked) / sum(sizes.values())
    instead = "AdamW updates them" if train.optimizer != "adamw" else "they are computed in bf16"
    return (
        f"{' and '.join(methods)} leaves out {share:.0%} of the weights, which are no matrices "
        f"({stacked[0]}, ...): {instead}"
    )


def prove_packing(
    task: Task, shards: Shards, parts: Parts, train: TrainSpec, evaluation: Evaluation
) -> Packing:
    """Whether documents may share a sequence on this network. All ranks have to call it."""
    length = loss_of(task.objective).pack_length(shards.manifest.settings)
    if length is None:
        return Packing(False)
    if length < 3 * DOCUMENTS or not hasattr(parts.network, "config"):
        return Packing(True)
    probe = _PackingProbe(task, shards, parts, train, evaluation, length)
    try:
        reason = probe.reason()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = OUT_OF_MEMORY
    reason = _agreed_reason(reason)
    if reason == OUT_OF_MEMORY:
        return Packing(True, _noticed(f"packing was not proven: {OUT_OF_MEMORY}"))
    if reason:
        return Packing(False, _noticed(f"documents are not packed: {reason}"))
    return Packing(True, "documents in one sequence do not change each other's states")


def prove_forward(
    task: Task,
    shards: Shards,
    parts: Parts,
    train: TrainSpec,
    evaluation: Evaluation,
    small: Callable[[], tuple[Parts, Evaluation, Shards]],
) -> str:
    """That the engine's loss is the architecture's own, in words; "" where there is none
    to ask.

    `small` makes parts of a small network of the same configuration on this rank alone,
    for layouts that cut the network. Raises StepError where the losses differ, or the own
    forward fails."""
    if not hasattr(parts.network, "config"):
        return ""
    if not task.kind.writes and not parts.stages[0].part.joins_texts:
        return "the loss is made of what the architecture's own forward gives"
    if not _cuts(parts):
        probe = _ForwardProbe(task, shards, parts, train, evaluation)
        try:
            return probe.prove("the architecture's own")
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            text = f"its loss was not compared with the architecture's own: {OUT_OF_MEMORY}"
            return _noticed(text)
    if dist.get_rank() != 0:
        return ""
    small_parts, small_evaluation, small_shards = small()
    probe = _ForwardProbe(task, small_shards, small_parts, train, small_evaluation)
    return probe.prove("that of a small network of this architecture")


def prove_scores(
    task: Task, settings: Settings, labels: tuple[str, ...], parts: Parts, train: TrainSpec
) -> None:
    """That a language model is judged by the scores that its own forward gives.

    As `prove_forward`, where no layout cuts it. Another engine may have trained what ours
    cannot compute."""
    if not task.kind.writes or _cuts(parts) or not hasattr(parts.network, "config"):
        return
    random = np.random.default_rng(3)
    # no longer than a text of the training: the network may have no more positions
    length = min(PROBE_TOKENS, int(settings.get("max_length", PROBE_TOKENS)))
    texts = [random.integers(0, settings["vocab_size"], length).tolist()]
    table = pa.table({"input_ids": pa.array(texts, pa.list_(pa.int32()))})
    manifest = ShardManifest(
        task="", source="", labels=labels, rows={TRAIN: len(texts)}, settings=settings
    )
    shards = Shards.of_tables(Path(), manifest, {TRAIN: table})
    (stage,) = parts.stages
    scoring = stage.part.scoring
    stage.part.scoring = None
    try:
        evaluation = Evaluation(parts, train.precision)
        _ForwardProbe(task, shards, parts, train, evaluation).prove("the architecture's own")
    finally:
        stage.part.scoring = scoring
        stage.part.eval()


def _noticed(text: str) -> str:
    """The same, as a notice of rank 0, too."""
    if dist.get_rank() == 0:
        emit("notice", text=text)
    return text


def _agreed_reason(reason: str) -> str:
    """Of all ranks' reasons the first that is one."""
    reasons: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    return next((reason for reason in reasons if reason), "")


def _known_tokens(shards: Shards) -> np.ndarray:
    """Tokens that the training texts have: none is a stand-in for an image, say."""
    rows = np.arange(min(_KNOWN_ROWS, shards.rows(TRAIN)))
    texts = shards.take(TRAIN, rows).column("input_ids").to_pylist()
    return np.unique(np.concatenate([np.array(text or [0], np.int64) for text in texts]))


def _texts_of(task: Task, shards: Shards, texts: list[list[int]], silent: int = 0) -> Shards:
    """Shards of made-up texts; nothing is to be predicted of the first `silent`."""
    random = np.random.default_rng(0)
    columns = {
        "id": pa.array([str(row) for row in range(len(texts))]),
        "hash": pa.array([bytes(16)] * len(texts), pa.binary(16)),
        "input_ids": pa.array(texts, pa.list_(pa.int32())),
        **loss_of(task.objective).invented(random, texts, max(1, len(shards.manifest.labels))),
    }
    if silent:
        marks = [[int(row >= silent)] * len(text) for row, text in enumerate(texts)]
        columns["supervised"] = pa.array(marks, pa.list_(pa.uint8()))
    return Shards.of_tables(shards.folder, shards.manifest, {TRAIN: pa.table(columns)})


class _PackingProbe:
    """Three documents in a sequence, the first of them once with other tokens."""

    def __init__(
        self,
        task: Task,
        shards: Shards,
        parts: Parts,
        train: TrainSpec,
        evaluation: Evaluation,
        length: int,
    ) -> None:
        self.task = task
        self.shards = shards
        self.parts = parts
        self.evaluation = evaluation
        # a pipeline, and a compiled block, have one shape; else no more tokens than are needed
        self.one_shape = train.compile or parts.mesh.layout.pp > 1
        self.length = length if self.one_shape else min(length, DOCUMENTS * PROBE_TOKENS)
        self.allowed = PACKED_TOLERANCE[_precision_of_states(train)]
        random = np.random.default_rng(1)
        tokens = _known_tokens(shards)
        longest = min(PROBE_TOKENS, self.length // DOCUMENTS)
        sizes = [longest, longest - 1, longest]
        self.texts = [random.choice(tokens, size).tolist() for size in sizes]
        first = np.array(self.texts[0])
        # every token of the first document is another one, if there are two
        others = tokens[(np.searchsorted(tokens, first) + 1) % len(tokens)]
        self.changed = [others.tolist(), *self.texts[1:]]

    def reason(self) -> str:
        """Why documents cannot share a sequence; "" where they can."""
        in_one_sequence = np.zeros(DOCUMENTS, np.int64)
        try:
            states = self._states(self.texts, in_one_sequence)
        except ValueError as error:
            if any(stage.part.has_our_attention for stage in self.parts.stages):
                raise
            return first_line(error)  # transformers names the kernel that keeps documents apart
        changed = self._states(self.changed, in_one_sequence)
        is_same = _agreed(_same_bits(states, changed), self.parts)
        if not is_same and not _agreed(self._only_rounding(), self.parts):
            return "in one sequence they change each other's states"
        if self.parts.mesh.layout.cp > 1:  # whose ranks hold other tokens of other sequences
            return ""
        apart = self._states(self.texts, np.arange(DOCUMENTS))
        gap = _relative_gap(states, apart)
        if not gap <= self.allowed:
            return f"in one sequence their states differ by {gap:.2g} from those they have alone"
        return ""

    def _states(self, texts: list[list[int]], slots: np.ndarray) -> list[torch.Tensor]:
        """What the targets of all documents but the first are predicted from, on this rank."""
        return _states_of(self.parts, self.evaluation, self._micro(texts, slots))

    def _micro(self, texts: list[list[int]], slots: np.ndarray) -> Micro:
        shards = _texts_of(self.task, self.shards, texts, silent=1)
        layout = self.parts.mesh.layout
        order = shards.order(TRAIN, global_batch_size=layout.data, seed=0, pack_length=self.length)
        batches = Batches(
            loss_of(self.task.objective), self.task, shards, TRAIN, order, self.parts.mesh, 0
        )
        count = len(np.unique(slots))
        # as a step has them: architectures are told more of a sequence that is alone
        sequences = max(count, self.parts.mesh.layout.micro_batch_size)
        if self.one_shape:
            sequences = max(sequences, DOCUMENTS)
        empty = np.arange(count, sequences)
        rows = np.concatenate([np.arange(DOCUMENTS), np.full(len(empty), -1)])
        return batches.arranged(rows, np.concatenate([slots, empty]))

    def _only_rounding(self) -> bool:
        """Whether no token of the first document has a part in a target of the others."""
        if _cuts(self.parts):
            return False
        micro = self._micro(self.texts, np.zeros(DOCUMENTS, np.int64))
        gradient_BTH = _embedding_gradient(self.parts, self.evaluation, micro)
        return bool((gradient_BTH[0, : len(self.texts[0])] == 0).all())


def _cuts(parts: Parts) -> bool:
    """Whether the layout cuts the network, so that no rank runs it whole."""
    layout = parts.mesh.layout
    return layout.tp * layout.pp * layout.cp > 1


def _states_of(parts: Parts, evaluation: Evaluation, micro: Micro) -> list[torch.Tensor]:
    """[N, H] of the targets on this rank: what they are predicted from."""
    watching = [stage.part for stage in parts.stages]
    for part in watching:
        part.watches = True
        part.watched.clear()
    try:
        evaluation.losses([micro])
        return [states for part in watching for states in part.watched]
    finally:
        for part in watching:
            part.watches = False
            part.watched.clear()


def _embedding_gradient(parts: Parts, evaluation: Evaluation, micro: Micro) -> torch.Tensor:
    """[B, T, H]: of the loss with respect to what each token is embedded as.

    It is exactly nothing where a token has no part in a target, in any precision. States
    may change in their last bits all the same: experts multiply as many rows as are sent
    to them, and kernels round by that number."""
    (stage,) = parts.stages
    embedded: list[torch.Tensor] = []

    def keep(module: object, args: object, output: torch.Tensor) -> torch.Tensor:
        watched = output.detach().requires_grad_()
        embedded.append(watched)
        return watched.clone()  # which may be written to

    table: Any = stage.part.network.get_input_embeddings()  # type: ignore[operator]
    hook = table.register_forward_hook(keep)
    stage.module.eval()
    try:
        (moved,) = evaluation.feed([micro])
        with torch.enable_grad(), autocast(evaluation.precision, parts.mesh.device):
            loss = stage.part(micro=moved)[0, 0]
            (gradient,) = torch.autograd.grad(loss, embedded[:1])
    finally:
        hook.remove()
        evaluation.return_to_training()
    return gradient


def _agreed(holds: bool, parts: Parts) -> bool:
    """Whether it holds on every rank."""
    verdict = torch.tensor(float(holds), device=parts.mesh.device)
    dist.all_reduce(verdict, dist.ReduceOp.MIN)
    return bool(verdict)


def _precision_of_states(train: TrainSpec) -> str:
    """In what precision states are rounded: weights of fewer bits round them as bf16 does."""
    if train.weights == "fp32" or train.precision == "fp64":
        return train.precision
    return "bf16"


def _same_bits(states: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(states, others, strict=True))


def _relative_gap(states: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    if not states:
        return 0.0
    values = torch.cat([tensor.double().flatten() for tensor in states])
    other_values = torch.cat([tensor.double().flatten() for tensor in others])
    return float((values - other_values).norm() / other_values.norm().clamp_min(1e-30))


class _ForwardProbe:
    """Two texts of a length, by the engine and by the architecture's own forward."""

    def __init__(
        self, task: Task, shards: Shards, parts: Parts, train: TrainSpec, evaluation: Evaluation
    ) -> None:
        self.task = task
        self.parts = parts
        self.evaluation = evaluation
        self.compiles = train.compile
        self.allowed = FORWARD_TOLERANCE[_precision_of_states(train)]
        random = np.random.default_rng(2)
        tokens = _known_tokens(shards)
        # no longer than a text of the training: the network may have no more positions
        self.size = max(2, min(PROBE_TOKENS, shards.longest(TRAIN)))
        texts = [random.choice(tokens, self.size).tolist() for _ in range(2)]
        self.shards = _texts_of(task, shards, texts)
        # the same with another last token, if there are two
        places = np.searchsorted(tokens, [text[-1] for text in texts])
        other_tokens = tokens[(places + 1) % len(tokens)]
        changed_texts = [
            [*text[:-1], int(token)] for text, token in zip(texts, other_tokens, strict=True)
        ]
        self.changed = _texts_of(task, shards, changed_texts)

    def prove(self, whose: str) -> str:
        """In words. Raises UnsupportedError where the losses differ, StepError where the
        forward fails; what memory cannot hold is raised as it is."""
        try:
            return self._compare(whose)
        except Exception as error:
            if isinstance(error, RekindleError) or is_out_of_memory(error):
                raise
            kind = modules.model_type(self.parts.network)
            message = f"{kind}'s forward fails on a text of {self.size} tokens: "
            message += f"{type(error).__name__}: {first_line(error)}"
            fix = "check config.json; `from_pretrained` has to work, and a call with input_ids and "
            fix += "position_ids"
            raise StepError(message, where="model.source", fix=fix) from error

    def _compare(self, whose: str) -> str:
        (stage,) = self.parts.stages
        if self.task.kind.writes:
            self._refuse_foresight()
        gaps = []
        for factor in (1.0, LOUDER):
            with _louder(stage.part, factor), _eager(self.compiles):
                ours = self._loss(joined=stage.part.joins_texts)
                with _own_forward(stage.part):
                    own = self._loss(joined=False)
            if not math.isfinite(ours) and not math.isfinite(own):
                continue  # weights that are not numbers: a step, or a score, says so
            gap = abs(ours - own) / max(abs(own), 1e-12)
            if not (math.isfinite(gap) and gap <= self.allowed):
                raise self._refusal(ours, own, factor)
            gaps.append(gap)
        return f"the loss of a probe is {whose}, within {max(gaps, default=0.0):.1g}"

    def _refuse_foresight(self) -> None:
        """Raise UnsupportedError where a token is predicted with what comes behind it in sight."""
        with _eager(self.compiles):
            micro = self._micro(self.shards, joined=False)
            changed = self._micro(self.changed, joined=False)
            states = _states_of(self.parts, self.evaluation, micro)
            changed_states = _states_of(self.parts, self.evaluation, changed)
            if _same_bits(states, changed_states):
                return
            gradient_BTH = _embedding_gradient(self.parts, self.evaluation, micro)
        if (gradient_BTH[:, -1] == 0).all():
            return
        kind = modules.model_type(self.parts.network)
        message = f"{kind} sees the tokens that it is to predict: another last token changes the "
        message += "states before it"
        fix = "use a causal architecture; a BERT needs is_decoder: true in its config"
        raise UnsupportedError(message, where="model.source", fix=fix)

    def _loss(self, joined: bool) -> float:
        loss, _, targets = self.evaluation.losses([self._micro(self.shards, joined)]).tolist()
        return float(loss / targets)

    def _micro(self, shards: Shards, joined: bool) -> Micro:
        order = shards.order(TRAIN, global_batch_size=2, seed=0)
        mesh = Mesh(Layout(), self.parts.mesh.device)  # every rank asks the same
        batches = Batches(
            loss_of(self.task.objective), self.task, shards, TRAIN, order, mesh, 0, joined
        )
        return batches.arranged(np.arange(2), np.arange(2))

    def _refusal(self, ours: float, own: float, factor: float) -> UnsupportedError:
        kind = modules.model_type(self.parts.network)
        message = f"{kind} computes another loss than the engine: {own:.6g} by its own forward, "
        message += f"{ours:.6g} by the product of its last states with the output layer"
        if factor != 1.0:
            message += f" (with weights of that layer times {factor:g}, where a cap or scale shows)"
        fix = "use another architecture, or train.engine: trainer, which runs its own forward"
        return UnsupportedError(message, where="model.source", fix=fix)


def _eager(compiles: bool) -> contextlib.AbstractContextManager[Any]:
    """Without compiling for a shape that no step has: blocks would then be compiled for any."""
    if not compiles:  # the import takes a second
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


@contextlib.contextmanager
def _louder(part: Part, factor: float) -> Iterator[None]:
    """With the output layer's weights times a power of two; each bit is as before behind it."""
    head = getattr(part.network, "get_output_embeddings", lambda: None)()
    weight = getattr(head, "weight", None)
    if weight is None or factor == 1.0:
        yield
        return
    with torch.no_grad():
        weight.mul_(factor)
    try:
        yield
    finally:
        with torch.no_grad():
            weight.mul_(1 / factor)


@contextlib.contextmanager
def _own_forward(part: Part) -> Iterator[None]:
    """With the architecture's own forward and, where ours is installed, its own attention."""
    config: Any = part.network.config
    before = config._attn_implementation
    part.runs_own_forward = True
    if part.has_our_attention:
        config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        part.runs_own_forward = False
        config._attn_implementation = before
