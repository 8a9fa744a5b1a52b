"""The champion is replaced by a candidate that was compared with it, and by no other, on
whichever machine and however late the registry answers.

MLflow sets an alias without asking what it was, so promotions exclude each other by
claims: tags of the registered model, one an attempt. Who claims first and then sees no
other claim may go on; two who claim at once see each other, and both step back. The
champion is read after that, held against the evidence, and replaced within the time for
which a claim is respected. An attempt that was killed leaves its claim, which others
respect for `LEASE` of their own clock. One whose last request has no answer leaves it as
`UNSURE`: the request may still be carried out, and until it is, or a person looks, no
process promotes. A machine that was paused, its clocks too, may have lost its claim
meanwhile: the last look at the claims is behind the last word of its own.

The embedded registry is one machine's, where a lock lets one process promote at a time;
it claims all the same, because another home may have the same database as its
`tracking_uri`. Claims that processes under the lock left are void to the next."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import os
import random
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rekindle.launch.events import emit
from rekindle.records import ROLLED_BACK_BY_HAND, ChangeKind, Evidence, Registration
from rekindle.registry import models
from rekindle.registry.client import PREFIX, tags_of
from rekindle.registry.history import champion_before, changes, existing, note
from rekindle.registry.models import CHALLENGER, CHAMPION, Registry, by_alias, has_alias
from rekindle.spec.identity import file_sha256

if TYPE_CHECKING:
    from mlflow import MlflowClient

CLAIM = f"{PREFIX}promoting."
EMBEDDED = "embedded, "
UNSURE = "no answer to "
LEASE = 120.0
"""Seconds for which others respect a claim that does not change."""
_CHANCE = random.SystemRandom()
IN_TIME = 60.0
"""Seconds from a claim to the last request at most."""
ANSWER = 20.0
"""Seconds for the answer to that request."""
STEP_BACK = 5.0
"""Seconds for others who see a claim to take back theirs."""
_AGAIN = "run the same command again"


def promote(
    where: Registry, registered: Registration, evidence_file: Path, reason: str = ""
) -> Registration:
    """Make the registered version the champion if the evidence, the version's tags and
    files, and the registry of this moment all agree. With a person's `reason` also a
    version that was compared with another champion, or could not be compared with it, or
    was rolled back."""
    version = registered.version
    evidence = Evidence.read(evidence_file)
    how: ChangeKind = "reason" if reason else "gate"
    with where.alone(), where.open(f"promote version {version} of {where.name}") as client:
        if not _is_promoted(client, where, version, evidence):
            models.fetch_model(where, version, evidence.model_digest)
            with _claimed(client, where, version) as claim:
                may_replace = functools.partial(
                    _may_replace, client, where, version, evidence, evidence_file, reason
                )
                if may_replace():
                    note(client, where.name, version, how, reason or evidence.reason)
                    claim.replace_champion(may_replace)
        elif changes(client, where.name):
            # a roll back that was interrupted may be the last entry
            note(client, where.name, version, how, reason)
        if has_alias(client, where, CHALLENGER, version):
            client.delete_registered_model_alias(where.name, CHALLENGER)
        model_version = client.get_model_version(where.name, version)
        if tags_of(model_version).get("decision") != "promoted":
            client.set_model_version_tag(where.name, version, f"{PREFIX}decision", "promoted")
        return models.registration(client, where, model_version, registered.created, "promoted")


def roll_back(
    where: Registry, reason: str, to: str = "", *, by_hand: bool = False
) -> tuple[str, str]:
    """Make version `to`, or the champion before, the champion again; returns the version
    that was champion and the one that is. The former is not promoted again without a
    person's reason; that a person rolled it back is noted with the time. Raises
    RegistryError where there is none, it is gone, was never champion, or has other
    files."""
    with where.alone(), where.open(f"roll back {where.name}") as client:
        champion = by_alias(client, where, CHAMPION)
        if champion is None:
            message = f"{where.name} has no champion to roll back"
            raise where.error(message, "`rekindle run` trains one")
        current = str(champion.version)
        to = to or champion_before(client, where, current)
        if to == current:
            return current, current
        tags = existing(client, where, to)
        if tags.get("decision") != "promoted":
            message = f"version {to} of {where.name} was never champion, or was rolled back"
            fix = "`rekindle promote RUN --reason WHY` promotes one that passed its gate"
            raise where.error(message, fix)
        models.fetch_model(where, to, tags.get("model_digest", ""))
        with _claimed(client, where, to) as claim:
            may_replace = functools.partial(_is_still_champion, client, where, current)
            may_replace()  # before the tags below, which say that it was replaced
            facts = {"decision": "rolled_back", "rolled_back_for": reason}
            if by_hand:
                now_utc = datetime.datetime.now(datetime.UTC)
                facts[ROLLED_BACK_BY_HAND] = now_utc.isoformat(timespec="seconds")
            for name, value in facts.items():
                client.set_model_version_tag(where.name, current, f"{PREFIX}{name}", value)
            note(client, where.name, to, "rollback", reason)
            claim.replace_champion(may_replace)
        return current, to


def _is_still_champion(client: MlflowClient, where: Registry, version: str) -> bool:
    if not has_alias(client, where, CHAMPION, version):
        message = f"version {version} of {where.name} is no longer the champion"
        fix = "`rekindle champion` shows which is; then run the command again"
        raise where.error(message, fix)
    return True


def _is_promoted(client: MlflowClient, where: Registry, version: str, evidence: Evidence) -> bool:
    """Whether the version is the champion, and the model of the evidence.

    A registry that was set up again gives out its numbers again."""
    if not has_alias(client, where, CHAMPION, version):
        return False
    tags = tags_of(client.get_model_version(where.name, version))
    return tags.get("model_digest") == evidence.model_digest


def _may_replace(
    client: MlflowClient,
    where: Registry,
    version: str,
    evidence: Evidence,
    evidence_file: Path,
    reason: str,
) -> bool:
    """False if it is the champion by now; RegistryError where something speaks against it."""
    champion = by_alias(client, where, CHAMPION)
    if _is_promoted(client, where, version, evidence):
        return False
    champion_version = ""
    champion_digest = ""
    if champion is not None:
        champion_version = str(champion.version)
        champion_digest = tags_of(champion).get("model_digest", "")
    tags = tags_of(client.get_model_version(where.name, version))
    doubts = []
    has_passed = evidence.promote and all(check.passed for check in evidence.checks)
    # without a comparison a person decides
    if not has_passed and not (reason and evidence.is_for_a_person):
        doubts.append("the gate refused it")
    if evidence.run_key != tags.get("run_key"):
        doubts.append("the evidence belongs to another model")
    if evidence.model_digest != tags.get("model_digest"):
        doubts.append("the evidence belongs to other files than were registered")
    if file_sha256(evidence_file) != tags.get("evidence_sha256"):
        doubts.append("the evidence was changed after it was registered")
    if not reason:
        doubts += _doubts_about_champion(champion_version, champion_digest, evidence)
        if tags.get("decision") == "rolled_back":
            doubts.append(f"it was rolled back: {tags.get('rolled_back_for', '')}")
    if doubts:
        fix = "run the same config again: it is judged against the champion of that moment; or "
        fix += "promote what passed its gate in spite of that: `rekindle promote RUN --reason WHY`"
        raise where.error(f"not promoted: {'; '.join(doubts)}", fix)
    return True


def _doubts_about_champion(version: str, digest: str, evidence: Evidence) -> list[str]:
    """Why the champion, "" for none, is not the one that the candidate was compared with."""
    if version != evidence.champion_version:
        return [
            f"the champion is now version {version or 'none'}, and the candidate was compared "
            f"with version {evidence.champion_version or 'none'}"
        ]
    if digest != evidence.champion_digest:
        return [
            f"the champion, version {version}, is another model now than the one that the "
            "candidate was compared with"
        ]
    return []


@dataclasses.dataclass
class Claim:
    """That of one attempt to promote `version`, in the name of `who`; `made_at` by a clock
    that also runs while this machine is suspended; `unsure` while its last request may
    still be carried out."""

    client: MlflowClient
    where: Registry
    version: str
    who: str
    key: str = ""
    made_at: float = 0.0
    unsure: bool = False

    def renew(self) -> dict[str, str]:
        """Claim, under a new key (others time each); returns the claims of others."""
        self.made_at = _clock()
        self.key = f"{CLAIM}{uuid.uuid4().hex[:12]}"
        self.client.set_registered_model_tag(self.where.name, self.key, self.who)
        claims_of_others = claims(self.client, self.where.name)
        claims_of_others.pop(self.key, None)
        return claims_of_others

    def outlive(self, key: str, who: str) -> None:
        """Take away another's claim after `LEASE`; RegistryError while it may take effect."""
        champion = by_alias(self.client, self.where, CHAMPION)
        is_done = False
        if champion is not None:
            is_done = who.startswith(f"{UNSURE}version {champion.version},")
        if who.startswith(UNSURE) and not is_done:
            message = "an earlier promotion had no answer from the registry, which may still carry "
            message += f"it out: {who.removeprefix(UNSURE)}"
            raise self.where.error(message, self._look_first(key))
        self.client.delete_registered_model_tag(self.where.name, key)

    def _look_first(self, key: str) -> str:
        """What a person does about a claim whose promotion has no answer."""
        return (
            f"look which version of {self.where.name} is the champion, then delete the tag {key} "
            "of this registered model and run the same command again"
        )

    def replace_champion(self, may_replace: Callable[[], bool]) -> None:
        """Set the alias `champion`, if `may_replace` still says so; RegistryError where
        others may have gone on meanwhile, or without an answer."""
        from mlflow.exceptions import RestException

        self._hold_alone()
        if not self.where.spec.tracking_uri:
            self.client.set_registered_model_alias(self.where.name, CHAMPION, self.version)
            return
        # before the request: an attempt that is killed after it says nothing any more
        self.client.set_registered_model_tag(self.where.name, self.key, f"{UNSURE}{self.who}")
        self._hold_alone()
        # others may have gone on, and a machine that slept need not know how long
        if not may_replace():
            return
        if _clock() - self.made_at > IN_TIME:
            message = f"not promoted: the registry took more than {IN_TIME:.0f} s for a few "
            message += "questions"
            raise self.where.error(message, _AGAIN)
        self.unsure = True
        try:
            with _one_answer():
                self.client.set_registered_model_alias(self.where.name, CHAMPION, self.version)
        except Exception as error:
            if isinstance(error, RestException) and error.get_http_status_code() < 500:
                self.unsure = False  # it was refused
                raise
            if not self._done_late():
                message = f"the registry gave no answer to promoting version {self.version}, and "
                message += "may still do it; no other version is promoted until that is known: "
                message += str(error)
                raise self.where.error(message, self._look_first(self.key)) from error
        self.unsure = False

    def _hold_alone(self) -> None:
        """Wait until others have stepped back; RegistryError unless this claim is left."""
        give_up = time.monotonic() + STEP_BACK
        while (keys := list(claims(self.client, self.where.name))) != [self.key]:
            if self.key not in keys or time.monotonic() > give_up:
                message = "not promoted: another promotion began while this one was held up"
                raise self.where.error(message, _AGAIN)
            time.sleep(0.2)

    def _done_late(self) -> bool:
        """Whether the version becomes the champion after all."""
        give_up = time.monotonic() + ANSWER
        while time.monotonic() < give_up:
            with contextlib.suppress(Exception):
                if has_alias(self.client, self.where, CHAMPION, self.version):
                    return True
            time.sleep(0.5)
        return False


