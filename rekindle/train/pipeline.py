"""One step of a pipeline: torch's schedules, fed with micro-batches that are ready.

Decides which schedule a layout's name means (1F1B: Narayanan et al. 2021, arXiv
2104.04473; looped: the same, interleaved; zero bubble in a V: Qi et al. 2024, arXiv
2405.15362). A schedule knows the shapes it moves, so every length of micro-batch has its
own; these reach the stages as they are."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules

from rekindle.objectives.micro import Micro
from rekindle.plan.inflight import stages_of
from rekindle.train.parts import Parts

# of ranks with two stages or more
_SCHEDULES = {
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zero_bubble": schedules.ScheduleZBVZeroBubble,
}
_ShapeKey = tuple[int, torch.Size]
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Pipeline:
    """Runs the stages of this rank; all ranks of a pipeline call it alike."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.layout = parts.mesh.layout
        self.group = parts.mesh.group("pp")
        self.owns_first = any(stage.index == 0 for stage in parts.stages)
        self.owns_last = any(stage.index == stage.count - 1 for stage in parts.stages)
        self._schedules: dict[Any, Any] = {}
        # whose shapes were sent and received, see `_send`
        self._sent: set[_ShapeKey] = set()
        self._shapes: dict[_ShapeKey, tuple[list[int], torch.dtype]] = {}

    def train(self, micro: Sequence[Micro]) -> torch.Tensor:
        """Forward and backward of all micro-batches; float64 [3], zeros without the last stage."""
        first = micro[0].inputs[_first(micro[0])]
        # one for each shape; a step of another number of micro-batches has one of its own
        key = tuple(first.shape), len(micro)
        if key not in self._schedules:
            self._schedules[key] = self._schedule(len(micro))
        for stage in self.parts.stages:
            stage.part.results.clear()
        inputs = (first,) if self.owns_first else ()
        target = None
        losses: list[torch.Tensor] | None = None
        if self.owns_last:
            target = torch.empty(len(micro))  # one for each micro-batch; `_loss` looks at none
            losses = []
        self._schedules[key].step(
            *inputs,
            micro=micro,
            target=target,
            losses=losses,
            return_outputs=False,
        )
        # a schedule that learns its shapes runs the first micro-batch once more before the others
        return self._total(len(micro))

    def evaluate(self, micro: Sequence[Micro]) -> torch.Tensor:
        """As `train`, without the backward."""
        self.forward(micro)
        return self._total(len(micro))

    def forward(self, micro: Sequence[Micro]) -> None:
        """One micro-batch follows the other down the stages, into `results` of the last
        part.

        The schedules of torch 2.13 cannot do that where a rank has two stages."""
        stages = {stage.index: stage for stage in self.parts.stages}
        owners: dict[int, int] = {}
        for rank in range(self.layout.pp):
            owners |= dict.fromkeys(stages_of(self.layout, rank), rank)
        this_rank = self.parts.mesh.place("pp")
        for stage in self.parts.stages:
            stage.part.results.clear()
        for batch in micro:
            first = batch.inputs[_first(batch)]
            carried = first
            for index in range(self.layout.stages):
                if index not in stages:
                    continue
                if index > 0 and owners[index - 1] != this_rank:
                    carried = self._receive(owners[index - 1], (index, first.shape))
                carried = stages[index].module(carried, micro=without_first(batch))
                if index + 1 < self.layout.stages and owners[index + 1] != this_rank:
                    self._send(carried, owners[index + 1], (index + 1, first.shape))

    def _send(self, hidden: torch.Tensor, to: int, key: _ShapeKey) -> None:
        """Send hidden states, with their shape ahead of them where it has not been sent
        before.

        `key` is the stage that receives and what the first one did, on which shapes
        depend."""
        if key not in self._sent:
            self._sent.add(key)
            unused_dimensions = [0] * (6 - hidden.ndim)
            dtype = _DTYPES.index(hidden.dtype)
            header = [hidden.ndim, dtype, *hidden.shape, *unused_dimensions]
            dist.send(torch.tensor(header, device=hidden.device), group=self.group, group_dst=to)
        dist.send(hidden.contiguous(), group=self.group, group_dst=to)

    def _receive(self, source: int, key: _ShapeKey) -> torch.Tensor:
        """Waits for the device to learn a shape, the first time it comes by."""
        device = self.parts.mesh.device
        if key not in self._shapes:
            header = torch.zeros(8, dtype=torch.int64, device=device)
            dist.recv(header, group=self.group, group_src=source)
            dimensions, dtype_number, *shape = header.tolist()
            self._shapes[key] = shape[:dimensions], _DTYPES[dtype_number]
        shape, dtype = self._shapes[key]
        hidden = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(hidden, group=self.group, group_src=source)
        return hidden

    def _total(self, count: int) -> torch.Tensor:
        """The sum of the last `count` results of this rank's last stage."""
        total = torch.zeros(3, dtype=torch.float64, device=self.parts.mesh.device)
        results = [result for stage in self.parts.stages for result in stage.part.results]
        for result in results[-count:]:
            total += result[0].double()
        return total

    def _schedule(self, micro: int) -> Any:
        """torch's schedule for this number of micro-batches."""
        stages = [
            PipelineStage(
                stage.module, stage.index, stage.count, self.parts.mesh.device, group=self.group
            )
            for stage in self.parts.stages
        ]
        name = self.layout.schedule
        schedule: Any
        # losses are shares of one mean, so that their gradients add up unscaled
        if name == "1f1b":
            schedule = schedules.Schedule1F1B(stages[0], micro, loss_fn=_loss, scale_grads=False)
        else:
            kind: Any = _SCHEDULES[name]
            schedule = kind(stages, micro, loss_fn=_loss, scale_grads=False)
        schedule._split_inputs = functools.partial(_as_they_are, self.owns_first)
        return schedule


def _as_they_are(
    owns_first: bool, args: Any, kwargs: dict[str, Sequence[Micro]]
) -> tuple[list[tuple[torch.Tensor, ...]], list[dict[str, Micro]]]:
    """The positional and the keyword arguments of each micro-batch."""
    micro = kwargs["micro"]
    carried: list[tuple[torch.Tensor, ...]] = [() for _ in micro]
    if owns_first:
        carried = [(batch.inputs[_first(batch)],) for batch in micro]
    return carried, [{"micro": without_first(batch)} for batch in micro]


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
