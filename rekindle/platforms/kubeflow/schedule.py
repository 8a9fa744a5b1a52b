"""Schedules of Kubeflow Pipelines, which are recurring runs: how one is written there, and how it
is set, listed, paused and taken away.

A recurring run cannot be changed: another takes its place, and it goes away when that is there. Its
cron has seconds, and the clock of the controller (platforms.kubeflow.timezone).

Authority: kfp 2.17's client. No cluster has run it."""

from __future__ import annotations

from typing import Any

from rekindle.errors import PlatformError, UnsupportedError
from rekindle.platforms.definition import Definition
from rekindle.platforms.kubeflow.client import (
    Server,
    connected,
    equals,
    experiment_of,
    where,
    written,
)
from rekindle.platforms.submission import Schedule, digest_of
from rekindle.spec.places import KubeflowSpec
from rekindle.spec.schedule import ScheduleSpec

_MARK = "rekindle"  # begins the description of what is ours
_SECTION = "platforms.kubeflow"


def set_(
    definition: Definition, place: KubeflowSpec, schedule: ScheduleSpec, name: str
) -> Schedule:
    """The recurring run of the config `name`: the one that is there if it is this, else a new one
    in place of those that were."""
    cron = lowered(schedule, place)
    described = f"{_MARK} {digest_of(definition.files, cron)} {schedule.cron}"
    with connected(place) as server, written(definition) as file:
        kfp = server.kfp
        experiment = experiment_of(server, definition)

        def same() -> Any:
            listed = _recurring(server, name)
            return next((one for one in listed if one.description == described), None)

        made = server.call(same) or server.created(
            lambda: kfp.create_recurring_run(
                experiment, name, described, cron_expression=cron, max_concurrency=1,
                no_catchup=True, pipeline_package_path=str(file),
                service_account=place.service_account,
            ),
            same,
        )  # fmt: skip
        if str(made.status) == "DISABLED":
            server.call(kfp.enable_recurring_run, made.recurring_run_id)
        for other in server.call(_recurring, server, name):
            if other.recurring_run_id != made.recurring_run_id:
                _deleted(server, other)
        return _shown(server.call(kfp.get_recurring_run, made.recurring_run_id), place)


def list_(place: KubeflowSpec) -> tuple[Schedule, ...]:
    """Recurring runs that were set here, those that pause too, by name."""
    with connected(place) as server:
        found = server.call(_recurring, server)
        return tuple(sorted((_shown(one, place) for one in found), key=lambda one: one.id))


def pause(place: KubeflowSpec, name: str) -> Schedule:
    """The recurring run of the config `name`, which starts nothing until it is set again."""
    with connected(place) as server:
        found = server.call(_recurring, server, name)
        if not found:
            raise PlatformError(
                f"there is no schedule `{name}`", where=where(place), fix="rekindle schedule list"
            )
        for one in found:
            server.call(server.kfp.disable_recurring_run, one.recurring_run_id)
        return _shown(server.call(server.kfp.get_recurring_run, found[0].recurring_run_id), place)


def delete(place: KubeflowSpec, name: str) -> bool:
    """Whether there was one to take away."""
    with connected(place) as server:
        found = server.call(_recurring, server, name)
        for one in found:
            _deleted(server, one)
        return bool(found)


def lowered(schedule: ScheduleSpec, place: KubeflowSpec) -> str:
    """The expression: `0 3 * * 1` is ``0 0 3 * * 1``, since the service reads five fields as if
    they began with seconds. UnsupportedError for another time zone than the controller's."""
    if schedule.timezone != place.timezone:
        raise UnsupportedError(
            f"the cluster's schedules follow the clock of {place.timezone}, not of "
            f"{schedule.timezone}", where="schedule.timezone",
            fix="write the line for that clock, or, where CRON_SCHEDULE_TIMEZONE of the controller "
            f"says otherwise, set {_SECTION}.timezone",
        )  # fmt: skip
    return f"0 {' '.join(schedule.cron.split())}"


def _recurring(server: Server, name: str = "") -> list[Any]:
    """Recurring runs that are ours, of a config or all, the oldest first."""
    found, page_token = list[Any](), ""
    while True:
        listed = server.kfp.list_recurring_runs(
            page_token=page_token, page_size=100, sort_by="created_at", namespace=server.namespace,
            filter=equals("display_name", name) if name else None,
        )  # fmt: skip
        found += listed.recurring_runs or ()
        page_token = listed.next_page_token
        if not page_token:
            break
    return [one for one in found if (one.description or "").startswith(f"{_MARK} ")]


def _deleted(server: Server, one: Any) -> None:
    from kfp_server_api import ApiException

    try:
        server.call(server.kfp.delete_recurring_run, one.recurring_run_id)
    except ApiException as error:
        if error.status != 404:  # somebody else took it away
            raise


def _shown(found: Any, place: KubeflowSpec) -> Schedule:
    cron = str(found.description).split(" ", 2)[2]
    return Schedule(found.display_name, cron, place.timezone, str(found.status) == "ENABLED")
