"""How fast a run goes, how much of the machine it uses, how far it has come, and what its
steps are bound by: `train.profile` of them recorded with torch.profiler on rank 0.

Model FLOPs of a step: 6 N a token, or 4 N where most weights are frozen, N being the
weights in matrix products; plus attention, 12 L d s^2 a document of s tokens, halved
where it is causal (L layers, d heads times head size). What is recomputed or left out
does not count. MFU is that over the time and the peak of all devices (Chowdhery et al.
2022, arXiv 2204.02311), where one is known.

The profile decides the shares of a step: `communication` (collectives, and waiting in
them), `data` (waiting for batches), `compute` (the other operators; on a GPU its
kernels), and `host`, the rest: Python and launching. The largest is what bounds it.
Communication that a GPU hides counts once."""

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
from rekindle.train import modules
from rekindle.train.batches import StepWork

Span = tuple[float, float]

PROGRESS_SECONDS = 0.25
PROFILE = "profile.json"
SKIPPED = 3
"""Steps before a profile: the first ones allocate and tune."""
SHOWN = 8
"""Operators of a profile that are shown."""
# parts of the names of operators that are collectives, or wait for one
_COLLECTIVES = (
    "c10d",
    "gloo",
    "nccl",
    "all_reduce",
    "allreduce",
    "all_gather",
    "allgather",
    "reduce_scatter",
    "broadcast",
    "record_param_comms",
    "barrier",
    "wait_tensor",
)


@dataclasses.dataclass(frozen=True)
class StepCost:
    """FLOPs of a model, forward and backward."""

    per_token: float
    """Of products."""
    per_square: float
    """Of attention, for a document of one token."""
    first_only: float = 0.0
    """Of those products that only the first token of a text takes."""

    @classmethod
    def of(cls, network: nn.Module, frozen: bool) -> Self | None:
        """Of a network without values; None without tokens. A Llama of 4 layers, 64 wide,
        0.25 M weights in products: 1.5 MFLOP a token plus 1,536 for a document's length
        squared."""
        config = getattr(network, "config", None)
        if config is None or not hasattr(config, "vocab_size"):
            return None
        flops_per_weight = 4.0 if frozen else 6.0
        weights_behind_attention = 0
        known = modules.known(network)
        if known is not None and known.summary is not None:
            _, last_block = modules.blocks(network)[-1]
            attention = last_block.get_submodule(known.attention)
            weights_behind_attention = _weights(last_block) - _weights(attention)
        shape = Shape.of(config.to_dict())
        head_size = getattr(config, "head_dim", None) or config.hidden_size // max(1, shape.heads)
        flops_per_square = 12.0 * shape.layers * shape.heads * head_size
        if any(getattr(module, "is_causal", False) for module in network.modules()):
            flops_per_square *= 0.5
        return cls(
            per_token=flops_per_weight * _weights(network),
            per_square=flops_per_square,
            first_only=flops_per_weight * weights_behind_attention,
        )

    def step(self, work: StepWork) -> float:
        """FLOPs of a step on all ranks."""
        products = self.per_token * work.tokens - self.first_only * (work.tokens - work.examples)
        return products + self.per_square * work.squares


def _weights(module: nn.Module) -> int:
    """How many weights of a module are in matrix products."""
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    return sum(layer.weight.numel() for layer in layers)


