"""Which versions were champion, since when and why: numbered tags of the registered
model, each written before the alias moves. An entry that the alias does not follow was
interrupted; the same command completes it.

MLflow keeps no history of aliases, and without one the next run over the same data
promoted a model that had been rolled back. Such a version has the tag `decision` =
`rolled_back`, too, which `register` respects and only `promote --reason` overrides.
Rejected: a file under the home, because other machines move the alias, too; deleting the
version, because its evidence goes with it. The cost is a tag for each promotion."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

from rekindle.records import ChampionChange, ChampionRecord, ChangeKind
from rekindle.registry.client import PREFIX, tags_of
from rekindle.registry.models import CHALLENGER, CHAMPION, Registry, by_alias

if TYPE_CHECKING:
    from mlflow import MlflowClient

CHANGE = f"{PREFIX}champion."
MOST_LETTERS = 2_000  # of a reason: MLflow's tags hold 5,000


def changes(client: MlflowClient, name: str) -> list[ChampionChange]:
    """The history of the model's champions, oldest first."""
    tags = dict(client.get_registered_model(name).tags)
    numbers = sorted(key for key in tags if key.startswith(CHANGE))
    return [ChampionChange.model_validate_json(tags[key]) for key in numbers]


def note(client: MlflowClient, name: str, version: str, how: ChangeKind, reason: str) -> None:
    """Add that the version becomes champion, unless that is the last entry already."""
    earlier = changes(client, name)
    if earlier and earlier[-1].version == version:
        return
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    change = ChampionChange(version=version, at=now, how=how, reason=reason[:MOST_LETTERS])
    client.set_registered_model_tag(name, f"{CHANGE}{len(earlier) + 1:06}", change.to_json())


def champion_before(client: MlflowClient, where: Registry, now: str) -> str:
    """The champion before `now` that was not rolled back itself; RegistryError without one."""
    history = changes(client, where.name)
    if history and history[-1].how == "rollback" and history[-1].version != now:
        return history[-1].version  # interrupted between this entry and the alias
    earlier = [change.version for change in history]
    while earlier and earlier.pop() != now:
        pass  # until only what came before `now` is left
    candidates = earlier[::-1]
    beaten = tags_of(client.get_model_version(where.name, now)).get("beaten", "")
    if beaten:
        candidates.append(beaten)
    for version in dict.fromkeys(candidates):
        if version != now and existing(client, where, version).get("decision") != "rolled_back":
            return version
    message = f"version {now} of {where.name} is the first champion, or all before were rolled back"
    raise where.error(message, "name a version that passed its gate: --to N")


def existing(client: MlflowClient, where: Registry, version: str) -> dict[str, str]:
    """The tags of a version. Raises RegistryError where it is gone."""
    from mlflow.exceptions import MlflowException

    try:
        return tags_of(client.get_model_version(where.name, version))
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        message = f"version {version} of {where.name} does not exist, or was deleted"
        fix = "name another version with --to; `rekindle champion` lists those that were champion"
        raise where.error(message, fix) from None


def way_back(where: Registry) -> tuple[str, str]:
    """The champion, and the version that a roll back leads to. Raises RegistryError."""
    now = champion_of(where).version
    with where.open(f"ask for the champion before version {now}") as client:
        return now, champion_before(client, where, now)


def champion_of(where: Registry) -> ChampionRecord:
    """The champion, since when and on what evidence. Raises RegistryError where there is none."""
    with where.open(f"ask for the champion of {where.name}") as client:
        version = by_alias(client, where, CHAMPION)
        if version is None:
            message = f"{where.name} has no champion"
            raise where.error(message, "`rekindle run CONFIG` trains a candidate")
        challenger = by_alias(client, where, CHALLENGER)
        history = changes(client, where.name)
        tags = tags_of(version)
    now = str(version.version)
    own_changes = [change for change in history if change.version == now]
    metrics = {}
    for name, value in tags.items():
        if name.startswith("metric."):
            metrics[name.removeprefix("metric.")] = float(value)
    return ChampionRecord(
        name=where.name,
        version=now,
        digest=tags.get("model_digest", ""),
        change=own_changes[-1] if own_changes else None,
        beaten=tags.get("beaten", ""),
        reason=tags.get("reason", ""),
        metrics=metrics,
        window=tags.get("window", ""),
        run_key=tags.get("run_key", ""),
        challenger=str(challenger.version) if challenger else "",
        history=tuple(history),
        unfinished=bool(history) and history[-1].version != now,
        tracking_uri=where.shown_uri,
    )
