"""Schedules of Kubeflow Pipelines, which are recurring runs.

A recurring run cannot be changed: another takes its place, and the older goes away when that is
there; of several of one name, left by whatever was cut off, the newest stays. Its cron begins with
seconds, and follows the clock of the controller (platforms.kubeflow.timezone). The controller
starts what fell due as soon as it may: after the run before it, after it was down, and after a
pause. So one that paused is created again, unless missed starts are to be made up for.

Authority: kfp 2.17's client; kubeflow/pipelines,
backend/src/crd/controller/scheduledworkflow/util/{scheduled_workflow,cron_schedule}.go. No cluster
has run it."""

import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rekindle.errors import PlatformError, Problem, UnsupportedError
from rekindle.outputs import Schedule
from rekindle.platforms import submission
from rekindle.platforms.kubeflow import client
from rekindle.platforms.submission import Definition, Lowered, digest_of, newest, no_schedule
from rekindle.spec import cron
from rekindle.spec.platforms import KubeflowSpec
from rekindle.spec.schedule import ScheduleSpec
from rekindle.tables import rows

_MARK = "rekindle"  # begins the description of what is ours
_MOST = 10  # runs at once that the controller allows (maxMaxConcurrency)
_TURNS = 3
_problem = submission.problems_in(__file__)


def lowered(schedule: ScheduleSpec, place: KubeflowSpec) -> Lowered:
    """The schedule as the cluster has it: `0 3 * * mon` is ``0 0 3 * * 1``, since the service reads
    five fields as if they began with seconds. UnsupportedError for what it cannot do."""
    if problems := list(_problems(schedule, place)):
        raise UnsupportedError(problems)
    words = rows(Path(__file__).with_suffix(".yaml"))
    how = "catch_up" if schedule.catch_up else "leave_out"
    overlap = words["overlap"]["parallel" if schedule.overlap == "parallel" else how]
    line = f"0 {cron.written(schedule.cron)}"
    said = overlap.format(most=_MOST), words["missed"][how], words["clocks"]
    return Lowered(line, place.timezone, *said)


def set_(
    definition: Definition, place: KubeflowSpec, schedule: ScheduleSpec, name: str
) -> Schedule:
    """The recurring run of the config `name`, the newest if it is this, else a new one in place of
    all before it; if another process sets one a moment later, that is it."""
    there = lowered(schedule, place)
    parallel, catch_up = schedule.overlap == "parallel", schedule.catch_up
    policy = f"{there.expression} {'parallel' if parallel else 'queue'} {catch_up}"
    described = f"{_MARK} {digest_of(definition.files, policy)} {schedule.cron}"
    with client.connected(place) as server, definition.written() as file:
        experiment = client.experiment_of(server, definition)

        def same() -> Any:
            last = next(reversed(_recurring(server, name)), None)
            if last is None or last.description != described:
                return None
            return last if catch_up or str(last.status) == "ENABLED" else None

        for _ in range(_TURNS):
            made = server.call(same) or server.created(
                lambda: server.kfp.create_recurring_run(
                    experiment,
                    name,
                    described,
                    cron_expression=there.expression,
                    max_concurrency=_MOST if parallel else 1,
                    no_catchup=not catch_up,
                    pipeline_package_path=str(file),
                    service_account=place.service_account,
                ),
                same,
            )
            if str(made.status) == "DISABLED":
                server.call(server.kfp.enable_recurring_run, made.recurring_run_id)
            kept = _settled(server, name)
            ours = kept is not None and kept.description == described
            if kept is not None and (ours or kept.created_at > made.created_at):
                return _shown(kept, place)
            time.sleep(client.FIRST_PAUSE_SECONDS)  # two of one second: the next one is newer
    raise PlatformError([_problem("contended", where=client.where(place), name=name)])


def list_(place: KubeflowSpec) -> tuple[Schedule, ...]:
    """Recurring runs that were set here, by name; older ones of a name are taken away."""
    with client.connected(place) as server:
        kept = newest(server.call(_recurring, server), functools.partial(_deleted, server))
        return tuple(_shown(one, place) for one in kept)


def pause(place: KubeflowSpec, name: str) -> Schedule:
    with client.connected(place) as server:
        if (kept := _settled(server, name)) is None:
            raise no_schedule(name, client.where(place))
        server.call(server.kfp.disable_recurring_run, kept.recurring_run_id)
        return _shown(server.call(server.kfp.get_recurring_run, kept.recurring_run_id), place)


def delete(place: KubeflowSpec, name: str) -> bool:
    with client.connected(place) as server:
        found = server.call(_recurring, server, name)
        for one in found:
            _deleted(server, one)
        return bool(found)


def _problems(schedule: ScheduleSpec, place: KubeflowSpec) -> Iterator[Problem]:
    if schedule.timezone != place.timezone:
        yield _problem("clock", place=place, schedule=schedule)
    if schedule.overlap == "skip":
        yield _problem("skip")


def _settled(server: client.Server, name: str) -> Any:
    """The newest of that name, or None."""
    found = server.call(_recurring, server, name)
    return next(iter(newest(found, functools.partial(_deleted, server))), None)


def _recurring(server: client.Server, name: str = "") -> list[Any]:
    """Recurring runs that are ours, of a config or all, the oldest first."""
    wanted = client.equals("display_name", name) if name else None
    query = {"namespace": server.namespace, "filter": wanted}
    found = server.listed(server.kfp.list_recurring_runs, "recurring_runs", **query)
    ours = [one for one in found if (one.description or "").startswith(f"{_MARK} ")]
    return sorted(ours, key=lambda one: (one.created_at, one.recurring_run_id))


def _deleted(server: client.Server, one: Any) -> None:
    """Without `ORPHAN`, which the client has no word for, the runs that it started, its children,
    would be taken away in the middle of their work (kubeflow/pipelines#12573)."""
    from kfp_server_api import ApiException

    try:
        server.call(
            server.kfp._recurring_run_api.recurring_run_service_delete_recurring_run,
            one.recurring_run_id,
            propagation_policy="ORPHAN",
        )
    except ApiException as error:
        if error.status != 404:  # another process took it away
            raise


def _shown(found: Any, place: KubeflowSpec) -> Schedule:
    cron = str(found.description).split(" ", 2)[2]
    return Schedule(found.display_name, cron, place.timezone, str(found.status) == "ENABLED")
