"""How fast a run goes, how much of the machine it uses, how far it has come, and what its steps are
bound by: `train.profile` of them recorded with torch.profiler on rank 0.

Model FLOPs of a step: 6 N a token, or 4 N where most weights are frozen, N being the weights in
matrix products; plus attention, 12 L d s^2 a document of s tokens, halved where it is causal (L
layers, d heads times head size). What is recomputed or left out does not count. MFU is that over
the time and the peak of all devices (Chowdhery et al. 2022, arXiv 2204.02311), where one is known.

The profile decides the shares of a step: `communication` (collectives, and waiting in them), `data`
(waiting for batches), `compute` (the other operators; on a GPU its kernels), and `host`, the rest:
Python and launching. The largest names the verdict. Communication that a GPU hides counts once."""

import dataclasses
import resource
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from rekindle.catalog.machines import peak_flops
from rekindle.launch.events import emit
from rekindle.records import HistoryRow, OperatorShare, Profile
from rekindle.spec.layout import Layout, Shape
from rekindle.spec.layout_support import Cell, tested
from rekindle.spec.model import TrainSpec
from rekindle.tables import rows
from rekindle.train import modules
from rekindle.train.batches import StepWork

PROGRESS_SECONDS = 0.25


@dataclasses.dataclass(frozen=True)
class Cost:
    """FLOPs of a model: `per_token` of products, `per_square` of attention for a document of one
    token, `first_only` of those products that only the first token of a text takes."""

    per_token: float
    per_square: float
    first_only: float = 0.0

    @classmethod
    def of(cls, network: nn.Module, frozen: bool) -> Self | None:
        """Of a network without values; None without tokens. A Llama of 4 layers, 64 wide, 0.25 M
        weights in products: 1.5 MFLOP a token plus 1,536 for a document's length squared."""
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

    def step(self, work: StepWork) -> float:
        products = self.per_token * work.tokens - self.first_only * (work.tokens - work.examples)
        return products + self.per_square * work.squares


def _weights(module: nn.Module) -> int:
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

    def tick(self, work: StepWork, waited: float, seconds: float) -> dict[str, Any]:
        """The measurements of a step; `waited`: seconds of waiting for data since the start."""
        seconds = max(seconds, 1e-9)
        wait, self.waited = waited - self.waited, waited
        self.smooth = seconds if not self.smooth else 0.9 * self.smooth + 0.1 * seconds
        # most memory that this rank has used so far: of the GPU, or resident
        if self.device.type == "cuda":
            memory_bytes = int(torch.cuda.max_memory_allocated(self.device))
        else:
            memory_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        row: dict[str, Any] = {
            "samples_per_second": round(work.examples / self.smooth, 2),
            "step_seconds": round(seconds, 6),
            "data_wait": round(min(1.0, wait / seconds), 4),
            "memory_bytes": memory_bytes,
        }
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
            "progress",
            step=row.step,
            steps=self.steps,
            loss=row.loss,
            samples_per_second=row.samples_per_second,
            eta_seconds=(self.steps - row.step) * self.smooth,
        )


