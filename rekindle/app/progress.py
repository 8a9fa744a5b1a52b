"""What a person sees while a run goes on: a step table with one live line, or plain lines
where there is no terminal.

All of it goes to stderr; stdout belongs to the result."""

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rekindle import formats
from rekindle.masking import plain
from rekindle.records import WAITING, Ignored, RunRecord, StepRecord
from rekindle.report.readable_log import progress_text

MARKS = {
    "pending": ("·", "dim"),
    "running": ("▸", "cyan"),
    "succeeded": ("✓", "green"),
    "failed": ("✗", "red"),
    "skipped": ("-", "dim"),
    "cancelled": ("■", "yellow"),
}
FINAL = ("succeeded", "failed", "skipped", "cancelled")


class RunConsole(Console):
    """A console whose reader may leave (`| head`): the run goes on unseen."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)


class Progress:
    """Follow one run: pass `changed` and `event` to `execute`. A context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or RunConsole(stderr=True)
        self.record: RunRecord | None = None
        self.lines: dict[str, str] = {}
        self.printed_steps: set[str] = set()
        self.printed_obstacles: set[tuple[str, str]] = set()
        live = Live(console=self.console, transient=True, get_renderable=self._render)
        self.live: Live | None = live if self.console.is_terminal else None

    def __enter__(self) -> Self:
        if self.live:
            self.live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.lines.clear()
        if self.live:
            self.live.__exit__(kind, error, traceback)

    def changed(self, record: RunRecord) -> None:
        """The run began, or a step changed state."""
        if self.record is None:
            self.console.print(f"run [bold]{record.run_id}[/]", highlight=False)
            if record.ignored:
                self.console.print(ignored_table(record.ignored))
        self.record = record
        if self.live:
            return
        for step in record.steps:
            self._print_obstacle(step)
            if step.status in FINAL and step.name not in self.printed_steps:
                self.printed_steps.add(step.name)
                mark, _ = MARKS[step.status]
                line = f"{mark} {step.name} {_seconds(step)} {step.reason}"
                self._print(line.rstrip())

    def _print_obstacle(self, step: StepRecord) -> None:
        """Print what a step waits for, once: its line in a log comes when it is done."""
        is_new = (step.name, step.reason) not in self.printed_obstacles
        if step.status not in FINAL and step.reason.startswith(WAITING) and is_new:
            self.printed_obstacles.add((step.name, step.reason))
            self._print(f"  {step.name}: {step.reason}")

    def event(self, step: str, event: dict[str, Any]) -> None:
        """A step reported: `progress` replaces its live line, `notice` stays."""
        if event["event"] == "notice":
            # lines of their own would look like those of other steps
            text = str(event.get("text", "")).replace("\n", "\n    ")
            self._print(f"  {step}: {text}")
        elif event["event"] == "progress":
            self.lines[step] = progress_text(event)
            if not self.live and event.get("step") == event.get("steps"):
                self._print(f"  {step}: {self.lines[step]}")

    def _print(self, text: str) -> None:
        self.console.print(Text(plain(text)), soft_wrap=True)

    def _render(self) -> RenderableType:
        if self.record is None:
            return Text("")
        running = {step.name for step in self.record.steps if step.status == "running"}
        live_lines = []
        for name, line in self.lines.items():
            if name in running:
                live_lines.append(Text(plain(f"  {name}: {line}"), style="cyan"))
        total = Text(plain(_total(self.record)), style="dim")
        return Group(step_table(self.record, self.console.width), *live_lines, total)


def _total(record: RunRecord) -> str:
    """The steps done, of all, and the time since the run began."""
    done = sum(step.status in FINAL for step in record.steps)
    began = formats.instant(record.started_at)
    seconds = (datetime.now(UTC) - began).total_seconds() if began else None
    return f"{done} of {len(record.steps)} steps done, {formats.duration(seconds)}"


def ignored_table(ignored: Sequence[Ignored]) -> Table:
    """What this machine does not honour, and who asked for it."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", style="yellow")
    table.add_column("ignored here", overflow="fold")
    table.add_column("asked by", overflow="fold")
    for row in ignored:
        asked_by = ", ".join(row.asked_by) or "the pipeline"
        table.add_row(Text(plain(row.what)), Text(plain(asked_by)))
    return table


def step_table(record: RunRecord, width: int) -> Table:
    """Steps with their state, time and reason, which has no room on a narrow terminal."""
    longest_name = max((len(step.name) for step in record.steps), default=0)
    has_room = longest_name + 30 <= width
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=True, header_style="dim")
    table.add_column("")
    table.add_column("step", overflow="fold", no_wrap=has_room)
    table.add_column("time", justify="right")
    if has_room:
        table.add_column("why", style="dim", overflow="fold")
    for step in record.steps:
        mark, style = MARKS[step.status]
        cells: list[Text | str] = [
            Text(mark, style),
            Text(plain(step.name)),
            _seconds(step),
        ]
        if has_room:
            cells.append(Text(plain(_why(step))))
        table.add_row(*cells)
    return table


def _why(step: StepRecord) -> str:
    if step.cached:
        return step.reason
    reasons = []
    if step.attempts > 1:
        reasons.append(f"{step.attempts} attempts")
    if step.reason:
        reasons.append(step.reason)
    for artifact in step.artifacts.values():
        pieces = artifact.metadata.get("pieces")
        if pieces:
            reasons.append(f"pieces {pieces}")
    return "; ".join(reasons)


def _seconds(step: StepRecord) -> str:
    if step.cached:
        return "cached"
    if step.seconds is not None:
        return formats.duration(step.seconds)
    if step.status != "running":
        return ""
    began = formats.instant(step.started_at)
    if began is None:
        return "..."
    return formats.duration(max(0.0, (datetime.now(UTC) - began).total_seconds()))
