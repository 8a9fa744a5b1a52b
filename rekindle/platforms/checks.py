"""Checks of a platform: they only read, and run concurrently, with a timeout each.

A check that the user may not make, or that gets no answer, is reported as not asked and is not a
problem: the platform itself decides later. If the login fails, what follows it is skipped."""

import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rekindle.errors import Problem, RekindleError, RequestError
from rekindle.http import HttpError
from rekindle.masking import masked
from rekindle.outputs import ReadinessCheck

log = logging.getLogger(__name__)

PATIENCE_SECONDS, EARLY_SECONDS = 30.0, 10.0


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a config asks of a platform for its `model` beyond training, which needs more rights."""

    model: str = ""
    deploys: bool = False  # `rekindle deploy`, by who asks
    publishes: bool = False  # champions go to its registry, by who promotes and by steps
    deploys_in_steps: bool = False


class NotChecked(Exception):
    """A check without an answer; the text says why."""


@dataclasses.dataclass(frozen=True)
class Check:
    """`ask` returns what was found; RequestError is a problem, any other error leaves it open.
    `where` is a field of the config, or a name on the platform. `early` ones are few and quick, and
    are also asked before a submission; those behind a `login` only if that is ok."""

    name: str
    where: str
    ask: Callable[[], str]
    early: bool = False
    login: bool = False


def rights(rows: Iterable[Sequence[str]]) -> Iterator[tuple[str, str]]:
    """The permissions in rows of the catalog, with the role at each row's end; `a.{b,c}` is two."""
    for name, *_, role in rows:
        begin, _, ends = name.partition("{")
        yield from ((f"{begin}{end}", role) for end in ends.rstrip("}").split(","))


def may(fixes: Mapping[str, str], missing: Collection[str], who: str = "you") -> str:
    """All rights by name where none is missing; else RequestError with each that is and its fix."""
    if missing:
        raise RequestError(Problem(f"{who} may not {name}", "", fixes[name]) for name in missing)
    return ", ".join(fixes)


def about(section: str, there: Any) -> Callable[..., Check]:
    """A maker of checks of fields of `section`, each made by `ask(there, *words)`."""

    def check(name: str, field: str, ask: Callable[..., str], *words: Any, **more: bool) -> Check:
        asked = functools.partial(ask, there, *words)
        return Check(name, f"platforms.{section}.{field}", asked, **more)

    return check


def run_checks(checks: Iterable[Check], early: bool = False) -> tuple[ReadinessCheck, ...]:
    """What all checks found, or the early ones, in their order."""
    wanted = [check for check in checks if check.early or not early]
    patience_seconds = EARLY_SECONDS if early else PATIENCE_SECONDS
    end = next((i for i, check in enumerate(wanted, 1) if check.login), len(wanted))
    first, rest = answered(wanted[:end], patience_seconds), wanted[end:]
    if not rest or first[-1].state == "ok":
        return (*first, *answered(rest, patience_seconds))
    is_wrong = first[-1].state == "problem"
    why = "the login failed" if is_wrong else f"it is not known who asks: {first[-1].said}"
    return (*first, *(_unasked(check, why) for check in rest))


def answered(
    checks: Sequence[Check], patience_seconds: float = PATIENCE_SECONDS
) -> tuple[ReadinessCheck, ...]:
    """What they found, in their order; those that take longer are left alone."""
    found: dict[int, tuple[ReadinessCheck, ...]] = {}

    def ask(number: int, check: Check) -> None:
        found[number] = _answer(check)

    # daemons: what hangs shall not keep the process
    rows = list(enumerate(checks))
    threads = [threading.Thread(target=ask, args=row, daemon=True) for row in rows]
    for thread in threads:
        thread.start()
    end = time.monotonic() + patience_seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    late = f"no answer within {patience_seconds:g} s"
    known = dict(found)
    return tuple(row for i, check in rows for row in known.get(i, (_unasked(check, late),)))


def problems(found: Iterable[ReadinessCheck]) -> tuple[Problem, ...]:
    """Those that are wrong, for an error."""
    wrong = (check for check in found if check.state == "problem")
    return tuple(Problem(check.said, check.where, check.fix) for check in wrong)


def _answer(check: Check) -> tuple[ReadinessCheck, ...]:
    made = functools.partial(ReadinessCheck, name=check.name)
    try:
        return (made(where=check.where, state="ok", said=masked(check.ask())),)
    except (NotChecked, HttpError) as error:
        return (_unasked(check, str(error)),)
    except RequestError as error:
        return tuple(
            made(where=p.where or check.where, state="problem", said=p.what, fix=p.fix)
            for p in error.problems
        )
    except RekindleError as error:
        return (_unasked(check, error.problems[0].what),)
    except Exception as error:  # an answer of another shape must not hide all others
        log.info("%s: %s", check.name, error, exc_info=True)
        return (_unasked(check, f"the answer cannot be read ({type(error).__name__})"),)


def _unasked(check: Check, why: str) -> ReadinessCheck:
    said = masked(why)  # a service may send back what it was sent
    return ReadinessCheck(name=check.name, where=check.where, state="not asked", said=said)
