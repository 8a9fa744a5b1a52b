"""Questions: asked at once, each by itself and within a time."""

from __future__ import annotations

import threading

import pytest

from rekindle.errors import Problem, RequestError, UnreachableError
from rekindle.platforms import checks
from rekindle.platforms.checks import NotChecked, PlatformCheck, answered, problems, run_checks
from rekindle.platforms.reads import Image, images


def fails(error: Exception, login: bool = False) -> PlatformCheck:
    def ask() -> str:
        raise error

    return PlatformCheck("a", "platforms.p.a", ask, login=login)


def test_each_answer_is_one_of_three_and_one_question_may_find_several_problems() -> None:
    several = RequestError([Problem("one", fix="do"), Problem("two", "elsewhere", "do more")])
    asked = [
        PlatformCheck("a", "platforms.p.a", lambda: "there"),
        fails(NotChecked("you may not")),
        fails(several),
        fails(UnreachableError("no answer")),
        fails(KeyError("of another shape")),
    ]
    found = answered(asked)
    assert [(check.state, check.where, check.said) for check in found] == [
        ("ok", "platforms.p.a", "there"),
        ("not asked", "platforms.p.a", "you may not"),
        ("problem", "platforms.p.a", "one"),
        ("problem", "elsewhere", "two"),
        ("not asked", "platforms.p.a", "no answer"),
        ("not asked", "platforms.p.a", "the answer cannot be read (KeyError)"),
    ]
    assert problems(found) == (
        Problem("one", "platforms.p.a", "do"),
        Problem("two", "elsewhere", "do more"),
    )


def test_they_are_asked_at_once_and_one_that_hangs_holds_up_no_other() -> None:
    meet, never = threading.Barrier(2, timeout=10), threading.Event()

    def met() -> str:
        return f"{meet.wait() >= 0}"

    def hangs() -> str:
        return f"{never.wait(30)}"

    asked = [
        PlatformCheck("hangs", "", hangs),
        PlatformCheck("a", "", met),
        PlatformCheck("b", "", met),
    ]
    found = answered(asked, patience_seconds=0.5)
    never.set()
    assert [check.said for check in found] == ["no answer within 0.5 s", "True", "True"]
    assert [check.state for check in found] == ["not asked", "ok", "ok"]


@pytest.mark.parametrize(
    ("login", "says"),
    [
        (fails(RequestError("expired"), True), "the login failed"),
        (fails(NotChecked("no answer"), True), "it is not known who asks: no answer"),
    ],
)
def test_without_a_login_nothing_behind_it_is_asked(login: PlatformCheck, says: str) -> None:
    def never() -> str:
        raise AssertionError

    anyhow = PlatformCheck("z", "", lambda: "there")
    behind = PlatformCheck("b", "", never), PlatformCheck("c", "", never, early=True)
    found = run_checks([anyhow, login, *behind])
    assert [check.said for check in found if check.name != "a"] == ["there", says, says]


def test_before_a_submission_only_what_is_quick_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(checks, "EARLY_SECONDS", 0.2)
    slow = PlatformCheck("slow", "", lambda: f"{never.wait(30)}", early=True)
    late = PlatformCheck("late", "", lambda: "unasked")
    login = PlatformCheck("login", "", lambda: "me", early=True, login=True)
    found = run_checks([login, slow, late], early=True)
    never.set()
    assert [(check.name, check.said) for check in found] == [
        ("login", "me"),
        ("slow", "no answer within 0.2 s"),
    ]


def test_images_are_those_whose_registry_is_known_each_once() -> None:
    references = [
        "a.example.com/b/c@sha256:00",
        "a.example.com:5000/b:1@sha256:00",
        "localhost:5000/b:1",
        "gcr.io/p/b",
        "gcr.io/p/b",
        "python:3.11",
        "library/python:3.11",
        "",
    ]
    assert images(references) == [
        Image("a.example.com", "b/c", "sha256:00"),
        Image("a.example.com:5000", "b", "sha256:00"),
        Image("gcr.io", "p/b", "latest"),
        Image("localhost:5000", "b", "1"),
    ]
