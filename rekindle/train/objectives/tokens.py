"""The next token: several documents may share a sequence, and each supervised token is a target.

The loss of a large output layer, and what it says of single targets, are computed a few rows at a
time: never are there the logits of all of them. Shapes: B sequences, T tokens of this rank, N
supervised tokens (F where they are scored), H hidden, V vocabulary."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from rekindle.data.manifest import row_tokens
from rekindle.plan.tensors import TAUGHT, rows_at_once
from rekindle.train.micro import Chosen, Documents, Micro, Tensors
from rekindle.train.objectives import base
from rekindle.train.objectives.base import Alone, Columns, Objective, Texts
from rekindle.train.weights import intervals

if TYPE_CHECKING:
    from rekindle.tasks.base import Settings
    from rekindle.train.batches import Batches
    from rekindle.train.mesh import Mesh, Ranks
    from rekindle.train.modelfolder import ModelFolder
    from rekindle.train.part import Part

IGNORED = -100


class Tokens(Objective):
    divided_by_cp: ClassVar[bool] = True

    def pack_length(self, settings: Settings) -> int | None:
        return int(settings["max_length"]) if settings.get("packing") else None

    def micro(self, batches: Batches, chosen: Chosen, key: int, count: Tensor) -> Micro:
        layout, task = batches.mesh.layout, batches.task
        found = task.collate(
            chosen.table,
            batches.settings,
            slots=chosen.slots,
            rows=chosen.rows,
            length=chosen.length,
        )  # type: ignore[call-arg]
        packed = batches.order.pack_length is not None
        return micro_of_tokens(found, layout.cp, batches.mesh.place("cp"), packed, key, count)

    def loss(self, part: Part, batch: Tensors, micro: Micro) -> Tensor:
        lesson = _lesson(part, batch, micro)
        hidden_BTH = part.states(part.network, batch)
        if not part.last:
            return base.sendable(hidden_BTH)
        head: Any = part.network.get_output_embeddings()  # type: ignore[operator]
        if part.watches:
            part.watch(base.of_targets(hidden_BTH, micro))
        loss, right = linear_cross_entropy(  # states without a name go once they are cast
            base.of_targets(hidden_BTH, micro),
            head.weight,
            micro.labels,
            1 / micro.count[0],
            part.tp_group,
            not part.sequence_parallel,
            lesson,
            part.goal.label_smoothing if part.training else 0.0,
        )
        return base.row(loss, right, torch.full_like(loss, len(micro.labels)))

    def own_loss(self, part: Part, batch: Tensors, micro: Micro) -> Tensor:
        """Of sequences of one document each, without padding, by the scores of its own forward."""
        logits_NV = base.of_targets(part.network(input_ids=batch["input_ids"]).logits, micro)
        losses_N = F.cross_entropy(base.exact(logits_NV), micro.labels, reduction="none")
        loss = losses_N.double().sum() / micro.count[0]
        return base.row(loss, torch.zeros_like(loss), torch.full_like(loss, len(losses_N)))

    def score(self, part: Part, batch: Tensors, micro: Micro) -> Tensor:
        """[N, 2]: the loss in nats and the most probable token."""
        if not hasattr(part.network, "get_output_embeddings"):
            logits_NV = base.of_targets(part.task.logits(part.network, batch), micro)
            return judged(base.exact(logits_NV), micro.labels, 0, None)
        hidden_BTH = part.states(part.network, batch)
        if not part.last:
            return base.sendable(hidden_BTH)
        head: Any = part.network.get_output_embeddings()  # type: ignore[operator]
        states_NH = base.of_targets(hidden_BTH, micro)
        return judge_targets(states_NH, head.weight, micro.labels, part.tp_group)

    def alone(
        self, model: ModelFolder, table: pa.Table, mesh: Mesh, asked: int | None = None
    ) -> Alone:
        """With `asked`, the only target is what follows that place."""
        task: Any = model.task
        layout, cp_rank = mesh.layout, mesh.place("cp")
        unit = layout.tp * (2 * layout.cp if layout.cp > 1 else 1)
        length = -(-int(row_tokens(table).max()) // unit) * unit
        tensors = task.collate(table, model.settings, length=length)
        if asked is not None:
            tensors["labels"][0, asked] = 0
        micro = micro_of_tokens(tensors, layout.cp, cp_rank, False, 0, torch.ones(1))
        assert micro.targets is not None
        return micro, micro.targets // (length // layout.cp)

    def sums(self, result: Tensor, micro: Micro) -> Tensor:
        """Nats, right predictions, targets."""
        right_N = (result[:, 1] == micro.labels).double()
        return torch.stack([result[:, 0], right_N, torch.ones_like(right_N)], 1)

    def width(self, labels: Sequence[str]) -> int:
        return 3

    def columns(self, encoded: pa.Table, sums: np.ndarray, settings: Settings) -> Columns:
        """What the targets of a text cost, and which they are: another tokenizer's are others."""
        longest = settings.get("max_length", sys.maxsize)
        ids, cut, full = [], [], []
        for text in encoded.select(["input_ids", "supervised"]).to_pylist():
            tokens = np.array(text["input_ids"] or [], np.int32)
            marks = np.array(text["supervised"] if len(tokens) else [], np.uint8)
            ids.append(tokens[1:][marks[1:] > 0])
            full.append(len(tokens) >= longest)
            cut.append(hashlib.sha256(tokens.tobytes() + marks.tobytes()).digest()[:16])
        return {
            "nats": pa.array(sums[:, 0]),
            "right": pa.array(sums[:, 1].astype(np.int32)),
            "targets": pa.array(sums[:, 2].astype(np.int32)),
            "target_bytes": encoded.column("target_bytes"),
            "target_ids": pa.array(ids, pa.list_(pa.int32())),
            "cut": pa.array(cut, pa.binary(16)),
            "full": pa.array(full, pa.bool_()),
        }

    def invented(self, random: np.random.Generator, texts: Texts, classes: int) -> Columns:
        """Every token is a target."""
        marks = [np.ones(len(text), np.uint8).tolist() for text in texts]
        return {"supervised": pa.array(marks, pa.list_(pa.uint8()))}

    def rows_at_once(self, most: int) -> int | None:
        return None


