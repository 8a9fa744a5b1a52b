"""The roll-out of a version: one state machine for all platforms.

Its log is numbered files under the home or the artifact root, each put only if it is
absent and before what it announces is done: a command that was killed is completed by the
same command, and of two at once the slower one stops. What a platform has to do is
`Endpoint`; every call may come again.

    (shadow ->) create -> smoke -> canary (a share after another) -> live -> settled
       |           |        |        |
       +-----------+--------+--------+--> roll_back -> rolled_back
    delete -> deleted"""

import dataclasses
import datetime
import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rekindle.errors import RekindleError, RequestError, StorageError, UnreachableError
from rekindle.records import RolloutEvent, RolloutState
from rekindle.serve.messages import ASK_SHADOW, SHADOWED_JSON, ServedModel, Shadowed, Traffic
from rekindle.serve.smoke import prove
from rekindle.serve.verdict import breach, breach_in_shadow, look_of
from rekindle.spec.deploy import DeploySpec
from rekindle.storage import Failure, about, storage_of

ENDS = ("settled", "rolled_back", "deleted")
_MOST_REASON = 2_000
TrafficAndVerdict = tuple[Traffic, Callable[[int], str]]
"""Requests so far, and the verdict on them at a look."""

# a wrong request, a platform or a store that does not answer: the same command goes on later
_SAYS_NOTHING_OF_THE_VERSION = (RequestError, StorageError, UnreachableError)


class Endpoint(Protocol):
    """What a platform does for a deployment. Every call may be repeated."""

    address: str
    poll_seconds: float

    def usd_per_day(self) -> tuple[str, float | None]:
        """The machines of one version in words, and what they cost a day; None where that
        is not known, 0 where it costs nothing."""

    def standing(self) -> Mapping[str, tuple[str, int]]:
        """State (see `VersionStatus`) and share of
        each version that runs; changes nothing."""

    def create(self, model: ServedModel, number: int) -> None:
        """Have the version run beside the others, without a share of requests, and wait
        until it is ready, which it is once it has proven itself by rows of its test
        split. Raises StepError with the end of its log where it never is."""

    def ask(self, model: ServedModel, body: dict[str, object]) -> Any:
        """What this version, with or without a share, answers to a body of `/predict`
        that goes the way of requests. Raises StepError with what comes instead."""

    def split(self, shares: Mapping[str, int], number: int) -> None:
        """Share requests among versions, in percent, and count them from zero."""

    def observe(self) -> Mapping[str, Traffic]:
        """Requests of each version since the last `split`."""

    def retain(self, versions: set[str], number: int) -> None:
        """Let all other versions answer what they were given, and end them."""

    def delete(self) -> None:
        """End the whole deployment."""


class RolloutLog:
    """The events of a deployment, below a path or URI."""

    def __init__(self, root: str | Path, on_event: Callable[[RolloutEvent], None]) -> None:
        self.storage = storage_of(root, _log_error)
        self.on_event = on_event

    def events(self) -> list[RolloutEvent]:
        """All of them, oldest first; their numbers have no gaps."""
        events = list[RolloutEvent]()
        while (content := self.storage.read(_name(len(events) + 1))) is not None:
            events.append(RolloutEvent.model_validate_json(content))
        return events

    def last(self) -> RolloutEvent | None:
        """The newest of them."""
        return next(reversed(self.events()), None)

    def put(
        self,
        last: RolloutEvent | None,
        state: RolloutState,
        version: str,
        previous: str,
        shares: Mapping[str, int] | None = None,
        reason: str = "",
        digest: str = "",
        inputs: str = "",
    ) -> RolloutEvent:
        """Announce the event after `last`. Raises RequestError if another command did."""
        event = RolloutEvent(
            number=last.number + 1 if last else 1,
            state=state,
            version=version,
            previous=previous,
            at=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            shares=dict(shares or {}),
            reason=reason[:_MOST_REASON],
            digest=digest,
            inputs=inputs,
        )
        # put only if absent: of two commands at once one announces it
        self.storage.put_new(_name(event.number), event.to_json().encode())
        self.on_event(event)
        return event


def _name(number: int) -> str:
    return f"{number:06}.json"


