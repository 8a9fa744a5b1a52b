"""The conditions of KFP's If, Elif and Else: tokenizer, parser, type check and evaluator.
Never `eval`.

The KFP compiler writes a small part of CEL:

    or      := and ('||' and)*        and := factor ('&&' factor)*
    factor  := '!' '(' or ')' | '(' or ')' | compare
    compare := term OP term           OP  := == != < <= > >=
    term    := inputs.parameter_values['P'] | int(term) | double(term) | 'text' | number | boolean

where the left term of a comparison always reads a parameter.

KFP does not escape quotes in a literal, so text with a quote in it cannot be told from an
expression; whatever does not fit the grammar is refused, and a value at run time is never
parsed. Text and numbers do not compare: that is an error, not False."""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NoReturn, TypeVar

from rekindle.errors import StepError, UnsupportedError

Kind = Literal["text", "number", "boolean"]
T = TypeVar("T")

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<reference>inputs\.parameter_values\['(?P<parameter>[^'\\\n]+)'\])
    | (?P<cast>int|double)(?=\s*\()
    | (?P<boolean>true|false)(?![\w.])
    | (?P<number>-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?![\w.])
    | '(?P<text>[^'\\]*)'
    | (?P<compare>==|!=|<=|>=|<|>)
    | (?P<mark>&&|\|\||!|\(|\))
    )""",
    re.VERBOSE,
)
_MOST_TOKENS, _MOST_LEVELS, _MOST_DIGITS = 800, 50, 400  # far beyond what is written by hand
_KINDS: Mapping[str, Kind] = {
    "STRING": "text",
    "NUMBER_INTEGER": "number",
    "NUMBER_DOUBLE": "number",
    "BOOLEAN": "boolean",
}
_OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclasses.dataclass(frozen=True)
class Value:
    """A value written in the condition."""

    value: str | int | float | bool

    def __str__(self) -> str:
        return f"'{self.value}'" if isinstance(self.value, str) else str(self.value).lower()


@dataclasses.dataclass(frozen=True)
class ParameterReference:
    """The value of an input parameter of the node that carries the condition."""

    parameter: str

    def __str__(self) -> str:
        return self.parameter.removeprefix("pipelinechannel--")


@dataclasses.dataclass(frozen=True)
class Cast:
    """`int(...)` truncates towards zero, `double(...)` widens; numbers only."""

    to: Literal["int", "double"]
    term: Term

    def __str__(self) -> str:
        return str(self.term)


Term = Value | ParameterReference | Cast


@dataclasses.dataclass(frozen=True)
class Compare:
    left: Term
    operator: str
    right: Term

    def __str__(self) -> str:
        return f"{self.left} {self.operator} {self.right}"


@dataclasses.dataclass(frozen=True)
class Not:
    inner: Expression

    def __str__(self) -> str:
        return f"not ({self.inner})"


@dataclasses.dataclass(frozen=True)
class Both:
    left: Expression
    right: Expression

    def __str__(self) -> str:
        return f"{_bracketed(self.left)} and {_bracketed(self.right)}"


@dataclasses.dataclass(frozen=True)
class Either:
    left: Expression
    right: Expression

    def __str__(self) -> str:
        return f"{self.left} or {self.right}"


Expression = Compare | Not | Both | Either


def _bracketed(side: Expression) -> str:
    """One side of an `and`, which binds closer than `or`."""
    return f"({side})" if isinstance(side, Either) else str(side)


def parse(text: str, where: str = "") -> Expression:
    """The expression that `text` spells; UnsupportedError at `where` outside the grammar."""
    parser = _Parser(text, where)
    expression = parser.either()
    if parser.at < len(parser.tokens):
        parser.take("end")
    return expression


def check(expression: Expression, types: Mapping[str, str], where: str = "") -> None:
    """Raise UnsupportedError unless both sides of each comparison have one kind of IR type."""
    match expression:
        case Not(inner):
            check(inner, types, where)
        case Both(left, right) | Either(left, right):
            check(left, types, where)
            check(right, types, where)
        case Compare(left, symbol, right):
            left_kind = _kind_of_term(left, types, where)
            right_kind = _kind_of_term(right, types, where)
            if left_kind is None or left_kind != right_kind:
                other = "a list or struct"
                message = f"`{expression}` compares {left_kind or other} with {right_kind or other}"
                fix = "give both sides the same type, or compute a bool in a component"
                raise UnsupportedError(message, where=where, fix=fix)
            if left_kind == "boolean" and symbol not in ("==", "!="):
                raise UnsupportedError(f"`{expression}`: booleans have no order", where=where)


def evaluate(expression: Expression, values: Mapping[str, Any]) -> bool:
    """Does the expression hold over `values`? StepError for no value, or kinds that differ."""
    match expression:
        case Not(inner):
            return not evaluate(inner, values)
        case Both(left, right):
            return evaluate(left, values) and evaluate(right, values)
        case Either(left, right):
            return evaluate(left, values) or evaluate(right, values)
        case Compare(left_term, symbol, right_term):
            left = _value(left_term, values)
            right = _value(right_term, values)
            kind = _kind_of_value(left)
            if kind is None or kind != _kind_of_value(right):
                raise StepError(f"the condition `{expression}` compares {left!r} with {right!r}")
            if kind == "boolean" and symbol not in ("==", "!="):
                raise StepError(f"the condition `{expression}`: booleans have no order")
            return _OPERATORS[symbol](left, right)


class _Parser:
    """Recursive descent over a token list; `self.at` is the next token."""

    def __init__(self, text: str, where: str) -> None:
        self.text = text
        self.where = where
        self.at = 0
        self.levels = 0
        self.tokens: list[tuple[str, str]] = []
        position = 0
        end = len(text.rstrip())
        while position < end:
            match = _TOKEN.match(text, position)
            if match is None:
                self.refuse(text[position:].strip())
            kind = match.lastgroup or ""
            if match["reference"]:
                kind = "parameter"
            self.tokens.append((kind, match[kind]))
            # int() of many digits takes hours, deep brackets overflow the stack
            is_long = kind == "number" and len(match[kind]) > _MOST_DIGITS
            if is_long or len(self.tokens) > _MOST_TOKENS:
                self.refuse_size()
            position = match.end()

    def refuse(self, near: str) -> NoReturn:
        message = f"the condition cannot be read near {near[:200]!r}: {self.text[:2_000]}"
        fix = "branch on a bool that a component computes; KFP does not escape quotes in text"
        raise UnsupportedError(message, where=self.where, fix=fix)

    def refuse_size(self) -> NoReturn:
        most = f"{_MOST_TOKENS} words, {_MOST_LEVELS} levels of brackets, or {_MOST_DIGITS} digits"
        message = f"the condition has more than {most} in a number: {self.text[:200]}..."
        fix = "branch on a bool that a component computes"
        raise UnsupportedError(message, where=self.where, fix=fix)

    def peek(self) -> tuple[str, str]:
        return self.tokens[self.at] if self.at < len(self.tokens) else ("end", "the end")

    def take(self, name: str) -> str:
        """The next token, which has to be this mark, or of this kind."""
        kind, value = self.peek()
        token_name = value if kind == "mark" else kind
        if token_name != name:
            self.refuse(value)
        self.at += 1
        return value

    def either(self) -> Expression:
        left = self.both()
        while self.peek() == ("mark", "||"):
            self.at += 1
            left = Either(left, self.both())
        return left

    def both(self) -> Expression:
        left = self.factor()
        while self.peek() == ("mark", "&&"):
            self.at += 1
            left = Both(left, self.factor())
        return left

    def factor(self) -> Expression:
        if self.peek() == ("mark", "!"):
            self.at += 1
            return Not(self.bracketed(self.either))
        if self.peek() == ("mark", "("):
            return self.bracketed(self.either)
        return self.compare()

    def bracketed(self, parse: Callable[[], T]) -> T:
        self.take("(")
        self.levels += 1
        if self.levels > _MOST_LEVELS:
            self.refuse_size()
        inner = parse()
        self.levels -= 1
        self.take(")")
        return inner

    def compare(self) -> Compare:
        left = self.term()
        if isinstance(left, Value):
            self.refuse(str(left))
        return Compare(left, self.take("compare"), self.term())

    def term(self) -> Term:
        kind, value = self.peek()
        if kind not in ("parameter", "text", "boolean", "number", "cast"):
            self.refuse(value)
        self.at += 1
        match kind:
            case "parameter":
                return ParameterReference(value)
            case "cast":
                inner = self.bracketed(self.term)
                return Cast("int", inner) if value == "int" else Cast("double", inner)
            case "number":
                is_float = re.search(r"[.eE]", value) is not None
                return Value(float(value)) if is_float else Value(int(value))
            case "boolean":
                return Value(value == "true")
        return Value(value)


def _kind_of_value(value: Any) -> Kind | None:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "text" if isinstance(value, str) else None


def _kind_of_term(term: Term, types: Mapping[str, str], where: str) -> Kind | None:
    match term:
        case Value(value):
            return _kind_of_value(value)
        case Cast(to, inner):
            if _kind_of_term(inner, types, where) != "number":
                raise UnsupportedError(f"{to}() of `{inner}`, which is not a number", where=where)
            return "number"
        case ParameterReference(name):
            if name not in types:
                message = f"the condition reads `{name}`, which is not an input here"
                raise UnsupportedError(message, where=where)
            return _KINDS.get(types[name])


def _value(term: Term, values: Mapping[str, Any]) -> Any:
    match term:
        case Value(value):
            return value
        case Cast(to, inner):
            number = _value(inner, values)
            if _kind_of_value(number) != "number":
                raise StepError(f"{to}() of `{inner}`, which is {number!r} and no number")
            return int(number) if to == "int" else float(number)
        case ParameterReference(name):
            if values.get(name) is None:
                raise StepError(f"the condition needs `{term}`, which has no value")
            return values[name]