def _lesson(part: Part, batch: Tensors, micro: Micro) -> Lesson | None:
    """Before the student's forward pass, whose activations are not there yet."""
    if not (part.teachers and part.training):
        return None
    (teacher,), goal = part.teachers, part.goal
    with torch.no_grad():
        states_NH = base.of_targets(part.states(teacher, batch), micro)
    head: Any = teacher.get_output_embeddings()  # type: ignore[operator]
    return Lesson(head, states_NH, goal.temperature, goal.teacher_weight)


def micro_of_tokens(
    found: Tensors, cp: int, cp_rank: int, packed: bool, key: int, count: Tensor
) -> Micro:
    """What a token task's `collate` made, as this context-parallel rank's share of it."""
    numbers_BS, documents = found.pop("documents").numpy(), None
    if cp > 1:
        chunks = torch.arange(numbers_BS.shape[1]).chunk(2 * cp)
        held = torch.cat([chunks[cp_rank], chunks[2 * cp - 1 - cp_rank]])
        found = {name: tensor[:, held] for name, tensor in found.items()}
        documents = Documents.of(numbers_BS, cp, cp_rank)
    elif packed:
        documents = Documents.of(numbers_BS)
    labels_F = found.pop("labels").flatten()
    targets_N = (labels_F != IGNORED).nonzero()[:, 0]
    return Micro(
        inputs=found,
        labels=labels_F[targets_N],
        targets=targets_N,
        documents=documents,
        key=key,
        count=count,
    )


_ALIGNED = 64


