"""Questions to a platform: read-only checks that run concurrently, with a timeout each.

A check that the user may not make, or that gets no answer, is reported as not asked and is not a
problem: the platform itself decides later. If the login fails, what follows it is skipped."""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rekindle.answers import ReadinessCheck
from rekindle.errors import Problem, RekindleError, RequestError
from rekindle.http import HttpError
from rekindle.masking import masked

log = logging.getLogger(__name__)

PATIENCE_SECONDS, EARLY_SECONDS = 30.0, 10.0


class Unasked(Exception):
    """A question without an answer; the text says why."""


@dataclasses.dataclass(frozen=True)
class Question:
    """`ask` returns what was found; RequestError is a problem, any other error leaves it open.

    `where` is what it is about: a field of the config, or a name on the platform. `early` ones are
    few and quick, and are also asked before a submission. Those behind a `login` in a platform's
    list are asked only if it is ok."""

    name: str
    where: str
    ask: Callable[[], str]
    early: bool = False
    login: bool = False


def about(section: str, there: Any) -> Callable[..., Question]:
    """A maker of questions about fields of `section`, each answered by `ask(there, *words)`."""

    def question(
        name: str, field: str, ask: Callable[..., str], *words: Any, **more: bool
    ) -> Question:
        asked = functools.partial(ask, there, *words)
        return Question(name, f"platforms.{section}.{field}", asked, **more)

    return question


def checks(questions: Iterable[Question], early: bool = False) -> tuple[ReadinessCheck, ...]:
    """The answers to all questions, or to the early ones, in their order."""
    wanted = [question for question in questions if question.early or not early]
    patience_seconds = EARLY_SECONDS if early else PATIENCE_SECONDS
    end = next((i for i, question in enumerate(wanted, 1) if question.login), len(wanted))
    first, rest = answered(wanted[:end], patience_seconds), wanted[end:]
    if not rest or first[-1].state == "ok":
        return (*first, *answered(rest, patience_seconds))
    is_wrong = first[-1].state == "problem"
    why = "the login failed" if is_wrong else f"it is not known who asks: {first[-1].said}"
    return (*first, *(_unasked(question, why) for question in rest))


def answered(
    questions: Sequence[Question], patience_seconds: float = PATIENCE_SECONDS
) -> tuple[ReadinessCheck, ...]:
    """The answers in the order of the questions; those that take longer are left alone."""
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
    except (Unasked, HttpError) as error:
        return (_unasked(question, str(error)),)
    except RequestError as error:
        return tuple(
            made(where=p.where or question.where, state="problem", said=p.what, fix=p.fix)
            for p in error.problems
        )
    except RekindleError as error:
        return (_unasked(question, error.problems[0].what),)
    except Exception as error:  # an answer of another shape must not hide all others
        log.info("%s: %s", question.name, error, exc_info=True)
        return (_unasked(question, f"the answer cannot be read ({type(error).__name__})"),)


def _unasked(question: Question, why: str) -> ReadinessCheck:
    said = masked(why)  # a service may send back what it was sent
    return ReadinessCheck(name=question.name, where=question.where, state="not asked", said=said)
