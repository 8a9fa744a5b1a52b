"""Deployments: rolls champions out, and back with their alias; shows and deletes them."""

import contextlib
import dataclasses
import datetime
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from rekindle.app import champion
from rekindle.app.notify import tell
from rekindle.app.runs import read_run
from rekindle.errors import RekindleError, RequestError, RolledBackError
from rekindle.launch.process import compute_threads, owned
from rekindle.platforms.api import endpoint_of, platform_of
from rekindle.platforms.local.endpoint import LocalEndpoint
from rekindle.records import (
    ChampionChange,
    ChampionRecord,
    Deployment,
    RolloutEvent,
    VersionTraffic,
)
from rekindle.registry.history import champion_of
from rekindle.registry.models import Registry, served_model
from rekindle.report.collect import collect, local_path
from rekindle.report.ledger import ledger
from rekindle.serve.inputs import described
from rekindle.serve.messages import BOUNDS_MS, LogTo, ServedModel, Traffic
from rekindle.serve.rollout import Endpoint, Rollout, RolloutLog, serving, version_hours
from rekindle.serve.verdict import quantile
from rekindle.spec.model import Spec

log = logging.getLogger(__name__)

DEPLOYMENTS = "deployments"  # folder of a home
_PRECISION = "precision"  # folder beside those of platforms, with what lower precisions lose
_ENDED = ("delete", "deleted")


@dataclasses.dataclass(frozen=True)
class DeployOptions:
    """How a command deploys: see `rekindle deploy --help`.

    `may` gets what the machines are and cost a day, and whether the version is new there,
    before anything is changed; where it returns False, nothing is changed."""

    platform: str = "local"
    host: str | None = None
    port: int | None = None
    wait: bool = False
    may: Callable[[str, float | None, bool], bool] = lambda machines, usd, new: True
    on_event: Callable[[RolloutEvent], None] = lambda event: None
    on_traffic: Callable[[RolloutEvent, Traffic], None] = lambda event, traffic: None


def log_to(spec: Spec, home: Path, platform: str) -> LogTo | None:
    """The place where servers on a platform log predictions; None for no log."""
    if spec.monitor is None:
        return None
    if platform == "local":
        root = str(home.resolve())
    else:
        section = spec.platforms.section(platform)
        section.refuse_if_incomplete()
        root = section.artifact_root.rstrip("/")
    key = spec.data.columns.key if spec.data else None
    folder = spec.monitor.log or f"{root}/predictions"
    return LogTo(folder, key or "", spec.monitor.text == "store")


def model_to_serve(
    spec: Spec, home: Path, version: str = "", platform: str = "local"
) -> ServedModel:
    """The champion, or this version, in the precision that the config asks for."""
    model = served_model(champion.registry_of(spec, home), spec.data, spec.task, version)
    model = dataclasses.replace(model, log=log_to(spec, home, platform))
    if not spec.deploy.precision:
        return model
    from rekindle.serve.precision import lowered

    folder = home.resolve() / DEPLOYMENTS / model.name / _PRECISION
    examples = _examples_of(model, home)
    return lowered(model, spec.deploy.precision, examples, spec.deploy.max_precision_loss, folder)


def _examples_of(model: ServedModel, home: Path) -> Path | None:
    """The folder with the examples of the run that made a version, the last such run;
    None where no run under `home` did, or left them."""
    examples: Path | None = None
    for entry in ledger(home).entries:
        if entry.version != model.version:
            continue
        record = read_run(home, entry.run_id)
        registration = collect(record, history=False).registration
        if registration is None or registration.name != model.name:
            continue
        examples = None
        for step in record.steps:
            artifact = step.artifacts.get("examples")
            if artifact is not None:
                examples = local_path(artifact.kept or artifact.uri)
                break
    return examples