@dataclasses.dataclass(frozen=True)
class Lesson:
    """What a teacher says of the same tokens: `head` makes logits of its `states_NH`. `weight` is
    the share of the loss that is the divergence of distributions softened by `temperature`, times
    the temperature squared (Hinton, Vinyals, Dean 2015, arXiv 1503.02531)."""

    head: Callable[[Tensor], Tensor]
    states_NH: Tensor
    temperature: float
    weight: float


def linear_cross_entropy(
    hidden_NH: Tensor,
    weight: Tensor,
    labels_N: Tensor,
    scale: Tensor,
    group: Ranks = None,
    add_up: bool = True,
    lesson: Lesson | None = None,
    smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of `hidden @ weight.T`, summed and times `scale`, and the number of right
    predictions, a few rows at a time, gradients made on the way; partly the divergence of a
    `lesson`. Rows of `weight` [V, H] may be divided over `group`; `add_up` makes the gradient of
    `hidden` the whole. `smoothing` spreads that share of each target evenly over all V tokens, as
    `torch.nn.functional.cross_entropy` does; a lesson's share of the loss has none."""
    hidden_NH, local_VH, share = _factors(hidden_NH, weight, group)
    # a teacher has no columns but the real ones
    head_WH = _aligned(local_VH, hidden_NH.dtype, lesson is None)
    if not torch.is_grad_enabled():  # which `needs_input_grad` does not tell
        hidden_NH, head_WH = hidden_NH.detach(), head_WH.detach()
    loss, right = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden_NH, head_WH, labels_N, scale, share, add_up, lesson, smoothing
    )
    return loss, right


@dataclasses.dataclass(frozen=True)
class _Share:
    """The columns of the logits that this rank has: `count` of `total`, from `start` on, the others
    being those of its peers in `group`. A rank may have none."""

    count: int
    total: int
    start: int = 0
    group: Ranks = None

    def rows_at_once(self, matrices: int, device: str) -> int:
        """Rows of a piece, with so many matrices as large as its logits. By the widest share of
        any rank: each piece is reduced over the group, so all ranks need the same pieces."""
        peers = 1 if self.group is None else dist.get_world_size(self.group)
        widest = -(-self.total // peers)
        return rows_at_once(widest * matrices, device)


def _factors(hidden: Tensor, weight: Tensor, group: Ranks) -> tuple[Tensor, Tensor, _Share]:
    """Both as they are multiplied here, and which rows of `weight` are here."""
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    if not isinstance(weight, DTensor):
        return hidden, weight, _Share(len(weight), len(weight))
    local = weight.to_local()
    return hidden, local, _Share(len(local), len(weight), intervals(weight)[0][0], group)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        head_WH: Tensor,
        labels_N: Tensor,
        scale: Tensor,
        share: _Share,
        add_up: bool,
        lesson: Lesson | None,
        smoothing: float,
    ) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(hidden_NH.dtype, torch.float32)
        device, (for_hidden, for_head, *_) = hidden_NH.device, ctx.needs_input_grad
        grad_hidden = torch.zeros_like(hidden_NH, dtype=exact) if for_hidden else None
        grad_head = torch.zeros_like(head_WH, dtype=exact) if for_head else None
        loss = torch.zeros((), dtype=exact, device=device)
        right = torch.zeros((), dtype=exact, device=device)
        learns, factor = for_hidden or for_head, scale.to(exact)
        hard = 1.0 if lesson is None else 1 - lesson.weight
        rows = share.rows_at_once(1 if lesson is None else TAUGHT, device.type)
        for low in range(0, len(hidden_NH), rows):
            piece = slice(low, low + rows)
            part_NH = hidden_NH[piece]
            logits_NV, soft_NV = _product(part_NH, head_WH.T, exact), None
            logits_NV[:, share.count :] = -math.inf
            if lesson is not None:
                divergence, soft_NV = _softened(logits_NV, lesson, piece)
                loss += divergence
            slope = factor * hard if learns else None
            labels_P = labels_N[piece] - share.start
            entropy, hits = _hardened(logits_NV, labels_P, share, slope, smoothing)
            loss += hard * entropy
            right += hits
            if not learns:
                continue
            if soft_NV is not None:
                logits_NV += soft_NV.mul_(factor)
                del soft_NV
            slope_NV = logits_NV.to(hidden_NH.dtype)
            if grad_hidden is not None:
                grad_hidden[piece] = slope_NV @ head_WH
            if grad_head is not None:
                grad_head += slope_NV.T @ part_NH
            del logits_NV, slope_NV  # before the next piece is made
        if grad_hidden is not None and share.group is not None and add_up:
            dist.all_reduce(grad_hidden, group=share.group)
        ctx.save_for_backward(
            None if grad_hidden is None else grad_hidden.to(hidden_NH.dtype),
            None if grad_head is None else grad_head.to(head_WH.dtype),
        )
        return loss * factor, right

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        grads = (None if x is None else x * grad.to(x.dtype) for x in ctx.saved_tensors)
        return *grads, *[None] * 6


