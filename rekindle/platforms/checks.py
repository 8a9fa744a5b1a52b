"""Checks of a platform: they only read, and run concurrently, with a timeout each.

A check that the user may not make, or that gets no answer, is reported as not asked and
is not a problem: the platform itself decides later. If the login fails, what follows it
is skipped."""

import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from rekindle.errors import Problem, RekindleError, RequestError
from rekindle.http import HttpError
from rekindle.masking import masked
from rekindle.outputs import ReadinessCheck

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 30.0
EARLY_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a config asks of a platform for its `model` beyond training, which needs more
    rights."""

    model: str = ""
    deploys: bool = False  # `rekindle deploy`, by who asks
    publishes: bool = False  # champions go to its registry, by who promotes and by steps
    deploys_in_steps: bool = False


class NotChecked(Exception):
    """Raised by a check without an answer; the text says why."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a check found, and what the config should say of it."""

    text: str
    settings: Mapping[str, str]
    """Values by the dotted paths of their fields: `platforms.kubeflow.pipeline_root`."""


class CurableError(RequestError):
    """A problem that is cured where the config has these settings."""

    def __init__(
        self, what: str, settings: Mapping[str, str], *, where: str = "", fix: str = ""
    ) -> None:
        super().__init__(what, where=where, fix=fix)
        self.settings = settings


@dataclasses.dataclass(frozen=True)
class PlatformCheck:
    """`ask` returns what was found; RequestError is a problem, any other error leaves it
    open. `where` is a field of the config, or a name on the platform. `early` ones are
    few and quick, and are also asked before a submission; those behind a `login` only if
    that is ok."""

    name: str
    where: str
    ask: Callable[[], str | Answer]
    early: bool = False
    login: bool = False


def rights(rows: Iterable[Sequence[str]]) -> Iterator[tuple[str, str]]:
    """The permissions in rows of the catalog, with the role at each row's end; `a.{b,c}`
    is two."""
    for name, *_, role in rows:
        begin, _, ends = name.partition("{")
        for end in ends.rstrip("}").split(","):
            yield f"{begin}{end}", role


def may(fixes: Mapping[str, str], missing: Collection[str], who: str = "you") -> str:
    """All rights by name where none is missing; else RequestError with each that is and
    its fix."""
    if missing:
        raise RequestError(Problem(f"{who} may not {name}", "", fixes[name]) for name in missing)
    return ", ".join(fixes)


def about(section: str, client: object) -> Callable[..., PlatformCheck]:
    """A maker of checks of fields of `section`, each made by `ask(client, *args)`."""

    def check(
        name: str,
        field: str,
        ask: Callable[..., str | Answer],
        *args: object,
        early: bool = False,
        login: bool = False,
    ) -> PlatformCheck:
        bound_ask = functools.partial(ask, client, *args)
        return PlatformCheck(name, f"platforms.{section}.{field}", bound_ask, early, login)

    return check


def run_checks(checks: Iterable[PlatformCheck], early: bool = False) -> tuple[ReadinessCheck, ...]:
    """What all checks found, or the early ones, in their order."""
    before_login = []  # with the login itself
    after_login = []
    has_login = False
    for check in checks:
        if early and not check.early:
            continue
        if has_login:
            after_login.append(check)
        else:
            before_login.append(check)
            has_login = check.login
    patience_seconds = EARLY_SECONDS if early else PATIENCE_SECONDS
    results = answered(before_login, patience_seconds)
    if not after_login:
        return results
    login = results[-1]
    if login.state == "ok":
        return (*results, *answered(after_login, patience_seconds))
    why = f"it is not known who asks: {login.said}"
    if login.state == "problem":
        why = "the login failed"
    return (*results, *(_unasked(check, why) for check in after_login))


def answered(
    checks: Sequence[PlatformCheck], patience_seconds: float = PATIENCE_SECONDS
) -> tuple[ReadinessCheck, ...]:
    """What they found, in their order; those that take longer are left alone."""
    answers: dict[int, tuple[ReadinessCheck, ...]] = {}

    def ask(number: int, check: PlatformCheck) -> None:
        answers[number] = _answer(check)

    # daemons: what hangs shall not keep the process
    rows = list(enumerate(checks))
    threads = [threading.Thread(target=ask, args=row, daemon=True) for row in rows]
    for thread in threads:
        thread.start()
    end = time.monotonic() + patience_seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    late = f"no answer within {patience_seconds:g} s"
    answers_in_time = dict(answers)  # threads that are late may still write
    results: list[ReadinessCheck] = []
    for number, check in rows:
        if number in answers_in_time:
            results += answers_in_time[number]
        else:
            results.append(_unasked(check, late))
    return tuple(results)


def problems(results: Iterable[ReadinessCheck]) -> tuple[Problem, ...]:
    """Those that are wrong, for an error."""
    failed_checks = [check for check in results if check.state == "problem"]
    return tuple(Problem(check.said, check.where, check.fix) for check in failed_checks)


def _answer(check: PlatformCheck) -> tuple[ReadinessCheck, ...]:
    """What a check found: one row, or one a problem."""
    row = functools.partial(ReadinessCheck, name=check.name)
    try:
        answer = check.ask()
        if isinstance(answer, str):
            answer = Answer(answer, {})
        settings = dict(answer.settings)
        return (row(where=check.where, state="ok", said=masked(answer.text), settings=settings),)
    except (NotChecked, HttpError) as error:
        return (_unasked(check, str(error)),)
    except RequestError as error:
        settings = dict(error.settings) if isinstance(error, CurableError) else {}
        return tuple(
            row(
                where=problem.where or check.where,
                state="problem",
                said=problem.what,
                fix=problem.fix,
                settings=settings,
            )
            for problem in error.problems
        )
    except RekindleError as error:
        return (_unasked(check, error.problems[0].what),)
    except Exception as error:  # an answer of another shape must not hide all others
        log.info("%s: %s", check.name, error, exc_info=True)
        return (_unasked(check, f"the answer cannot be read ({type(error).__name__})"),)


def _unasked(check: PlatformCheck, why: str) -> ReadinessCheck:
    message = masked(why)  # a service may send back what it was sent
    return ReadinessCheck(name=check.name, where=check.where, state="not asked", said=message)