def claims(client: MlflowClient, name: str) -> dict[str, str]:
    """The claims of all attempts: key, and who made it."""
    tags = dict(client.get_registered_model(name).tags)
    return {key: str(who) for key, who in tags.items() if key.startswith(CLAIM)}


def _clock() -> float:
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@contextlib.contextmanager
def _claimed(client: MlflowClient, where: Registry, version: str) -> Iterator[Claim]:
    """A claim, once others have gone: no other process replaces the champion meanwhile."""
    who = f"version {version}, {socket.gethostname()}, process {os.getpid()}"
    if not where.spec.tracking_uri:
        who = f"{EMBEDDED}{who}"
        for key, claimant in claims(client, where.name).items():
            if claimant.startswith(EMBEDDED):  # of a process that held the lock before
                client.delete_registered_model_tag(where.name, key)
    claim = Claim(client, where, version, who)
    first_seen: dict[str, float] = {}  # by the key of another's claim
    try:
        while claims_of_others := claim.renew():
            client.delete_registered_model_tag(where.name, claim.key)
            if not first_seen:
                claimant = next(iter(claims_of_others.values()))
                emit("notice", text=f"another run promotes ({claimant}); waiting for it")
            now = time.monotonic()
            first_seen = {key: first_seen.get(key, now) for key in claims_of_others}
            for key, since in first_seen.items():
                if now - since > LEASE:
                    claim.outlive(key, claims_of_others[key])
            time.sleep(_CHANCE.uniform(0.1, 1.5))  # so that two do not meet again
        yield claim
    finally:
        if not claim.unsure:
            with contextlib.suppress(Exception):  # else others wait for `LEASE`
                client.delete_registered_model_tag(where.name, claim.key)


@contextlib.contextmanager
def _one_answer() -> Iterator[None]:
    """A request is sent once: of two, the second might be carried out long after the first."""
    settings = {
        "MLFLOW_HTTP_REQUEST_TIMEOUT": f"{ANSWER:.0f}",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    }
    settings_before = {name: os.environ[name] for name in settings if name in os.environ}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in settings:
            os.environ.pop(name, None)
        os.environ.update(settings_before)
