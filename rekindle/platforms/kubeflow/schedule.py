"""Schedules of Kubeflow Pipelines, which are recurring runs.

A recurring run cannot be changed: another takes its place, and the older goes away when
that is there; of several of one name, left by whatever was cut off, the newest stays. Its
cron begins with seconds, and follows the clock of the controller
(platforms.kubeflow.timezone). The controller starts what fell due as soon as it may:
after the run before it, after it was down, and after a pause. So one that paused is
created again, unless missed starts are to be made up for.

Authority: kfp 2.17's client; kubeflow/pipelines,
backend/src/crd/controller/scheduledworkflow/util/{scheduled_workflow,cron_schedule}.go.
No cluster has run it."""

import functools
import time
from collections.abc import Iterator
from typing import Any

from rekindle.errors import PlatformError, Problem, UnsupportedError
from rekindle.outputs import Schedule
from rekindle.platforms.kubeflow import client
from rekindle.platforms.kubeflow.section import KubeflowSpec
from rekindle.platforms.submission import Definition, Lowered, digest_of, newest, no_schedule
from rekindle.spec import cron
from rekindle.spec.schedule import ScheduleSpec

_MARK = "rekindle"  # begins the description of what is ours
_MOST = 10  # runs at once that the controller allows (maxMaxConcurrency)
_TURNS = 3


def lowered(schedule: ScheduleSpec, place: KubeflowSpec) -> Lowered:
    """The schedule as the cluster has it: `0 3 * * mon` is ``0 0 3 * * 1``, since the
    service reads five fields as if they began with seconds. UnsupportedError for what it
    cannot do."""
    problems = list(_problems(schedule, place))
    if problems:
        raise UnsupportedError(problems)
    overlap = "waits until the run has ended; of several that wait, the last"
    missed = "left out after a pause; of those while the cluster was down the last is made up"
    if schedule.catch_up:
        overlap = "waits until the run has ended; of several that wait, all, one after the other"
        missed = "made up for, one after the other, after a pause too"
    if schedule.overlap == "parallel":
        overlap = f"begins beside the run, up to {_MOST} at once"
    return Lowered(
        f"0 {cron.written(schedule.cron)}",
        place.timezone,
        overlap,
        missed,
        "what is skipped is left out, what comes twice starts twice",
    )


def set_schedule(
    definition: Definition, place: KubeflowSpec, schedule: ScheduleSpec, name: str
) -> Schedule:
    """The recurring run of the config `name`, the newest if it is this, else a new one in
    place of all before it; if another process sets one a moment later, that is it."""
    expression = lowered(schedule, place).expression
    is_parallel = schedule.overlap == "parallel"
    catch_up = schedule.catch_up
    policy = f"{expression} {'parallel' if is_parallel else 'queue'} {catch_up}"
    # what KFP is settings beside the definition: a change of it is another schedule
    settings = f"{policy} {place.pipeline_root} {place.service_account}"
    description = f"{_MARK} {digest_of(definition.files, settings)} {schedule.cron}"
    with client.connected(place) as server, definition.written() as file:
        experiment = client.experiment_of(server, definition, place)

        def usable() -> Any:
            """The newest of that name, if it is this schedule and may go on as it is."""
            recurring_runs = _recurring(server, name)
            if not recurring_runs or recurring_runs[-1].description != description:
                return None
            newest_run = recurring_runs[-1]
            # one that paused would make up for the starts that it missed
            if not catch_up and str(newest_run.status) != "ENABLED":
                return None
            return newest_run

        def create() -> Any:
            return server.kfp.create_recurring_run(
                experiment,
                name,
                description,
                cron_expression=expression,
                max_concurrency=_MOST if is_parallel else 1,
                no_catchup=not catch_up,
                pipeline_package_path=str(file),
                pipeline_root=place.pipeline_root or None,
                service_account=place.service_account,
            )

        for _ in range(_TURNS):
            recurring_run = server.call(usable) or server.created(create, usable)
            if not recurring_run.recurring_run_id:
                raise client.no_answer("recurring run", place)
            if str(recurring_run.status) == "DISABLED":
                server.call(server.kfp.enable_recurring_run, recurring_run.recurring_run_id)
            remaining_run = _remove_older(server, name)
            if remaining_run is not None:
                is_same = remaining_run.description == description
                if is_same or remaining_run.created_at > recurring_run.created_at:
                    return _shown(remaining_run, place)
            time.sleep(client.FIRST_PAUSE_SECONDS)  # two of one second: the next one is newer
    raise PlatformError(
        f"another process sets the schedule `{name}` at this moment",
        where=client.where(place),
        fix="see whose it is, rekindle schedule list, and retry the command",
    )


