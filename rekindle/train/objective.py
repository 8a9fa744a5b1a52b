"""The loss as a module: the network, or one pipeline stage of it, and what is made of its output.

`Part` is what gets wrapped by DDP or FSDP and cut by the pipeline: it takes one micro-batch and
returns, on the last stage, float [1, 3]: the loss (a sum divided by the number of targets of the
whole global batch, so that ranks and micro-batches simply add up), the number of right predictions,
and the number of targets; hidden states on the others.

Every block draws its dropout from (seed, step, micro-batch, block), so neither the number of ranks
nor the cutting into stages changes a mask. Shapes: B rows, T tokens, H hidden, V vocabulary, N
supervised tokens, C classes."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from rekindle.families import Modules, config_of
from rekindle.families.family import DROPOUTS
from rekindle.plan.tensors import TAUGHT, rows_at_once
from rekindle.tasks.base import Task
from rekindle.tasks.text_classification import TextClassification
from rekindle.train import attention, modules
from rekindle.train.batches import Micro, Tensors
from rekindle.train.documents import Documents
from rekindle.train.weights import intervals


@dataclasses.dataclass(frozen=True)
class Goal:
    """What is minimised."""

    label_smoothing: float = 0.0
    teacher: nn.Module | None = None
    temperature: float = 1.0
    teacher_weight: float = 0.0


@dataclasses.dataclass(frozen=True)
class Lesson:
    """What a teacher says of the same tokens: `head` makes logits of its `states_NH`. `weight` is
    the share of the loss that is the divergence of distributions softened by `temperature`, times
    the temperature squared (Hinton, Vinyals, Dean 2015, arXiv 1503.02531)."""

    head: Callable[[torch.Tensor], torch.Tensor]
    states_NH: torch.Tensor
    temperature: float
    weight: float


class Part(nn.Module):
    """One stage of the network, with the loss behind the last one. `joins_texts`: texts with a
    class share a sequence, each with positions and a summary of its own."""

    def __init__(
        self, task: Task, network: nn.Module, goal: Goal, first: bool = True, last: bool = True,
        tp_group: dist.ProcessGroup | None = None, sequence_parallel: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.network = network
        self.first, self.last = first, last
        self.tp_group, self.sequence_parallel = tp_group, sequence_parallel
        self.task, self.goal = task, goal
        # a plain list, so that the teacher is neither trained, sharded nor saved
        self.teachers = [goal.teacher] if goal.teacher is not None else []
        self.key, self.device = 0, torch.device("cpu")
        self.results: list[torch.Tensor] = []
        # only our attention understands which documents share a sequence
        self.ours = any(hasattr(m, attention.PEERS) for m in network.modules())
        # how many texts are joined in the sequence, and documents, with those that fill it
        self.texts: int | None = None
        self.documents = 0
        networks = [network, *self.teachers]
        self.joins_texts = isinstance(task, TextClassification) and all(
            known is not None and known.summary is not None
            for known in map(modules.known, networks)
        )
        for one in networks if last and self.joins_texts else ():
            _summarise_each(one, self)
        if _drops(network):
            for name, block in modules.blocks(network):
                block.register_forward_pre_hook(self._reseed(zlib.crc32(name.encode())))

    def _reseed(self, place: int) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            if module.training:
                seed(_mixed(self.key, place), self.device)

        return hook

    def forward(self, carried: torch.Tensor | None = None, *, micro: Micro) -> torch.Tensor:
        """Of one micro-batch on this rank's device; `carried` is what the stage before handed on,
        or in a pipeline what the first stage receives."""
        self.key, self.device = micro.key, micro.count.device
        if self.training:
            seed(self.key, self.device)
        batch = dict(micro.inputs)
        if carried is not None:
            first = "pixels" if carried.is_floating_point() else "input_ids"
            batch[first if self.first else "inputs_embeds"] = carried
        made = self._tokens if self.task.objective == "tokens" else self._classes
        result = made(batch, micro)
        if self.last:
            self.results.append(result.detach())
        return result

    def _tokens(self, batch: Tensors, micro: Micro) -> torch.Tensor:
        lesson = self._lesson(batch, micro)
        hidden_BTH = self._states(self.network, batch, micro)
        if not self.last:
            return sendable(hidden_BTH)
        assert micro.targets is not None
        head = self.network.get_output_embeddings()  # type: ignore[operator]
        loss, right = linear_cross_entropy(
            chosen(hidden_BTH, micro.targets), head.weight, micro.labels, 1 / micro.count[0],
            self.tp_group, not self.sequence_parallel, lesson,
        )  # fmt: skip
        return _row(loss, right, torch.full_like(loss, len(micro.targets)))

    def _lesson(self, batch: Tensors, micro: Micro) -> Lesson | None:
        """Before the student's forward pass, whose activations are not there yet."""
        if not (self.teachers and self.training):
            return None
        assert micro.targets is not None
        (teacher,), goal = self.teachers, self.goal
        with torch.no_grad():
            states_NH = chosen(self._states(teacher, batch, micro), micro.targets)
        head = teacher.get_output_embeddings()  # type: ignore[operator]
        return Lesson(head, states_NH, goal.temperature, goal.teacher_weight)

    def _states(self, network: nn.Module, batch: Tensors, micro: Micro) -> torch.Tensor:
        """[B, T, H] behind the last block."""
        more: dict[str, Any] = {}
        if self.ours and micro.documents is not None:
            more = {"documents": micro.documents}
        body = modules.backbone(network)
        states_BTH: torch.Tensor = body(**batch, **more, use_cache=False).last_hidden_state
        return states_BTH

    def _classes(self, batch: Tensors, micro: Micro) -> torch.Tensor:
        assert micro.weights is not None
        labels_B, weights_B, count = micro.labels, micro.weights, micro.count[0]
        if micro.documents is not None:
            batch["documents"] = micro.documents  # type: ignore[assignment]
            self.documents = len(micro.documents.queries)
        if not self.last:
            return self._hidden(batch)
        self.texts = None if micro.targets is None else len(micro.targets)
        theirs_BC = self._taught(batch)
        if self.first or hasattr(self.network, "config"):
            logits_BC = self.task.logits(self.network, batch)
        else:
            logits_BC = self.network(batch["inputs_embeds"])
        logits_BC = logits_BC.to(torch.promote_types(logits_BC.dtype, torch.float32))
        losses_B = F.cross_entropy(
            logits_BC, labels_B, reduction="none",
            label_smoothing=self.goal.label_smoothing if self.training else 0.0,
        )  # fmt: skip
        weights_B = weights_B.to(logits_BC.dtype)
        loss = (losses_B * weights_B).sum() / count
        if theirs_BC is not None:
            warmth, share = self.goal.temperature, self.goal.teacher_weight
            divergence_B = F.kl_div(
                F.log_softmax(logits_BC / warmth, -1),
                F.log_softmax(theirs_BC.to(logits_BC.dtype) / warmth, -1),
                reduction="none", log_target=True,
            ).sum(-1)  # fmt: skip
            soft = (divergence_B * weights_B).sum() / count
            loss = (1 - share) * loss + share * warmth**2 * soft
        right = ((logits_BC.argmax(-1) == labels_B) * weights_B).sum()
        return _row(loss, right.to(loss.dtype), weights_B.sum())

    def _taught(self, batch: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """The teacher's logits of classes, before the student's forward pass, too."""
        if not (self.teachers and self.training):
            return None
        with torch.no_grad():
            return self.task.logits(self.teachers[0], batch)

    def _hidden(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """What the next stage receives; a Sequential takes one input."""
        if hasattr(self.network, "config"):
            return sendable(modules.backbone(self.network)(**batch).last_hidden_state)
        return sendable(self.network(batch.get("inputs_embeds", next(iter(batch.values())))))


def _summarise_each(network: nn.Module, part: Part) -> None:
    """Have transformers' own summary of the first token made of each joined text: [1, documents, H]
    becomes [texts, 1, H] in front of it. Documents behind the texts fill a pipeline's sequence."""
    known, body = modules.required(network, "summary"), modules.backbone(network)

    def each(hidden_BTH: torch.Tensor) -> torch.Tensor:
        if part.texts is None:
            return hidden_BTH
        if hidden_BTH.shape[1] != part.documents:
            raise RuntimeError(f"{hidden_BTH.shape[1]} summaries of {part.documents} documents")
        return hidden_BTH[0, : part.texts, None]

    def before(module: nn.Module, args: Any) -> Any:
        return (each(args[0]), *args[1:])

    def behind(module: nn.Module, args: Any, output: Any) -> Any:
        output["last_hidden_state"] = each(output["last_hidden_state"])
        return output

    _compute_only_firsts(modules.blocks(network)[-1][1], known)
    if known.summary:
        body.get_submodule(known.summary).register_forward_pre_hook(before)
    else:
        body.register_forward_hook(behind)


def _compute_only_firsts(block: nn.Module, known: Modules) -> None:
    """Have the last block compute, behind its attention, each joined text's first token alone:
    [1, T, H] becomes [1, documents, H], and nothing reads what is left out.

    The documents are taken from attention's own arguments, which are right as well where a block
    computes its activations again."""
    documents: list[Documents | None] = [None]

    def seen(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        documents[0] = kwargs.get("documents")

    def narrowed(module: nn.Module, args: tuple[torch.Tensor, ...]) -> Any:
        if documents[0] is None:
            return args
        firsts = documents[0].starts[:-1]
        return tuple(x_BTH.index_select(1, firsts) for x_BTH in args)

    block.get_submodule(known.attention).register_forward_pre_hook(seen, with_kwargs=True)
    block.get_submodule(known.behind).register_forward_pre_hook(narrowed)


def sendable(hidden: torch.Tensor) -> torch.Tensor:
    """A pipeline sends it as it lies in memory, and zero bubble detaches it in place, which no view
    allows: GPT-2 ends in one."""
    return hidden.clone() if hidden._is_view() else hidden.contiguous()


def chosen(values_BTH: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    """The tokens that are to be predicted from, one after the other: [N, H]."""
    return values_BTH.flatten(0, 1).index_select(0, targets_N)


def seed(key: int, device: torch.device) -> None:
    """What `torch.manual_seed` does to the generators that this rank draws from.

    It would also seed those of devices that are not there, and each of them, until it is used,
    keeps the stack of its caller as text: 150 to 300 microseconds a call."""
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(key)


def _row(*values: torch.Tensor) -> torch.Tensor:
    """[1, N], and no view: FSDP warns of those."""
    return torch.stack([value[None] for value in values], dim=1)


def linear_cross_entropy(
    hidden_NH: torch.Tensor, weight: torch.Tensor, labels_N: torch.Tensor, scale: torch.Tensor,
    group: dist.ProcessGroup | None = None, add_up: bool = True, lesson: Lesson | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Cross-entropy of `hidden @ weight.T`, summed and times `scale`, and the number of right
    predictions, without ever holding all logits: a few rows at a time, gradients made on the way.
    With a `lesson` the loss is partly the divergence from a teacher.

    `weight` [V, H] may be a DTensor whose rows are divided over `group`; then each rank's gradient
    of `hidden` is its share, and `add_up` makes it the whole."""
    start = intervals(weight)[0][0] if isinstance(weight, DTensor) else 0
    divided = group if isinstance(weight, DTensor) and group is not None else None
    local_VH = weight.to_local() if isinstance(weight, DTensor) else weight
    if torch.is_autocast_enabled(hidden_NH.device.type):
        dtype = torch.get_autocast_dtype(hidden_NH.device.type)
        hidden_NH, local_VH = hidden_NH.to(dtype), local_VH.to(dtype)
    loss, right = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden_NH, local_VH, labels_N, scale, divided, start, add_up, lesson
    )
    return loss, right


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, labels_N: torch.Tensor,
        scale: torch.Tensor, group: dist.ProcessGroup | None, start: int, add_up: bool,
        lesson: Lesson | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        exact = torch.promote_types(hidden_NH.dtype, torch.float32)
        device, (for_hidden, for_weight, *_) = hidden_NH.device, ctx.needs_input_grad
        grad_hidden = torch.zeros_like(hidden_NH, dtype=exact) if for_hidden else None
        grad_weight = torch.zeros_like(weight_VH, dtype=exact) if for_weight else None
        loss = torch.zeros((), dtype=exact, device=device)
        right = torch.zeros((), dtype=exact, device=device)
        learns, factor = for_hidden or for_weight, scale.to(exact)
        hard = 1.0 if lesson is None else 1 - lesson.weight
        rows = rows_at_once(len(weight_VH) * (1 if lesson is None else TAUGHT), device.type)
        for low in range(0, len(hidden_NH), rows):
            piece = slice(low, low + rows)
            part_NH = hidden_NH[piece]
            logits_NV, soft_NV = (part_NH @ weight_VH.T).to(exact), None
            if lesson is not None:
                divergence, soft_NV = _softened(logits_NV, lesson, piece)
                loss += divergence
            entropy, hits = _hardened(
                logits_NV, labels_N[piece] - start, factor * hard if learns else None, group
            )
            loss += hard * entropy
            right += hits
            if not learns:
                continue
            if soft_NV is not None:
                logits_NV += soft_NV.mul_(factor)
                del soft_NV
            slope_NV = logits_NV.to(hidden_NH.dtype)
            if grad_hidden is not None:
                grad_hidden[piece] = slope_NV @ weight_VH
            if grad_weight is not None:
                grad_weight += slope_NV.T @ part_NH
            del logits_NV, slope_NV  # before the next piece is made
        if grad_hidden is not None and group is not None and add_up:
            dist.all_reduce(grad_hidden, group=group)
        ctx.save_for_backward(
            None if grad_hidden is None else grad_hidden.to(hidden_NH.dtype),
            None if grad_weight is None else grad_weight.to(weight_VH.dtype),
        )
        return loss * factor, right

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> Any:
        grads = (None if x is None else x * grad.to(x.dtype) for x in ctx.saved_tensors)
        return *grads, None, None, None, None, None, None


def _hardened(
    logits_NV: torch.Tensor, labels_N: torch.Tensor, factor: torch.Tensor | None,
    group: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Cross-entropy of a piece, summed, and its right predictions. In place of the logits are then
    their gradients, times `factor`, if there is one. Labels of other ranks' columns lie outside."""
    columns = logits_NV.shape[1]
    mine_N = (labels_N >= 0) & (labels_N < columns)
    safe_N = labels_N.clamp(0, columns - 1)
    top_N = logits_NV.amax(-1)
    target_N = logits_NV.gather(1, safe_N[:, None])[:, 0].masked_fill(~mine_N, 0.0)
    if group is not None:
        dist.all_reduce(top_N, dist.ReduceOp.MAX, group)
        dist.all_reduce(target_N, group=group)
    logits_NV.sub_(top_N[:, None]).exp_()
    total_N = logits_NV.sum(-1)
    if group is not None:
        dist.all_reduce(total_N, group=group)
    if factor is not None:
        logits_NV.mul_((factor / total_N)[:, None])
        places_N = torch.arange(len(safe_N), device=logits_NV.device)
        logits_NV[places_N, safe_N] -= mine_N.to(logits_NV.dtype) * factor
    return (total_N.log() + top_N - target_N).sum(), (target_N >= top_N).sum()


def _softened(
    ours_NV: torch.Tensor, lesson: Lesson, piece: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """The lesson's share of a piece's loss, and its gradients with respect to our logits. In place,
    so that there are never more than `TAUGHT` matrices as large as the logits."""
    warmth = lesson.temperature
    theirs_NV = lesson.head(lesson.states_NH[piece]).to(ours_NV.dtype, copy=True)
    theirs_NV = F.log_softmax(theirs_NV.div_(warmth), -1)
    ours_NV = F.log_softmax(ours_NV / warmth, -1)
    chances_NV = theirs_NV.exp()
    divergence = theirs_NV.sub_(ours_NV).mul_(chances_NV).sum()
    slopes_NV = ours_NV.exp_().sub_(chances_NV)
    return lesson.weight * warmth**2 * divergence, slopes_NV.mul_(lesson.weight * warmth)


def _drops(network: nn.Module) -> bool:
    """Whether anything in the network draws random numbers while training: a layer, or a function
    that its config gives a rate."""
    if any(isinstance(m, nn.Dropout) and m.p > 0 for m in network.modules()):
        return True
    given = getattr(getattr(network, "config", None), "__dict__", {})
    rates = config_of({**given, "model_type": modules.model_type(network)})
    return any(float(rates.get(name) or 0.0) > 0 for name in DROPOUTS)


def _mixed(key: int, place: int) -> int:
    """A seed from a seed and a place: splitmix64's finalizer (Steele, Lea, Flood 2014)."""
    z = (key + place * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) >> 1
