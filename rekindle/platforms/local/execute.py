"""Run a Graph on this machine: independent steps side by side, each in child processes,
every change on record.

The calling thread schedules the steps, and it alone writes the record. Each running step
has a thread that watches its processes and reports through one queue. After a failure
nothing begins but exit handlers."""

import contextlib
import dataclasses
import os
import queue
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rekindle import errors
from rekindle.errors import RekindleError, RequestError, StepError, fix_of
from rekindle.ir.edit.rewrite import OWN_IMAGES
from rekindle.ir.features import uses
from rekindle.ir.graph import Graph
from rekindle.ir.values import bind
from rekindle.launch.fork_server import fork_server_for
from rekindle.launch.process import on_signal
from rekindle.platforms.feature_checks import admit
from rekindle.platforms.local import environments
from rekindle.platforms.local.cache import as_artifacts
from rekindle.platforms.local.containers import NO_CONTAINERS, Containers
from rekindle.platforms.local.environments import OnEvent
from rekindle.platforms.local.process import Control
from rekindle.platforms.local.step import (
    Outcome,
    StepJob,
    StepSettings,
    Surroundings,
    perform,
    utc_now,
)
from rekindle.platforms.local.store import HomeStore, is_alive, make_home
from rekindle.platforms.local.walk import Leaf, Ready, Refused, Skipped, Walk, dependents
from rekindle.records import Ignored, RunRecord, StepRecord

OnChange = Callable[[RunRecord], None]
# a step must not fail because it prints a text that UTF-8 or the locale cannot encode
PRINTING = {"PYTHONIOENCODING": "utf-8:backslashreplace"}


def execute(
    graph: Graph,
    arguments: Mapping[str, Any],
    settings: StepSettings,
    *,
    home: Path,
    record: RunRecord,
    fresh: bool = False,
    from_step: str | None = None,
    on_change: OnChange | None = None,
    on_event: OnEvent | None = None,
) -> RunRecord:
    """Run `graph` under `home`; returns the finished record, as in `runs/<run_id>/run.json`.

    `fresh` runs every step, and `from_step` that step and all that depend on it, whatever
    the cache has. `on_change` and `on_event` are called in this thread.

    Raises RequestError before anything runs; StepError if a step failed; PreemptedError
    if one saved and gave way, also on SIGTERM; InterruptedRunError on Ctrl-C, or on
    SIGTERM when nothing was saved, after the steps had their seconds of grace to end (a
    second Ctrl-C kills them)."""
    containers = settings.containers
    unheeded = ignored(graph, containers, arguments)
    env = {**PRINTING, **settings.env}
    values = bind(graph, arguments)
    forced = _forced(graph, fresh, from_step)
    store = HomeStore(Path(home).absolute())
    leaves = graph.leaves()
    steps = tuple(StepRecord(name=leaf.path, component=leaf.component) for leaf in leaves)
    record = record.model_copy(
        update={
            "platform": "local",
            "status": "running",
            "steps": steps,
            "arguments": values,
            "ignored": record.ignored or unheeded,
            "home": str(store.home),
        }
    )
    try:
        make_home(store.home)
        processes = [step for step in graph.steps() if not containers.image_of(step)]
        pythons = environments.prepare(processes, store.home, env, on_event)
        fork_server_at_work = fork_server_for(env, settings.imports)
        with store.hold_run(record.run_id), fork_server_at_work as fork_server:
            containers.sweep(store.home, lambda run_id: is_alive(store.home, run_id))
            surroundings = Surroundings(
                store=store,
                run_id=record.run_id,
                name=record.name,
                pipeline=graph.name,
                started_at=record.started_at or utc_now(),
                settings=dataclasses.replace(settings, env=env),
                control=Control(),
                fork_server=fork_server,
                pythons=pythons,
            )
            run = _Run(graph, values, surroundings, forced, record, on_change, on_event)
            has_workspace = any(use.feature == "workspace" for use in uses(graph))
            if has_workspace:  # a folder, which stays after a failure
                surroundings.workspace.mkdir()
            finished = run.to_the_end(settings.max_parallel or max(2, os.cpu_count() or 1))
            if has_workspace:
                shutil.rmtree(surroundings.workspace, ignore_errors=True)
            return finished
    except OSError as error:
        message = f"cannot keep the run under {store.home}: {error.strerror}"
        fix = f"{fix_of(error)}, or choose another home folder"
        raise RekindleError(message, where=str(error.filename or store.home), fix=fix) from error


# features that this machine has for steps in docker only
_IN_DOCKER = ("cpu_and_memory", "image_entry_points")