def list_schedules(place: KubeflowSpec) -> tuple[Schedule, ...]:
    """Recurring runs that were set here, by name; older ones of a name are taken away."""
    with client.connected(place) as server:
        recurring_runs = server.call(_recurring, server)
        remaining_runs = newest(recurring_runs, functools.partial(_delete, server))
        return tuple(_shown(recurring_run, place) for recurring_run in remaining_runs)


def pause_schedule(place: KubeflowSpec, name: str) -> Schedule:
    with client.connected(place) as server:
        recurring_run = _remove_older(server, name)
        if recurring_run is None:
            raise no_schedule(name, client.where(place))
        id = recurring_run.recurring_run_id
        server.call(server.kfp.disable_recurring_run, id)
        return _shown(server.call(server.kfp.get_recurring_run, id), place)


def delete_schedule(place: KubeflowSpec, name: str) -> bool:
    with client.connected(place) as server:
        recurring_runs = server.call(_recurring, server, name)
        for recurring_run in recurring_runs:
            _delete(server, recurring_run)
        return bool(recurring_runs)


def _problems(schedule: ScheduleSpec, place: KubeflowSpec) -> Iterator[Problem]:
    if schedule.timezone != place.timezone:
        yield Problem(
            f"the cluster's schedules follow the clock of {place.timezone}, "
            f"not of {schedule.timezone}",
            "schedule.timezone",
            "write the line for that clock, or, where CRON_SCHEDULE_TIMEZONE of the "
            "controller says otherwise, set platforms.kubeflow.timezone",
        )
    if schedule.overlap == "skip":
        yield Problem(
            "Kubeflow starts what fell due as soon as the run before it has ended, and skips "
            "no start for it",
            "schedule.overlap",
            "write schedule.overlap: queue, or leave it out",
        )


def _remove_older(server: client.KfpServer, name: str) -> Any:
    """The newest recurring run of that name, or None; the older ones are deleted."""
    recurring_runs = server.call(_recurring, server, name)
    remaining_runs = newest(recurring_runs, functools.partial(_delete, server))
    return remaining_runs[0] if remaining_runs else None


def _recurring(server: client.KfpServer, name: str = "") -> list[Any]:
    """Recurring runs that are ours, of a config or all, the oldest first."""
    name_filter = client.equals("display_name", name) if name else None
    query = {"namespace": server.namespace, "filter": name_filter}
    recurring_runs = server.listed(server.kfp.list_recurring_runs, "recurring_runs", **query)
    own_runs = [run for run in recurring_runs if (run.description or "").startswith(f"{_MARK} ")]
    return sorted(own_runs, key=lambda run: (run.created_at, run.recurring_run_id))


def _delete(server: client.KfpServer, recurring_run: Any) -> None:
    """Delete a recurring run, and none of the runs that it started."""
    from kfp_server_api import ApiException

    try:
        server.call(
            server.kfp._recurring_run_api.recurring_run_service_delete_recurring_run,
            recurring_run.recurring_run_id,
            # which the client has no word for; without it the runs that it started, its
            # children, are taken away in the middle of their work
            # (kubeflow/pipelines#12573)
            propagation_policy="ORPHAN",
        )
    except ApiException as error:
        if error.status != 404:  # another process took it away
            raise


def _shown(recurring_run: Any, place: KubeflowSpec) -> Schedule:
    cron = str(recurring_run.description).split(" ", 2)[2]
    is_active = str(recurring_run.status) == "ENABLED"
    return Schedule(recurring_run.display_name, cron, place.timezone, is_active)