class Clock:
    """Throughput of the worker group and time to the end, smoothed over recent steps."""

    def __init__(
        self, steps: int, cost: StepCost | None, device: torch.device, world: int, spec: TrainSpec
    ) -> None:
        self.steps = steps
        self.cost = cost
        self.device = device
        precision = spec.precision if spec.weights == "fp32" else "bf16"
        peak = peak_flops(device_name(device), precision, tf32=not spec.deterministic)
        self.peak = peak * world if peak else None
        self.waited = 0.0
        self.reported_at = 0.0
        self.smooth_seconds = 0.0

    def tick(self, work: StepWork, waited: float, seconds: float) -> dict[str, Any]:
        """The measurements of a step; `waited`: seconds of waiting for data since the start."""
        seconds = max(seconds, 1e-9)
        wait = waited - self.waited
        self.waited = waited
        if self.smooth_seconds:
            self.smooth_seconds = 0.9 * self.smooth_seconds + 0.1 * seconds
        else:
            self.smooth_seconds = seconds
        # most memory that this rank has used so far: of the GPU, or resident
        if self.device.type == "cuda":
            memory_bytes = int(torch.cuda.max_memory_allocated(self.device))
        else:
            memory_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        row: dict[str, Any] = {
            "samples_per_second": round(work.examples / self.smooth_seconds, 2),
            "step_seconds": round(seconds, 6),
            "data_wait": round(min(1.0, wait / seconds), 4),
            "memory_bytes": memory_bytes,
        }
        if self.cost is not None:
            row["tokens_per_second"] = round(work.tokens / self.smooth_seconds, 1)
            row["tokens"] = work.tokens
            if self.peak is not None:
                row["mfu"] = round(self.cost.step(work) / self.smooth_seconds / self.peak, 4)
        return row

    def report(self, row: HistoryRow) -> None:
        """Tell who watches, not more often than a person can read."""
        now = time.perf_counter()
        if now - self.reported_at < PROGRESS_SECONDS and row.step < self.steps:
            return
        self.reported_at = now
        emit(
            "progress",
            step=row.step,
            steps=self.steps,
            loss=row.loss,
            samples_per_second=row.samples_per_second,
            eta_seconds=(self.steps - row.step) * self.smooth_seconds,
        )


