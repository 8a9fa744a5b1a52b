"""What protobuf and Go make of values, as KFP's backend writes them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.protojson import argument_of, carried, text_of

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize(
    ("value", "text", "argument"),
    [
        # recorded from KFP 2.17.0 on 2026-11-29
        (2.0, "2", "2"),
        (1e-05, "0.00001", "1e-05"),
        (1e21, "1000000000000000000000", "1e+21"),
        (1e-07, "0.0000001", "1e-07"),
        (1e6, "1000000", "1000000"),
        (123456789.125, "123456789.125", "1.23456789125e+08"),
        ([1, "é", 2.5], '[1,"é",2.5]', '[1,"é",2.5]'),
        ({"k": "ü", "n": 1.0}, '{"k":"ü","n":1}', '{"k":"ü","n":1}'),
        (True, "true", "true"),
        (None, "", ""),
        # by the rules of Go's strconv and encoding/json
        (0.1, "0.1", "0.1"),
        (100000.5, "100000.5", "100000.5"),
        (1234567.5, "1234567.5", "1.2345675e+06"),
        (0.0001, "0.0001", "0.0001"),
        (-1.5e-09, "-0.0000000015", "-1.5e-09"),
        (1e19, "10000000000000000000", "1e+19"),
        (2**53 + 1, "9007199254740992", "9007199254740992"),
        (-0.0, "-0", "0"),
        (float("nan"), "NaN", "NaN"),
        (float("-inf"), "-Inf", "-Inf"),
        ([1e-07, 1e21, 1e-05, None], "[1e-7,1e+21,0.00001,null]", "[1e-7,1e+21,0.00001,null]"),
        (
            {"b": 1, "a": "<&>"},
            r'{"a":"\u003c\u0026\u003e","b":1}',
            r'{"a":"\u003c\u0026\u003e","b":1}',
        ),
        ("as it is: é \n", "as it is: é \n", "as it is: é \n"),
    ],
)
def test_texts_of_values_are_those_of_kfp(value: Any, text: str, argument: str) -> None:
    assert (text_of(value), argument_of(value)) == (text, argument)


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (2.0, 2),
        (-0.0, 0),
        (1.5, 1.5),
        (2**53 + 1, 2**53),
        (2.306664292437605e16, 23066642924376050),
        (1e21, 1e21),
        (10**21, 1e21),
        (True, True),
        ((1.0, [2.0]), [1, [2]]),
        ({"k": 3.0, "a": None}, {"a": None, "k": 3}),
    ],
)
def test_a_component_reads_what_protobuf_carries(value: Any, read: Any) -> None:
    assert json.dumps(carried(value)) == json.dumps(read), "kinds and order included"


def test_a_number_that_no_double_holds_is_an_error() -> None:
    with pytest.raises(ValueError, match="no double holds 1000"):
        carried([10**400])


@given(NUMBERS)
def test_every_text_of_a_number_names_the_same_number(number: float) -> None:
    assert float(text_of(number)) == number
    assert float(argument_of(number)) == number
    assert float(json.loads(text_of([number]))[0]) == number
    assert "e" not in text_of(number)


@given(
    st.recursive(
        NUMBERS | st.text() | st.none(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_what_was_carried_stays_as_it_is(value: Any) -> None:
    once = carried(value)
    assert json.dumps(carried(once)) == json.dumps(once)
    if isinstance(value, list | dict):
        assert carried(json.loads(text_of(value))) == once
