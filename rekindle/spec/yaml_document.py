"""YAML text -> plain values plus the line of every key, and nothing else: no tags, no
code, no bombs.

Authority: YAML 1.2 core schema for scalars (so `on` is a string and `1e-4` a number,
unlike YAML 1.1), on PyYAML's parser. Refused: tags, duplicate keys, more than one
document, merge keys, aliases that grow the document past `MAX_NODES`, nesting past
`MAX_DEPTH`, text past `MAX_BYTES`."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import yaml

from rekindle.errors import Problem, SpecError

MAX_BYTES = 1_000_000
MAX_NODES = 20_000
MAX_DEPTH = 30

KeyPath = tuple[str | int, ...]

_NULL = re.compile(r"^(~|null|Null|NULL|)$")
_BOOL = re.compile(r"^(true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^[-+]?[0-9]+(_[0-9]+)*$")
_FLOAT = re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(_[0-9]+)*(\.[0-9]*)?)([eE][-+]?[0-9]+)?$")
_SPECIAL_FLOAT = re.compile(r"^([-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$")
_CORE_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "map", "seq")}


@dataclasses.dataclass(frozen=True)
class Document:
    """The values of one YAML text, and the place of every key path in them (`file:line`)."""

    values: dict[str, Any]
    lines: dict[KeyPath, str]


class _Loader(yaml.SafeLoader):
    """PyYAML's composer with no implicit types: scalars arrive as text and `_scalar` decides."""


_Loader.yaml_implicit_resolvers = {}


_QUOTE = """put the value in quotes, such as --set 'KEY="a # b"'"""
_DATA = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")


def read_document(path: Path) -> Document:
    """The mapping in the YAML file `path`; raises SpecError for everything that is not one."""
    if path.suffix.lower() in _DATA:
        fix = "write a YAML config whose data.source names it"
        raise SpecError(f"{path} is a data file, not a config", fix=fix)
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        fix = "check the path; `rekindle init` writes example configs"
        raise SpecError(f"file not found: {path}", fix=fix) from None
    except OSError as error:
        message = f"cannot read {path}: {error.strerror}"
        raise SpecError(message, fix="name a readable YAML file") from error
    if len(raw) > MAX_BYTES:
        raise SpecError(f"{path} is too large for a config, which has at most {MAX_BYTES:,} bytes")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"{path} is not UTF-8 text: {error.reason} at byte {error.start}"
        raise SpecError(message, fix="save it as UTF-8") from error
    return parse_document(text, str(path))


def parse_document(text: str, origin: str) -> Document:
    """The mapping in `text`; `origin` names it in errors."""
    node = compose(text, origin)
    reader = _YamlReader(origin)
    values = reader.value(node, (), 0) if node is not None else {}
    if not isinstance(values, dict):
        kinds = {list: "list", str: "text", type(None): "null", bool: "boolean"}
        kind = kinds.get(type(values), "number")
        message = f"a config is a mapping of sections, not a {kind}"
        raise SpecError(message, where=f"{origin}:1", fix="start with `name:` and `task:`")
    if reader.problems:
        raise SpecError(reader.problems)
    return Document(values, reader.lines)


def parse_value(text: str) -> Any:
    """The value of a `--set` override: a YAML scalar, `[a, b]` or `{a: b}`."""
    if text.strip()[:1] in ("@", "`", "%"):  # reserved in YAML, so that no value begins so
        return text.strip()
    node = compose(text, "--set", _QUOTE)
    reader = _YamlReader("--set")
    value = reader.value(node, (), 0) if node is not None else None
    if reader.problems:
        raise SpecError(reader.problems)
    comment = text[_end_of_last_value(node) :].strip("]}, \n")
    if comment:
        is_plain = isinstance(node, yaml.ScalarNode) and node.style is None
        if node is None or is_plain:
            return text.strip()  # no comment on a command line, but a text such as `Ticket #`
        raise SpecError("what follows `#` would be a comment", where="--set", fix=_QUOTE)
    return value


def _end_of_last_value(node: yaml.Node | None) -> int:
    """Where the last scalar of a text ends: behind it are brackets, or a comment."""
    last = node
    while isinstance(last, yaml.CollectionNode) and last.value:
        last = last.value[-1]
        if isinstance(last, tuple):  # of a mapping: key and value
            last = last[1]
    return int(last.end_mark.index) if last is not None else 0


def compose(text: str, origin: str, fix: str = "") -> yaml.Node | None:
    """The nodes of `text`, with their places in it; None where it holds nothing. SpecError
    where it is not YAML, with `fix` or what suits the error."""
    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{origin}:{mark.line + 1}:{mark.column + 1}" if mark else origin
        message = f"not valid YAML: {error.problem}"
        raise SpecError(message, where=where, fix=fix or _syntax_fix(message)) from None
    except (yaml.YAMLError, RecursionError) as error:
        message = f"not valid YAML: {str(error) or 'nested too deeply'}"
        raise SpecError(message, where=origin) from None


def _syntax_fix(message: str) -> str:
    """What to do about an error of PyYAML's scanner or parser."""
    if r"'\t'" in message:
        return "indent with spaces, not tabs"
    if "cannot start any" in message:
        return "put the value in quotes"
    return "correct the syntax"


class _YamlReader:
    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.lines: dict[KeyPath, str] = {}
        self.problems: list[Problem] = []
        self.nodes = 0

    def where(self, node: yaml.Node) -> str:
        return f"{self.origin}:{node.start_mark.line + 1}"

    def refuse(self, node: yaml.Node, what: str, fix: str) -> None:
        self.problems.append(Problem(what, self.where(node), fix))

    def value(self, node: yaml.Node, path: KeyPath, depth: int) -> Any:
        self.nodes += 1
        if self.nodes > MAX_NODES or depth > MAX_DEPTH:
            message = (
                f"aliases or nesting make more than {MAX_NODES:,} values or {MAX_DEPTH} levels"
            )
            raise SpecError(message, where=self.where(node), fix="write the values out")
        self.lines.setdefault(path, self.where(node))
        if node.tag not in _CORE_TAGS and node.tag != "!":
            self.refuse(node, f"the tag {node.tag} is not allowed", "write a plain value")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, i), depth + 1) for i, item in enumerate(node.value)]
        return self._scalar(node)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            is_text = isinstance(key_node, yaml.ScalarNode)
            if not is_text or key_node.value == "<<":
                kind = "merge keys (<<)" if is_text else "keys other than text"
                fix = "write the keys out, or use `extends`"
                self.refuse(key_node, f"{kind} are not allowed", fix)
                continue
            key = str(key_node.value)
            if key in result:
                self.refuse(key_node, f"duplicate key `{key}`", "keep one of them")
            self.lines[(*path, key)] = self.where(key_node)
            result[key] = self.value(value_node, (*path, key), depth + 1)
        return result

    def _scalar(self, node: yaml.Node) -> Any:
        text = str(node.value)
        if getattr(node, "style", None) is not None or node.tag == "!":
            return text
        if _NULL.match(text):
            return None
        if _BOOL.match(text):
            return text.lower() == "true"
        if _INT.match(text):
            return int(text) if len(text) <= 40 else text  # int() of many digits takes long
        if _SPECIAL_FLOAT.match(text):
            return float(text.replace(".", ""))
        return float(text) if _FLOAT.match(text) else text
