"""Deployments: the champion rolled out where it serves, rolled back with its alias, looked at and
deleted."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rekindle.app import champion
from rekindle.errors import RequestError, StepError
from rekindle.launch.process import owned
from rekindle.platforms.local.endpoint import LocalEndpoint
from rekindle.records import Deployment, RolloutEvent, VersionTraffic
from rekindle.registry.history import champion_of
from rekindle.registry.served import served_model
from rekindle.serve.deployed import BOUNDS_MS, Traffic
from rekindle.serve.rollout import Log, Rollout, serving
from rekindle.serve.verdict import quantile
from rekindle.spec.model import Spec
from rekindle.train.storage import storage_of

log = logging.getLogger(__name__)

DEPLOYMENTS = "deployments"
_POLL_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class Options:
    """How a command deploys: see `rekindle deploy --help`."""

    host: str | None = None
    port: int | None = None
    wait: bool = False
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    on_event: Callable[[RolloutEvent], None] = lambda event: None
    on_traffic: Callable[[RolloutEvent, Traffic], None] = lambda event, traffic: None


def deploy(spec: Spec, home: Path, options: Options) -> Deployment:
    """Roll the champion out. Raises StepError where it had to be rolled back, which moves the alias
    back, too."""
    where = champion.registry_of(spec, home)
    model = served_model(where, spec)
    with _alone(spec.model_name, home):
        rollout = _rollout(spec, home, options)
        last, change = rollout.log.last(), champion_of(where).change
        was_back = (
            last is not None and last.state == "rolled_back" and last.version == model.version
        )
        if not (was_back and last and last.previous and change and change.at <= last.at):
            last = rollout.to(model)  # else only the alias is left to do
        assert last is not None
        if last.state == "rolled_back" and last.version == model.version:
            kept = f"version {last.previous} answers" if last.previous else "no version answers"
            if last.previous:
                champion.roll_back(home, where, last.reason, last.previous)
            raise StepError(
                f"version {last.version} was rolled back, {kept}: {last.reason}",
                fix="`rekindle promote RUN --reason WHY` makes it champion again, for another try",
            )
        return shown(spec, home)


def roll_back(spec: Spec, home: Path, reason: str, to: str, options: Options) -> tuple[str, str]:
    """Move the alias back, and the requests of the deployment, if there is one; returns the
    versions before and after."""
    where = champion.registry_of(spec, home)
    moved = champion.roll_back(home, where, reason, to)
    with _alone(spec.model_name, home):
        rollout = _rollout(spec, home, options)
        last = rollout.log.last()
        if last is not None and last.state not in ("delete", "deleted"):
            if last.previous == moved[1] and last.version != moved[1]:
                rollout.back(reason)
            else:
                rollout.spec = spec.deploy.model_copy(update={"canary": ()})
                rollout.to(served_model(where, spec, moved[1]))
    return moved


def delete(spec: Spec, home: Path, options: Options) -> Deployment:
    """End the deployment."""
    with _alone(spec.model_name, home):
        _rollout(spec, home, options).delete()
    return shown(spec, home)


def shown(spec: Spec, home: Path) -> Deployment:
    """The deployment of a config's model as it is now."""
    endpoint = LocalEndpoint(_folder(spec.model_name, home), None, None, {})
    events = _log(spec.model_name, home, lambda event: None).events()
    if not events:
        what = f"{spec.model_name} is not deployed here"
        raise RequestError(what, fix="`rekindle deploy CONFIG` deploys its champion")
    status = endpoint.status() if events[-1].state != "deleted" else None
    versions = {
        version: _traffic(one.state, endpoint.wanted.shares.get(version, 0), one.traffic)
        for version, one in (status.versions if status else {}).items()
    }
    return Deployment(
        name=spec.model_name, platform="local", address=endpoint.address, versions=versions,
        events=tuple(events),
    )  # fmt: skip


def serving_at(spec: Spec, home: Path, version: str) -> Iterator[str]:
    """Addresses at which this version of the config's model answers."""
    last = _log(spec.model_name, home, lambda event: None).last()
    if last and last.state != "deleted" and version in (*last.shares, serving(last)):
        yield LocalEndpoint(_folder(spec.model_name, home), None, None, {}).address


def _traffic(state: str, share: int, traffic: Traffic) -> VersionTraffic:
    answered = sum(traffic.latencies)
    p50, p99 = (BOUNDS_MS[quantile(traffic, q)] if answered else None for q in (0.5, 0.99))
    return VersionTraffic(
        state=state, share=share, requests=traffic.requests, errors=traffic.errors, p50_ms=p50,
        p99_ms=p99,
    )  # fmt: skip


def _is_back(last: RolloutEvent | None, version: str) -> bool:
    """Whether the version was rolled back to one before it."""
    back = last is not None and last.state == "rolled_back" and last.version == version
    return back and last is not None and bool(last.previous)


def _alone(name: str, home: Path) -> contextlib.AbstractContextManager[None]:
    waits = "another command moves this deployment; waiting for it"
    return owned(_folder(name, home), lambda: log.warning("%s", waits))


def _folder(name: str, home: Path) -> Path:
    return home.resolve() / DEPLOYMENTS / name / "local"


def _log(name: str, home: Path, on_event: Callable[[RolloutEvent], None]) -> Log:
    return Log(storage_of(_folder(name, home) / "log"), on_event)


def _rollout(spec: Spec, home: Path, options: Options) -> Rollout:
    folder = _folder(spec.model_name, home)
    endpoint = LocalEndpoint(folder, options.host, options.port, options.environment)
    log = _log(spec.model_name, home, options.on_event)
    return Rollout(endpoint, log, spec.deploy, _POLL_SECONDS, options.wait, options.on_traffic)
