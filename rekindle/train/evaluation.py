"""Forward passes without gradients, in evaluation mode, in any layout: validation and proofs."""

import dataclasses
from collections.abc import Sequence

import torch
from torch.distributed.fsdp import FSDPModule

from rekindle.objectives.micro import Feed, Micro
from rekindle.train.parts import Parts, autocast


class Evaluation:
    """Runs micro-batches through the parts of this rank; all ranks have to call it alike."""

    def __init__(self, parts: Parts, precision: str) -> None:
        self.parts = parts
        self.precision = precision
        self.feed = Feed(parts.mesh.device, precision)
        self.pipeline = None
        if parts.mesh.layout.pp > 1:
            from rekindle.train.pipeline import Pipeline  # torch's part of it takes a second

            self.pipeline = Pipeline(parts)

    @torch.no_grad()
    def losses(self, micro: Sequence[Micro]) -> torch.Tensor:
        """Float64 [3] on the device: loss, right predictions and targets of this rank."""
        for stage in self.parts.stages:
            stage.module.eval()
        # losses are added up here, and divided by all targets at the end
        moved = (
            dataclasses.replace(batch, count=torch.ones_like(batch.count))
            for batch in self.feed(micro)
        )
        sums = torch.zeros(3, dtype=torch.float64, device=self.parts.mesh.device)
        try:
            with autocast(self.precision, self.parts.mesh.device):
                if self.pipeline is not None:
                    sums += self.pipeline.evaluate(list(moved))
                else:
                    self.parts.stages[0].part.results.clear()
                    for batch in moved:
                        sums += self.parts.stages[0].part(micro=batch)[0].double()
        finally:
            self.return_to_training()
        return sums

    def return_to_training(self) -> None:
        """Put the stages back into training mode, sharded as between steps."""
        for stage in self.parts.stages:
            stage.module.train()
            for module in stage.part.modules():
                if isinstance(module, FSDPModule):
                    # Without a backward pass FSDP stays unsharded; checkpoints need the shards.
                    module.reshard()