def device_name(device: torch.device) -> str:
    """The GPU as torch calls it, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


Span = tuple[float, float]

SKIPPED = 3  # the first steps allocate and tune
SHOWN = 8
PROFILE = "profile.json"
_TABLES = rows(Path(__file__).with_suffix(".yaml"))


class Profiler:
    """Records `steps` steps after a few, if any; `tips`: what to change, by what bounds them."""

    def __init__(
        self, steps: int, device: torch.device, target: Path, tips: Mapping[str, str]
    ) -> None:
        self.left = SKIPPED + steps if steps else -1
        self.steps, self.device, self.target, self.tips = steps, device, target, tips
        self.recorder: Any = None
        self.began = self.waited = 0.0

    def step(self, waited: float) -> None:
        """At the end of each step; `waited`: seconds waited for data since the start."""
        if self.left < 0:
            return
        if self.left == 0:
            self._finish(waited)
        elif self.left == self.steps:
            cuda = [ProfilerActivity.CUDA] * (self.device.type == "cuda")
            self.recorder = profile(activities=[ProfilerActivity.CPU, *cuda])
            self.recorder.start()
            self.began, self.waited = time.perf_counter(), waited
        self.left -= 1

    def _finish(self, waited: float) -> None:
        if cuda := self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - self.began
        self.recorder.stop()
        clock = "self_device_time_total" if cuda else "self_cpu_time_total"  # microseconds
        found = self.recorder.key_averages()
        events = [(event.key, event.count, float(getattr(event, clock)) / 1e6) for event in found]
        exposed = 0.0 if cuda else _exposed_on_cpu(self.recorder.events())
        waited -= self.waited
        verdict(events, self.steps, seconds, waited, exposed, self.tips).write(self.target)
        self.recorder = None


def _exposed_on_cpu(events: Iterable[Any]) -> float:
    """Seconds that training waited for gloo, whose threads the profiler counts for no operator."""
    spans = [(e, (e.time_range.start / 1e6, e.time_range.end / 1e6)) for e in events]
    collectives = [span for e, span in spans if e.is_async and is_collective(e.name)]
    return exposed_seconds(collectives, [span for e, span in spans if not e.is_async])


def exposed_seconds(collectives: Sequence[Span], operators: Sequence[Span]) -> float:
    """How long a collective was under way and no operator ran, from (start, end) in seconds."""
    marks = [(start, 1, 0) for start, _ in collectives] + [(end, -1, 0) for _, end in collectives]
    marks += [(start, 0, 1) for start, _ in operators] + [(end, 0, -1) for _, end in operators]
    exposed, before, flying, running = 0.0, 0.0, 0, 0
    for now, flies, runs in sorted(marks):
        if flying and not running:
            exposed += now - before
        before, flying, running = now, flying + flies, running + runs
    return exposed


def verdict(
    events: list[tuple[str, int, float]],
    steps: int,
    seconds: float,
    waited: float,
    exposed: float = 0.0,
    tips: Mapping[str, str] = MappingProxyType({}),
) -> Profile:
    """The record of `steps` steps that took `seconds`, from (operator, calls, seconds of its own)
    and `exposed` seconds of waiting for collectives. A collective of 0.6 s and a product of 0.3 s
    in 1 s are communication 0.6, compute 0.3, host 0.1."""
    together = exposed + sum(took for name, _, took in events if is_collective(name))
    compute = sum(took for name, _, took in events if not is_collective(name))
    busy = max(together + compute + waited, 1e-12)
    scale = min(1.0, seconds / busy)  # threads and streams overlap
    busy_with = {"compute": compute, "communication": together, "data": waited}
    shares = {name: spent * scale / seconds for name, spent in busy_with.items()}
    shares["host"] = max(0.0, 1.0 - sum(shares.values()))
    bound = max(shares, key=lambda name: shares[name])
    top = sorted(events, key=lambda event: -event[2])[:SHOWN]
    spent = ((name, calls, round(took / seconds, 4)) for name, calls, took in top if took > 0)
    return Profile(
        steps=steps,
        seconds=seconds,
        bound=bound,
        advice=tips.get(bound, ""),
        shares={name: round(share, 4) for name, share in shares.items()},
        operators=tuple(OperatorShare(name=n, calls=calls, share=s) for n, calls, s in spent),
    )


def is_collective(name: str) -> bool:
    lower = name.lower()
    return any(word in lower for word in _TABLES["collectives"])


def tips(train: TrainSpec, layout: Layout, cell: Cell | None) -> dict[str, str]:
    """What to change about steps that are bound by something: nothing that is so already, and
    nothing that would be refused. `cell`: the run's, None for a network of the user's own."""

    def allowed(**change: Any) -> bool:
        return cell is None or dataclasses.replace(cell, **change) in tested()

    again, small = train.activation_checkpointing, layout.micro_batch_size * layout.data
    helps = {
        "compiled": not train.compile and allowed(compile=True),
        "bf16": train.precision in ("fp32", "fp64") and allowed(precision="bf16"),
        "kept": again != "none",
        "shorter": cell is not None and cell.kind != "image",
        "larger batch": True,
        "less tp": layout.tp > 1,
        "less shard": layout.shard > 1,
        "more micro-batches": layout.pp > 1,
        "larger micro-batch": small < train.global_batch_size,
    }
    found = dict[str, str]()
    for name, advice in _TABLES["advice"].items():
        changes = [_TABLES["changes"][change] for change in advice["try"] if helps[change]]
        found[name] = advice["says"].format("; or ".join(changes) or advice.get("else"))
    return found
