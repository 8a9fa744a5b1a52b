"""A plan in a notebook: a value to look at, which shows itself as `rekindle plan` does."""

import dataclasses
import html
from typing import Any

from rekindle.app.plan_text import lines
from rekindle.outputs import Planned, PlannedLayout

GIB = 2**30


@dataclasses.dataclass(frozen=True, repr=False)
class Forecast:
    """What a training needs, how long it takes and what it costs: `record` holds all of it."""

    record: Planned

    @property
    def layout(self) -> str:
        """Degrees, such as `shard 8`."""
        return self.record.chosen.layout

    @property
    def machines(self) -> str:
        """How many of which, such as `1 x p4de.24xlarge`."""
        return f"{self.record.chosen.nodes} x {self.record.chosen.machine}"

    @property
    def hours(self) -> tuple[float, float, float] | None:
        """Of training without interruptions: least, expected, most; None for uncounted data."""
        return self.record.hours

    @property
    def on_demand_usd(self) -> tuple[float, float, float] | None:
        """What those hours cost; None where they or the price are not known."""
        return self.record.on_demand_usd

    @property
    def refused(self) -> list[str]:
        """Why it should not be submitted, and what to do; empty where nothing speaks against it."""
        return [f"{error.what}: {error.fix}" for error in self.record.errors]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The chosen layout, then the next best: `pandas.DataFrame(plan.rows)`."""
        layouts = (self.record.chosen, *self.record.others)
        return [_row(one, one is self.record.chosen) for one in layouts]

    @property
    def rejected(self) -> list[dict[str, str]]:
        """Why not the others: `pandas.DataFrame(plan.rejected)`."""
        return [{"layout": one.layout, "reason": one.reason} for one in self.record.rejected]

    def __str__(self) -> str:
        return "\n".join(lines(self.record))

    def __repr__(self) -> str:
        return f"Forecast({self.record.name!r}, {self.layout} on {self.machines})"

    def _repr_html_(self) -> str:
        return f'<pre style="white-space:pre-wrap">{html.escape(str(self))}</pre>'


def _row(layout: PlannedLayout, chosen: bool) -> dict[str, Any]:
    least, expected, most = layout.step_seconds
    return {
        "layout": layout.layout, "chosen": chosen, "machines": f"{layout.nodes} x {layout.machine}",
        "gpus": layout.nodes * layout.gpus_per_node, "gpu": layout.gpu, "region": layout.region,
        "micro_batch_size": layout.micro_batch_size, "accumulation": layout.accumulation,
        "activation_checkpointing": layout.activation_checkpointing, "step_seconds": expected,
        "step_seconds_least": least, "step_seconds_most": most,
        "tokens_per_second": layout.tokens_per_second, "mfu": layout.mfu,
        "memory_gib": layout.memory_bytes / GIB, "needed_gib": layout.needed_bytes / GIB,
        "device_gib": layout.device_bytes / GIB,
        "on_demand_usd_per_hour": layout.on_demand_usd_per_hour,
        "spot_usd_per_hour": layout.spot_usd_per_hour, "dominant": layout.dominant,
    }  # fmt: skip
