"""One step of a pipeline: torch's schedules, fed with micro-batches that are ready.

Decides which schedule a layout's name means (1F1B: Narayanan et al. 2021, arXiv 2104.04473; looped:
the same, interleaved; zero bubble in a V: Qi et al. 2024, arXiv 2405.15362). A schedule knows the
shapes it moves, so every length of micro-batch has its own; these reach the stages as they are."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules

from rekindle.plan.inflight import stages_of
from rekindle.train.micro import Micro
from rekindle.train.parts import Parts

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Pipeline:
    """Runs the stages of this rank; all ranks of a pipeline call it alike."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.layout, self.group = parts.mesh.layout, parts.mesh.group("pp")
        self.owns_first = any(stage.index == 0 for stage in parts.stages)
        self.owns_last = any(s.index == s.count - 1 for s in parts.stages)
        self._schedules: dict[Any, Any] = {}
        self._sent: set[Any] = set()
        self._shapes: dict[Any, tuple[list[int], torch.dtype]] = {}

    def train(self, micro: Sequence[Micro]) -> torch.Tensor:
        """Forward and backward of all micro-batches; float64 [3], zeros without the last stage."""
        first = micro[0].inputs[_first(micro[0])]
        # one for each shape; a step of another number of micro-batches has one of its own
        key = tuple(first.shape), len(micro)
        if key not in self._schedules:
            self._schedules[key] = self._made(len(micro))
        for stage in self.parts.stages:
            stage.part.results.clear()
        self._schedules[key].step(
            *((first,) if self.owns_first else ()),
            micro=micro,
            # one for each micro-batch, which `_loss` does not look at
            target=torch.empty(len(micro)) if self.owns_last else None,
            losses=[] if self.owns_last else None,
            return_outputs=False,
        )
        # a schedule that learns its shapes runs the first micro-batch once more before the others
        return self._total(len(micro))

    def evaluate(self, micro: Sequence[Micro]) -> torch.Tensor:
        """As `train`, without the backward."""
        self.forward(micro)
        return self._total(len(micro))

    def forward(self, micro: Sequence[Micro]) -> None:
        """One micro-batch follows the other down the stages, into `results` of the last part. (The
        schedules of torch 2.13 cannot do that where a rank has two stages.)"""
        mine = {stage.index: stage for stage in self.parts.stages}
        owner = {s: r for r in range(self.layout.pp) for s in stages_of(self.layout, r)}
        me = self.parts.mesh.place("pp")
        for stage in self.parts.stages:
            stage.part.results.clear()
        for one in micro:
            carried = first = one.inputs[_first(one)]
            for index in range(self.layout.stages):
                if index not in mine:
                    continue
                if index > 0 and owner[index - 1] != me:
                    carried = self._receive(owner[index - 1], (index, first.shape))
                carried = mine[index].module(carried, micro=without_first(one))
                if index + 1 < self.layout.stages and owner[index + 1] != me:
                    self._send(carried, owner[index + 1], (index + 1, first.shape))

    def _send(self, hidden: torch.Tensor, to: int, key: Any) -> None:
        """`key` is the stage that receives and what the first one did, on which shapes depend."""
        if key not in self._sent:
            self._sent.add(key)
            shape = [*hidden.shape, *[0] * (6 - hidden.ndim)]
            head = [hidden.ndim, _DTYPES.index(hidden.dtype), *shape]
            dist.send(torch.tensor(head, device=hidden.device), group=self.group, group_dst=to)
        dist.send(hidden.contiguous(), group=self.group, group_dst=to)

    def _receive(self, source: int, key: Any) -> torch.Tensor:
        """Waits for the device to learn a shape, the first time it comes by."""
        device = self.parts.mesh.device
        if key not in self._shapes:
            head = torch.zeros(8, dtype=torch.int64, device=device)
            dist.recv(head, group=self.group, group_src=source)
            ndim, kind, *shape = head.tolist()
            self._shapes[key] = shape[:ndim], _DTYPES[kind]
        shape, dtype = self._shapes[key]
        hidden = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(hidden, group=self.group, group_src=source)
        return hidden

    def _total(self, count: int) -> torch.Tensor:
        total = torch.zeros(3, dtype=torch.float64, device=self.parts.mesh.device)
        for result in [r for stage in self.parts.stages for r in stage.part.results][-count:]:
            total += result[0].double()
        return total

    def _made(self, micro: int) -> Any:
        mesh, group, own = self.parts.mesh, self.group, self.parts.stages
        stages = [PipelineStage(s.module, s.index, s.count, mesh.device, group=group) for s in own]
        kind, mine = {
            "1f1b": (schedules.Schedule1F1B, stages[0]),
            "interleaved": (schedules.ScheduleInterleaved1F1B, stages),
            "zero_bubble": (schedules.ScheduleZBVZeroBubble, stages),
        }[mesh.layout.schedule]
        schedule: Any = kind(mine, micro, loss_fn=_loss, scale_grads=False)
        schedule._split_inputs = functools.partial(_as_they_are, self.owns_first)
        return schedule


def _as_they_are(
    owns_first: bool, args: Any, kwargs: dict[str, Sequence[Micro]]
) -> tuple[list[tuple[torch.Tensor, ...]], list[dict[str, Micro]]]:
    """The positional and the keyword arguments of each micro-batch."""
    micro = kwargs["micro"]
    carried: list[tuple[torch.Tensor, ...]] = [() for _ in micro]
    if owns_first:
        carried = [(one.inputs[_first(one)],) for one in micro]
    return carried, [{"micro": without_first(one)} for one in micro]


def without_first(micro: Micro) -> Micro:
    """What all stages receive: everything but the input that the first one does."""
    first = _first(micro)
    inputs = {name: tensor for name, tensor in micro.inputs.items() if name != first}
    return dataclasses.replace(micro, inputs=inputs)


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The part has computed it already."""
    return output[:, 0].sum()  # no view: a schedule detaches it in place


def _first(micro: Micro) -> str:
    return "input_ids" if "input_ids" in micro.inputs else "pixels"
