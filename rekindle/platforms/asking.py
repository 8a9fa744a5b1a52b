"""Questions to a platform: read-only checks that run concurrently, with a timeout each.

A check that the user may not make, or that gets no answer, is reported as not asked and is not a
problem: the platform itself decides later. If the login fails, the other checks are skipped."""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from rekindle.answers import ReadinessCheck
from rekindle.errors import Problem, RekindleError
from rekindle.masking import masked

log = logging.getLogger(__name__)

PATIENCE_SECONDS, EARLY_SECONDS = 30.0, 10.0


class Unasked(Exception):
    """A question without an answer; the text says why."""


@dataclasses.dataclass(frozen=True)
class Question:
    """`ask` returns what was found, and raises RekindleError for what is wrong, Unasked where there
    is no telling. `where` is what it is about: a field of the config, or a name on the platform.
    `early` ones are few and quick, and are asked before something is submitted, too."""

    name: str
    where: str
    ask: Callable[[], str]
    early: bool = False


def checks(
    login: Question, more: Iterable[Question], early: bool = False
) -> tuple[ReadinessCheck, ...]:
    """What came of all questions, or of the early ones, in their order; only of `login` unless that
    is well."""
    wanted = [question for question in more if question.early or not early]
    patience_seconds = EARLY_SECONDS if early else PATIENCE_SECONDS
    first = answered([login], patience_seconds)
    if all(check.state == "ok" for check in first):
        return (*first, *answered(wanted, patience_seconds))
    is_wrong = any(check.state == "problem" for check in first)
    why = "the login failed" if is_wrong else f"it is not known who asks: {first[0].said}"
    return (*first, *(_unasked(question, why) for question in wanted))


def answered(
    questions: Sequence[Question], patience_seconds: float = PATIENCE_SECONDS
) -> tuple[ReadinessCheck, ...]:
    """What came of the questions, in their order; those that take longer are left alone."""
    found: dict[int, tuple[ReadinessCheck, ...]] = {}
    threads = [
        threading.Thread(  # a daemon: what hangs shall not keep the process
            target=lambda i=i, question=question: found.update({i: _answer(question)}),
            daemon=True,
        )
        for i, question in enumerate(questions)
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + patience_seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    late = f"no answer within {patience_seconds:g} s"
    known = dict(found)
    return tuple(
        check
        for i, question in enumerate(questions)
        for check in known.get(i, (_unasked(question, late),))
    )


def problems(found: Iterable[ReadinessCheck]) -> tuple[Problem, ...]:
    """Those that are wrong, for an error."""
    return tuple(
        Problem(check.said, check.where, check.fix) for check in found if check.state == "problem"
    )


def _answer(question: Question) -> tuple[ReadinessCheck, ...]:
    made = functools.partial(ReadinessCheck, name=question.name)
    try:
        return (made(where=question.where, state="ok", said=masked(question.ask())),)
    except Unasked as error:
        return (_unasked(question, str(error)),)
    except RekindleError as error:
        return tuple(
            made(where=p.where or question.where, state="problem", said=p.what, fix=p.fix)
            for p in error.problems
        )
    except Exception as error:  # an answer of another shape must not hide all others
        log.info("%s: %s", question.name, error, exc_info=True)
        return (_unasked(question, f"the answer cannot be read ({type(error).__name__})"),)


def _unasked(question: Question, why: str) -> ReadinessCheck:
    said = masked(why)  # a service may send back what it was sent
    return ReadinessCheck(name=question.name, where=question.where, state="not asked", said=said)
