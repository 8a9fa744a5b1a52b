"""Every platform has the functions that the seam calls, with the seam's own signatures."""

import importlib
import inspect
import re
from typing import get_args

import pytest

from rekindle.errors import RequestError
from rekindle.platforms.alarms import Monitoring
from rekindle.platforms.platform import ENDPOINTS, PLATFORMS, Platform, Publisher
from rekindle.serve.rollout import Endpoint
from rekindle.spec.deploy import DeploySpec
from rekindle.spec.model import RegisterSpec
from rekindle.spec.platforms import PlatformsSpec
from tests.platforms.toy import ToySpec

# method of Platform -> module and function of a platform
FUNCTIONS = {
    "compile": "compile.compile",
    "cache_keys": "client.cache_keys",
    "submit": "client.submit",
    "describe": "runs.describe",
    "read_log": "runs.read_log",
    "cancel": "runs.cancel",
    "resume": "runs.resume",
    "artifacts": "runs.artifacts",
    "read": "runs.read",
    "lowered": "schedule.lowered",
    "set_schedule": "schedule.set_",
    "list_schedules": "schedule.list_",
    "pause_schedule": "schedule.pause",
    "delete_schedule": "schedule.delete",
    "permissions": "doctor.permissions",
    "checks": "doctor.checks",
}


def test_the_table_has_a_section_of_the_config_for_each_platform():
    assert {"local", *PLATFORMS} == set(PlatformsSpec.model_fields)


def test_every_question_of_the_seam_is_compared_here():
    methods = {n for n, _ in inspect.getmembers(Platform, inspect.isfunction) if n[0] != "_"}
    assert methods == {"outline", "endpoint", "alarms", "publisher", *FUNCTIONS}


@pytest.mark.parametrize("name", PLATFORMS)
def test_a_platform_has_what_an_outline_is_made_of(name):
    client = importlib.import_module(f"{PLATFORMS[name]}.client")
    settings = type(getattr(PlatformsSpec(), name)).__name__
    for function, asked in (
        ("where", {"place": settings, "return": "str"}),
        ("run_name", {"definition": "Definition", "token": "str", "return": "str"}),
        ("steps", {"definition": "Definition", "return": "tuple[PlannedStep, ...]"}),
    ):
        found = inspect.signature(getattr(client, function))
        described = {p.name: _text(p.annotation) for p in found.parameters.values()}
        assert {**described, "return": _text(found.return_annotation)} == asked


@pytest.mark.parametrize("method", FUNCTIONS)
@pytest.mark.parametrize("name", PLATFORMS)
def test_a_platform_answers_as_the_seam_asks(name, method):
    _compare(name, type(getattr(PlatformsSpec(), name)), method)


def _compare(name, settings, method):
    module, _, function = FUNCTIONS[method].partition(".")
    found = inspect.signature(
        getattr(importlib.import_module(f"{PLATFORMS[name]}.{module}"), function)
    )
    parameters = dict(found.parameters)
    if method != "cache_keys":
        place = parameters.pop("place")
        assert _text(place.annotation) == settings.__name__
    asked = inspect.signature(getattr(Platform, method))
    _, *wanted = asked.parameters.values()
    described = {p.name: (_text(p.annotation), p.default) for p in wanted}
    assert {p.name: (_text(p.annotation), p.default) for p in parameters.values()} == described
    assert _text(found.return_annotation) == _text(asked.return_annotation)


def _text(annotation):
    """As its module writes it: some hold types, some (`from __future__`) their text."""
    if isinstance(annotation, type) and not hasattr(annotation, "__args__"):
        return annotation.__name__
    return re.sub(r"(?:\w+\.)+(\w+)", r"\1", str(annotation))


@pytest.mark.parametrize("method", FUNCTIONS)
def test_the_toy_answers_as_the_seam_asks(method, monkeypatch):
    monkeypatch.setitem(PLATFORMS, "toy", "tests.platforms.toy")
    _compare("toy", ToySpec, method)


@pytest.mark.parametrize("name", ENDPOINTS)
def test_platforms_that_publish_have_what_is_asked(name):
    kind = getattr(importlib.import_module(f"{PLATFORMS[name]}.endpoint"), ENDPOINTS[name])
    known = list(inspect.signature(Publisher.publish).parameters)
    publishes = hasattr(kind, "publish")
    assert publishes == (
        name in get_args(get_args(RegisterSpec.model_fields["publish"].annotation)[0])
    )
    if publishes:
        assert list(inspect.signature(kind.publish).parameters) == known


@pytest.mark.parametrize("name", ENDPOINTS)
def test_an_endpoint_is_asked_as_the_roll_out_asks(name):
    """Every method of the protocol is there with its parameters, and nothing has been made by asking for it."""
    kind = getattr(importlib.import_module(f"{PLATFORMS[name]}.endpoint"), ENDPOINTS[name])
    methods = [
        m for m, found in vars(Endpoint).items() if inspect.isfunction(found) and m[0] != "_"
    ]
    assert len(methods) == 8
    for method in methods:
        wanted, found = (inspect.signature(getattr(one, method)) for one in (Endpoint, kind))
        assert list(found.parameters) == list(wanted.parameters), method


@pytest.mark.parametrize("name", PLATFORMS)
def test_alarms_are_asked_for_alike(name):
    kind = importlib.import_module(f"{PLATFORMS[name]}.alarms").Alarms
    assert [*inspect.signature(kind).parameters] == ["place", "definition", "model", "folder"]
    for method in ("find", "put", "remove"):
        wanted, found = (inspect.signature(getattr(one, method)) for one in (Monitoring, kind))
        assert [*found.parameters] == [*wanted.parameters], method
    assert kind.template.exists()


@pytest.mark.parametrize("name", sorted({*ENDPOINTS} - {"kubeflow"}))
def test_a_limit_that_nothing_measures_is_refused(name):
    with pytest.raises(RequestError, match=r"deploy\.max_p99_ms"):
        Platform.of(name, PlatformsSpec()).endpoint(DeploySpec(max_p99_ms=250), "tickets")