def ignored(
    graph: Graph, containers: Containers = NO_CONTAINERS, arguments: Mapping[str, Any] | None = None
) -> tuple[Ignored, ...]:
    """What this machine ignores of a pipeline; UnsupportedError for what it refuses."""
    contained = {step.path for step in graph.steps() if containers.image_of(step)}
    honoured = {(feature, path) for feature in _IN_DOCKER for path in contained}
    rows = [*admit(graph, "local", honoured, arguments=arguments), *containers.left_out]
    named_before = {""}  # images that the list has already, because they cannot be pulled
    for row in containers.left_out:
        named_before.update(row.asked_by)
    unused_images = set()
    for step in graph.steps():
        image = step.container.image
        # an image of ours holds what is installed here
        if step.path in contained or image in named_before or image.startswith(OWN_IMAGES):
            continue
        unused_images.add(image)
    if unused_images:
        message = "Images are not used, steps run in this Python environment"
        if containers is not NO_CONTAINERS:
            message = "Python components run in this environment, not in their image"
        rows.append(Ignored(what=message, asked_by=tuple(sorted(unused_images))))
    if graph.pipeline_root:
        message = "The pipeline root is not used, artifacts stay here"
        rows.append(Ignored(what=message, asked_by=(graph.pipeline_root,)))
    return tuple(rows)


def _forced(graph: Graph, fresh: bool, from_step: str | None) -> dict[str, str]:
    """By the path of a step, the option because of which it may not come from the cache."""
    if fresh:
        return {leaf.path: "--fresh" for leaf in graph.leaves()}
    if not from_step:
        return {}
    try:
        start = graph.find(from_step).path
    except KeyError as error:
        raise RequestError(str(error.args[0]), where="--from") from error
    paths = set(dependents(graph, start))
    for leaf in graph.leaves():
        if leaf.path == start or leaf.path.startswith(f"{start}/"):
            paths.add(leaf.path)
    return dict.fromkeys(paths, f"--from {start}")


