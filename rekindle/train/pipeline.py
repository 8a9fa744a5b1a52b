"""One step of a pipeline: torch's schedules, fed with micro-batches that are ready.

Decides which schedule a layout's name means (1F1B: Narayanan et al. 2021, arXiv 2104.04473; looped:
the same, interleaved; zero bubble in a V: Qi et al. 2024, arXiv 2405.15362). A schedule knows the
shapes it moves, so there is one for every length of micro-batch seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from rekindle.train.parallel import Parts
from rekindle.train.stages import stages_of

Tensors = dict[str, torch.Tensor]
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Pipeline:
    """Runs the stages of this rank; all ranks of a pipeline call it alike."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.layout = parts.mesh.layout
        self.owns_first = any(stage.index == 0 for stage in parts.stages)
        self.owns_last = any(s.index == s.count - 1 for s in parts.stages)
        self._schedules: dict[Any, Any] = {}

    def train(self, micro: Sequence[Tensors]) -> torch.Tensor:
        """Forward and backward of all micro-batches; float64 [3], summed, on the ranks that hold
        the last stage, zeros on the others."""
        joined = {name: torch.cat([m[name] for m in micro]) for name in micro[0]}
        first = _first(joined)
        carried = joined.pop(first)
        shape = tuple(micro[0][first].shape)
        schedule = self._schedule((shape, len(micro), "attention_mask" in joined), len(micro))
        for stage in self.parts.stages:
            stage.part.results.clear()
        schedule.step(
            *((carried,) if self.owns_first else ()),
            target=joined["key"] if self.owns_last else None,
            losses=[] if self.owns_last else None, return_outputs=False, **joined,
        )  # fmt: skip
        # a schedule that learns its shapes runs the first micro-batch once more before the others
        return self._total(len(micro))

    def evaluate(self, micro: Sequence[Tensors]) -> torch.Tensor:
        """As `train`, without the backward: one micro-batch follows the other down the stages.
        (The schedules of torch 2.13 cannot do that where a rank has two stages.)"""
        group = self.parts.mesh.group("pp")
        mine = {stage.index: stage for stage in self.parts.stages}
        owner = {s: r for r in range(self.layout.pp) for s in stages_of(self.layout, r)}
        me = self.parts.mesh.place("pp")
        for stage in self.parts.stages:
            stage.part.results.clear()
        for tensors in micro:
            batch = dict(tensors)
            carried = batch.pop(_first(batch))
            for index in range(self.layout.stages):
                if index not in mine:
                    continue
                if index > 0 and owner[index - 1] != me:
                    carried = _receive(owner[index - 1], group, self.parts.mesh.device)
                carried = mine[index].module(carried, **batch)
                if index + 1 < self.layout.stages and owner[index + 1] != me:
                    _send(carried, owner[index + 1], group)
        return self._total(len(micro))

    def _total(self, count: int) -> torch.Tensor:
        total = torch.zeros(3, dtype=torch.float64)
        for result in [r for stage in self.parts.stages for r in stage.part.results][-count:]:
            total += result[0].double().cpu()
        return total

    def _schedule(self, key: Any, micro: int) -> Any:
        if key not in self._schedules:
            self._schedules[key] = self._made(micro)
        return self._schedules[key]

    def _made(self, micro: int) -> Any:
        mesh = self.parts.mesh
        stages = [
            PipelineStage(s.module, s.index, s.count, mesh.device, group=mesh.group("pp"))
            for s in self.parts.stages
        ]
        kind = mesh.layout.schedule
        if kind == "1f1b":
            return Schedule1F1B(stages[0], micro, loss_fn=_loss, scale_grads=False)
        chosen: Any = ScheduleInterleaved1F1B if kind == "interleaved" else ScheduleZBVZeroBubble
        return chosen(stages, micro, loss_fn=_loss, scale_grads=False)


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The part has computed it already."""
    return output[:, 0].sum()  # no view: a schedule detaches it in place


def _first(batch: Tensors) -> str:
    """What the first stage receives."""
    return "input_ids" if "input_ids" in batch else "pixels"


def _send(hidden: torch.Tensor, to: int, group: dist.ProcessGroup | None) -> None:
    head = [hidden.ndim, _DTYPES.index(hidden.dtype), *hidden.shape, *[0] * (6 - hidden.ndim)]
    dist.send(torch.tensor(head, device=hidden.device), group=group, group_dst=to)
    dist.send(hidden.contiguous(), group=group, group_dst=to)


def _receive(source: int, group: dist.ProcessGroup | None, device: torch.device) -> torch.Tensor:
    head = torch.zeros(8, dtype=torch.int64, device=device)
    dist.recv(head, group=group, group_src=source)
    ndim, kind, *shape = head.tolist()
    hidden = torch.empty(shape[:ndim], dtype=_DTYPES[kind], device=device)
    dist.recv(hidden, group=group, group_src=source)
    return hidden