def deploy(spec: Spec, home: Path, options: DeployOptions) -> Deployment | None:
    """Roll the champion out; None where `options.may` refuses.

    Raises RolledBackError, and tells `notify`, where the version had to be rolled back,
    which moves the alias back, too."""
    registry = champion.registry_of(spec, home)
    with _exclusive(spec, home, options.platform):
        model = model_to_serve(spec, home, platform=options.platform)
        rollout = _rollout(spec, home, options)
        if options.platform == "local":
            rollout.endpoint.standing()  # refuses where another program has the port
        machines, usd = rollout.endpoint.usd_per_day()
        _refuse_above_budget(spec, machines, usd)
        last = rollout.log.last()
        change = champion_of(registry).change
        version_before = serving(last)
        if not options.may(machines, usd, version_before != model.version):
            return None
        rollout.inputs = described(model)
        if spec.deploy.shadow and version_before not in ("", model.version):
            rollout.before = model_to_serve(spec, home, version_before, options.platform)
        # else a command ended between the roll back and the move of the alias
        if not _was_rolled_back(last, model, change):
            last = rollout.to(model)
        if last and last.state == "rolled_back" and last.version == model.version:
            _end_roll_back(spec, home, registry, last)
        return deployment_of(spec, home, options.platform)


def _was_rolled_back(
    last: RolloutEvent | None, model: ServedModel, change: ChampionChange | None
) -> bool:
    """Whether this version was rolled back and only the alias is left to be moved: it has
    not become champion again since."""
    if last is None or last.state != "rolled_back" or not last.previous:
        return False
    if last.version != model.version or change is None:
        return False
    return change.at <= last.at


def _end_roll_back(spec: Spec, home: Path, registry: Registry, last: RolloutEvent) -> NoReturn:
    """Move the alias to the version that answers again, and tell `notify`.

    Always raises RolledBackError."""
    answering = f"version {last.previous} answers" if last.previous else "no version answers"
    message = f"version {last.version} was rolled back, {answering}: {last.reason}"
    fix = "`rekindle promote RUN --reason WHY` makes it champion again, for another try"
    # the champion is the version that answers
    if last.previous and champion_of(registry).version == last.version:
        champion.roll_back(home, registry, last.reason, last.previous)
        try:
            champion.publish(spec, home)
        # the user has to know both: it went back, and this was not published
        except RekindleError as error:
            message += f"; this was not published: {error.problems[0].what}"
            fix = f"`rekindle rollback {registry.name} --to {last.previous}` publishes it"
    tell(spec.notify, "failure", f"{spec.name}: {message}")
    raise RolledBackError(message, fix=fix)


def roll_back(
    spec: Spec, home: Path, reason: str, to: str, options: DeployOptions | None = None
) -> tuple[str, str]:
    """Move the alias back, and the requests of the deployments of this home, or of the
    one that `options` name; returns the versions before and after."""
    registry = champion.registry_of(spec, home)
    versions = champion.roll_back(home, registry, reason, to, by_hand=True)
    champion.publish(spec, home)
    platforms = [options.platform] if options else _platforms_deployed_to(spec, home)
    for platform in platforms:
        with _exclusive(spec, home, platform):
            rollout = _rollout(spec, home, options or DeployOptions(platform))
            _roll_back_requests(spec, home, platform, rollout, versions[1], reason)
    return versions


def _platforms_deployed_to(spec: Spec, home: Path) -> list[str]:
    folder = home.resolve() / DEPLOYMENTS / spec.model_name
    if not folder.is_dir():
        return []
    return sorted({path.name for path in folder.iterdir()} - {_PRECISION})


def _roll_back_requests(
    spec: Spec, home: Path, platform: str, rollout: Rollout, version: str, reason: str
) -> None:
    """Have `version` answer the requests of a deployment again."""
    last = rollout.log.last()
    if last is None or last.state in _ENDED:
        return
    model = model_to_serve(spec, home, version, platform)
    if last.previous == version and last.version != version:
        rollout.endpoint.create(model, last.number)  # it may have ended since
        rollout.back(reason)
    else:
        # a person decided, whatever clients have to send from now on
        at_once = {"canary": (), "allow_other_inputs": True}
        rollout.spec = spec.deploy.model_copy(update=at_once)
        rollout.inputs = described(model)
        rollout.to(model)


def delete(spec: Spec, home: Path, options: DeployOptions) -> Deployment:
    """End the deployment."""
    with _exclusive(spec, home, options.platform):
        _rollout(spec, home, options).delete()
    return deployment_of(spec, home, options.platform)


