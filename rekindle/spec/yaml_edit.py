"""Values into the text of a config, everything else as it was: comments, order, quotes.

A value that is there is replaced; one that is not is added behind the last of its section,
in the style of the section (a line, or `, key: value` in braces). The result is read again,
and has to say what was asked and nothing else."""

import copy
import json
from collections.abc import Mapping
from typing import Any

import yaml

from rekindle.errors import RequestError
from rekindle.spec.yaml_document import compose, parse_document

_NULLS = ("~", "null", "Null", "NULL")
_STEP = "  "  # of indentation, below a section that is not there yet


def with_values(text: str, values: Mapping[str, str], origin: str) -> str:
    """The text of a config with these values by their dotted paths, such as
    `platforms.kubeflow.version`.

    Raises RequestError where that cannot be done without changing anything else, such as a
    section that is an alias of another one."""
    if "\r" in text.replace("\r\n", ""):
        raise RequestError(
            f"{origin} has lines that end with a carriage return alone",
            where=origin,
            fix="save it with the ends of lines of Unix or Windows",
        )
    expected = copy.deepcopy(parse_document(text, origin).values)
    changed_text = text
    for path, value in values.items():
        keys = path.split(".")
        _set(expected, keys, value)
        changed_text = _with_value(changed_text, keys, value, origin)
    if parse_document(changed_text, origin).values != expected:
        raise RequestError(
            f"{', '.join(values)} cannot be written without changing something else",
            where=origin,
            fix="add the lines by hand",
        )
    return changed_text


def as_lines(values: Mapping[str, str]) -> str:
    """The values as the lines of a config."""
    sections: dict[str, Any] = {}
    for path, value in values.items():
        _set(sections, path.split("."), value)
    return "\n".join(_block(sections, ""))


def _set(values: dict[str, Any], keys: list[str], value: str) -> None:
    *sections, name = keys
    section = values
    for key in sections:
        if not isinstance(section.get(key), dict):
            section[key] = {}
        section = section[key]
    section[name] = value


def _with_value(text: str, keys: list[str], value: str, origin: str) -> str:
    """The text with one value; it may say something else where the text is unusual."""
    section: yaml.Node | None = compose(text, origin)
    if section is None:  # nothing but comments
        return _ended(text) + "\n".join(_block(_nested(keys, value), "")) + "\n"
    for depth, key in enumerate(keys):
        if not isinstance(section, yaml.MappingNode):
            break
        child = _child(section, key)
        if child is None:
            return _added(text, section, _nested(keys[depth:], value))
        remaining = keys[depth + 1 :]
        if remaining and _is_null(child):
            return _with_value(_without_null(text, child), keys, value, origin)
        if remaining and _is_empty(child):
            return _with_section(text, section, child, _nested(remaining, value))
        section = child
    assert section is not None
    start = section.start_mark.index
    end = section.end_mark.index
    space = " " if start == end else ""  # `key:` without a value
    return text[:start] + space + _scalar(value) + text[end:]


def _child(section: yaml.MappingNode, key: str) -> yaml.Node | None:
    for key_node, value_node in section.value:
        if key_node.value == key:
            return value_node  # type: ignore[no-any-return]  # PyYAML has no types for it
    return None


def _is_empty(node: yaml.Node) -> bool:
    """Whether a key has nothing behind it."""
    return isinstance(node, yaml.ScalarNode) and node.start_mark.index == node.end_mark.index


def _is_null(node: yaml.Node) -> bool:
    """Whether a key has a word for nothing behind it."""
    return isinstance(node, yaml.ScalarNode) and not node.style and node.value in _NULLS


def _with_section(
    text: str, section: yaml.MappingNode, place: yaml.Node, values: Mapping[str, Any]
) -> str:
    """The text with values behind a key of a section that has nothing behind it."""
    index = place.start_mark.index
    if section.flow_style:
        return f"{text[:index]} {{{_flow(values)}}}{text[index:]}"
    indent = " " * _column_of(section) + _STEP
    return _after_line(text, index, _block(values, indent))


def _without_null(text: str, node: yaml.Node) -> str:
    """The text without a word for nothing, `~` or `null`, that stands in place of a section."""
    return text[: node.start_mark.index].rstrip(" ") + text[node.end_mark.index :]


def _column_of(section: yaml.MappingNode) -> int:
    """How far the keys of a section are indented."""
    first_key, _ = section.value[0]
    return int(first_key.start_mark.column)


def _added(text: str, section: yaml.MappingNode, values: Mapping[str, Any]) -> str:
    """The text with values behind the last one of a section."""
    if section.flow_style:
        words = _flow(values)
        if not section.value:
            inside = section.start_mark.index + 1
            return text[:inside] + words + text[inside:]
        end = _end_of(section.value[-1][1], text)
        return f"{text[:end]}, {words}{text[end:]}"
    indent = " " * _column_of(section)
    return _after_line(text, _end_of(section, text), _block(values, indent))


def _end_of(node: yaml.Node, text: str) -> int:
    """Where the last character of a value stands. PyYAML lets a block end where the next one
    begins, behind comments that are not its own."""
    last = node
    while isinstance(last, yaml.CollectionNode) and not last.flow_style and last.value:
        last = last.value[-1]
        if isinstance(last, tuple):  # a key and its value
            key, value = last
            last = key if _is_empty(value) else value
    end = int(last.end_mark.index)
    return len(text[:end].rstrip())


def _after_line(text: str, index: int, lines: list[str]) -> str:
    """The text with lines behind the one that has this index."""
    end = text.find("\n", index)
    if end < 0:
        text = _ended(text)
        end = len(text) - 1
    newline = "\r\n" if "\r\n" in text else "\n"
    added = "".join(line + newline for line in lines)
    return text[: end + 1] + added + text[end + 1 :]


def _ended(text: str) -> str:
    """The text with a newline at its end, as its others are."""
    if not text or text.endswith("\n"):
        return text
    return text + ("\r\n" if "\r\n" in text else "\n")


def _nested(keys: list[str], value: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    _set(values, keys, value)
    return values


def _block(values: Mapping[str, Any], indent: str) -> list[str]:
    """Values as the lines of a block."""
    lines = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{key}:")
            lines += _block(value, indent + _STEP)
        else:
            lines.append(f"{indent}{key}: {_scalar(value)}")
    return lines


def _flow(values: Mapping[str, Any]) -> str:
    """Values as they stand in braces."""
    words = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            words.append(f"{key}: {{{_flow(value)}}}")
        else:
            words.append(f"{key}: {_scalar(value, in_braces=True)}")
    return ", ".join(words)


def _scalar(value: str, *, in_braces: bool = False) -> str:
    """A text as YAML: plain where that is read as the same text, else in quotes."""
    plain = f"{{key: {value}}}" if in_braces else f"key: {value}"
    try:
        if parse_document(plain, "").values == {"key": value}:
            return value
    except RequestError:
        pass
    return json.dumps(value, ensure_ascii=False)