def _aligned(weight_VH: Tensor, dtype: torch.dtype, may: bool = True) -> Tensor:
    """[W, H] in this type; on a GPU maybe with rows of zeros: tensor cores want aligned rows of
    logits. Products with GPT-2's 50,257 took a quarter of a step on an H200."""
    spare = -len(weight_VH) % _ALIGNED if weight_VH.is_cuda and may else 0
    if not spare:
        return weight_VH.to(dtype)
    return _Padded.apply(weight_VH, dtype, spare)  # type: ignore[no-untyped-call,no-any-return]


class _Padded(torch.autograd.Function):
    """Cast, with rows of zeros behind it, in one copy."""

    @staticmethod
    def forward(ctx: Any, weight_VH: Tensor, dtype: torch.dtype, spare: int) -> Tensor:
        count, ctx.dtype = len(weight_VH), weight_VH.dtype
        head_WH = weight_VH.new_empty(count + spare, weight_VH.shape[1], dtype=dtype)
        head_WH[:count], head_WH[count:] = weight_VH, 0
        ctx.count = count
        return head_WH

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad[: ctx.count].to(ctx.dtype), None, None


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b in `dtype`; on a GPU without a result in half precision on the way."""
    if a.is_cuda and a.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


def _hardened(
    logits_NV: Tensor, labels_N: Tensor, share: _Share, factor: Tensor | None, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of a piece, summed, and its right predictions; columns beyond this rank's own
    are -inf. In place of the logits are then their gradients times `factor`, if any."""
    group = share.group
    mine_N = (labels_N >= 0) & (labels_N < share.count)
    safe_N = labels_N.clamp(0, max(0, share.count - 1))
    top_N, target_N = _largest(logits_NV), _picked(logits_NV, safe_N, mine_N)
    if group is not None:
        dist.all_reduce(top_N, dist.ReduceOp.MAX, group)
        dist.all_reduce(target_N, group=group)
    logits_NV.sub_(top_N[:, None])
    below_N = logits_NV[:, : share.count].sum(-1) if smoothing else None
    total_N = logits_NV.exp_().sum(-1)
    if group is not None:
        dist.all_reduce(total_N, group=group)
    if below_N is not None and group is not None:
        dist.all_reduce(below_N, group=group)
    if factor is not None:
        logits_NV.mul_((factor / total_N)[:, None])
        if share.count:
            places_N = torch.arange(len(safe_N), device=logits_NV.device)
            hit_N = mine_N.to(logits_NV.dtype) * (1 - smoothing)
            logits_NV[places_N, safe_N] -= hit_N * factor
        if smoothing:
            logits_NV[:, : share.count] -= factor * (smoothing / share.total)
    losses_N = total_N.log() + top_N - target_N
    if below_N is not None:
        # of the share that is spread, the mean over all tokens takes the target's place
        losses_N += smoothing * (target_N - top_N - below_N / share.total)
    return losses_N.sum(), (target_N >= top_N).sum()


