"""What an input receives by its type, as KFP's driver binds it, and a run's arguments."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from rekindle.errors import RequestError
from rekindle.ir.read.pipeline import read
from rekindle.ir.values import bind, element, received
from tests.support.read_pipeline import minimal

KINDS = {
    "STRING": "x",
    "NUMBER_INTEGER": 1,
    "NUMBER_DOUBLE": 1.5,
    "BOOLEAN": True,
    "LIST": [1],
    "STRUCT": {"a": 1},
}
NUMBERS = {"NUMBER_INTEGER", "NUMBER_DOUBLE"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("came", KINDS)
def test_every_kind_fits_at_its_own_at_text_and_nowhere_else(kind: str, came: str) -> None:
    value = KINDS[came]
    if kind == "STRING":
        assert isinstance(received(value, kind), str)
    elif kind == came or {kind, came} <= NUMBERS:
        assert received(value, kind) == value
    else:
        with pytest.raises(ValueError, match="is not"):
            received(value, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_null_is_the_empty_text_and_fits_nowhere_else(kind: str) -> None:
    if kind == "STRING":
        assert received(None, kind) == ""
    else:
        with pytest.raises(ValueError, match="None is not"):
            received(None, kind)


def test_a_final_status_is_a_mapping() -> None:
    assert received({"state": "FAILED"}, "TASK_FINAL_STATUS") == {"state": "FAILED"}
    with pytest.raises(ValueError, match="is not the final status of a step"):
        received("FAILED", "TASK_FINAL_STATUS")


def test_a_value_has_to_be_one_of_the_literals() -> None:
    assert received(2.0, "NUMBER_INTEGER", (1, 2)) == 2
    with pytest.raises(ValueError, match="3 is not one of 1, 2"):
        received(3, "NUMBER_INTEGER", (1, 2))


@pytest.mark.parametrize("value", [{"a": {"b": 2}}, '{"a": {"b": 2}}', {"a": '{"b": 2}'}])
def test_an_element_is_found_in_a_mapping_and_in_the_text_of_one(value: Any) -> None:
    assert element(value, ("a", "b")) == 2


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"b": 1}, "there is no `a`"),
        ("a", "there is no `a` in 'a'"),
        ([1], "there is no `a`"),
        ({"a": None}, "`a` is null"),
    ],
)
def test_an_element_that_is_missing_or_null_is_an_error(value: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        element(value, ("a",))


def bound(kind: str, value: Any) -> Any:
    spec = minimal()
    spec["root"]["inputDefinitions"] = {"parameters": {"a": {"parameterType": kind}}}
    return bind(read(yaml.safe_dump(spec)), {"a": value})["a"]


@pytest.mark.parametrize(("value", "taken"), [(3, 3), (3.0, 3), (3.5, 3.5), (2**53 + 1, 2**53)])
def test_any_number_is_taken_for_a_whole_one_as_kfp_takes_it(value: float, taken: float) -> None:
    assert repr(bound("NUMBER_INTEGER", value)) == repr(taken)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("NUMBER_INTEGER", "7"),
        ("STRING", 5),
        ("BOOLEAN", "true"),
        ("BOOLEAN", 1),
        ("LIST", "[1, 2]"),
        ("STRUCT", '{"a": 1}'),
        ("NUMBER_DOUBLE", "0.5"),
        ("NUMBER_INTEGER", True),
        ("LIST", [10**400]),
        ("NUMBER_DOUBLE", float("nan")),
    ],
)
def test_arguments_of_another_kind_are_refused(kind: str, value: Any) -> None:
    with pytest.raises(RequestError):
        bound(kind, value)
