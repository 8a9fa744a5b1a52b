"""Deployments: the champion rolled out where it serves, rolled back with its alias, looked at and
deleted."""

import contextlib
import dataclasses
import datetime
import logging
from collections.abc import Callable
from pathlib import Path

from rekindle.app import champion
from rekindle.app.notify import tell
from rekindle.app.runs import read_run
from rekindle.errors import RekindleError, RequestError, RolledBackError
from rekindle.launch.process import compute_threads, owned
from rekindle.platforms.local.endpoint import LocalEndpoint
from rekindle.platforms.platform import Platform
from rekindle.records import ChampionRecord, Deployment, RolloutEvent, VersionTraffic
from rekindle.registry.history import champion_of
from rekindle.registry.models import served_model
from rekindle.report.collect import collect, local_path
from rekindle.report.ledger import ledger
from rekindle.serve.inputs import described
from rekindle.serve.messages import BOUNDS_MS, LogTo, ServedModel, Traffic
from rekindle.serve.rollout import Endpoint, Log, Rollout, serving, stood
from rekindle.serve.verdict import quantile
from rekindle.spec.model import Spec
from rekindle.train.storage import storage_of

log = logging.getLogger(__name__)

DEPLOYMENTS, _PRECISION = "deployments", "precision"


@dataclasses.dataclass(frozen=True)
class Options:
    """How a command deploys: see `rekindle deploy --help`. `may` gets what the machines are and
    cost a day, and whether the version is new there, before anything is changed; nothing is where
    it returns False."""

    platform: str = "local"
    host: str | None = None
    port: int | None = None
    wait: bool = False
    may: Callable[[str, float | None, bool], bool] = lambda machines, usd, new: True
    on_event: Callable[[RolloutEvent], None] = lambda event: None
    on_traffic: Callable[[RolloutEvent, Traffic], None] = lambda event, traffic: None


def log_to(spec: Spec, home: Path, platform: str) -> LogTo | None:
    """Where servers on a platform log predictions, if they are to."""
    if spec.monitor is None:
        return None
    root = str(home.resolve())
    if platform != "local":
        section = getattr(spec.platforms, platform)
        section.refuse_if_incomplete()
        root = section.artifact_root.rstrip("/")
    key = spec.data.columns.key if spec.data else ""
    place = spec.monitor.log or f"{root}/predictions"
    return LogTo(place, key or "", spec.monitor.text == "store")


def served(spec: Spec, home: Path, version: str = "", platform: str = "local") -> ServedModel:
    """The champion, or this version, in the precision that the config asks for."""
    model = served_model(champion.registry_of(spec, home), spec.data, spec.task, version)
    model = dataclasses.replace(model, log=log_to(spec, home, platform))
    if not spec.deploy.precision:
        return model
    from rekindle.serve.precision import lowered

    folder, examples = home.resolve() / DEPLOYMENTS / model.name / _PRECISION, None
    for entry in ledger(home).entries:
        record = read_run(home, entry.run_id) if entry.version == model.version else None
        made = collect(record, history=False).registration if record else None
        if record and made and made.name == model.name:
            known = [found for step in record.steps if (found := step.artifacts.get("examples"))]
            examples = local_path(known[0].kept or known[0].uri) if known else None
    asked = spec.deploy
    return lowered(model, asked.precision, examples, asked.max_precision_loss, folder)


def deploy(spec: Spec, home: Path, options: Options) -> Deployment | None:
    """Roll the champion out. Raises RolledBackError, and tells `notify`, where it had to be rolled
    back, which moves the alias back, too."""
    where = champion.registry_of(spec, home)
    with _alone(spec, home, options.platform):
        model = served(spec, home, platform=options.platform)
        rollout = _rollout(spec, home, options)
        if options.platform == "local":
            rollout.endpoint.standing()  # refuses where another program has the port
        machines, usd = rollout.endpoint.usd_per_day()
        _within_budget(spec, machines, usd)
        last, change = rollout.log.last(), champion_of(where).change
        if not options.may(machines, usd, serving(last) != model.version):
            return None
        rollout.inputs = described(model)
        if spec.deploy.shadow and (now := serving(last)) not in ("", model.version):
            rollout.before = served(spec, home, now, options.platform)
        back = last if last and last.state == "rolled_back" and last.previous else None
        if not (back and back.version == model.version and change and change.at <= back.at):
            last = rollout.to(model)  # else only the alias is left to do
        if last and last.state == "rolled_back" and last.version == model.version:
            kept = f"version {last.previous} answers" if last.previous else "no version answers"
            what = f"version {last.version} was rolled back, {kept}: {last.reason}"
            fix = "`rekindle promote RUN --reason WHY` makes it champion again, for another try"
            if last.previous and champion_of(where).version == model.version:
                champion.roll_back(home, where, last.reason, last.previous)
                try:
                    champion.publish(spec, home)
                except RekindleError as error:
                    what += f"; this was not published: {error.problems[0].what}"
                    fix = f"`rekindle rollback {model.name} --to {last.previous}` publishes it"
            tell(spec.notify, "failure", f"{spec.name}: {what}")
            raise RolledBackError(what, fix=fix)
        return shown(spec, home, options.platform)


