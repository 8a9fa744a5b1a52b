"""A config made ready for one place, once, before anything is written, sent or started.

What follows a load starts from here: `prepare_here` for a run on this machine,
`prepare_for` for a platform. Each looks at the config, settles what it leaves open, reads
its pipeline, plans its training, and refuses with everything that is wrong at once.
`execute` and `submit_prepared` are handed the result and ask the config for none of it
again."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rekindle.app.compile import compiled
from rekindle.app.pipeline import CompiledPipeline, arguments_of, read_pipeline
from rekindle.app.plan import on_any_machine, planned, planned_here
from rekindle.app.preflight import ANYWHERE, HERE, QUICKLY_HERE, CheckResult, check_all, problems_in
from rekindle.app.preflight.files import is_folder
from rekindle.app.preflight.network import NetworkCheck
from rekindle.app.runs import find_run
from rekindle.errors import Problem, RequestError, collected
from rekindle.ir.graph import Graph
from rekindle.outputs import Planned
from rekindle.platforms.api import ConfiguredPlatform, platform_of
from rekindle.platforms.checks import Needs, run_checks
from rekindle.platforms.checks import problems as problems_of
from rekindle.platforms.local.content import describe, digest, local_path
from rekindle.platforms.submission import Definition, SubmissionPreview
from rekindle.platforms.user_code import hashes
from rekindle.records import ArtifactRecord, RunRecord
from rekindle.spec.model import Spec


class NotReadyError(RequestError):
    """A config that cannot run, with what each check found; its problems are theirs."""

    def __init__(self, findings: tuple[CheckResult, ...]) -> None:
        super().__init__(problems_in(findings))
        self.findings = findings


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A config that is ready to run on this machine."""

    spec: Spec
    """As it runs: with the layout of its plan, and the model folder of `init_from: run:ID`."""
    graph: Graph
    """Its pipeline."""
    arguments: Mapping[str, Any]
    """Values of the pipeline's parameters."""
    plan: Planned | None
    """What training takes; None where the planner does not know the model or the machine."""
    findings: tuple[CheckResult, ...]
    """What was looked at; nothing was wrong."""


@dataclasses.dataclass(frozen=True)
class PreparedSubmission:
    """A config that is ready to be sent to a platform."""

    spec: Spec
    """As it is recorded: with the machines of its plan, and the hours that its budget pays for."""
    platform: ConfiguredPlatform
    """Where it goes."""
    definition: Definition
    """What is sent."""
    plan: Planned | None
    """What training takes and costs; None where that is not known, or nothing is trained."""
    findings: tuple[CheckResult, ...]
    """What was looked at; nothing was wrong."""

    def preview(self, token: str = "") -> SubmissionPreview:
        """What a submission with this token will make; asks nothing."""
        preview = self.platform.preview(self.definition, token)
        return dataclasses.replace(preview, notices=self.definition.notices)

    def refuse_early(self) -> None:
        """Raise RequestError with the problems that the platform's early checks find."""
        results = run_checks(self.platform.checks(self.definition, Needs()), early=True)
        problems = problems_of(results)
        if problems:
            raise RequestError(dict.fromkeys(problems))


def prepare_here(spec: Spec, home: Path, *, thorough: bool = False) -> Prepared:
    """The config, ready to run on this machine; NotReadyError where it cannot.

    `thorough`: the network of an inline config is built, too, without values, which takes
    seconds."""
    looks_at_network = thorough or is_folder(spec.model.source)
    findings = [*check_all(HERE if looks_at_network else QUICKLY_HERE, spec, home)]
    if problems_in(findings):
        raise NotReadyError(tuple(findings))
    with _finding("pipeline", findings):
        spec, plan = planned_here(with_model_of_run(spec, home), home)
        graph = read_pipeline(spec, here=True).graph
        arguments = arguments_of(spec, graph, str(home.resolve()))
        hashes(spec, graph)  # refuses code that cannot be read
    if problems_in(findings):
        raise NotReadyError(tuple(findings))
    return Prepared(spec, graph, arguments, plan, tuple(findings))


def prepare_for(
    platform: str,
    spec: Spec,
    home: Path,
    pipeline: CompiledPipeline | None = None,
    *,
    is_sent: bool = True,
    trains: bool = True,
) -> PreparedSubmission:
    """The config, ready to be sent to a platform; NotReadyError where it cannot.

    `pipeline` is its own, where that has been read already. `is_sent`: the platform will
    be spoken to, so its section has to be complete. `trains`: a training will be paid, so
    its network is looked at, which takes seconds, and its limits of time and money are
    kept."""
    target = platform_of(platform, spec.platforms)
    findings: list[CheckResult] = []
    machine_problems: list[Problem] = []
    spec = on_any_machine(spec, platform, home, machine_problems)
    findings.append(CheckResult("machines", tuple(machine_problems)))
    if is_sent:
        findings.append(CheckResult("section", tuple(target.settings.missing())))
    config_findings = check_all(ANYWHERE, spec, home)
    findings += config_findings
    if trains and not problems_in(config_findings):
        findings += check_all([NetworkCheck()], spec, home)
    with _finding("definition", findings):
        pipeline = pipeline or read_pipeline(spec)
        definition = compiled(platform, spec, pipeline)
    plan = None
    if trains and not problems_in(findings):
        with _finding("limits", findings):
            plan = planned(spec, platform, home)
    if problems_in(findings):
        raise NotReadyError(tuple(findings))
    return PreparedSubmission(spec, target, definition, plan, tuple(findings))


@contextlib.contextmanager
def _finding(name: str, findings: list[CheckResult]) -> Iterator[None]:
    """Add what the block refuses to the findings, under this name, instead of raising it."""
    problems: list[Problem] = []
    with collected(problems):
        yield
    findings.append(CheckResult(name, tuple(problems)))


def with_model_of_run(spec: Spec, home: Path) -> Spec:
    """The spec with a run's model folder in the place of `model.init_from: run:ID`."""
    if not spec.model.init_from.startswith("run:"):
        return spec
    run = find_run(home, spec.model.init_from.removeprefix("run:"))
    artifact = _model_of(run)
    if artifact is None:
        raise RequestError(
            f"the run {run.run_id} left no model",
            where="model.init_from",
            fix="name a run whose finetune step succeeded",
        )
    path = local_path(artifact.uri)
    if path and artifact.digest and digest(describe(path)) != artifact.digest:
        raise RequestError(
            f"the model of the run {run.run_id} changed on disk, or is gone",
            where=str(path),
            fix="run that run's config again: the model is made again",
        )
    model = spec.model.model_copy(update={"init_from": artifact.uri})
    return spec.model_copy(update={"model": model})


def _model_of(run: RunRecord) -> ArtifactRecord | None:
    """The first model that a step of the run left."""
    for step in run.steps:
        for artifact in step.artifacts.values():
            if artifact.schema_title == "system.Model":
                return artifact
    return None
