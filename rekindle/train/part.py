"""The loss as a module: the network, or one pipeline stage of it, and what is made of its
output.

`Part` is what gets wrapped by DDP or FSDP and cut by the pipeline: it takes one
micro-batch and returns, on the last stage, float [1, 3]: the loss (divided by the targets
of the global batch, so that ranks and micro-batches add up), right predictions, and
targets; hidden states on others.

Every block draws its dropout from (seed, step, micro-batch, block), so no layout changes
a mask. Shapes: B rows, T tokens, H hidden, V vocabulary, N supervised tokens, C
classes."""

import functools
import inspect
import zlib
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from rekindle.families import Modules, config_of
from rekindle.families.family import DROPOUTS
from rekindle.objectives.loss import Goal, Loss, Scoring, sendable
from rekindle.objectives.micro import Documents, Micro, Tensors
from rekindle.tasks.base import Task
from rekindle.train import attention, modules


class Part(nn.Module):
    """One stage of the network, with the loss behind the last one.

    It is the `Stage` that its objective's `loss` sees. A part with a `scoring` gives on
    the last stage what `Scoring.score` does, and no loss."""

    joins_texts: bool
    """Whether the loss puts the texts of a micro-batch into one sequence, without packing."""
    has_our_attention: bool
    """Whether rekindle's attention is installed; no other one takes `documents`."""
    text_count: int | None
    """How many texts are joined in the sequence; None where targets are rows."""
    document_count: int
    """How many documents the sequence has, those that only fill it included."""
    runs_own_forward: bool
    """Set by proof.py, to compare with the architecture's own forward."""
    watches: bool
    """Set by proof.py, to have the states that targets are predicted from in `watched`."""

    if TYPE_CHECKING:
        # nn.Module has one that gives anything: a type checker would see no wrong attribute
        __getattr__ = None  # type: ignore[assignment, misc]

    def __init__(
        self,
        loss: Loss,
        task: Task,
        network: nn.Module,
        goal: Goal,
        first: bool = True,
        last: bool = True,
        tp_group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        scoring: Scoring | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self.first = first
        self.last = last
        self.tp_group = tp_group
        self.sequence_parallel = sequence_parallel
        self.task = task
        self.goal = goal
        # a plain list, so that the teacher is neither trained, sharded nor saved
        self.teachers = [goal.teacher] if goal.teacher is not None else []
        # of the current micro-batch: the seed of its dropout, and its device
        self.key = 0
        self.device = torch.device("cpu")
        self.results: list[torch.Tensor] = []
        self.has_our_attention = any(
            hasattr(module, attention.PEERS) for module in network.modules()
        )
        self.text_count = None
        self.document_count = 0
        self.loss = loss
        self.scoring = scoring
        self.runs_own_forward = False
        self.watches = False
        self.watched: list[torch.Tensor] = []
        self.joins_texts = self.loss.prepare(self)
        if _drops(network):
            for name, block in modules.blocks(network):
                place = zlib.crc32(name.encode())
                block.register_forward_pre_hook(functools.partial(self._reseed, place))

    def _reseed(self, place: int, module: nn.Module, args: object) -> None:
        if module.training:
            seed(_mixed(self.key, place), self.device)

    def forward(self, carried: torch.Tensor | None = None, *, micro: Micro) -> torch.Tensor:
        """The loss or the scores of one micro-batch on this rank's device; what the next
        stage receives, on other stages than the last. `carried` is what this stage
        receives."""
        self.key = micro.key
        self.device = micro.count.device
        if self.training:
            seed(self.key, self.device)
        batch = self._inputs(micro)
        if carried is not None:
            # a pipeline hands its first stage the input apart from the micro-batch
            name = "inputs_embeds"
            if self.first:
                name = "pixels" if carried.is_floating_point() else "input_ids"
            batch[name] = carried
        if self.runs_own_forward:
            result = self.loss.own_loss(self, batch, micro)
        elif self.scoring is not None:
            result = self.scoring.score(self, batch, micro)
        else:
            result = self.loss.loss(self, batch, micro)
        if self.last:
            self.results.append(result.detach())
        return result

    def _inputs(self, micro: Micro) -> dict[str, Any]:
        """The arguments of the network; which documents share a sequence is among them
        where it can take that."""
        batch: dict[str, Any] = dict(micro.inputs)
        self.text_count = None if micro.targets is None else len(micro.targets)
        if micro.documents is not None:
            self.document_count = len(micro.documents.queries)
            if self.has_our_attention:
                batch["documents"] = micro.documents
            elif _takes_any_keyword(self.network):
                batch |= document_keywords(micro.inputs["position_ids"], micro.documents)
        return batch

    def logits(self, batch: Tensors) -> torch.Tensor:
        """The scores of the task's network, on the last stage."""
        # a later stage of a network without a config is a Sequential: it takes one input
        if self.first or hasattr(self.network, "config"):
            return self.task.logits(self.network, batch)
        return self.network(batch["inputs_embeds"])  # type: ignore[no-any-return]

    def teacher_logits(self, batch: Tensors) -> torch.Tensor | None:
        """The teacher's scores; None where there is no teacher, or the network is not training."""
        if not (self.teachers and self.training):
            return None
        with torch.no_grad():
            return self.task.logits(self.teachers[0], batch)

    def summarise_each(self) -> bool:
        """Have the network summarise each of the texts that share a sequence, and return
        whether it can: its family has to say how."""
        if not self.task.shares_sequences:
            return False
        networks = [self.network, *self.teachers]
        for network in networks:
            known = modules.known(network)
            if known is None or known.summary is None:
                return False
        if self.last:
            for network in networks:
                _summarise_each(network, self)
        return True

    def keeps_texts_apart(self) -> bool:
        """Whether texts that share a sequence do not attend to each other."""
        # a family that is known gets rekindle's attention, which keeps them apart
        networks = [self.network, *self.teachers]
        return all(modules.known(network) is not None for network in networks)

    def states(self, network: nn.Module, batch: Tensors) -> torch.Tensor:
        """The hidden states behind the last block, [B, T, H]."""
        body = modules.backbone(network)
        return body(**batch, use_cache=False).last_hidden_state  # type: ignore[no-any-return]

    def watch(self, states: torch.Tensor) -> None:
        """Keep the states that targets are predicted from, if a proof asked for them."""
        if self.watches:
            self.watched.append(states.detach())

    def hidden(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """What the next stage receives."""
        if hasattr(self.network, "config"):
            return sendable(modules.backbone(self.network)(**batch).last_hidden_state)
        # a Sequential takes one input
        if "inputs_embeds" in batch:
            return sendable(self.network(batch["inputs_embeds"]))
        return sendable(self.network(next(iter(batch.values()))))


def _summarise_each(network: nn.Module, part: Part) -> None:
    """Have transformers' own summary, which reads the first token of each row, read the
    first token of each joined text.

    Hooks turn its input, [1, documents, H], into [texts, 1, H]. The documents behind the
    texts only fill a pipeline's sequence, and are left out."""
    known = modules.required(network, "summary")
    body = modules.backbone(network)

    def texts_of(hidden_BTH: torch.Tensor) -> torch.Tensor:
        if part.text_count is None:
            return hidden_BTH
        if hidden_BTH.shape[1] != part.document_count:
            raise RuntimeError(
                f"{hidden_BTH.shape[1]} summaries of {part.document_count} documents"
            )
        return hidden_BTH[0, : part.text_count, None]

    def before_summary(
        module: nn.Module, args: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        return (texts_of(args[0]), *args[1:])

    def after_body(
        module: nn.Module, args: object, output: MutableMapping[str, torch.Tensor]
    ) -> MutableMapping[str, torch.Tensor]:
        output["last_hidden_state"] = texts_of(output["last_hidden_state"])
        return output

    _compute_only_firsts(modules.blocks(network)[-1][1], known)
    if known.summary:
        body.get_submodule(known.summary).register_forward_pre_hook(before_summary)
    else:  # what follows the body makes the summary
        body.register_forward_hook(after_body)


def _compute_only_firsts(block: nn.Module, known: Modules) -> None:
    """Have the last block compute, after its attention, only the first token of each
    joined text, since the summary reads no other.

    [1, T, H] becomes [1, documents, H]."""
    # Taken from attention's own arguments: with activation checkpointing a block is
    # computed again in the backward pass, and its arguments are then still those of its
    # micro-batch.
    documents: list[Documents | None] = [None]

    def keep_documents(module: nn.Module, args: object, kwargs: Mapping[str, Any]) -> None:
        documents[0] = kwargs.get("documents")

    def keep_firsts(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        if documents[0] is None:
            return args
        firsts = documents[0].starts[:-1]
        return tuple(x_BTH.index_select(1, firsts) for x_BTH in args)

    block.get_submodule(known.attention).register_forward_pre_hook(keep_documents, with_kwargs=True)
    block.get_submodule(known.behind).register_forward_pre_hook(keep_firsts)


def _takes_any_keyword(network: nn.Module) -> bool:
    """Whether the network hands keywords that it does not know on to its layers."""
    parameters = inspect.signature(modules.backbone(network).forward).parameters
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def document_keywords(position_ids_BT: torch.Tensor, documents: Documents) -> dict[str, Any]:
    """The keywords by which architectures of transformers keep documents apart, beside
    positions that begin again: kernels of convolutions, state spaces and linear attention
    take them.

    `seq_idx`, int32 [B, T], is the number of each token's document in its sequence. For a
    micro-batch of one sequence there are also `cu_seq_lens_q` and `cu_seq_lens_k`, int32
    [N + 1], where documents begin, and `max_length_q` and `max_length_k`, the length of
    the longest document. Architectures whose kernels are not installed refuse these
    keywords."""
    keywords: dict[str, Any] = {"seq_idx": ((position_ids_BT == 0).cumsum(1) - 1).int()}
    if len(position_ids_BT) == 1:  # with these, kernels of linear attention take one sequence
        longest = max(documents.queries)
        keywords["cu_seq_lens_q"] = documents.starts
        keywords["cu_seq_lens_k"] = documents.key_starts
        keywords["max_length_q"] = longest
        keywords["max_length_k"] = longest
    return keywords


def seed(key: int, device: torch.device) -> None:
    """Seed the CPU and this rank's device.

    `torch.manual_seed` seeds every backend, whether it is there or not, which takes 150
    microseconds; this runs before each block of each micro-batch."""
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(key)


def _drops(network: nn.Module) -> bool:
    """Whether the network draws random numbers while training."""
    for module in network.modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            return True
    # attention may have no layer, and call F.dropout with a rate of the config
    config = getattr(getattr(network, "config", None), "__dict__", {})
    rates = config_of({**config, "model_type": modules.model_type(network)})
    return any(float(rates.get(name) or 0.0) > 0 for name in DROPOUTS)


def _mixed(key: int, place: int) -> int:
    """A seed for `place`, by splitmix64's finalizer (Steele, Lea, Flood 2014): blocks
    whose inputs differ in a few bits get unrelated seeds."""
    z = (key + place * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) >> 1
