"""YAML to values: what is read, at which line, and what is refused."""

import pytest

from rekindle.errors import SpecError
from rekindle.spec.yaml_document import parse_document, parse_value

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 10)}]" for i in range(8)
)


def test_scalars_follow_the_core_schema_of_yaml_1_2():
    text = "a: 1e-4\nb: on\nc: 010\nd: 1_000\ne: null\nf: '1'\ng: 2026-03\nh: .5\ni: true\nj: 1:30"
    assert parse_document(text, "c.yaml").values == {
        "a": 1e-4,
        "b": "on",
        "c": 10,
        "d": 1000,
        "e": None,
        "f": "1",
        "g": "2026-03",
        "h": 0.5,
        "i": True,
        "j": "1:30",
    }


@pytest.mark.parametrize("text", [".inf", "-.Inf", "+.INF", ".nan", ".NaN", ".NAN"])
def test_infinity_and_no_number_are_read_in_every_case_that_yaml_has(text):
    wanted = float(text.replace(".", ""))
    assert repr(parse_value(text)) == repr(wanted)


def test_every_key_knows_its_line():
    document = parse_document("a:\n  b: 1\n  c:\n    - 2\n    - 3\n", "c.yaml")
    assert document.lines[("a", "b")] == "c.yaml:2"
    assert document.lines[("a", "c", 1)] == "c.yaml:5"


@pytest.mark.parametrize(
    ("text", "says", "line"),
    [
        ("a: !!python/object/apply:os.system ['id']", "tag", 1),
        ("a: 1\nb: !secret x", "tag", 2),
        ("a: 1\na: 2", "duplicate key `a`", 2),
        ("a: [1, 2", "not valid YAML", 1),
        ("a: 1\n---\nb: 2", "not valid YAML", 2),
        (BOMB, "more than 20,000 values", None),
        ("a: " + "[" * 60 + "]" * 60, "30 levels", 1),
        ("- 1\n- 2", "a mapping of sections, not a list", 1),
        ("just text", "a mapping of sections, not a text", 1),
        ("a: &x {b: 1}\nc:\n  <<: *x", "merge keys", 3),
        ("? [1, 2]\n: 3", "keys other than text", 1),
        ("a: *unknown", "undefined alias", 1),
        ("a:\n\t- b", "not valid YAML", 2),
        ("\x00", "not valid YAML", None),
    ],
)
def test_what_is_no_config_is_refused_with_its_line(text, says, line):
    with pytest.raises(SpecError) as caught:
        parse_document(text, "c.yaml")
    assert says in str(caught.value)
    assert caught.value.exit_code == 2
    if line:
        assert caught.value.problems[0].where.startswith(f"c.yaml:{line}")


def test_a_bare_value_that_yaml_does_not_have_is_to_be_quoted():
    with pytest.raises(SpecError, match="put the value in quotes"):
        parse_document("cron: @daily", "c.yaml")
    with pytest.raises(SpecError, match="indent with spaces"):
        parse_document("train:\n\tepochs: 1", "c.yaml")


def test_a_recursive_alias_ends():
    with pytest.raises(SpecError):
        parse_document("a: &a [*a]", "c.yaml")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("[a, 2]", ["a", 2]),
        ("{x: 1}", {"x": 1}),
        ("", None),
        ("a b", "a b"),
        ("Ticket #", "Ticket #"),
        ("#5", "#5"),
        ("@daily", "@daily"),
        ("5 # x", "5 # x"),
        ("'a # b'", "a # b"),
        ('{x: "a #"}', {"x": "a #"}),
    ],
)
def test_overrides_are_yaml_values(text, value):
    assert parse_value(text) == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("'a' # b", "would be a comment"),
        ("[a, b] # c", "would be a comment"),
        ("a: b # c", "would be a comment"),
        ("!x", "the tag !x"),
        ("{a: 1, a: 2}", "duplicate key `a`"),
        ("a: b: c", "put the value in quotes"),
        ("&a [*a]", "30 levels"),
    ],
)
def test_an_override_that_would_lose_something_is_refused(text, says):
    with pytest.raises(SpecError, match=says):
        parse_value(text)