def device_name(device: torch.device) -> str:
    """The GPU as torch calls it, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


class Profiler:
    """Records `steps` steps after a few, if any; `tips`: what to change, by what bounds them."""

    def __init__(
        self, steps: int, device: torch.device, target: Path, tips: Mapping[str, str]
    ) -> None:
        # how many steps end before the profile does; negative: there is none, or it is done
        self.left = SKIPPED + steps if steps else -1
        self.steps = steps
        self.device = device
        self.target = target
        self.tips = tips
        self.recorder: Any = None
        self.began = 0.0
        self.waited = 0.0

    def step(self, waited: float) -> None:
        """At the end of each step; `waited`: seconds waited for data since the start."""
        if self.left < 0:
            return
        if self.left == 0:
            self._finish(waited)
        elif self.left == self.steps:
            activities = [ProfilerActivity.CPU]
            if self.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self.recorder = profile(activities=activities)
            self.recorder.start()
            self.began = time.perf_counter()
            self.waited = waited
        self.left -= 1

    def _finish(self, waited: float) -> None:
        is_on_gpu = self.device.type == "cuda"
        if is_on_gpu:
            torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - self.began
        self.recorder.stop()
        clock = "self_device_time_total" if is_on_gpu else "self_cpu_time_total"  # microseconds
        operators = []
        for event in self.recorder.key_averages():
            operators.append((event.key, event.count, float(getattr(event, clock)) / 1e6))
        exposed = 0.0 if is_on_gpu else _exposed_on_cpu(self.recorder.events())
        waited -= self.waited
        record = judge_profile(operators, self.steps, seconds, waited, exposed, self.tips)
        record.write(self.target)
        self.recorder = None


def _exposed_on_cpu(events: Iterable[Any]) -> float:
    """Seconds that training waited for gloo, whose threads the profiler counts for no operator."""
    collectives = []
    operators = []
    for event in events:
        span = event.time_range.start / 1e6, event.time_range.end / 1e6
        if not event.is_async:
            operators.append(span)
        elif is_collective(event.name):
            collectives.append(span)
    return exposed_seconds(collectives, operators)


def exposed_seconds(collectives: Sequence[Span], operators: Sequence[Span]) -> float:
    """How long a collective was under way and no operator ran, from (start, end) in seconds."""
    # (time, by how much the number of collectives changes, and that of operators)
    changes = []
    for start, end in collectives:
        changes += [(start, 1, 0), (end, -1, 0)]
    for start, end in operators:
        changes += [(start, 0, 1), (end, 0, -1)]
    exposed = 0.0
    before = 0.0
    under_way = 0
    running = 0
    for now, more_under_way, more_running in sorted(changes):
        if under_way and not running:
            exposed += now - before
        before = now
        under_way += more_under_way
        running += more_running
    return exposed


def judge_profile(
    operators: list[tuple[str, int, float]],
    steps: int,
    seconds: float,
    waited: float,
    exposed: float = 0.0,
    tips: Mapping[str, str] = MappingProxyType({}),
) -> Profile:
    """The record of `steps` steps that took `seconds`, from (operator, calls, seconds of
    its own) and `exposed` seconds of waiting for collectives. A collective of 0.6 s and a
    product of 0.3 s in 1 s are communication 0.6, compute 0.3, host 0.1."""
    communication = exposed
    communication += sum(took for name, _, took in operators if is_collective(name))
    compute = sum(took for name, _, took in operators if not is_collective(name))
    busy = max(communication + compute + waited, 1e-12)
    scale = min(1.0, seconds / busy)  # threads and streams overlap
    shares = {
        "compute": compute * scale / seconds,
        "communication": communication * scale / seconds,
        "data": waited * scale / seconds,
    }
    shares["host"] = max(0.0, 1.0 - sum(shares.values()))
    bound = max(shares, key=lambda name: shares[name])
    largest = []
    for name, calls, took in sorted(operators, key=lambda operator: -operator[2])[:SHOWN]:
        if took > 0:
            share = round(took / seconds, 4)
            largest.append(OperatorShare(name=name, calls=calls, share=share))
    return Profile(
        steps=steps,
        seconds=seconds,
        bound=bound,
        advice=tips.get(bound, ""),
        shares={name: round(share, 4) for name, share in shares.items()},
        operators=tuple(largest),
    )


def is_collective(name: str) -> bool:
    """Whether an operator of this name is a collective, or waits for one."""
    lower = name.lower()
    return any(word in lower for word in _COLLECTIVES)


def tips(train: TrainSpec, layout: Layout, cell: Cell | None) -> dict[str, str]:
    """What to change about steps that are bound by something: nothing that is so already,
    and nothing that would be refused. `cell`: the run's, None for a network of the user's
    own."""

    def allowed(**change: Any) -> bool:
        return cell is None or dataclasses.replace(cell, **change) in tested()

    compiled = []
    if not train.compile and allowed(compile=True):
        compiled.append("train.compile: true")

    less_compute = list(compiled)
    if train.precision in ("fp32", "fp64") and allowed(precision="bf16"):
        less_compute.append("train.precision: bf16")
    if train.activation_checkpointing != "none":
        less_compute.append("train.activation_checkpointing: none, where memory allows")
    if cell is not None and cell.kind != "image":
        less_compute.append("a smaller data.max_length")

    less_communication = [
        "a larger train.global_batch_size, so that gradients are added up less often"
    ]
    if layout.tp > 1:
        less_communication.append("a smaller layout.tp, or one that stays inside a node")
    if layout.shard > 1:
        less_communication.append("layout.dp in place of some of layout.shard")
    if layout.pp > 1:
        less_communication.append("more micro-batches (a smaller train.micro_batch_size)")

    less_python = []
    if layout.micro_batch_size * layout.data < train.global_batch_size:
        less_python.append("a larger train.micro_batch_size")
    less_python += compiled

    return {
        "compute": "Arithmetic is the limit, as it should be. Faster: "
        f"{_alternatives(less_compute) or 'more ranks'}.",
        "communication": f"Ranks wait for each other. Try {_alternatives(less_communication)}.",
        "data": "Ranks wait for batches. Put the shards on a local disk, or give each rank more "
        "cores.",
        "host": "Many small operators keep Python busy. Try "
        f"{_alternatives(less_python) or 'a larger train.global_batch_size'}.",
    }


def _alternatives(changes: Sequence[str]) -> str:
    return "; or ".join(changes)
