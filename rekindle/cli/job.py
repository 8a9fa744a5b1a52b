"""From a spec to a finished run: what the verbs and the notebook share. Arguments in, `Run` out."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import os
import secrets
import shlex
import subprocess
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rekindle
from rekindle.cli.options import numbered
from rekindle.cli.planning import planned_here
from rekindle.cli.preflight import preflight
from rekindle.errors import Problem, RequestError
from rekindle.launch.rendezvous import Rendezvous
from rekindle.records import Ignored, RunRecord, RunSummary
from rekindle.report.summary import summarised
from rekindle.spec.identity import source_hash
from rekindle.spec.imports import INCLUDED
from rekindle.spec.model import Spec

if TYPE_CHECKING:
    from rekindle.answers import Planned
    from rekindle.ir.graph import Graph, Parameter

log = logging.getLogger(__name__)

OnChange = Callable[[RunRecord], None]
OnEvent = Callable[[str, dict[str, Any]], None]

PIPELINE = "pipelines/continuous_training.py:continuous_training"


@dataclasses.dataclass(frozen=True)
class Options:
    """How to run, as opposed to what."""

    home: Path
    fresh: bool = False
    from_step: str | None = None


def shipped(path: str) -> Path:
    """A file or folder that comes with rekindle: inside the wheel, or beside the package in a
    checkout.
    """
    package = Path(rekindle.__file__).resolve().parent
    inside = package / "shipped" / path
    return inside if inside.exists() else package.parent / path


def pipeline_of(spec: Spec) -> str:
    """`path.py:function`, or the path of a compiled pipeline."""
    if spec.pipeline:
        return spec.pipeline
    path, _, function = PIPELINE.partition(":")
    return f"{shipped(path)}:{function}"


def graph_of(spec: Spec) -> tuple[str, Graph]:
    """The IR of the spec's pipeline, and the Graph read from it."""
    from rekindle.ir.compile import compile_pipeline
    from rekindle.ir.read import read

    text = compile_pipeline(pipeline_of(spec))
    return text, read(text)


def arguments_of(spec: Spec, graph: Graph, artifact_root: str) -> dict[str, Any]:
    """Values for the pipeline's parameters: what the config says for those that it `receives`, and
    the user's own `arguments`. The shipped pipeline receives everything.

    Raises RequestError where a parameter has no value, and where a section that the config sets has
    the name of a parameter without anything that says that they belong together."""
    filled: dict[str, Any] = {
        "name": spec.model_name,
        "task": spec.task,
        "data": spec.data.model_dump_json() if spec.data else "",
        "model": spec.model.model_dump_json(),
        "train": spec.train.model_dump_json(),
        "evaluate": spec.evaluate.model_dump_json(),
        "register": spec.registration.model_dump_json(),
        "artifact_root": artifact_root,
        "code_commit": code_commit(),
    }
    parameters = graph.inputs.parameters
    wanted: Iterable[str] = spec.receives
    if spec.pipeline is None or spec.receives == "all":
        wanted = [name for name in filled if name in parameters]
    values = {**{name: filled[name] for name in wanted}, **spec.arguments}
    open_ones = [parameter for name, parameter in parameters.items() if name not in values]
    if problems := list(_open(spec, open_ones, filled)):
        raise RequestError(problems)
    return values


_SECTIONS = {"task", "data", "model", "train", "evaluate", "register"}


def _open(
    spec: Spec, parameters: Iterable[Parameter], filled: Collection[str]
) -> Iterator[Problem]:
    """Parameters that need a value and have none, or that a section of the config may be for."""
    for parameter in parameters:
        name, fix = parameter.name, f"write arguments: {{{parameter.name}: VALUE}}"
        if name in filled:
            fix = f"write receives: [{name}] for what the config says, or {fix[6:]}"
        field = "registration" if name == "register" else name
        if parameter.required:
            yield Problem(f"the pipeline needs a value for `{name}`", "pipeline", fix)
        elif name in _SECTIONS and field in spec.model_fields_set:
            what = (
                f"the config sets `{name}`, and the pipeline has a parameter `{name}`: nothing "
                "says whether it receives the one or keeps its default"
            )
            yield Problem(what, name, f"{fix}; or remove the section")


def code_commit() -> str:
    """The commit of the working directory, `+changes` when it is not clean, or nothing outside of
    git.
    """
    try:
        commit = _git("rev-parse", "HEAD")
        return (
            f"{commit}+changes" if _git("status", "--porcelain", "--untracked-files=no") else commit
        )
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, timeout=10, check=True)  # noqa: S607 - found on PATH
    return done.stdout.strip()


def execute(
    spec: Spec,
    options: Options,
    on_change: OnChange = lambda record: None,
    on_event: OnEvent = lambda step, event: None,
) -> RunRecord:
    """Run the spec's pipeline on this machine; the record says what happened.

    Raises RequestError before anything is written; StepError, PreemptedError or InterruptedRunError
    after the record and the card are."""
    from rekindle.platforms.code import hashes
    from rekindle.platforms.local import execute as local
    from rekindle.platforms.local.containers import prepare

    preflight(spec, options.home)
    spec, plan = planned_here(resolved(spec, options.home), options.home)
    _, graph = graph_of(spec)
    own_code = hashes(spec, graph)
    home, env, here = options.home.resolve(), environment_of(spec), spec.platforms.local
    containers = prepare(graph, here.containers, env, tuple(here.secrets))
    arguments = arguments_of(spec, graph, str(home))
    ignored = local.ignored(graph, containers, arguments) + _ignored(spec)
    record = numbered(new_record(spec, ignored, plan=plan), home)
    try:
        return local.execute(
            graph,
            arguments,
            home=home,
            record=record,
            env=env,
            containers=containers,
            source_hash=source_hash(),
            own_code=own_code,
            fresh=options.fresh,
            from_step=options.from_step,
            imports=_imports(spec),
            on_change=on_change,
            on_event=on_event,
            grace_seconds=spec.train.grace_seconds,
        )
    finally:
        try:
            write_card(home, record.run_id)
        except OSError as error:  # what the run came to matters more
            log.warning("the card could not be written: %s", error.strerror)