def _log_error(failure: Failure) -> RekindleError:
    if failure.reason == "exists":
        message = "another command moved this deployment on meanwhile"
        fix = "wait for it, or run the command again"
        return RequestError(message, where=failure.root, fix=fix)
    return about("the log of the deployment")(failure)


@dataclasses.dataclass
class Rollout:
    """One deployment, and how it moves. With `wait` a canary is watched until it has had
    its requests; otherwise `to` returns where more are needed, and goes on at the next
    call."""

    endpoint: Endpoint
    log: RolloutLog
    spec: DeploySpec
    wait: bool
    on_traffic: Callable[[RolloutEvent, Traffic], None]
    before: ServedModel | None = None
    """The version that answers now, if another one is to be in its shadow first."""
    inputs: str = ""
    """How clients ask the version that is rolled
    out (`Inputs.described`); "" if unknown."""
    shadowed: str = ""

    def to(self, model: ServedModel) -> RolloutEvent:
        """Roll this version out, from any state of the deployment;
        returns the last event."""
        last = self.log.last()
        self._check_same(model)
        if last is not None and last.state not in ENDS:
            if last.version == model.version and last.state != "delete":
                return self._advance(last, model)
            # a roll-out of another version that is under way goes back first
            if last.state not in ("roll_back", "delete"):
                reason = f"version {model.version} is to be deployed instead"
                last = self._start_back(last, reason)
            last = self._finish(last)
        if last is not None and serving(last) == model.version:  # what ended since starts again
            self.endpoint.create(model, last.number)
            self.endpoint.split({model.version: 100}, last.number)
            return last
        before = serving(last)
        self._check_inputs(model, before)
        state: RolloutState = "shadow" if self.before else "create"
        last = self.log.put(
            last, state, model.version, before, digest=model.identity, inputs=self.inputs
        )
        return self._advance(last, model)

    def _check_inputs(self, model: ServedModel, before: str) -> None:
        """Raise RequestError where clients would have to ask the version otherwise than
        the one `before`, which answers now: they would be refused."""
        inputs_before = ""
        for event in self.log.events():
            if event.state == "deleted":
                inputs_before = ""
            elif event.version == before and event.inputs:
                inputs_before = event.inputs
        # inputs that are not known are not compared
        if not before or not inputs_before or not self.inputs or inputs_before == self.inputs:
            return
        message = (
            f"version {model.version} reads {self.inputs}, and version {before}, which answers "
        )
        message += f"now, reads {inputs_before}: clients of today would be refused"
        fix = "name the columns as before; or, once clients can send what the new version reads, "
        fix += "pass `--set deploy.allow_other_inputs=true`"
        if not self.spec.allow_other_inputs:
            raise RequestError(message, where="data.columns", fix=fix)
        if self.spec.shadow:
            message = "a version in the shadow gets the same requests as the one that answers, and "
            message += f"version {model.version} reads {self.inputs} in place of {inputs_before}"
            raise RequestError(message, where="deploy.shadow", fix="set it to 0 for this roll-out")

    def _check_same(self, model: ServedModel) -> None:
        """Raise RequestError where the deployment knows the version's number of another
        model: a registry that was set up again gives its numbers out again."""
        for event in self.log.events()[::-1]:
            if event.state == "deleted":
                return
            if event.version == model.version and event.digest not in ("", model.identity):
                message = (
                    f"version {model.version} is another model, or has another precision, than "
                )
                message += "the one deployed before"
                fix = "`rekindle deploy delete` ends that deployment; then deploy again"
                raise RequestError(message, where=self.endpoint.address, fix=fix)

    def back(self, reason: str) -> RolloutEvent:
        """Give all requests to the version before. Raises RequestError without one."""
        last = self.log.last()
        if last is None or last.state in ("delete", "deleted"):
            raise RequestError("nothing is deployed", fix="`rekindle deploy CONFIG` deploys")
        if last.state == "rolled_back":
            return last
        if not last.previous:
            message = f"there is no version before version {last.version} in this deployment"
            raise RequestError(message, fix="`rekindle deploy delete` ends the deployment")
        if last.state != "roll_back":
            last = self._start_back(last, reason)
        return self._finish(last)

    def delete(self) -> RolloutEvent:
        """End the deployment."""
        last = self.log.last()
        if last is None:
            raise RequestError("nothing is deployed", fix="`rekindle deploy CONFIG` deploys")
        if last.state == "deleted":
            return last
        if last.state != "delete":
            last = self.log.put(last, "delete", last.version, last.previous)
        return self._finish(last)

    def _advance(self, event: RolloutEvent, model: ServedModel) -> RolloutEvent:
        """Do what the event announces and what follows,
        to the end or to where it has to wait."""
        while event.state not in ("roll_back", *ENDS):
            try:
                reason = self._do(event, model)
            except _SAYS_NOTHING_OF_THE_VERSION:
                raise
            except RekindleError as error:
                reason = str(error)
            if reason is None:
                return event
            event = self._start_back(event, reason) if reason else self._next(event)
        return self._finish(event)

    def _do(self, event: RolloutEvent, model: ServedModel) -> str | None:
        """Do what the event announces; returns why it has to be rolled back, "" if it has
        not, and None where more requests are needed."""
        match event.state:
            case "shadow":
                if not self.before:
                    raise RequestError(
                        "deploy.shadow is 0, and a version is in the shadow",
                        fix="set it as it was, or `rekindle deploy rollback`",
                    )
                # the version before once more, with the new one in its shadow
                shadowing = self.before.with_shadow(model)
                self.endpoint.create(shadowing, event.number)
                prove(shadowing, functools.partial(self.endpoint.ask, shadowing))
                share = self.spec.shadow
                shares = {shadowing.version: share, event.previous: 100 - share}
                self.endpoint.split(shares, event.number)
                return self._watch(event, functools.partial(self._look_in_shadow, shadowing, {}))
            case "create":
                if event.shares:  # which end the shadow
                    self.endpoint.split(event.shares, event.number)
                    self.endpoint.retain(set(event.shares), event.number)
                self.endpoint.create(model, event.number)
            case "smoke":
                prove(model, functools.partial(self.endpoint.ask, model))
            case "canary":
                self.endpoint.split(event.shares, event.number)
                return self._watch(event, functools.partial(self._look_at_canary, event))
            case _:
                self.endpoint.split(event.shares, event.number)
                self.endpoint.retain({event.version, event.previous} - {""}, event.number)
        return ""

    def _look_at_canary(self, event: RolloutEvent) -> TrafficAndVerdict:
        """The requests of the canary, and the verdict on them."""
        traffic_of = self.endpoint.observe()
        no_traffic = Traffic(0, 0, ())
        canary = traffic_of.get(event.version, no_traffic)
        stable = traffic_of.get(event.previous, no_traffic)
        return canary, functools.partial(breach, canary, stable, self.spec)

    def _look_in_shadow(
        self, shadowing: ServedModel, replicas: dict[str, Shadowed]
    ) -> TrafficAndVerdict:
        """The requests of the version in the shadow, and the verdict on them. A replica
        counts for itself, and each look reaches one of them: `replicas` keeps what each
        counted last."""
        body: dict[str, object] = {"instances": [ASK_SHADOW]}
        answer = self.endpoint.ask(shadowing, body)
        counts = SHADOWED_JSON.validate_python(answer["predictions"][0])
        replicas[counts.replica] = counts
        total = _total(list(replicas.values()))
        self.shadowed = _shadow_summary(total)
        traffic = Traffic(total.answered, total.failed, (), refused=total.refused)
        return traffic, functools.partial(breach_in_shadow, total, self.spec)

    def _watch(self, event: RolloutEvent, look_at: Callable[[], TrafficAndVerdict]) -> str | None:
        """Look at the traffic until the verdict is clear; returns as `_do` does."""
        last_look = -1
        began = datetime.datetime.fromisoformat(event.at)
        while True:
            traffic, breach_at = look_at()
            self.on_traffic(event, traffic)
            minutes = (datetime.datetime.now(datetime.UTC) - began).total_seconds() / 60
            # a request that it refused is no evidence of how it answers
            has_enough = traffic.requests - traffic.refused >= self.spec.min_requests
            is_over = has_enough and minutes >= self.spec.step_minutes
            look = look_of(traffic.requests)
            if is_over:
                # the last look is one of its own: each spends its part of alpha once
                reason = breach_at(look + 1)
            elif look > last_look:
                reason = breach_at(look)
            else:
                reason = breach_at(-1)
            if reason or is_over:
                return reason
            if not self.wait:
                return None
            last_look = look
            time.sleep(self.endpoint.poll_seconds)

    def _next(self, event: RolloutEvent) -> RolloutEvent:
        """Announce what follows the event."""
        version = event.version
        previous = event.previous
        if event.state == "shadow":
            return self.log.put(
                event,
                "create",
                version,
                previous,
                shares={previous: 100},
                reason=self.shadowed,
                digest=event.digest,
            )
        if event.state == "create":
            return self.log.put(event, "smoke", version, previous)
        if event.state == "live":
            return self.log.put(event, "settled", version, previous, event.shares)
        share_now = event.shares.get(version, 0)
        share = next((share for share in self.spec.canary if share > share_now), 100)
        # a first version has no other to share requests with
        if share < 100 and previous:
            shares = {version: share, previous: 100 - share}
            return self.log.put(event, "canary", version, previous, shares)
        return self.log.put(event, "live", version, previous, {version: 100})

    def _start_back(self, event: RolloutEvent, reason: str) -> RolloutEvent:
        shares = {event.previous: 100} if event.previous else {}
        return self.log.put(event, "roll_back", event.version, event.previous, shares, reason)

    def _finish(self, event: RolloutEvent) -> RolloutEvent:
        """Complete a roll back or a deletion; returns the event that ends it."""
        if event.state in ENDS:
            return event
        # without a version before, a roll back leaves nothing
        if event.state == "delete" or not event.previous:
            self.endpoint.delete()
        else:
            self.endpoint.split(event.shares, event.number)
            self.endpoint.retain({event.previous}, event.number)
        state: RolloutState = "deleted" if event.state == "delete" else "rolled_back"
        return self.log.put(event, state, event.version, event.previous, event.shares, event.reason)


