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
from rekindle.app.pipeline import arguments_of, graph_of
from rekindle.app.plan import planned_here
from rekindle.app.preflight import preflight
from rekindle.app.runs import find_run, new_record, numbered, read_run, write_card
from rekindle.errors import RequestError
from rekindle.launch.preloaded import Preloaded
from rekindle.launch.rendezvous import Rendezvous
from rekindle.platforms.local import execute as local
from rekindle.platforms.local.containers import prepare
from rekindle.platforms.local.content import describe, digest, local_path
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
class Options:
    """How to run; `until` leaves out later steps; `settings` are those of a training of a grid;
    `because` says why it runs, where that was decided by triggers."""

    home: Path
    fresh: bool = False
    from_step: str | None = None
    until: str | None = None
    settings: tuple[str, ...] = ()
    because: str = ""


def execute(
    spec: Spec,
    options: Options,
    on_change: OnChange = lambda record: None,
    on_event: OnEvent = lambda step, event: None,
) -> RunRecord:
    """Run the spec's pipeline on this machine; the record says what happened. RequestError before
    anything is written; StepError, PreemptedError or InterruptedRunError after record and card
    are."""
    preflight(spec, options.home)
    spec, plan = planned_here(resolved(spec, options.home), options.home)
    _, graph = graph_of(spec, here=True)
    if options.until is not None:
        graph = graph.until(options.until)
    hashes(spec, graph)  # refuses what cannot be read before anything is written
    home, env, here = options.home.resolve(), environment_of(spec), spec.platforms.local
    containers = prepare(graph, here.containers, env, tuple(here.secrets))
    arguments = arguments_of(spec, graph, str(home))
    ignored = local.ignored(graph, containers, arguments) + _ignored(spec)
    record = numbered(new_record(spec, ignored, plan=plan), home)
    record = record.model_copy(update={"settings": options.settings, "because": options.because})
    # what the ranks of training and scoring import, and torchrun before them
    ranks = ("torch.distributed.run", "rekindle.train.worker", "rekindle.train.score_rank")
    preloaded = Preloaded((*ranks, *(load_task(spec.task).imports if spec.task in TASKS else ())))
    env = {**preloaded.environment, **env}

    def changed(record: RunRecord) -> None:
        if {step.component for step in record.steps if step.status == "running"} & _BEFORE_RANKS:
            preloaded.start({**local.PRINTING, **env})
        on_change(record)

    try:
        return local.execute(
            graph,
            arguments,
            home=home,
            record=record,
            env=env,
            containers=containers,
            source_hash=source_hash(),
            own_code=functools.partial(hashes, spec, graph),
            fresh=options.fresh,
            from_step=options.from_step,
            imports=_imports(spec),
            on_change=changed,
            on_event=on_event,
            grace_seconds=spec.train.grace_seconds,
        )
    finally:
        preloaded.close()
        try:
            write_card(home, record.run_id)
        except OSError as error:  # what the run came to matters more
            log.warning("the card could not be written: %s", error.strerror)
        with contextlib.suppress(OSError, ValueError):  # refused before it had a record
            record = read_run(home, record.run_id)
            push(record, home)
            if not options.because:  # else who decided that it runs tells what came of it
                tell_of(record)


def _imports(spec: Spec) -> tuple[str, ...]:
    """What most steps of the shipped pipeline import; the first sets what the second reads."""
    if spec.pipeline is not None:
        return ()
    stores = [f"mlflow.store.{kind}.sqlalchemy_store" for kind in ("tracking", "model_registry")]
    embedded = () if spec.registration.tracking_uri else stores
    return ("rekindle.registry.client", "mlflow", *embedded)


_BEFORE_RANKS = {"ingest", "shard", "finetune"}  # when they are at work, ranks will be


def environment_of(spec: Spec) -> dict[str, str]:
    """What the steps of a local run see: ours, their secrets, and how ranks find each other."""
    here = spec.platforms.local
    secrets_of = {name: os.environ[ref.removeprefix("env:")] for name, ref in here.secrets.items()}
    rendezvous = Rendezvous(ranks_per_node=here.ranks)
    included = {INCLUDED: hash_} if (hash_ := included_hash(spec)) else {}
    return {**os.environ, **secrets_of, **rendezvous.environment(), **included}


def resolved(spec: Spec, home: Path) -> Spec:
    """`model.init_from: run:ID` becomes the folder of that run's model."""
    if not spec.model.init_from.startswith("run:"):
        return spec
    run = find_run(home, spec.model.init_from.removeprefix("run:"))
    for step in run.steps:
        for artifact in step.artifacts.values():
            if artifact.schema_title == "system.Model":
                path = local_path(artifact.uri)
                if path and artifact.digest and digest(describe(path)) != artifact.digest:
                    what = f"the model of the run {run.run_id} changed on disk, or is gone"
                    fix = "run that run's config again: the model is made again"
                    raise RequestError(what, where=str(path), fix=fix)
                model = spec.model.model_copy(update={"init_from": artifact.uri})
                return spec.model_copy(update={"model": model})
    fix = "name a run whose finetune step succeeded"
    raise RequestError(f"the run {run.run_id} left no model", where="model.init_from", fix=fix)


def _ignored(spec: Spec) -> tuple[Ignored, ...]:
    """What the spec asks of a platform that this machine does not give."""
    asked, notes = spec.resources, []
    if asked.nodes > 1 or asked.gpus_per_node:
        what = f"{spec.platforms.local.ranks} processes share this machine"
        fields = f"nodes={asked.nodes}", f"gpus_per_node={asked.gpus_per_node}"
        notes.append(Ignored(what=what, asked_by=tuple(f"resources.{field}" for field in fields)))
    if asked.spot:
        notes.append(Ignored(what="This machine is not taken away", asked_by=("resources.spot",)))
    return tuple(notes)


def windows(spec: Spec) -> Sequence[Spec]:
    """The spec for each window to run: `backfill` earlier ones, oldest first, then its own."""
    if spec.data is None or spec.data.window is None or not spec.data.window.backfill:
        return [spec]
    window, (config, overrides), found = spec.data.window, spec.origin, list[Spec]()
    for offset in range(window.offset + window.backfill, window.offset - 1, -1):
        moved = window.model_copy(update={"offset": offset, "backfill": 0})
        data = spec.data.model_copy(update={"window": moved})
        found.append(spec.model_copy(update={"data": data}))
        words = (f"data.window.offset={offset}", "data.window.backfill=0")
        found[-1]._origin = (config, (*overrides, *words))
    return found
