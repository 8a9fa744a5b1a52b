"""How fast a run goes, how much of the machine it uses, how far it has come.

Model FLOPs of a step: 6 N a token, or 4 N where most weights are frozen (their gradients are not
computed), N being the weights in matrix products (no embedding table); plus attention, 12 L d s^2 a
document of s tokens, halved where it is causal (L layers, d heads times head size). Recomputed
activations do not count, nor does what a text classifier leaves out: behind its attention the last
block computes only the first token of each text. MFU is that over the time and the peak of all
devices (Chowdhery et al. 2022, arXiv 2204.02311); there is none where the catalog knows no peak."""

from __future__ import annotations

import dataclasses
import resource
import sys
import time
from typing import Any

import torch
from torch import nn

from rekindle.catalog.machines import peak_flops
from rekindle.launch.events import emit
from rekindle.records import HistoryRow
from rekindle.spec.layout import Shape
from rekindle.spec.model import TrainSpec
from rekindle.train import modules
from rekindle.train.batches import Work

PROGRESS_SECONDS = 0.25


@dataclasses.dataclass(frozen=True)
class Cost:
    """FLOPs of a model: `per_token` of matrix products, `per_square` of attention for a document
    of one token (it grows with the square), `first_only` of those products that only the first
    token of a text takes."""

    per_token: float
    per_square: float
    first_only: float = 0.0

    @classmethod
    def of(cls, network: nn.Module, frozen: bool) -> Cost | None:
        """Of a whole network, its values not needed; None for one that has no tokens.

        A Llama of 4 layers, 64 wide (4 heads), 0.25 M weights in products: 1.5 MFLOP a token plus
        1,536 for a document's length squared."""
        config = getattr(network, "config", None)
        if config is None or not hasattr(config, "vocab_size"):
            return None
        each, known = 4.0 if frozen else 6.0, modules.known(network)
        behind = 0
        if known is not None and known.summary is not None:
            last = modules.blocks(network)[-1][1]
            behind = _weights(last) - _weights(last.get_submodule(known.attention))
        shape = Shape.of(config.to_dict())
        width = getattr(config, "head_dim", None) or config.hidden_size // max(1, shape.heads)
        causal = any(getattr(m, "is_causal", False) for m in network.modules())
        square = 12.0 * shape.layers * shape.heads * width * (0.5 if causal else 1.0)
        return cls(each * _weights(network), square, each * behind)

    def step(self, work: Work) -> float:
        """FLOPs of the whole worker group in one step."""
        products = self.per_token * work.tokens - self.first_only * (work.tokens - work.examples)
        return products + self.per_square * work.squares


def _weights(module: nn.Module) -> int:
    """Of linear layers."""
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))


class Clock:
    """Throughput of the worker group and time to the end, smoothed over recent steps."""

    def __init__(
        self, steps: int, cost: Cost | None, device: torch.device, world: int, spec: TrainSpec
    ) -> None:
        self.steps, self.cost, self.device = steps, cost, device
        precision = spec.precision if spec.weights == "fp32" else "bf16"
        peak = peak_flops(device_name(device), precision, tf32=not spec.deterministic)
        self.peak = peak * world if peak else None
        self.waited = self.said = self.smooth = 0.0

    def tick(self, work: Work, waited: float, seconds: float) -> dict[str, Any]:
        """The measurements of a step that took `seconds`; `waited` are the seconds that this rank
        has waited for data since the start."""
        seconds = max(seconds, 1e-9)
        wait, self.waited = waited - self.waited, waited
        self.smooth = seconds if not self.smooth else 0.9 * self.smooth + 0.1 * seconds
        row: dict[str, Any] = {
            "samples_per_second": round(work.examples / self.smooth, 2),
            "step_seconds": round(seconds, 6), "data_wait": round(min(1.0, wait / seconds), 4),
            "memory_bytes": _peak_bytes(self.device),
        }  # fmt: skip
        if self.cost is not None:
            row["tokens_per_second"] = round(work.tokens / self.smooth, 1)
            row["tokens"] = work.tokens
            if self.peak is not None:
                row["mfu"] = round(self.cost.step(work) / self.smooth / self.peak, 4)
        return row

    def report(self, row: HistoryRow) -> None:
        """Tell who watches, not more often than a person can read."""
        now = time.perf_counter()
        if now - self.said < PROGRESS_SECONDS and row.step < self.steps:
            return
        self.said = now
        emit(
            "progress", step=row.step, steps=self.steps, loss=row.loss,
            samples_per_second=row.samples_per_second,
            eta_seconds=(self.steps - row.step) * self.smooth,
        )  # fmt: skip


def device_name(device: torch.device) -> str:
    """The GPU as torch calls it, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _peak_bytes(device: torch.device) -> int:
    """Most memory that this rank has used so far: of the GPU, or resident."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
