"""How the softwares differ from ours that the rows of tests/plan/rows were measured with: the time model is held against them, and
knows them here alone."""

from __future__ import annotations

import dataclasses

from rekindle.plan.cluster import Cluster
from rekindle.plan.steptime import FORWARD, Constants, StepTime, _Model
from rekindle.plan.steptime import step_time as of_ours
from rekindle.plan.work import Kernels, Work

# Matrices that some software multiplies with at once
_TOGETHER = (("q", "k", "v"), ("gate", "up"))
# The share of communication beside computing that costs time all the same, where nothing is gathered ahead: fitted to the rows
# of llm-foundry
CONTENTION = 1.0
# Bytes a score that the operations between the products of attention move, forward and backward, by whether there is dropout: a
# softmax reads and writes (backward it reads the gradient and its own output, and writes), and so does dropout, with a mask of
# a byte
MOVED = {
    ("unfused", False): (4.0, 6.0),
    ("unfused", True): (9.0, 11.0),
    ("apart", False): (12.0, 10.0),
    ("apart", True): (17.0, 15.0),
}


@dataclasses.dataclass(frozen=True)
class Software:
    """What runs a step; the defaults are what our engine does.

    `attention` is the kernel: a flash kernel of constants.yaml, flash1, or `unfused`, operation by operation, of which `apart` has
    the scale and the mask as kernels of their own, too. `kernels` are those of what is neither a product nor attention; None: ours.
    `prefetched`: FSDP gathers the next weights, and gradients are added up, while something is computed. `overlapped` are the
    axes (tp, cp) whose exchange runs beside products and attention. `scored`: the share of tokens that the output head sees,
    where a model that is not causal has one. `reduced_bytes` are those of a gradient on the wire. `sequence`: tp ranks divide
    the residual stream. `merged`: queries, keys and values are one product, and so are gate and up. `chunks`: pieces of a
    pipeline on each rank, if not the schedule's.

    What is computed again where `checkpointing` says so: that share of the time of a block's products (`repeated`), attention
    (`core`), and the rest (`elementwise`), in that share of the `blocks`. None: as ours does it."""

    attention: str | None = None
    kernels: Kernels | None = None
    prefetched: bool = True
    overlapped: tuple[str, ...] = ()
    scored: float | None = None
    reduced_bytes: int = 4
    sequence: bool = True
    merged: bool = False
    chunks: int = 0
    repeated: float | None = None
    core: bool | None = None
    elementwise: bool = True
    blocks: float = 1.0


@dataclasses.dataclass(frozen=True)
class StackWork(Work):
    """The same work by another software."""

    software: Software = Software()

    @property
    def turns(self) -> int:
        return self.software.chunks or super().turns

    @property
    def factors(self) -> tuple[tuple[float, float], ...]:
        if not self.software.merged:
            return super().factors
        found = {matrix.name: matrix for matrix in self.shape.matrices}
        for names in _TOGETHER:
            parts = [found.pop(name) for name in names if name in found]
            if parts:
                outputs = sum(part.outputs for part in parts)
                found[parts[0].name] = dataclasses.replace(parts[0], outputs=outputs)
        shape = dataclasses.replace(self.shape, matrices=tuple(found.values()))
        return Work(shape, self.layout, self.accumulation, self.sequence).factors

    @property
    def kernels(self) -> Kernels:
        return self.software.kernels or super().kernels

    @property
    def attention(self) -> str:  # type: ignore[override]
        return self.software.attention or super().attention

    @property
    def along_sequence(self) -> bool:
        return super().along_sequence and self.software.sequence


class _Stack(_Model):
    def __init__(self, work: StackWork, cluster: Cluster, constants: Constants) -> None:
        super().__init__(work, cluster, constants)
        self.software, self.reduced_bytes = work.software, work.software.reduced_bytes
        if work.software.scored is not None:
            self.scored = work.software.scored

    def _contention(self) -> float:
        return super()._contention() if self.software.prefetched else CONTENTION

    def _tensor(self) -> float:
        exchanging = super()._tensor()
        if "tp" not in self.software.overlapped:
            return exchanging
        products = sum(
            self._product(self.work.tokens, *sizes, self.peak) for sizes in self.work.factors
        )
        return self._exposed(
            exchanging, products * (FORWARD + self.backward), self.constants.overlapped
        )

    def _context(self) -> float:
        exchanging = super()._context()
        if "cp" not in self.software.overlapped:
            return exchanging
        return self._exposed(exchanging, sum(self._core()), self.constants.overlapped)

    def _moved_by_attention(self) -> tuple[float, float] | None:
        known = MOVED.get((self.work.attention, self.work.shape.attention_dropout > 0))
        return known or super()._moved_by_attention()

    def _again(self, products: float, core: float, stream: float) -> float:
        if self.work.checkpointing == "none":
            return 0.0
        software, full = self.software, self.work.checkpointing == "full"
        repeated = super()._again(products, 0.0, 0.0) if full else 0.0
        if software.repeated is not None:
            repeated = software.repeated * products
        with_core = full if software.core is None else software.core
        return software.blocks * (repeated + with_core * core + software.elementwise * stream)


def step_time(work: Work, cluster: Cluster, constants: Constants) -> StepTime:
    """Of the slowest rank; every term is in seconds a step."""
    if isinstance(work, StackWork):
        return _Stack(work, cluster, constants).step()
    return of_ours(work, cluster, constants)