def _largest(logits_NV: Tensor) -> Tensor:
    """The largest of each row; -inf on a rank without columns."""
    if not logits_NV.shape[1]:
        return logits_NV.new_full((len(logits_NV),), -math.inf)
    return logits_NV.amax(-1)


def _picked(logits_NV: Tensor, places_N: Tensor, mine_N: Tensor) -> Tensor:
    """What stands at one place of each row where it is this rank's, else 0."""
    if not logits_NV.shape[1]:
        return logits_NV.new_zeros(len(logits_NV))
    return logits_NV.gather(1, places_N[:, None])[:, 0].masked_fill(~mine_N, 0.0)


def _softened(ours_NV: Tensor, lesson: Lesson, piece: slice) -> tuple[Tensor, Tensor]:
    """The lesson's share of a piece's loss, and its gradients; in place, to hold few matrices."""
    warmth = lesson.temperature
    theirs_NV = lesson.head(lesson.states_NH[piece]).to(ours_NV.dtype, copy=True)
    theirs_NV = F.log_softmax(theirs_NV.div_(warmth), -1)
    ours_NV = F.log_softmax(ours_NV / warmth, -1)
    chances_NV = theirs_NV.exp()
    divergence = theirs_NV.sub_(ours_NV).mul_(chances_NV).sum()
    slopes_NV = ours_NV.exp_().sub_(chances_NV)
    return lesson.weight * warmth**2 * divergence, slopes_NV.mul_(lesson.weight * warmth)


def judge_targets(
    hidden_FH: Tensor, weight: Tensor, targets_F: Tensor, group: Ranks = None
) -> Tensor:
    """Float [F, 2]: of each target the loss in nats and the most probable token, a few targets at a
    time. `weight` [V, H] may be a DTensor whose rows are divided over `group`."""
    hidden_FH, local_VH, share = _factors(hidden_FH, weight, group)
    kind = torch.promote_types(hidden_FH.dtype, torch.float32)
    head_WH = _aligned(local_VH, hidden_FH.dtype)
    rows = share.rows_at_once(1, hidden_FH.device.type)
    judgements, pieces = [], torch.split(hidden_FH, rows)
    for states, targets in zip(pieces, torch.split(targets_F, rows), strict=True):
        logits = _product(states, head_WH.T, kind)[:, : share.count]
        judgements.append(judged(logits, targets, share.start, share.group))
    return torch.cat(judgements)


def judged(logits_FV: Tensor, targets_F: Tensor, start: int, group: Ranks) -> Tensor:
    """As `judge_targets`, of tokens from `start` on; of equally probable ones the first counts."""
    columns = logits_FV.shape[1]
    place_F = targets_F - start
    mine_F = (place_F >= 0) & (place_F < columns)
    safe_F = place_F.clamp(0, max(0, columns - 1))
    target_F = _picked(logits_FV, safe_F, mine_F)
    if columns:
        top_F, token_F = logits_FV.max(-1)
        token_F = token_F + start
    else:
        top_F = _largest(logits_FV)
        token_F = torch.full_like(place_F, torch.iinfo(torch.int64).max)
    if group is not None:
        best_F = top_F.clone()
        dist.all_reduce(best_F, dist.ReduceOp.MAX, group)
        token_F = token_F.masked_fill(top_F != best_F, torch.iinfo(torch.int64).max)
        dist.all_reduce(token_F, dist.ReduceOp.MIN, group)
        dist.all_reduce(target_F, group=group)
        top_F = best_F
    total_F = (logits_FV - top_F[:, None]).exp().sum(-1)
    if group is not None:
        dist.all_reduce(total_F, group=group)
    nats_F = total_F.log() + top_F - target_F
    return torch.stack([nats_F.double(), token_F.double()], 1)
