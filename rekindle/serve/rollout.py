"""The roll-out of a version: one state machine for all platforms.

Its log is numbered files under the home or the artifact root, each put only if it is absent and
before what it announces is done: a command that was killed is completed by the same command, and of
two at once the slower one stops. What a platform has to do is `Endpoint`; every call may come
again.

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
from typing import Any, Protocol

from rekindle.errors import CheckpointError, RekindleError, RequestError, UnreachableError
from rekindle.records import RolloutEvent, RolloutState
from rekindle.serve.messages import ASK_SHADOW, SHADOWED_JSON, ServedModel, Shadowed, Traffic
from rekindle.serve.smoke import prove
from rekindle.serve.verdict import breach, breach_in_shadow, look_of
from rekindle.spec.deploy import DeploySpec
from rekindle.train.storage import Storage

ENDS = ("settled", "rolled_back", "deleted")
_MOST_REASON = 2_000
Seen = tuple[Traffic, Callable[[int], str]]
"""Requests so far, and the verdict on them at a look."""


class Endpoint(Protocol):
    """What a platform does for a deployment. Every call may be repeated."""

    address: str
    poll_seconds: float
    sees_latency: bool  # whether `observe` has latencies

    def usd_per_day(self) -> tuple[str, float | None]:
        """The machines of one version in words, and what they cost a day; None where that is not
        known, 0 where it costs nothing."""

    def standing(self) -> Mapping[str, tuple[str, int]]:
        """State (as in `VersionStatus`) and share of each version that runs; changes nothing."""

    def create(self, model: ServedModel, number: int) -> None:
        """Have the version run beside the others, without a share of requests, and wait until it is
        ready, which it is once it has proven itself by rows of its test split. Raises StepError
        with the end of its log where it never is."""

    def ask(self, model: ServedModel, body: dict[str, Any]) -> Any:
        """What this version, with or without a share, answers to a body of `/predict` that goes the
        way of requests. Raises StepError with what comes instead."""

    def split(self, shares: Mapping[str, int], number: int) -> None:
        """Share requests among versions, in percent, and count them from zero."""

    def observe(self) -> Mapping[str, Traffic]:
        """Requests of each version since the last `split`."""

    def retain(self, versions: set[str], number: int) -> None:
        """Let all other versions answer what they were given, and end them."""

    def delete(self) -> None:
        """End the whole deployment."""


@dataclasses.dataclass
class Log:
    """The events of a deployment, in `storage`."""

    storage: Storage
    on_event: Callable[[RolloutEvent], None]

    def events(self) -> list[RolloutEvent]:
        """All of them, oldest first; their numbers have no gaps."""
        found = list[RolloutEvent]()
        while (content := self.storage.read(_name(len(found) + 1))) is not None:
            found.append(RolloutEvent.model_validate_json(content))
        return found

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
        """Announce the event after `last`. Raises RequestError where another command did."""
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
        try:
            self.storage.put_new(_name(event.number), event.to_json().encode())
        except CheckpointError:
            if self.storage.read(_name(event.number)) is None:
                raise
            what = "another command moved this deployment on meanwhile"
            fix = "wait for it, or run the command again"
            raise RequestError(what, where=self.storage.root, fix=fix) from None
        self.on_event(event)
        return event


def _name(number: int) -> str:
    return f"{number:06}.json"


@dataclasses.dataclass
class Rollout:
    """One deployment, and how it moves. With `wait` a canary is watched until it has had its
    requests; otherwise `to` returns where more are needed, and goes on at the next call."""

    endpoint: Endpoint
    log: Log
    spec: DeploySpec
    wait: bool
    on_traffic: Callable[[RolloutEvent, Traffic], None]
    before: ServedModel | None = None
    """The version that answers now, if another one is to be in its shadow first."""
    inputs: str = ""
    """How clients ask the version that is rolled out (`Inputs.described`); "": not known."""
    shadowed: str = ""

    def to(self, model: ServedModel) -> RolloutEvent:
        """Roll this version out, from wherever the deployment is; returns the last event."""
        last = self.log.last()
        self._check_same(model)
        if last is not None and last.state not in ENDS:
            if last.version == model.version and last.state != "delete":
                return self._advance(last, model)
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
        """Raise RequestError where clients would have to ask the version otherwise than the one
        `before`, which answers now: they would be refused."""
        asked = ""
        for event in self.log.events():
            if event.state == "deleted":
                asked = ""
            elif event.version == before and event.inputs:
                asked = event.inputs
        if not before or not asked or not self.inputs or asked == self.inputs:
            return
        what = f"version {model.version} reads {self.inputs}, and version {before}, which answers "
        what += f"now, reads {asked}: clients of today would be refused"
        fix = "name the columns as before; or, once clients can send what the new version reads, "
        fix += "pass `--set deploy.allow_other_inputs=true`"
        if not self.spec.allow_other_inputs:
            raise RequestError(what, where="data.columns", fix=fix)
        if self.spec.shadow:
            what = "a version in the shadow gets the same requests as the one that answers, and "
            what += f"version {model.version} reads {self.inputs} in place of {asked}"
            raise RequestError(what, where="deploy.shadow", fix="set it to 0 for this roll-out")

    def _check_same(self, model: ServedModel) -> None:
        """Raise RequestError where the deployment knows the version's number of another model: a
        registry that was set up again gives its numbers out again."""
        for event in self.log.events()[::-1]:
            if event.state == "deleted":
                return
            if event.version == model.version and event.digest not in ("", model.identity):
                what = f"version {model.version} is another model, or has another precision, than "
                what += "the one deployed before"
                fix = "`rekindle deploy delete` ends that deployment; then deploy again"
                raise RequestError(what, where=self.endpoint.address, fix=fix)

    def back(self, reason: str) -> RolloutEvent:
        """Give all requests to the version before. Raises RequestError where there is none."""
        last = self.log.last()
        if last is None or last.state in ("delete", "deleted"):
            raise RequestError("nothing is deployed", fix="`rekindle deploy CONFIG` deploys")
        if last.state == "rolled_back":
            return last
        if not last.previous:
            what = f"there is no version before version {last.version} in this deployment"
            raise RequestError(what, fix="`rekindle deploy delete` ends the deployment")
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
        """Do what the event announces, and what follows, to the end or to where it has to wait."""
        while event.state not in ("roll_back", *ENDS):
            try:
                reason = self._do(event, model)
            except (RequestError, UnreachableError):  # neither says anything of the version
                raise
            except RekindleError as error:
                reason = str(error)
            if reason is None:
                return event
            event = self._start_back(event, reason) if reason else self._next(event)
        return self._finish(event)

    def _do(self, event: RolloutEvent, model: ServedModel) -> str | None:
        """Do what the event announces; returns why it has to be rolled back, "" if it has not, and
        None where more requests are needed."""
        match event.state:
            case "shadow":
                if not self.before:
                    raise RequestError(
                        "deploy.shadow is 0, and a version is in the shadow",
                        fix="set it as it was, or `rekindle deploy rollback`",
                    )
                both = self.before.with_shadow(model)
                self.endpoint.create(both, event.number)
                prove(both, functools.partial(self.endpoint.ask, both))
                share = self.spec.shadow
                shares = {both.version: share, event.previous: 100 - share}
                self.endpoint.split(shares, event.number)
                return self._watch(event, functools.partial(self._in_shadow, both, {}))
            case "create":
                if event.shares:  # which end the shadow
                    self.endpoint.split(event.shares, event.number)
                    self.endpoint.retain(set(event.shares), event.number)
                self.endpoint.create(model, event.number)
            case "smoke":
                prove(model, functools.partial(self.endpoint.ask, model))
            case "canary":
                self.endpoint.split(event.shares, event.number)
                return self._watch(event, functools.partial(self._as_canary, event))
            case _:
                self.endpoint.split(event.shares, event.number)
                self.endpoint.retain({event.version, event.previous} - {""}, event.number)
        return ""

    def _as_canary(self, event: RolloutEvent) -> Seen:
        """Those of the canary."""
        found, nothing = self.endpoint.observe(), Traffic(0, 0, ())
        canary, stable = (found.get(v, nothing) for v in (event.version, event.previous))
        return canary, functools.partial(breach, canary, stable, self.spec)

    def _in_shadow(self, both: ServedModel, replicas: dict[str, Shadowed]) -> Seen:
        """Those of the version in the shadow: whichever replica answers tells what it counted."""
        body = {"instances": [ASK_SHADOW]}
        found = SHADOWED_JSON.validate_python(self.endpoint.ask(both, body)["predictions"][0])
        replicas[found.replica] = found
        names = ("answered", "failed", "differed", "spared", "refused")
        sums = {name: sum(getattr(s, name) for s in replicas.values()) for name in names}
        all_ = Shadowed("", **sums)
        times = [s.took_ms + s.before_ms for s in replicas.values() if s.took_ms and s.before_ms]
        differed = f"{all_.differed:,} otherwise than the version before, {all_.failed:,} failed"
        differed += f", {all_.refused:,} refused" if all_.refused else ""
        self.shadowed = f"of {all_.answered:,} requests in the shadow, {differed}"
        if times:  # those of the slowest machine
            half, most, *before = (f"{max(one):.0f}" for one in zip(*times, strict=True))
            self.shadowed += f"; p50 {half} ms and p99 {most} ms, of the version before "
            self.shadowed += f"{before[0]} ms and {before[1]} ms"
        traffic = Traffic(all_.answered, all_.failed, (), refused=all_.refused)
        return traffic, functools.partial(breach_in_shadow, all_, self.spec)

    def _watch(self, event: RolloutEvent, seen: Callable[[], Seen]) -> str | None:
        looked, began = -1, datetime.datetime.fromisoformat(event.at)
        while True:
            traffic, breach_at = seen()
            self.on_traffic(event, traffic)
            minutes = (datetime.datetime.now(datetime.UTC) - began).total_seconds() / 60
            # a request that it refused is no evidence of how it answers
            enough = traffic.requests - traffic.refused >= self.spec.min_requests
            over, look = enough and minutes >= self.spec.step_minutes, look_of(traffic.requests)
            # the last look is one of its own: each spends its part of alpha once
            now = look + over if over or look > looked else -1
            reason = breach_at(now)
            if reason or over:
                return reason
            if not self.wait:
                return None
            looked = look
            time.sleep(self.endpoint.poll_seconds)

    def _next(self, event: RolloutEvent) -> RolloutEvent:
        """Announce what follows the event."""
        version, previous, now = event.version, event.previous, event.shares.get(event.version, 0)
        if event.state == "shadow":
            shares, why = {previous: 100}, self.shadowed
            return self.log.put(event, "create", version, previous, shares, why, event.digest)
        if event.state == "create":
            return self.log.put(event, "smoke", version, previous)
        if event.state == "live":
            return self.log.put(event, "settled", version, previous, event.shares)
        share = next((share for share in self.spec.canary if share > now), 100)
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
        if event.state == "delete" or not event.previous:
            self.endpoint.delete()
        else:
            self.endpoint.split(event.shares, event.number)
            self.endpoint.retain({event.previous}, event.number)
        state: RolloutState = "deleted" if event.state == "delete" else "rolled_back"
        return self.log.put(event, state, event.version, event.previous, event.shares, event.reason)


def serving(event: RolloutEvent | None) -> str:
    """The version that has the requests once this event, which ends something, is reached."""
    if event is None or event.state == "deleted":
        return ""
    return event.version if event.state == "settled" else event.previous


def stood(events: Sequence[RolloutEvent], until: datetime.datetime) -> float:
    """Hours for which versions had their machines, as was announced; each of two that stand at once
    counts. With events oldest first."""
    hours, standing = 0.0, set[str]()
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
