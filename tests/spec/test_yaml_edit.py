"""Values written into a config: they are there, and every other byte is as it was."""

from __future__ import annotations

import pytest

from rekindle.errors import RequestError
from rekindle.spec.yaml_document import parse_document
from rekindle.spec.yaml_edit import as_lines, with_values

VERSION = "platforms.kubeflow.version"
KEY = "platforms.kubeflow.secrets.AWS_ACCESS_KEY_ID"

CASES: dict[str, tuple[str, dict[str, str], str]] = {
    "a value that is there": (
        "platforms:\n  kubeflow:\n    version: 2.17.0  # ours\n",
        {VERSION: "2.16.1"},
        "platforms:\n  kubeflow:\n    version: 2.16.1  # ours\n",
    ),
    "a new line of a section, behind its comment": (
        "platforms:\n  kubeflow:\n    host: http://h  # here\n# the end\ntask: t\n",
        {VERSION: "2.16.1"},
        "platforms:\n  kubeflow:\n    host: http://h  # here\n    version: 2.16.1\n# the end\ntask: t\n",
    ),
    "two lines of a section that is not there": (
        "name: c\n",
        {VERSION: "2.16.1", KEY: "store/key"},
        "name: c\nplatforms:\n  kubeflow:\n    version: 2.16.1\n"
        "    secrets:\n      AWS_ACCESS_KEY_ID: store/key\n",
    ),
    "a section that is empty": (
        "platforms:\n    kubeflow:\nname: c\n",
        {VERSION: "2.16.1"},
        "platforms:\n    kubeflow:\n      version: 2.16.1\nname: c\n",
    ),
    "a key that is empty": (
        "platforms:\n  kubeflow:\n    version:\n",
        {VERSION: "2.16.1"},
        "platforms:\n  kubeflow:\n    version: 2.16.1\n",
    ),
    "braces": (
        "platforms: {kubeflow: {host: 'http://h'}}  # one line\n",
        {VERSION: "2.16.1", KEY: "store/key"},
        "platforms: {kubeflow: {host: 'http://h', version: 2.16.1, "
        "secrets: {AWS_ACCESS_KEY_ID: store/key}}}  # one line\n",
    ),
    "empty braces": (
        "platforms: {}\n",
        {VERSION: "2.16.1"},
        "platforms: {kubeflow: {version: 2.16.1}}\n",
    ),
    "behind a text of several lines": (
        "platforms:\n  kubeflow:\n    host: >\n      http://h\n\n\nname: c\n",
        {VERSION: "2.16.1"},
        "platforms:\n  kubeflow:\n    host: >\n      http://h\n    version: 2.16.1\n\n\nname: c\n",
    ),
    "behind a list": (
        "platforms:\n  kubeflow:\n    tags:\n    - a\n    - b\n\nname: c\n",
        {VERSION: "2.16.1"},
        "platforms:\n  kubeflow:\n    tags:\n    - a\n    - b\n    version: 2.16.1\n\nname: c\n",
    ),
    "no newline at the end": (
        "platforms:\n  kubeflow:\n    host: http://h",
        {VERSION: "2.16.1"},
        "platforms:\n  kubeflow:\n    host: http://h\n    version: 2.16.1\n",
    ),
    "lines of Windows": (
        "platforms:\r\n  kubeflow:\r\n    host: http://h\r\n",
        {VERSION: "2.16.1"},
        "platforms:\r\n  kubeflow:\r\n    host: http://h\r\n    version: 2.16.1\r\n",
    ),
    "lines of Windows, and none at the end": (
        "platforms:\r\n  kubeflow:\r\n    host: http://h",
        {VERSION: "2.16.1"},
        "platforms:\r\n  kubeflow:\r\n    host: http://h\r\n    version: 2.16.1\r\n",
    ),
    "a section that is null": (
        "platforms:\n  kubeflow: ~  # later\nname: c\n",
        {VERSION: "2.16.1"},
        "platforms:\n  kubeflow:  # later\n    version: 2.16.1\nname: c\n",
    ),
    "a section that is null, in braces": (
        "platforms: {kubeflow: null, local: {}}\n",
        {VERSION: "2.16.1"},
        "platforms: {kubeflow: {version: 2.16.1}, local: {}}\n",
    ),
    "what would be a number": (
        "platforms:\n  kubeflow:\n    host: http://h\n",
        {VERSION: "2.16"},
        'platforms:\n  kubeflow:\n    host: http://h\n    version: "2.16"\n',
    ),
    "nothing but a comment": (
        "# later\n",
        {VERSION: "2.16.1"},
        "# later\nplatforms:\n  kubeflow:\n    version: 2.16.1\n",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_value_is_written_and_all_else_stays(case: str) -> None:
    before, values, after = CASES[case]
    assert with_values(before, values, "c.yaml") == after
    assert with_values(after, values, "c.yaml") == after, "it is there by now"


def test_lines_to_add_by_hand_say_the_same() -> None:
    values = {VERSION: "2.16", KEY: "store/key"}
    assert (
        parse_document(as_lines(values), "").values
        == parse_document(with_values("", values, ""), "").values
    )


@pytest.mark.parametrize(
    "text",
    [
        "base: &b\n  kubeflow: {host: 'http://h'}\nplatforms: *b\n",
        "platforms:\n  kubeflow: text\n",
        "platforms:\n  kubeflow: [a, b]\n",
    ],
)
def test_what_would_change_something_else_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="cannot be written without changing something else"):
        with_values(text, {VERSION: "2.16.1"}, "c.yaml")


def test_lines_of_old_machines_are_refused() -> None:
    with pytest.raises(RequestError, match="carriage return alone"):
        with_values("name: c\rtask: t\r", {VERSION: "2.16.1"}, "c.yaml")