def deployment_of(spec: Spec, home: Path, platform: str) -> Deployment:
    """The deployment of a config's model as it is now.

    RequestError where there is none."""
    rollout = _rollout(spec, home, DeployOptions(platform))
    endpoint = rollout.endpoint
    events = rollout.log.events()
    if not events:
        raise RequestError(
            f"{spec.model_name} is not deployed on {platform}",
            fix="`rekindle deploy CONFIG` deploys its champion",
        )
    standing: Mapping[str, tuple[str, int]] = {}
    if events[-1].state != "deleted":
        standing = endpoint.standing()
    traffic: Mapping[str, Traffic] = endpoint.observe() if standing else {}
    versions = {}
    for version, (state, share) in standing.items():
        versions[version] = _traffic(state, share, traffic.get(version, Traffic(0, 0, ())))
    hours = version_hours(events, datetime.datetime.now(datetime.UTC))
    usd_per_day = None
    with contextlib.suppress(RequestError):  # the config allows no deployment any more
        _, usd_per_day = endpoint.usd_per_day()
    return Deployment(
        name=spec.model_name,
        platform=platform,
        address=endpoint.address,
        versions=versions,
        events=tuple(events),
        version_hours=hours,
        usd=None if usd_per_day is None else usd_per_day * hours / 24,
    )


def champion_here(spec: Spec, home: Path) -> ChampionRecord:
    """The champion of a config's model, with its history and its addresses here."""
    record = champion_of(champion.registry_of(spec, home))
    rollout = _rollout(spec, home, DeployOptions())
    last = rollout.log.last()
    if last is None or last.state == "deleted":
        return record
    if record.version in (*last.shares, serving(last)):
        with contextlib.suppress(RequestError):  # another program has the port
            if rollout.endpoint.standing():
                return record.model_copy(update={"serves_at": (rollout.endpoint.address,)})
    return record


def _refuse_above_budget(spec: Spec, machines: str, usd: float | None) -> None:
    budget = spec.deploy.budget_usd_per_day
    if budget is None:
        return
    if usd is None or usd > budget:
        cost = "at an unknown price" if usd is None else f"at ${usd:,.2f} a day"
        raise RequestError(
            f"a version on {machines} {cost} is not within ${budget:,.2f} a day",
            where="deploy.budget_usd_per_day",
            fix="raise it, or name a smaller deploy.machine",
        )


def _traffic(state: str, share: int, traffic: Traffic) -> VersionTraffic:
    p50_ms = None
    p99_ms = None
    if sum(traffic.latencies):
        p50_ms = BOUNDS_MS[quantile(traffic, 0.5)]
        p99_ms = BOUNDS_MS[quantile(traffic, 0.99)]
    return VersionTraffic(
        state=state,
        share=share,
        requests=traffic.requests,
        errors=traffic.errors,
        p50_ms=p50_ms,
        p99_ms=p99_ms,
        refused=traffic.refused,
    )


def _exclusive(spec: Spec, home: Path, platform: str) -> contextlib.AbstractContextManager[None]:
    """Hold the deployment for the block; waits for other commands that move it."""
    message = "another command moves this deployment; waiting for it"
    return owned(_folder(spec, home, platform), lambda: log.warning("%s", message))


def _folder(spec: Spec, home: Path, platform: str) -> Path:
    return home.resolve() / DEPLOYMENTS / spec.model_name / platform


def _rollout(spec: Spec, home: Path, options: DeployOptions) -> Rollout:
    """The deployment on a platform; its log lies where all who deploy there see it."""
    name = spec.model_name
    if options.platform == "local":
        folder = _folder(spec, home, options.platform)
        endpoint: Endpoint = LocalEndpoint(folder, options.host, options.port, compute_threads())
        log_root = str(folder / "log")
    else:
        target = platform_of(options.platform, spec.platforms)
        target.settings.refuse_if_incomplete()
        endpoint = endpoint_of(target, spec.deploy, name)
        log_root = f"{target.settings.artifact_root.rstrip('/')}/deployments/{name}/log"
    events = RolloutLog(log_root, options.on_event)
    return Rollout(endpoint, events, spec.deploy, options.wait, options.on_traffic)