def roll_back(
    spec: Spec, home: Path, reason: str, to: str, options: Options | None = None
) -> tuple[str, str]:
    """Move the alias back, and the requests of the deployments of this home, or of the one that
    `options` name; returns the versions before and after."""
    where = champion.registry_of(spec, home)
    moved = champion.roll_back(home, where, reason, to, by_hand=True)
    champion.publish(spec, home)
    folder = home.resolve() / DEPLOYMENTS / spec.model_name
    here = sorted({e.name for e in folder.iterdir()} - {_PRECISION}) if folder.is_dir() else []
    for platform in [options.platform] if options else here:
        with _alone(spec, home, platform):
            rollout = _rollout(spec, home, options or Options(platform))
            last = rollout.log.last()
            if last is None or last.state in ("delete", "deleted"):
                continue
            model = served(spec, home, moved[1], platform)
            if last.previous == moved[1] and last.version != moved[1]:
                rollout.endpoint.create(model, last.number)  # it may have ended since
                rollout.back(reason)
            else:
                # a person decided, whatever clients have to send from now on
                at_once = {"canary": (), "allow_other_inputs": True}
                rollout.spec = spec.deploy.model_copy(update=at_once)
                rollout.inputs = described(model)
                rollout.to(model)
    return moved


def delete(spec: Spec, home: Path, options: Options) -> Deployment:
    """End the deployment."""
    with _alone(spec, home, options.platform):
        _rollout(spec, home, options).delete()
    return shown(spec, home, options.platform)


def shown(spec: Spec, home: Path, platform: str) -> Deployment:
    """The deployment of a config's model as it is now."""
    rollout = _rollout(spec, home, Options(platform))
    events = rollout.log.events()
    if not events:
        what = f"{spec.model_name} is not deployed on {platform}"
        raise RequestError(what, fix="`rekindle deploy CONFIG` deploys its champion")
    standing = rollout.endpoint.standing() if events[-1].state != "deleted" else {}
    seen = rollout.endpoint.observe() if standing else {}
    hours, usd = stood(events, datetime.datetime.now(datetime.UTC)), None
    with contextlib.suppress(RequestError):  # the config allows no deployment any more
        usd = rollout.endpoint.usd_per_day()[1]
    return Deployment(
        name=spec.model_name,
        platform=platform,
        address=rollout.endpoint.address,
        versions={v: _traffic(*now, seen.get(v, Traffic(0, 0, ()))) for v, now in standing.items()},
        events=tuple(events),
        version_hours=hours,
        usd=None if usd is None else usd * hours / 24,
    )


def champion_here(spec: Spec, home: Path) -> ChampionRecord:
    """The champion of the config's model, its history, and where on this machine it answers."""
    found = champion_of(champion.registry_of(spec, home))
    rollout = _rollout(spec, home, Options())
    last = rollout.log.last()
    if last and last.state != "deleted" and found.version in (*last.shares, serving(last)):
        with contextlib.suppress(RequestError):  # another program has the port
            if rollout.endpoint.standing():
                return found.model_copy(update={"serves_at": (rollout.endpoint.address,)})
    return found


def _within_budget(spec: Spec, machines: str, usd: float | None) -> None:
    budget = spec.deploy.budget_usd_per_day
    if budget is not None and (usd is None or usd > budget):
        cost = "at an unknown price" if usd is None else f"at ${usd:,.2f} a day"
        what = f"a version on {machines} {cost} is not within ${budget:,.2f} a day"
        fix = "raise it, or name a smaller deploy.machine"
        raise RequestError(what, where="deploy.budget_usd_per_day", fix=fix)


def _traffic(state: str, share: int, traffic: Traffic) -> VersionTraffic:
    answered = sum(traffic.latencies)
    p50, p99 = (BOUNDS_MS[quantile(traffic, q)] if answered else None for q in (0.5, 0.99))
    return VersionTraffic(
        state=state,
        share=share,
        requests=traffic.requests,
        errors=traffic.errors,
        p50_ms=p50,
        p99_ms=p99,
        refused=traffic.refused,
    )


def _alone(spec: Spec, home: Path, platform: str) -> contextlib.AbstractContextManager[None]:
    waits = "another command moves this deployment; waiting for it"
    return owned(_folder(spec, home, platform), lambda: log.warning("%s", waits))


def _folder(spec: Spec, home: Path, platform: str) -> Path:
    return home.resolve() / DEPLOYMENTS / spec.model_name / platform


def _rollout(spec: Spec, home: Path, options: Options) -> Rollout:
    """The deployment on a platform; its log lies where all who deploy there see it."""
    name, folder = spec.model_name, _folder(spec, home, options.platform)
    if options.platform == "local":
        endpoint: Endpoint = LocalEndpoint(folder, options.host, options.port, compute_threads())
        storage = storage_of(folder / "log")
    else:
        section = getattr(spec.platforms, options.platform)
        section.refuse_if_incomplete()
        endpoint = Platform.of(options.platform, spec.platforms).endpoint(spec.deploy, name)
        storage = storage_of(f"{section.artifact_root.rstrip('/')}/deployments/{name}/log")
    events = Log(storage, options.on_event)
    return Rollout(endpoint, events, spec.deploy, options.wait, options.on_traffic)
