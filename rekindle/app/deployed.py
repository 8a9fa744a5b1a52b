"""Deployments for the notebook: the champion, where it answers, and back."""

from collections.abc import Sequence
from pathlib import Path

from rekindle.app import deploy as deployments
from rekindle.app.champion import registry_of
from rekindle.app.runs import DEFAULT_HOME, wanted
from rekindle.records import ChampionRecord, Deployment
from rekindle.registry.history import champion_of
from rekindle.spec.load import load_target
from rekindle.spec.model import Spec


def deploy(
    spec: Spec | str | Path, overrides: Sequence[str] = (), *, platform: str = "local",
    port: int | None = None, wait: bool = False, home: str | Path = DEFAULT_HOME,
) -> Deployment:  # fmt: skip
    """Roll the champion out; with `wait` until the canary has had its requests, else call it again.
    Raises RekindleError where it was rolled back. Nothing is asked, as `rekindle deploy` does."""
    resolved = spec if isinstance(spec, Spec) else load_target(spec, overrides)
    options = deployments.Options(platform, port=port, wait=wait)
    found = deployments.deploy(resolved, Path(home), options)
    assert found is not None  # it may
    return found


def champion(target: Spec | str | None = None, home: str | Path = DEFAULT_HOME) -> ChampionRecord:
    """Which version is champion, of the model of a spec, a name, a run or a config (None: of the
    latest run), with its history and where it answers here."""
    spec = _spec(target, home)
    found = champion_of(registry_of(spec, Path(home)))
    at = tuple(deployments.serving_at(spec, Path(home), found.version))
    return found.model_copy(update={"serves_at": at})


def rollback(
    target: Spec | str | None, reason: str, to: str = "", home: str | Path = DEFAULT_HOME
) -> ChampionRecord:
    """Make the champion before, or `to`, the champion again; deployments of this home follow."""
    spec = _spec(target, home)
    deployments.roll_back(spec, Path(home), reason, to)
    return champion(spec, home)


def _spec(target: Spec | str | None, home: str | Path) -> Spec:
    return target if isinstance(target, Spec) else wanted(target, Path(home))[0]