class _Run:
    """The state of one run: the walk over the graph, the threads at work, the record."""

    def __init__(
        self,
        graph: Graph,
        values: Mapping[str, Any],
        around: Surroundings,
        forced: Mapping[str, str],
        record: RunRecord,
        on_change: OnChange | None,
        on_event: OnEvent | None,
    ) -> None:
        self.around = around
        self.forced = forced
        self.walk = Walk(graph, values, around.facts)
        self.record = record
        self.on_change = on_change
        self.on_event = on_event
        self.file = around.store.run(record.run_id) / "run.json"
        self.changed = True
        self.began = time.monotonic()
        # changes of the record that threads of steps ask this thread to make
        self.messages: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.waiting: list[Ready] = []  # steps that may begin, until there is room for them
        self.working: dict[str, threading.Thread] = {}  # by path, of running steps
        self.failed: list[Outcome] = []
        self.reclaimed = False  # by SIGTERM, with which machines are reclaimed
        self.refused: list[StepError] = []
        self.unkept: OSError | None = None  # why the last write of the record failed

    def to_the_end(self, max_parallel: int) -> RunRecord:
        """Run all steps, at most `max_parallel` at a time; returns the finished record."""
        with self.signals():
            try:
                self.show()
                if self.unkept:  # not even the first record could be written
                    raise self.unkept
                self.advance()
                while True:
                    while self.waiting and len(self.working) < max_parallel and not self.halted():
                        self.start(self.waiting.pop(0))
                    self.show()
                    if not self.working:
                        break
                    self.messages.get()()
                    while not self.messages.empty():  # one write for all that came meanwhile
                        self.messages.get_nowait()()
            except BaseException as error:  # stop all steps, and record why
                self.around.control.level = 1
                for thread in self.working.values():
                    thread.join()
                self.change(status="failed", error=f"{type(error).__name__}: {error}")
                with contextlib.suppress(Exception):  # the display may be what failed
                    self.show()
                raise
            return self.conclude()

    def halted(self) -> bool:
        """Whether nothing may begin any more, not even an exit handler."""
        gave_way = any(outcome.status != "failed" for outcome in self.failed)
        return gave_way or self.around.control.stopped()

    def advance(self) -> None:
        """Queue what became ready, and record what will not run."""
        for item in self.walk.advance():
            if isinstance(item, Ready):
                self.waiting.append(item)
            elif isinstance(item, Skipped):
                self.update(item.path, status="skipped", reason=item.reason)
            elif isinstance(item, Refused):
                self.refused.append(item.error)
                message = item.error.problems[0].what
                self.update(item.path, status="failed", error=message)
            else:
                self.unroll(item.path, item.steps)

    def unroll(self, path: str, leaves: Sequence[Leaf]) -> None:
        """Put the steps of all turns of a loop where the record has those of its body."""
        steps = list(self.record.steps)
        body = [i for i, step in enumerate(steps) if step.name.startswith(f"{path}/")]
        turns = [StepRecord(name=leaf.path, component=leaf.component) for leaf in leaves]
        steps[body[0] : body[-1] + 1] = turns
        self.change(steps=tuple(steps))

    def start(self, ready: Ready) -> None:
        """Begin a step, in a thread of its own."""
        path = ready.node.path
        folder = self.around.store.step(self.around.run_id, path)

        def show_event(event: dict[str, Any]) -> None:
            if self.on_event:
                self.on_event(path, event)

        job = StepJob(
            ready.node,
            ready.inputs,
            self.around,
            self.forced.get(ready.origin, ""),
            say=lambda fields: self.messages.put(lambda: self.update(path, **fields)),
            event=lambda event: self.messages.put(lambda: show_event(event)),
        )

        def work() -> None:
            outcome = perform(job)
            self.messages.put(lambda: self.finish(outcome))

        self.update(path, status="running", started_at=utc_now(), log=str(folder / "log.txt"))
        thread = threading.Thread(target=work, name=f"step {path}", daemon=True)
        thread.start()
        self.working[path] = thread

    def finish(self, outcome: Outcome) -> None:
        """Record how a step ended, and decide what follows from it."""
        path = outcome.step.path
        self.working.pop(path).join()
        artifacts = {}
        for name, output in outcome.outputs.artifacts.items():
            (artifact,) = as_artifacts(output)  # a step has no output that is a list
            artifacts[name] = artifact.record()
        self.update(
            path,
            # `preempted` is a status of runs; steps do not have it
            status="cancelled" if outcome.status == "preempted" else outcome.status,
            cached=outcome.cached,
            reason=outcome.reason,
            error=outcome.error,
            failed_log=outcome.failed_log,
            seconds=round(outcome.seconds, 3),
            cache_key=outcome.key,
            parameters=outcome.outputs.parameters,
            artifacts=artifacts,
        )
        if outcome.status == "succeeded":
            self.walk.succeeded(path, outcome.outputs)
            self.advance()
            return
        self.failed.append(outcome)
        if outcome.status != "failed":  # it was preempted or cancelled: nothing begins any more
            return
        self.walk.failed(path, outcome.error)
        for ready in [ready for ready in self.waiting if not ready.exempt]:
            self.waiting.remove(ready)
            reason = self.walk.withdrawn(ready.node.path)
            self.update(ready.node.path, status="skipped", reason=reason)
        self.advance()

    def conclude(self) -> RunRecord:
        """Skip what never began and close the record; raises the error that the run ended
        with."""
        error = self.verdict()
        preempted = self.preempted_paths()
        cause = f"`{preempted[0]}` gave way" if preempted else self.walk.stopped_by
        reason = f"the run stopped when {cause}"
        if self.around.control.stopped():
            reason = "the run was interrupted"
        for step in self.record.steps:
            if step.status == "pending":
                self.update(step.name, status="skipped", reason=reason)
        if error is None:
            self.change(status="succeeded")
        else:
            statuses = {
                errors.InterruptedRunError: "cancelled",
                errors.PreemptedError: "preempted",
            }
            self.change(status=statuses.get(type(error), "failed"), error=str(error))
        self.show()
        if error:
            raise error
        if self.unkept:
            raise self.unkept
        return self.record

    def preempted_paths(self) -> list[str]:
        """The steps that saved and were preempted, in the order of their ends."""
        return [outcome.step.path for outcome in self.failed if outcome.status == "preempted"]

    def verdict(self) -> RekindleError | None:
        """The error that the run ended with; None for a success."""
        if self.walk.finished and not self.failed and not self.refused:
            return None
        command = "the same command resumes: finished steps come from the cache"
        preempted = self.preempted_paths()
        if self.reclaimed and preempted:
            message = f"SIGTERM came; `{preempted[0]}` saved its state first"
            return errors.PreemptedError(message, fix=command)
        if self.around.control.stopped():
            message = f"the run {self.record.run_id} was interrupted"
            return errors.InterruptedRunError(message, fix=command)
        problems = list(self.failures())
        for error in self.refused:
            problems += error.problems
        if problems:
            return StepError(problems)
        if preempted:
            return errors.PreemptedError(f"`{preempted[0]}` saved and gave way", fix=command)
        return None

    def failures(self) -> Iterator[errors.Problem]:
        """A problem for each step that ran and failed, with its log."""
        for outcome in self.failed:
            if outcome.status == "failed":
                path = outcome.step.path
                log = outcome.failed_log or self.record.step(path).log
                yield errors.Problem(f"step `{path}` failed: {outcome.error}", log)

    def update(self, path: str, **fields: Any) -> None:
        """Change the record of one step."""
        steps = list(self.record.steps)
        for index, step in enumerate(steps):
            if step.name == path:
                steps[index] = step.model_copy(update=fields)
        self.change(steps=tuple(steps))

    def change(self, **fields: Any) -> None:
        """Change the record; `show` writes it."""
        seconds = round(time.monotonic() - self.began, 3)
        self.record = self.record.model_copy(update={"seconds": seconds, **fields})
        self.changed = True

    def show(self) -> None:
        """Write the record if it changed and there is room, then tell the caller."""
        if self.changed:
            self.changed = False
            try:
                self.record.write(self.file)
                self.unkept = None
            except OSError as error:  # the run goes on: a step that needs the disk fails by itself
                self.unkept = error
            if self.on_change:
                self.on_change(self.record)

    def signals(self) -> contextlib.AbstractContextManager[None]:
        """The context in which Ctrl-C or SIGTERM asks all steps to stop, and a second one
        kills them. Only the main thread can handle signals."""

        def stop(number: int) -> None:
            control = self.around.control
            self.reclaimed = self.reclaimed or number == signal.SIGTERM
            control.level = min(2, control.level + 1)

        is_main = threading.current_thread() is threading.main_thread()
        return on_signal(stop) if is_main else contextlib.nullcontext()
