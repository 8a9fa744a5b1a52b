"""The condition grammar: what parses, what it means, and that no value is ever read as code."""

from __future__ import annotations

import contextlib
import operator
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rekindle.errors import StepError, UnsupportedError
from rekindle.ir.condition import check, evaluate, parse
from tests.support.samples import SAMPLES, needs_samples

OPERATORS = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
symbols = st.sampled_from(sorted(OPERATORS))
literals = st.text().filter(lambda text: "'" not in text and "\\" not in text)


def p(name: str) -> str:
    return f"inputs.parameter_values['{name}']"


def holds(text: str, **values: Any) -> bool:
    return evaluate(parse(text), values)


@given(st.text(), literals, symbols)
def test_texts_compare_as_texts_whatever_is_in_them(value: str, literal: str, symbol: str) -> None:
    assert holds(f"{p('x')} {symbol} '{literal}'", x=value) is OPERATORS[symbol](value, literal)


@given(st.integers(), st.integers(), symbols)
def test_whole_numbers_compare_as_kfp_writes_them(left: int, right: int, symbol: str) -> None:
    expected = OPERATORS[symbol](left, right)
    assert holds(f"int({p('x')}) {symbol} {right}", x=left) is expected
    assert holds(f"int({p('x')}) {symbol} int({p('y')})", x=left, y=right) is expected
    assert holds(f"{p('x')} {symbol} double(int({p('y')}))", x=left, y=right) is OPERATORS[symbol](
        left, float(right)
    )


@given(
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(allow_nan=False, allow_infinity=False),
    symbols,
)
def test_floats_compare_as_python_prints_them(left: float, right: float, symbol: str) -> None:
    assert holds(f"{p('x')} {symbol} {right}", x=left) is OPERATORS[symbol](left, right)


@given(st.booleans(), st.booleans())
def test_booleans_know_only_equality(left: bool, right: bool) -> None:
    literal = str(right).lower()
    assert holds(f"{p('x')} == {literal}", x=left) is (left == right)
    assert holds(f"{p('x')} != {literal}", x=left) is (left != right)
    with pytest.raises(StepError, match="no order"):
        holds(f"{p('x')} < {literal}", x=left)


formulas = st.recursive(
    st.sampled_from(["a", "b", "c"]),
    lambda inner: st.one_of(
        st.tuples(st.just("not"), inner),
        st.tuples(st.just("and"), inner, inner),
        st.tuples(st.just("or"), inner, inner),
    ),
    max_leaves=12,
)


def written(formula: Any) -> str:
    match formula:
        case str(name):
            return f"{p(name)} == true"
        case ("not", inner):
            return f"!({written(inner)})"
        case ("and", left, right):
            return f"({written(left)}) && ({written(right)})"
        case (_, left, right):
            return f"({written(left)}) || ({written(right)})"
    raise AssertionError(formula)


def meant(formula: Any, values: dict[str, bool]) -> bool:
    match formula:
        case str(name):
            return values[name]
        case ("not", inner):
            return not meant(inner, values)
        case ("and", left, right):
            return meant(left, values) and meant(right, values)
        case (_, left, right):
            return meant(left, values) or meant(right, values)
    raise AssertionError(formula)


@given(formulas, st.fixed_dictionaries({name: st.booleans() for name in "abc"}))
def test_not_and_or_mean_what_they_say(formula: Any, values: dict[str, bool]) -> None:
    assert evaluate(parse(written(formula)), values) is meant(formula, values)


def test_and_binds_closer_than_or() -> None:
    text = f"{p('a')} == true || {p('b')} == true && {p('c')} == true"
    assert holds(text, a=True, b=False, c=False)
    assert not holds(text, a=False, b=True, c=False)


def test_an_elif_reads_as_a_sentence() -> None:
    text = (
        f"!({p('pipelinechannel--coin-Output')} == 'heads') && int({p('pipelinechannel--n')}) > 3"
    )
    assert str(parse(text)) == "not (coin-Output == 'heads') and n > 3"


@pytest.mark.parametrize("value", ["no' or 'a'=='a", "deploy' || 'x'=='x", "'deploy'", "deploy "])
def test_a_value_cannot_talk_its_way_in(value: str) -> None:
    assert not holds(f"{p('x')} == 'deploy'", x=value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "true",
        "'a' == 'a'",
        f"{p('x')}",
        f"{p('x')} ==",
        f"{p('x')} == 'it's'",
        f"{p('x')} == 'a\\'b'",
        f"{p('x')} == 'a' == 'b'",
        f"{p('x')} == 'a' {p('y')}",
        f"{p('x')} == 'a' &&",
        f"({p('x')} == 'a'",
        f"{p('x')} == 'a' 'end'",
        f"{p('x')} 'compare' 1",
        f"({p('x')} == 'a' ')'",
        f"!{p('x')} == 'a'",
        f"{p('x')} + 1 == 2",
        f"{p('x')} == 1.2.3",
        f"{p('x')} == __import__('os')",
        f"{p('x')} in ['a']",
        f"size({p('x')}) == 1",
        f"'{p('x')}' == 'a'",
        "inputs.parameter_values[x] == 1",
        "eval('1') == 1",
    ],
)
def test_what_is_not_in_the_grammar_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        parse(text, "root.dag.tasks.x.triggerPolicy.condition")
    assert caught.value.problems[0].where == "root.dag.tasks.x.triggerPolicy.condition"


@given(
    st.text(
        alphabet="inputs.parameter_values[]'x\" ()!&|=<>0123456789.e-truefalse int(", max_size=60
    )
)
def test_any_text_parses_or_is_refused_and_nothing_else(text: str) -> None:
    with contextlib.suppress(UnsupportedError, StepError):
        evaluate(parse(text), {"x": 1})


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (f"{p('x')} == 1", {"x": "1"}),
        (f"{p('x')} == 'true'", {"x": True}),
        (f"{p('x')} == 1", {"x": True}),
        (f"{p('x')} == 'a'", {"x": None}),
        (f"{p('x')} == 'a'", {}),
        (f"{p('x')} == 'a'", {"x": ["a"]}),
        (f"int({p('x')}) == 1", {"x": "1"}),
    ],
)
def test_values_of_different_kinds_are_an_error_and_not_false(text: str, values: Any) -> None:
    with pytest.raises(StepError):
        evaluate(parse(text), values)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (f"{p('x')} == 1", "STRING"),
        (f"{p('x')} == 'a'", "NUMBER_INTEGER"),
        (f"{p('x')} == true", "NUMBER_DOUBLE"),
        (f"{p('x')} < true", "BOOLEAN"),
        (f"{p('x')} == 'a'", "LIST"),
        (f"int({p('x')}) == 1", "STRING"),
        (f"{p('y')} == 1", "STRING"),
    ],
)
def test_types_are_checked_before_anything_runs(text: str, kind: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        check(parse(text), {"x": kind}, "here")
    assert caught.value.problems[0].where == "here"


@needs_samples
def test_every_condition_of_the_corpus_parses() -> None:
    found: set[str] = set()

    def collect(node: Any) -> None:
        if isinstance(node, dict):
            found.update(v for k, v in node.items() if k == "condition" and isinstance(v, str))
            node = list(node.values())
        for child in node if isinstance(node, list) else []:
            collect(child)

    for file in SAMPLES.rglob("*.yaml"):
        collect(list(yaml.load_all(file.read_text(), yaml.CSafeLoader)))
    assert found
    for text in found:
        parse(text)