def _imports(spec: Spec) -> tuple[str, ...]:
    """What most steps of the shipped pipeline import; the first sets what the second reads."""
    if spec.pipeline is not None:
        return ()
    stores = (
        "mlflow.store.tracking.sqlalchemy_store",
        "mlflow.store.model_registry.sqlalchemy_store",
    )
    embedded = () if spec.registration.tracking_uri else stores
    return ("rekindle.registry.client", "mlflow", *embedded)


def environment_of(spec: Spec) -> dict[str, str]:
    """What the steps of a local run see: ours, their secrets, and how ranks find each other."""
    from rekindle.platforms.code import included_hash

    secrets_of = {
        name: os.environ[ref.removeprefix("env:")]
        for name, ref in spec.platforms.local.secrets.items()
    }
    rendezvous = Rendezvous(ranks_per_node=spec.platforms.local.ranks)
    included = {INCLUDED: hash_} if (hash_ := included_hash(spec)) else {}
    return {**os.environ, **secrets_of, **rendezvous.environment(), **included}


def resolved(spec: Spec, home: Path) -> Spec:
    """`model.init_from: run:ID` becomes the folder of that run's model."""
    if not spec.model.init_from.startswith("run:"):
        return spec
    from rekindle.cli.options import find_run
    from rekindle.platforms.local.content import describe, digest, local_path

    run = find_run(home, spec.model.init_from.removeprefix("run:"))
    for step in run.steps:
        for artifact in step.artifacts.values():
            if artifact.schema_title == "system.Model":
                path = local_path(artifact.uri)
                if path and artifact.digest and digest(describe(path)) != artifact.digest:
                    raise RequestError(
                        f"the model of the run {run.run_id} changed on disk, or is gone",
                        where=str(path),
                        fix="run that run's config again: the model is made again",
                    )
                model = spec.model.model_copy(update={"init_from": artifact.uri})
                return spec.model_copy(update={"model": model})
    raise RequestError(
        f"the run {run.run_id} left no model",
        where="model.init_from",
        fix="name a run whose finetune step succeeded",
    )


def write_card(home: Path, run_id: str) -> None:
    """The card of a run, and the index of all."""
    from rekindle.report.card import render_card
    from rekindle.report.index import render_index

    if (home / "runs" / run_id / "run.json").exists():
        render_card(home, RunRecord.read(home / "runs" / run_id / "run.json"))
        render_index(home)


def new_record(
    spec: Spec, ignored: tuple[Ignored, ...], platform: str = "local", plan: Planned | None = None
) -> RunRecord:
    """The record of a run that is about to begin."""
    now = datetime.datetime.now(datetime.UTC)
    config, overrides = spec.origin
    verb = ["run"] if platform == "local" else ["submit", f"--platform={platform}"]
    words = ["rekindle", *verb, config or "CONFIG", *(f"--set={text}" for text in overrides)]
    return RunRecord(
        run_id=f"{spec.name}-{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}",
        name=spec.name,
        platform=platform,
        status="running",
        started_at=now.isoformat(timespec="seconds"),
        config=config,
        command=shlex.join(words),
        spec=spec.model_dump(mode="json"),
        ignored=ignored,
        plan=plan.model_dump(mode="json") if plan else {},
        versions={"rekindle": rekindle.__version__},
    )


def _ignored(spec: Spec) -> tuple[Ignored, ...]:
    """What the spec asks of a platform that this machine does not give."""
    asked = spec.resources
    ranks = spec.platforms.local.ranks
    notes = []
    if asked.nodes > 1 or asked.gpus_per_node:
        what = f"{ranks} processes share this machine"
        fields = (
            f"resources.nodes={asked.nodes}",
            f"resources.gpus_per_node={asked.gpus_per_node}",
        )
        notes.append(Ignored(what=what, asked_by=fields))
    if asked.spot:
        notes.append(Ignored(what="This machine is not taken away", asked_by=("resources.spot",)))
    return tuple(notes)


def summary(record: RunRecord, home: Path) -> RunSummary:
    """What `run --json` ends with."""
    return summarised(record, card=card_of(record.run_id, home))


def card_of(run_id: str, home: Path) -> str:
    """The path of a run's card."""
    return str(home.resolve() / "runs" / run_id / "card.html")


def windows(spec: Spec) -> Sequence[Spec]:
    """The spec for each window to run: `backfill` earlier ones, oldest first, then the one asked
    for.
    """
    if spec.data is None or spec.data.window is None or not spec.data.window.backfill:
        return [spec]
    window = spec.data.window
    return [
        _with_window(spec, {"offset": window.offset + back, "backfill": 0})
        for back in range(window.backfill, -1, -1)
    ]


def _with_window(spec: Spec, update: Mapping[str, Any]) -> Spec:
    assert spec.data is not None
    assert spec.data.window is not None
    data = spec.data.model_copy(update={"window": spec.data.window.model_copy(update=update)})
    config, overrides = spec.origin
    moved = spec.model_copy(update={"data": data})
    moved._origin = (config, (*overrides, *(f"data.window.{k}={v}" for k, v in update.items())))
    return moved
