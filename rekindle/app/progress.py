"""What a person sees while a run goes on: a step table with one live line, or plain lines where
there is no terminal.

All of it goes to stderr; stdout belongs to the result."""

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rekindle import formats
from rekindle.masking import plain
from rekindle.records import Ignored, RunRecord, StepRecord
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
    """A console whose reader may leave (`| head`, a lost connection): the run goes on unseen."""

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
        self.said: set[str] = set()
        live = Live(console=self.console, transient=True, get_renderable=self._render)
        self.live = live if self.console.is_terminal else None

    def __enter__(self) -> Self:
        if self.live:
            self.live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.lines.clear()
        if self.live:
            self.live.__exit__(*error)

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
            if step.status in FINAL and step.name not in self.said:
                self.said.add(step.name)
                said = f"{MARKS[step.status][0]} {step.name} {_seconds(step)} {step.reason}"
                self._say(said.rstrip())

    def event(self, step: str, event: dict[str, Any]) -> None:
        """A step spoke: `progress` replaces its live line, `notice` stays."""
        if event["event"] == "notice":
            # lines of their own would look like those of other steps
            text = str(event.get("text", "")).replace("\n", "\n    ")
            self._say(f"  {step}: {text}")
        elif event["event"] == "progress":
            self.lines[step] = progress_text(event)
            if not self.live and event.get("step") == event.get("steps"):
                self._say(f"  {step}: {self.lines[step]}")

    def _say(self, text: str) -> None:
        self.console.print(Text(plain(text)), soft_wrap=True)

    def _render(self) -> RenderableType:
        if self.record is None:
            return Text("")
        running = {step.name for step in self.record.steps if step.status == "running"}
        said = [f"  {name}: {line}" for name, line in self.lines.items() if name in running]
        live = [Text(plain(line), style="cyan") for line in said]
        place = Text(plain(self._place()), style="dim")
        return Group(step_table(self.record, self.console.width), *live, place)

    def _place(self) -> str:
        """Where the run is: steps done, of all, and since when."""
        assert self.record is not None
        steps, began = self.record.steps, formats.instant(self.record.started_at)
        done = sum(step.status in FINAL for step in steps)
        since = (datetime.now(UTC) - began).total_seconds() if began else None
        return f"{done} of {len(steps)} steps done, {formats.duration(since)}"


def ignored_table(ignored: Sequence[Ignored]) -> Table:
    """What this machine does not honour, and who asked for it."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", style="yellow")
    table.add_column("ignored here", overflow="fold")
    table.add_column("asked by", overflow="fold")
    for row in ignored:
        table.add_row(Text(plain(row.what)), Text(plain(", ".join(row.asked_by) or "the pipeline")))
    return table


def step_table(record: RunRecord, width: int) -> Table:
    """Steps with their state, time and reason, which has no place on a narrow terminal."""
    roomy = max((len(step.name) for step in record.steps), default=0) + 30 <= width
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=True, header_style="dim")
    table.add_column("")
    table.add_column("step", overflow="fold", no_wrap=roomy)
    table.add_column("time", justify="right")
    if roomy:
        table.add_column("why", style="dim", overflow="fold")
    for step in record.steps:
        mark, style = MARKS[step.status]
        cells = Text(mark, style), Text(plain(step.name)), _seconds(step), Text(plain(_why(step)))
        table.add_row(*cells[: len(table.columns)])
    return table


def _why(step: StepRecord) -> str:
    if step.cached:
        return step.reason
    tries = f"{step.attempts} attempts" if step.attempts > 1 else ""
    read = (one.metadata.get("pieces") for one in step.artifacts.values())
    pieces = (f"pieces {said}" for said in read if said)
    return "; ".join(filter(None, (tries, step.reason, *pieces)))


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
