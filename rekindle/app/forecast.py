"""A plan in a notebook: a value to look at, which shows itself as a table with bars, in the words
of `rekindle plan`."""

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

from rekindle import formats
from rekindle.app.plan_text import facts, lines, per, title
from rekindle.outputs import Planned, PlannedLayout
from rekindle.report.page import render

GIB = 2**30
_FOLDED = ("or", "not")

COLOURS = {
    "parameters": "#1f77d0", "optimizer": "#d9730d", "gradients": "#0f8a6a",
    "gathered weights": "#7c6bd6", "copies of weights": "#7c6bd6", "pipeline buffers": "#9a7b00",
    "activations": "#c0427a", "temporaries": "#0e8ca0", "teacher": "#4d7c0f",
    "matrix products": "#1f77d0", "attention": "#0e8ca0", "memory traffic": "#7c6bd6",
    "recomputation": "#0f8a6a", "tensor parallel": "#b5483c", "context parallel": "#9a7b00",
    "weights and gradients": "#c0427a", "between stages": "#4d7c0f", "pipeline bubble": "#78716c",
    "waiting for the host": "#5f7a8a", "waiting for data": "#78716c",
}  # fmt: skip
_OTHER = "#78716c"
_STRIPES = "repeating-linear-gradient(135deg, currentColor 0 1px, transparent 1px 5px)"


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
        """A table with bars of memory and of time, for a notebook's output cell."""
        said = _by_head(facts(self.record))
        name, _, about = title(self.record).partition(": ")
        rows = [(head, texts) for head, texts in said.items() if head not in _FOLDED]
        return render(
            "plan.html.j2", name=name, about=about,
            rows=sorted(rows, key=lambda row: row[0] != "refused"),
            folded=[(head, said[head]) for head in _FOLDED if head in said],
            pictures={"memory": _memory(self.record), "step": _time(self.record)},
        )  # fmt: skip


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


def _by_head(told: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """What is said under each head, in order."""
    said: dict[str, list[str]] = {}
    last = ""
    for head, text in told:
        if head:
            last = head
            said.setdefault(head, []).append(text)
        else:
            said[last][-1] += f"; {text}" if last in _FOLDED else f", {text}"
    return said


class _Part(NamedTuple):
    """A segment of a bar: its share of the whole, its amount in words, and its colour."""

    name: str
    share: float
    said: str
    fill: str


def _memory(plan: Planned) -> tuple[str, list[_Part]]:
    """Terms, what is kept in reserve beyond them, and what stays free, of a GPU's memory."""
    chosen, has = plan.chosen, plan.chosen.device_bytes
    terms = [(t.name, t.amount, COLOURS.get(t.name, _OTHER)) for t in plan.memory]
    reserve = chosen.needed_bytes - chosen.memory_bytes
    terms.append(("reserve (allocator, CUDA, NCCL)", reserve, _STRIPES))
    terms.append(("free", has - chosen.needed_bytes, "none"))
    shown = [term for term in terms if term[1] > 0]
    whole = sum(amount for _, amount, _ in shown)
    parts = [_Part(name, size / whole, formats.binary(size), fill) for name, size, fill in shown]
    return f"Memory of {formats.binary(has)} {per(chosen)}", parts


def _time(plan: Planned) -> tuple[str, list[_Part]]:
    """Terms of the expected step."""
    whole, summed = plan.chosen.step_seconds[1], sum(term.amount for term in plan.time)
    return "Time of a step", [
        _Part(t.name, t.amount / summed, f"{t.amount / whole:.0%}", COLOURS.get(t.name, _OTHER))
        for t in plan.time
    ]