def serving(event: RolloutEvent | None) -> str:
    """The version that has all requests after this event,
    one of those that end something."""
    if event is None or event.state == "deleted":
        return ""
    return event.version if event.state == "settled" else event.previous


def _total(replicas: Sequence[Shadowed]) -> Shadowed:
    """What all replicas counted, with the times of the slowest of them."""
    took_ms: tuple[float, ...] = ()
    before_ms: tuple[float, ...] = ()
    timed = [counts for counts in replicas if counts.took_ms and counts.before_ms]
    if timed:
        took_ms = _slowest([counts.took_ms for counts in timed])
        before_ms = _slowest([counts.before_ms for counts in timed])
    return Shadowed(
        replica="",
        answered=sum(counts.answered for counts in replicas),
        failed=sum(counts.failed for counts in replicas),
        differed=sum(counts.differed for counts in replicas),
        spared=sum(counts.spared for counts in replicas),
        took_ms=took_ms,
        before_ms=before_ms,
        refused=sum(counts.refused for counts in replicas),
    )


def _slowest(quantiles_ms: list[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(max(times_ms) for times_ms in zip(*quantiles_ms, strict=True))


def _shadow_summary(total: Shadowed) -> str:
    summary = f"of {total.answered:,} requests in the shadow, {total.differed:,} otherwise than "
    summary += f"the version before, {total.failed:,} failed"
    if total.refused:
        summary += f", {total.refused:,} refused"
    if total.took_ms:
        p50_ms, p99_ms = total.took_ms
        p50_before_ms, p99_before_ms = total.before_ms
        summary += f"; p50 {p50_ms:.0f} ms and p99 {p99_ms:.0f} ms, of the version before "
        summary += f"{p50_before_ms:.0f} ms and {p99_before_ms:.0f} ms"
    return summary


def version_hours(events: Sequence[RolloutEvent], until: datetime.datetime) -> float:
    """Hours for which versions had their machines, as was announced; each of two that
    stand at once counts. With events oldest first."""
    hours = 0.0
    standing = set[str]()
    for event, after in itertools.zip_longest(events, events[1:]):
        match event.state:
            case "deleted":
                standing = set()
            case "rolled_back":
                standing = {event.previous} - {""}
            case "settled":
                standing = {event.version, event.previous} - {""}
            case _:
                standing |= {event.version}
        end = datetime.datetime.fromisoformat(after.at) if after else until
        began = datetime.datetime.fromisoformat(event.at)
        hours += len(standing) * (end - began).total_seconds() / 3600
    return hours
