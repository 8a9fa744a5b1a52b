"""Values as Kubeflow Pipelines carries them between steps, and the two texts that it
makes of one.

Its backend keeps every parameter as a protobuf Value and hands it to a component as
protobuf's JSON. A number is therefore a double, a whole one arrives as an int, and the
keys of a struct arrive sorted. Text of a number is written in two ways: with all digits
where a value becomes text (an f-string, an input of type STRING), and as Go's `%d` or
`%g` in an argument of a container.

Authority: kubeflow/pipelines 2.17.0, backend/src/v2: metadata/converter.go
(PbValueToText), component/launcher_v2.go (getPlaceholders), driver/util.go
(pbValueToString); protobuf-go's and Go's encoding/json for what stands inside of a list
or struct. Standard library only, and nothing of rekindle: bundles carry it into any
image."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, TypeAlias, TypeGuard

Json: TypeAlias = dict[str, Any]
"""An object of JSON, in one of the forms that others define: of KFP, Kubernetes, a cloud."""

# from here on protobuf and Go write a number with an exponent, so that Python reads a float
_FIRST_WITH_EXPONENT = 1e21
_SMALLEST_WITHOUT_EXPONENT = 1e-6
_INT64 = 2.0**63
# Go's json.Marshal escapes what HTML gives a meaning, and two line breaks of JavaScript
_ESCAPED = {ord(mark): f"\\u{ord(mark):04x}" for mark in "<>&\u2028\u2029"}


def carried(value: Any) -> Any:
    """`value` as a component reads it from protobuf's JSON, at any depth.

    Numbers are doubles: `carried(2.0)` is the int 2, `carried(2**53 + 1)` is 2**53. Keys
    are sorted. Raises ValueError for a whole number that no double holds."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return _double(value)
    if isinstance(value, list | tuple):
        return [carried(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): carried(value[key]) for key in sorted(value, key=str)}
    return value


def text_of(value: object) -> str:
    """The text of `value` in an f-string and at an input of type STRING: 1e-05 is
    `0.00001`, 2.0 is `2`, None is empty, a list or mapping is compact JSON."""
    if _is_number(value):
        return _all_digits(float(value))
    return _plain_text(value)


def argument_of(value: object) -> str:
    """The text of `value` in an argument of a container: 1000000.0 is `1000000`, 1e-05 is
    `1e-05`, 123456789.125 is `1.23456789125e+08`, all else as `text_of` has it."""
    if not _is_number(value):
        return _plain_text(value)
    number = float(value)
    if number.is_integer() and -_INT64 <= number < _INT64:
        return str(int(number))
    return _general(number)


def _is_number(value: object) -> TypeGuard[int | float]:
    """Whether protobuf has it as a number: for Python a bool is one, too."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _double(number: float) -> int | float:
    try:
        double = float(number)
    except OverflowError:
        raise ValueError(f"no double holds {str(number)[:20]}...") from None
    if double.is_integer() and abs(double) < _FIRST_WITH_EXPONENT:
        return int(Decimal(repr(double)))  # the shortest digits of the double, then zeros
    return double


def _plain_text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return _json(value)


def _json(value: object) -> str:
    """Compact JSON as Go writes it."""
    if isinstance(value, Mapping):
        keys = sorted(value, key=str)
        pairs = (f"{_json(str(key))}:{_json(value[key])}" for key in keys)
        return "{" + ",".join(pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_json, value)) + "]"
    if _is_number(value):
        return _json_number(float(value))
    return json.dumps(value, ensure_ascii=False).translate(_ESCAPED)


def _json_number(number: float) -> str:
    size = abs(number)
    if number == 0 or _SMALLEST_WITHOUT_EXPONENT <= size < _FIRST_WITH_EXPONENT:
        return _all_digits(number)
    if not math.isfinite(number):
        return json.dumps(number)
    return repr(number).replace("e-0", "e-")  # Go's exponent has no leading zero here


def _all_digits(number: float) -> str:
    """Go's FormatFloat(number, 'f', -1, 64)."""
    if not math.isfinite(number):
        return _not_finite(number)
    text = format(Decimal(repr(number)), "f")
    if "." not in text:
        return text
    return text.rstrip("0").rstrip(".")


def _general(number: float) -> str:
    """Go's `%g`: the shortest digits, with an exponent below -4 and from 6 on."""
    if not math.isfinite(number):
        return _not_finite(number)
    sign, digits, shift = Decimal(repr(number)).normalize().as_tuple()
    assert isinstance(shift, int)
    exponent = len(digits) - 1 + shift
    if -4 <= exponent < 6:
        return _all_digits(number)
    mantissa = str(digits[0])
    if len(digits) > 1:
        mantissa += "." + "".join(map(str, digits[1:]))
    if sign:
        mantissa = f"-{mantissa}"
    return f"{mantissa}e{exponent:+03d}"  # a sign, and two digits at least


def _not_finite(number: float) -> str:
    if math.isnan(number):
        return "NaN"
    return "+Inf" if number > 0 else "-Inf"
