"""Runs a spec's pipeline on this machine."""

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rekindle.app.notify import push, tell_of
from rekindle.app.prepared import Prepared
from rekindle.app.runs import new_record, numbered, read_run, write_card
from rekindle.launch.preloaded import Preloaded
from rekindle.launch.rendezvous import Rendezvous
from rekindle.platforms.local import execute as local
from rekindle.platforms.local.containers import prepare
from rekindle.platforms.local.step import StepSettings
from rekindle.platforms.user_code import hashes, included_hash
from rekindle.records import Ignored, RunRecord
from rekindle.spec.identity import source_hash
from rekindle.spec.imports import INCLUDED
from rekindle.spec.model import Spec
from rekindle.tasks import TASKS, load_task

log = logging.getLogger(__name__)

OnChange = Callable[[RunRecord], None]
OnEvent = Callable[[str, dict[str, Any]], None]


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """How to run a pipeline on this machine."""

    home: Path
    fresh: bool = False
    """Every step runs: none comes from the cache."""
    from_step: str | None = None
    """The step that runs, with all that depend on it, whatever the cache has."""
    until: str | None = None
    """The last step; later ones are left out."""
    settings: tuple[str, ...] = ()
    """Those that a training of a grid has for itself."""
    because: str = ""
    """Why it runs, where triggers decided that."""


# components of steps that run shortly before ranks start
_BEFORE_RANKS = {"ingest", "shard", "finetune"}
# what the ranks of training and scoring import, and torchrun before them
_RANK_IMPORTS = (
    "torch.distributed.run",
    "rekindle.train.worker",
    "rekindle.train.score_rank",
)


def execute(
    prepared: Prepared,
    options: RunOptions,
    on_change: OnChange = lambda record: None,
    on_event: OnEvent = lambda step, event: None,
) -> RunRecord:
    """Run a prepared config's pipeline on this machine; the record says what happened.

    RequestError before anything is written; StepError, PreemptedError or
    InterruptedRunError after record and card are."""
    spec = prepared.spec
    graph = prepared.graph
    arguments = prepared.arguments
    # a grid trains many times, and judges only its best model
    if options.until is not None:
        graph = graph.until(options.until)
    home = options.home.resolve()
    environment = environment_of(spec)
    local_section = spec.platforms.local
    secret_names = tuple(local_section.secrets)
    containers = prepare(graph, local_section.containers, environment, secret_names)
    ignored = local.ignored(graph, containers, arguments) + _ignored(spec)
    record = numbered(new_record(spec, ignored, plan=prepared.plan), home)
    record = record.model_copy(update={"settings": options.settings, "because": options.because})
    task_imports = load_task(spec.task).imports if spec.task in TASKS else ()
    preloaded = Preloaded((*_RANK_IMPORTS, *task_imports))
    settings = StepSettings(
        env={**preloaded.environment, **environment},
        source_hash=source_hash(),
        own_code=functools.partial(hashes, spec, graph),
        imports=_step_imports(spec),
        containers=containers,
        grace_seconds=spec.train.grace_seconds,
    )

    def on_record_change(record: RunRecord) -> None:
        running = {step.component for step in record.steps if step.status == "running"}
        # imports take most of a short training on CPUs: they run while data are read
        if running & _BEFORE_RANKS:
            preloaded.start({**local.PRINTING, **settings.env})
        on_change(record)

    try:
        return local.execute(
            graph,
            arguments,
            settings,
            home=home,
            record=record,
            fresh=options.fresh,
            from_step=options.from_step,
            on_change=on_record_change,
            on_event=on_event,
        )
    finally:
        preloaded.close()
        _report_end(home, record.run_id, because=options.because)


def _report_end(home: Path, run_id: str, because: str) -> None:
    """Write the card of a run that ended, however it did, and tell of that."""
    try:
        write_card(home, run_id)
    except OSError as error:  # how the run ended matters more
        log.warning("the card could not be written: %s", error.strerror)
    with contextlib.suppress(OSError, ValueError):  # refused before it had a record
        record = read_run(home, run_id)
        push(record, home)
        if not because:  # else the watch that decided to run tells how it ended
            tell_of(record)


def _step_imports(spec: Spec) -> tuple[str, ...]:
    """What most steps of the shipped pipeline import; the order matters.

    The first module sets what the second reads."""
    if spec.pipeline is not None:
        return ()
    imports = ["rekindle.registry.client", "mlflow"]
    if not spec.registration.tracking_uri:  # the embedded registry
        imports.append("mlflow.store.tracking.sqlalchemy_store")
        imports.append("mlflow.store.model_registry.sqlalchemy_store")
    return tuple(imports)


def environment_of(spec: Spec) -> dict[str, str]:
    """The environment of a local run's steps: ours, their secrets, and the rendezvous."""
    local_section = spec.platforms.local
    environment = dict(os.environ)
    for name, reference in local_section.secrets.items():
        environment[name] = os.environ[reference.removeprefix("env:")]
    environment |= Rendezvous(ranks_per_node=local_section.ranks).environment()
    code_hash = included_hash(spec)
    if code_hash:
        environment[INCLUDED] = code_hash
    return environment


def _ignored(spec: Spec) -> tuple[Ignored, ...]:
    """What the spec asks of a platform that this machine does not give."""
    resources = spec.resources
    ignored: list[Ignored] = []
    if resources.nodes > 1 or resources.gpus_per_node:
        ignored.append(
            Ignored(
                what=f"{spec.platforms.local.ranks} processes share this machine",
                asked_by=(
                    f"resources.nodes={resources.nodes}",
                    f"resources.gpus_per_node={resources.gpus_per_node}",
                ),
            )
        )
    if resources.spot:
        ignored.append(Ignored(what="This machine is not taken away", asked_by=("resources.spot",)))
    return tuple(ignored)


def windows(spec: Spec) -> Sequence[Spec]:
    """The spec for each window to run, oldest first: `backfill` earlier ones, its own."""
    if spec.data is None or spec.data.window is None or not spec.data.window.backfill:
        return [spec]
    window = spec.data.window
    config, overrides = spec.origin
    specs: list[Spec] = []
    for offset in range(window.offset + window.backfill, window.offset - 1, -1):
        moved = window.model_copy(update={"offset": offset, "backfill": 0})
        data = spec.data.model_copy(update={"window": moved})
        windowed = spec.model_copy(update={"data": data})
        # the recorded command is that of this window alone
        by_hand = (f"data.window.offset={offset}", "data.window.backfill=0")
        windowed._origin = (config, (*overrides, *by_hand))
        specs.append(windowed)
    return specs
