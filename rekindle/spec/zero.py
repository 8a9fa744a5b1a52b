"""What a `ds_config.json` says of ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054): which states of
a model the ranks divide, and what lies in the host's memory."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from rekindle.spec.model import AUTO

# a weight is kept for either of the two
_KEPT = ("stage3_max_live_parameters", "stage3_max_reuse_distance")


@dataclasses.dataclass(frozen=True)
class Zero:
    """A stage and its buffers, in elements; the defaults are DeepSpeed's (0.19.8).

    `buckets` of `bucket` elements collect gradients; `overlaps`: they are reduced, and weights are
    gathered, beside computing; a rank of stage 3 keeps up to `gathered`
    elements of weights beyond its own, and updates `updated` at a time."""

    stage: int = 1
    optimizer_offloaded: bool = False
    parameters_offloaded: bool = False
    bucket: int = 500_000_000
    buckets: int = 1
    overlaps: bool = False
    gathered: int = 1_000_000_000
    updated: int = 1_000_000_000

    @classmethod
    def of(cls, config: Mapping[str, Any] | None) -> Self:
        """As `train.engine_config` says it; what it leaves open, or to "auto", is the default."""
        section = (config or {}).get("zero_optimization") or {}
        given = {k: v for k, v in section.items() if v not in (None, AUTO)}
        stage = int(given.get("stage", cls.stage))
        overlaps = bool(given.get("overlap_comm", stage == 3))
        collected = stage > 0 and bool(given.get("contiguous_gradients", True))
        return cls(
            stage=stage, optimizer_offloaded=_on_host(given.get("offload_optimizer")),
            parameters_offloaded=_on_host(given.get("offload_param")),
            bucket=int(given.get("reduce_bucket_size", cls.bucket)) if collected else 0,
            buckets=1 + (overlaps and stage in (1, 2)), overlaps=overlaps,
            gathered=max(int(given.get(name, cls.gathered)) for name in _KEPT),
            updated=int(given.get("sub_group_size", cls.updated)),
        )  # fmt: skip

    def __str__(self) -> str:
        moved = {"optimizer": self.optimizer_offloaded, "weights": self.parameters_offloaded}
        host = " and ".join(name for name, there in moved.items() if there)
        return f"ZeRO {self.stage}" + (f", {host} in the host's memory" if host else "")


def _on_host(section: Any) -> bool:
    return isinstance(section, Mapping) and section.get("device") == "cpu"
