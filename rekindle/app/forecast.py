"""A plan in a notebook: a value to look at, which shows itself as a table with bars.

The words are those of `rekindle plan`. The page is plain HTML with styles on its elements:
notebooks that are not trusted lose `<svg>` and `<style>`, and two outputs share no names. Text and
lines take the notebook's own colour; those of the bars have a contrast of 3 or more with white and
with what Jupyter and VS Code call dark."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from markupsafe import Markup

from rekindle import formats
from rekindle.app.plan_text import facts, lines, per, title
from rekindle.outputs import Planned, PlannedLayout, PlannedTerm
from rekindle.report.drawing import join, tag

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
_LINE = "1px solid color-mix(in srgb, currentColor 22%, transparent)"
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
    def step_seconds(self) -> tuple[float, float, float]:
        """Of an optimizer step: least, expected, most (nine of ten lie within)."""
        return self.record.chosen.step_seconds

    @property
    def hours(self) -> tuple[float, float, float] | None:
        """Of training without interruptions: least, expected, most; None for uncounted data."""
        return self.record.hours

    @property
    def on_demand_usd(self) -> tuple[float, float, float] | None:
        """What those hours cost; None where they or the price are not known."""
        return self.record.on_demand_usd

    @property
    def spot_usd(self) -> tuple[float, float] | None:
        """What training costs on spot machines that are reclaimed all at once, and one by one."""
        return self.record.spot.usd if self.record.spot else None

    @property
    def memory(self) -> dict[str, float]:
        """Bytes of tensors on the fullest GPU, by term."""
        return {term.name: term.amount for term in self.record.memory}

    @property
    def time(self) -> dict[str, float]:
        """Seconds of a step, by term."""
        return {term.name: term.amount for term in self.record.time}

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
        pictures = {"memory": _memory(self.record), "step": _time(self.record)}
        first = sorted(said, key=lambda head: head != "refused")
        name, _, about = title(self.record).partition(": ")
        page = tag(
            "div",
            tag("div", tag("b", name), f" {about}", style="margin:0 0 .4em"),
            _table((head, said[head], pictures.get(head)) for head in first if head not in _FOLDED),
            _folded([(head, said[head], None) for head in _FOLDED if head in said]),
            style="max-width:62rem;line-height:1.45;overflow-wrap:anywhere",
        )
        return str(page)


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


def _table(rows: Iterable[tuple[str, list[str], Markup | None]]) -> Markup:
    """Inline, because Jupyter's own rules for cells are more particular than a class."""
    return tag(
        "table",
        tag("tbody", *(_shown(head, texts, picture) for head, texts, picture in rows)),
        style="border-collapse:collapse;margin:0;width:100%;table-layout:auto;font-size:inherit;"
        "color:inherit",
    )


def _shown(head: str, texts: list[str], picture: Markup | None) -> Markup:
    cell = f"text-align:left;vertical-align:top;padding:.35em 0;border-top:{_LINE};background:none;"
    marked = "border-left:4px solid #d03a2f;padding-left:.6em;" if head == "refused" else ""
    of_head = f"{cell}white-space:nowrap;font-weight:600;padding-right:1em;{marked}"
    lines = (tag("div", text, style="margin-bottom:.2em") for text in texts)
    return tag(
        "tr", tag("th", head, scope="row", style=of_head),
        tag("td", *lines, picture or "", style=f"{cell}width:100%"), style="background:none",
    )  # fmt: skip


def _folded(rows: list[tuple[str, list[str], None]]) -> Markup:
    if not rows:
        return Markup("")
    what, style = "Other layouts, and why not them", "cursor:pointer;padding:.35em 0"
    inside = tag("div", _table(rows), style="margin:.3em 0 0")
    return tag("details", tag("summary", what, style=style), inside, style=f"border-top:{_LINE}")


@dataclasses.dataclass(frozen=True)
class _Part:
    name: str
    amount: float
    said: str
    fill: str

    def __str__(self) -> str:
        return f"{self.name} {self.said}"


def _memory(plan: Planned) -> Markup:
    """Terms, what is kept in reserve beyond them, and what stays free, of a GPU's memory."""
    chosen = plan.chosen
    parts = [_part(term, formats.binary(term.amount)) for term in plan.memory]
    for name, amount, fill in (
        ("reserve (allocator, CUDA, NCCL)", chosen.needed_bytes - chosen.memory_bytes, _STRIPES),
        ("free", chosen.device_bytes - chosen.needed_bytes, "none"),
    ):
        if amount > 0:
            parts.append(_Part(name, amount, formats.binary(amount), fill))
    return _bar(f"Memory of {formats.binary(chosen.device_bytes)} {per(chosen)}", parts)


def _time(plan: Planned) -> Markup:
    """Terms of the expected step."""
    whole = plan.chosen.step_seconds[1]
    parts = [_part(term, f"{term.amount / whole:.0%}") for term in plan.time]
    return _bar("Time of a step", parts)


def _part(term: PlannedTerm, said: str) -> _Part:
    return _Part(term.name, term.amount, said, COLOURS.get(term.name, _OTHER))


def _bar(name: str, parts: list[_Part]) -> Markup:
    """One stacked bar as wide as the cell, and a legend that wraps."""
    whole = sum(part.amount for part in parts)
    segments = (
        tag(
            "div", title=str(part),
            style=f"flex:{part.amount / whole:.5f} 1 0;min-width:2px;background:{part.fill};"
            "box-shadow:inset -1px 0 0 color-mix(in srgb, currentColor 35%, transparent)",
        )
        for part in parts
    )  # fmt: skip
    exact = "print-color-adjust:exact;-webkit-print-color-adjust:exact"
    bar = tag(
        "div", *segments, role="img", aria_label=f"{name}: {', '.join(map(str, parts))}",
        style=f"display:flex;height:1.35em;margin:.35em 0;border:{_LINE};{exact}",
    )  # fmt: skip
    square = "display:inline-block;width:.75em;height:.75em;margin-right:.4em"
    legend = []
    for part in parts:
        swatch = tag("span", style=f"{square};border:{_LINE};{exact};background:{part.fill}")
        apart = "display:inline-block;margin-right:1.2em"
        legend.append(tag("span", swatch, str(part), style=apart))
    return join([bar, tag("div", *legend, aria_hidden="true", style="font-size:.92em")])
