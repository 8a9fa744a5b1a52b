"""Kubeflow Pipelines behind an API server: runs are submitted, looked at and terminated, recurring
runs set and taken away, through KFP's own client; it is imported when that is done.

The service gives ids. A run is called by its definition and the submission's token, and looked for
by that name before it is created and after a call that failed; of two that were created at once the
older one stays. A recurring run cannot be changed: another takes its place, and goes away when that
is there. Its cron has seconds, and the clock of the controller (platforms.kubeflow.timezone).

Authority: kfp 2.17's client, ../shared/facts/kfp.md. No cluster has run it."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rekindle.errors import PlatformError, Problem, SpecError, UnsupportedError
from rekindle.platforms.definition import Definition
from rekindle.platforms.kubeflow.outline import pipeline_file, steps
from rekindle.platforms.submission import Outline, Placed, Schedule, digest_of
from rekindle.records import RunStatus
from rekindle.spec.places import KubeflowSpec
from rekindle.spec.schedule import ScheduleSpec

OVER: dict[str, RunStatus] = {
    "SUCCEEDED": "succeeded", "SKIPPED": "succeeded", "FAILED": "failed", "CANCELED": "cancelled",
}  # fmt: skip
FIRST_PAUSE_SECONDS = 1.0
_ATTEMPTS = 4
_MARK = "rekindle"  # begins the description of what is ours
_SECTION = "platforms.kubeflow"


@dataclasses.dataclass(frozen=True)
class Server:
    """KFP's client, and where what it says of runs is shown."""

    kfp: Any
    namespace: str | None

    def call(self, function: Callable[..., Any], *words: Any, **more: Any) -> Any:
        """A call that may be said twice, repeated some times where it may yet succeed."""
        for attempt in range(_ATTEMPTS):
            try:
                return function(*words, **more)
            except Exception as error:
                if attempt == _ATTEMPTS - 1 or not _may_succeed(error):
                    raise
                time.sleep(FIRST_PAUSE_SECONDS * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    def created(self, create: Callable[[], Any], find: Callable[[], Any]) -> Any:
        """What `create` made, once: where a call failed, `find` says whether it took effect."""
        for attempt in range(_ATTEMPTS):
            try:
                return create()
            except Exception as error:
                if not _may_succeed(error):
                    raise
                if found := self.call(find):
                    return found
                if attempt == _ATTEMPTS - 1:
                    raise
                time.sleep(FIRST_PAUSE_SECONDS * 2**attempt)
        raise AssertionError("the last attempt returns or raises")


def submit(definition: Definition, place: KubeflowSpec, token: str) -> Placed:
    """The run, made now or by the same submission before; PlatformError if the server refuses it or
    does not answer, SpecError if `place` does not say which."""
    name = run_name(definition, token)
    with connected(place) as server, _written(definition) as file:
        experiment = _experiment(server, definition)

        def named() -> list[Any]:
            listed = server.kfp.list_runs(
                experiment_id=experiment, filter=equals("display_name", name), page_size=100,
                sort_by="created_at",
            )  # fmt: skip
            return list(listed.runs or ())

        if found := server.call(named):
            return Placed(found[0].run_id, page(place, found[0].run_id), anew=False)
        made = server.created(
            lambda: server.kfp.run_pipeline(
                experiment, name, str(file), service_account=place.service_account
            ),
            lambda: next(iter(named()), None),
        )
        first = server.call(named)[0]  # somebody may have submitted the same meanwhile
        if first.run_id != made.run_id:
            server.call(server.kfp.terminate_run, made.run_id)
        return Placed(first.run_id, page(place, first.run_id), first.run_id == made.run_id)


def status(place: KubeflowSpec, id: str) -> str:
    """The run's state in KFP's words, such as `RUNNING`; `OVER` are the last ones."""
    with connected(place) as server:
        return str(server.call(server.kfp.get_run, id).state)


def cancel(place: KubeflowSpec, id: str) -> str:
    """Have the run terminated; its state then. A run that is over stays as it is."""
    with connected(place) as server:
        if (now := str(server.call(server.kfp.get_run, id).state)) in OVER:
            return now
        server.call(server.kfp.terminate_run, id)
        return str(server.call(server.kfp.get_run, id).state)


def schedule_set(
    definition: Definition, place: KubeflowSpec, schedule: ScheduleSpec, name: str
) -> Schedule:
    """The recurring run of the config `name`: the one that is there if it is this, else a new one
    in place of those that were."""
    cron = lowered(schedule, place)
    described = f"{_MARK} {digest_of(definition.files, cron)} {schedule.cron}"
    with connected(place) as server, _written(definition) as file:
        kfp = server.kfp
        experiment = _experiment(server, definition)

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


def schedule_list(place: KubeflowSpec) -> tuple[Schedule, ...]:
    """Recurring runs that were set here, those that pause too, by name."""
    with connected(place) as server:
        found = server.call(_recurring, server)
        return tuple(sorted((_shown(one, place) for one in found), key=lambda one: one.id))


def schedule_pause(place: KubeflowSpec, name: str) -> Schedule:
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


def schedule_delete(place: KubeflowSpec, name: str) -> bool:
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


def run_name(definition: Definition, token: str) -> str:
    """What the run of this submission is called."""
    return f"{_pipeline(definition)}-{digest_of(definition.files, token)}"


def outline(definition: Definition, place: KubeflowSpec, token: str) -> Outline:
    """What `submit` with the same arguments will make; asks nobody."""
    return Outline(where(place), run_name(definition, token), steps(definition))


def lacks(place: KubeflowSpec) -> tuple[Problem, ...]:
    """What the config does not say about the server."""
    if place.host:
        return ()
    at = f"{_SECTION}.host"
    fix = f"set {at}: https://kubeflow.example.com/pipeline, or http://localhost:8080 behind "
    return (Problem("Kubeflow Pipelines needs `host`", at, f"{fix}kubectl port-forward"),)


def where(place: KubeflowSpec) -> str:
    """The server and namespace, for people."""
    return f"{place.host}, namespace {place.namespace}"


def page(place: KubeflowSpec, id: str) -> str:
    """Where to look."""
    return f"{place.host.rstrip('/')}/#/runs/details/{id}"


@contextlib.contextmanager
def connected(place: KubeflowSpec) -> Iterator[Server]:
    """KFP's client; what it raises becomes a PlatformError, what it prints is dropped."""
    if problems := lacks(place):
        raise SpecError(problems)
    import warnings

    import kfp
    from kfp_server_api import OpenApiException, V2beta1GetHealthzResponse
    from urllib3.exceptions import HTTPError

    class Client(kfp.Client):  # type: ignore[misc, unused-ignore]
        """Without a question that only a pod needs answered, and that takes 25 s to fail."""

        def get_kfp_healthz(self, sleep_duration: int = 0) -> Any:
            return V2beta1GetHealthzResponse(multi_user=False)

    token = token_of(place)
    namespace = place.namespace if place.namespace != "kubeflow" else None
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore", FutureWarning)  # that it needs KFP 2
        try:
            found = Client(place.host, existing_token=token, namespace=place.namespace)
            yield Server(found, namespace)
        except (OpenApiException, HTTPError) as error:
            raise _explained(error, place) from error


def token_of(place: KubeflowSpec) -> str | None:
    if not place.token:
        return None
    name = place.token.removeprefix("env:")
    if not os.environ.get(name):
        at = f"{_SECTION}.token"
        raise SpecError(f"the environment has no `{name}`", where=at, fix=f"export {name}=...")
    return os.environ[name]


@contextlib.contextmanager
def _written(definition: Definition) -> Iterator[Path]:
    """The pipeline as a file, as the client wants it."""
    with tempfile.TemporaryDirectory(prefix="rekindle-") as folder:
        file = Path(folder) / pipeline_file(definition)
        file.write_bytes(definition.files[file.name])
        yield file


def _pipeline(definition: Definition) -> str:
    return pipeline_file(definition).removesuffix(".yaml")


def _experiment(server: Server, definition: Definition) -> str:
    """The experiment of the pipeline's runs, looked for and else made."""
    from kfp_server_api import ApiException

    for last in (False, True):
        try:
            found = server.call(server.kfp.create_experiment, _pipeline(definition))
            return str(found.experiment_id)
        except ApiException as error:
            if error.status != 409 or last:  # somebody made it meanwhile
                raise
    raise AssertionError("the last attempt returns or raises")


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


def equals(key: str, value: str) -> str:
    predicate = {"operation": "EQUALS", "key": key, "stringValue": value}
    return json.dumps({"predicates": [predicate]})


def _shown(found: Any, place: KubeflowSpec) -> Schedule:
    cron = str(found.description).split(" ", 2)[2]
    return Schedule(found.display_name, cron, place.timezone, str(found.status) == "ENABLED")


def _may_succeed(error: Exception) -> bool:
    """Whether the same call may yet succeed, or did."""
    from kfp_server_api import ApiException
    from urllib3.exceptions import HTTPError

    if isinstance(error, ApiException):
        return error.status in (0, 408, 429) or (error.status or 0) >= 500
    return isinstance(error, HTTPError)


def _explained(error: Exception, place: KubeflowSpec) -> PlatformError:
    """What the server says, and what to do about it."""
    code = int(getattr(error, "status", 0) or 0)
    if code == 401:
        fix = f"name a token that is good: {_SECTION}.token: env:KFP_TOKEN"
    elif code == 403:
        fix = f"ask for the rights to run pipelines in the namespace {place.namespace}"
    elif code == 404:
        fix = f"see whether {_SECTION}.host is the API of Kubeflow Pipelines, and what is there"
    elif code and not _may_succeed(error):
        fix = "this may be a mistake of rekindle's: the service refuses what was sent"
    else:
        fix = f"see whether {_SECTION}.host answers; say it again, what was done already is found"
    return PlatformError(_said(error), where=where(place), fix=fix)


def _said(error: Exception) -> str:
    """The server's own sentence."""
    body = getattr(error, "body", None)
    with contextlib.suppress(ValueError, TypeError, KeyError):
        found = json.loads(body or "")
        return str(found.get("message") or found["error"]).splitlines()[0]
    text = str(getattr(error, "reason", "") or error).strip()
    return text.splitlines()[0] if text else type(error).__name__
