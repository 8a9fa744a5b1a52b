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
from typing import Any

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

    It is the `Stage` of its objective, whose `loss` it is handed. `joins_texts`: whether texts
    share a sequence. A part with a `scoring` gives on the last stage what `Scoring.score` does,
    and no loss."""

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
        # of the micro-batch at work: what seeds its dropout, and where it is
        self.key = 0
        self.device = torch.device("cpu")
        self.results: list[torch.Tensor] = []
        # only our attention understands which documents share a sequence
        self.ours = any(hasattr(module, attention.PEERS) for module in network.modules())
        # how many texts are joined in the sequence, and documents, with those that fill it
        self.texts: int | None = None
        self.documents = 0
        self.loss = loss
        self.scoring = scoring
        # what proof.py sets: to run the architecture's own forward, and to see states of targets
        self.own = False
        self.watches = False
        self.watched: list[torch.Tensor] = []
        self.joins_texts = self.loss.prepare(self)
        if _drops(network):
            for name, block in modules.blocks(network):
                place = zlib.crc32(name.encode())
                block.register_forward_pre_hook(functools.partial(self._reseed, place))

    def _reseed(self, place: int, module: nn.Module, args: Any) -> None:
        if module.training:
            seed(_mixed(self.key, place), self.device)

    def forward(self, carried: torch.Tensor | None = None, *, micro: Micro) -> torch.Tensor:
        """Of one micro-batch on this rank's device; `carried`: what this stage receives."""
        self.key = micro.key
        self.device = micro.count.device
        if self.training:
            seed(self.key, self.device)
        batch = self._inputs(micro)
        if carried is not None:
            name = "inputs_embeds"
            if self.first:
                name = "pixels" if carried.is_floating_point() else "input_ids"
            batch[name] = carried
        if self.own:
            result = self.loss.own_loss(self, batch, micro)
        elif self.scoring is not None:
            result = self.scoring.score(self, batch, micro)
        else:
            result = self.loss.loss(self, batch, micro)
        if self.last:
            self.results.append(result.detach())
        return result

    def _inputs(self, micro: Micro) -> dict[str, Any]:
        """What the network is given, with the documents of a sequence where it knows them."""
        batch: dict[str, Any] = dict(micro.inputs)
        self.texts = None if micro.targets is None else len(micro.targets)
        if micro.documents is not None:
            self.documents = len(micro.documents.queries)
            if self.ours:
                batch["documents"] = micro.documents
            elif _takes_any(self.network):
                batch |= numbered(micro.inputs["position_ids"], micro.documents)
        return batch

    def logits(self, batch: Tensors) -> torch.Tensor:
        """What the task's network scores, on the last stage."""
        if self.first or hasattr(self.network, "config"):
            return self.task.logits(self.network, batch)
        return self.network(batch["inputs_embeds"])  # type: ignore[no-any-return]

    def teacher_logits(self, batch: Tensors) -> torch.Tensor | None:
        """The teacher's, where there is one and the network learns."""
        if not (self.teachers and self.training):
            return None
        with torch.no_grad():
            return self.task.logits(self.teachers[0], batch)

    def summarises_each(self) -> bool:
        """Have the network summarise each of the texts that share a sequence; false where its
        family does not say how."""
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
        """Whether attention keeps texts apart that share a sequence."""
        networks = [self.network, *self.teachers]
        return all(modules.known(network) is not None for network in networks)

    def states(self, network: nn.Module, batch: Tensors) -> torch.Tensor:
        """[B, T, H] behind the last block."""
        body = modules.backbone(network)
        return body(**batch, use_cache=False).last_hidden_state  # type: ignore[no-any-return]

    def watch(self, states: torch.Tensor) -> None:
        """Keep the states that targets are predicted from, where a proof asked for them."""
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


def _takes_any(network: nn.Module) -> bool:
    """Whether the network hands keywords that it does not know on to its layers."""
    parameters = inspect.signature(modules.backbone(network).forward).parameters
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def numbered(position_ids_BT: torch.Tensor, documents: Documents) -> dict[str, Any]:
    """What architectures of transformers keep documents apart by, beside positions that
    begin again: kernels of convolutions, state spaces and linear attention take it.

    `seq_idx`, int32 [B, T], is which document of its sequence each token is of. Where a
    micro-batch is one sequence there are also `cu_seq_lens_q` and `_k`, int32 [N + 1],
    where documents begin, and `max_length_q` and `_k`, the longest. The kernels refuse
    them where they are not installed."""
    keywords: dict[str, Any] = {"seq_idx": ((position_ids_BT == 0).cumsum(1) - 1).int()}
    if len(position_ids_BT) == 1:  # kernels of linear attention take no more with these
        longest = max(documents.queries)
        keywords["cu_seq_lens_q"] = documents.starts
        keywords["cu_seq_lens_k"] = documents.key_starts
        keywords["max_length_q"] = longest
        keywords["max_length_k"] = longest
    return keywords


def seed(key: int, device: torch.device) -> None:
    """`torch.manual_seed` without devices that are not there, which takes 150 microseconds."""
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(key)


def _drops(network: nn.Module) -> bool:
    """Whether the network draws random numbers while training: a layer, or a rate of its config."""
    for module in network.modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            return True
    config = getattr(getattr(network, "config", None), "__dict__", {})
    rates = config_of({**config, "model_type": modules.model_type(network)})
    return any(float(rates.get(name) or 0.0) > 0 for name in DROPOUTS)


def _mixed(key: int, place: int) -> int:
    """A seed from a seed and a place: splitmix64's finalizer (Steele, Lea, Flood 2014)."""
    z = (key + place * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) >> 1
