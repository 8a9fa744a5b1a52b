"""Config file + overrides -> `Spec`, with every problem found at once and each at its line.

`extends: base.yaml` merges mappings key by key (lists and scalars replace); `--set a.b=c` comes
last. Relative paths in `data.source`, `model.source`, `model.tokenizer`, `model.init_from`,
`model.teacher.source`, `task`, `pipeline`, `train.entrypoint` and `image.include` start at the
folder of the file that names them. Images that `rekindle.lock` beside the config knows are named by
digest."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from rekindle.errors import Problem, SpecError, did_you_mean
from rekindle.spec import lock
from rekindle.spec.checks import check
from rekindle.spec.model import BUILTIN_TASKS, Duration, Name, PartialDate, Spec
from rekindle.spec.yaml_document import Document, KeyPath, parse_value, read_document

MAX_EXTENDS = 10
_HEAD = 1 << 20  # characters in which a compiled pipeline shows itself
_PATH_FIELDS: tuple[KeyPath, ...] = (
    ("task",), ("pipeline",), ("data", "source"), ("model", "source"), ("model", "tokenizer"),
    ("model", "init_from"), ("model", "teacher", "source"), ("train", "entrypoint"),
)  # fmt: skip


def load_spec(path: str | Path, overrides: Sequence[str] = (), *, pinned: bool = True) -> Spec:
    """The frozen `Spec` of the config `path` with `overrides` such as `train.lr=1e-4` applied.
    Images are named as written unless `pinned`.

    Raises SpecError (exit code 2) with all problems: syntax, types, bounds, unknown keys with the
    nearest known one, and contradictions between fields."""
    document = _with_extends(Path(path), ())
    values, lines = document.values, dict(document.lines)
    for override in overrides:
        _apply_override(values, lines, override)
    spec = validate(values, lines, str(path))
    spec._origin = (str(path), tuple(overrides))
    return lock.pinned(spec, Path(path).parent) if pinned else spec


def load_target(target: str | Path, overrides: Sequence[str] = (), *, pinned: bool = True) -> Spec:
    """The `Spec` of a config, or of nothing but a pipeline: `path.py:function`, or a compiled one.

    Raises SpecError as `load_spec` does."""
    text = str(target)
    if not _is_pipeline(text):
        return load_spec(target, overrides, pinned=pinned)
    name = re.sub(r"[^a-z0-9_.-]+", "-", Path(text.partition(".py:")[0]).stem.lower())
    values: dict[str, Any] = {"name": name.strip("-._") or "pipeline"}
    values["pipeline"] = _anchored("pipeline", text, Path.cwd())
    lines: dict[KeyPath, str] = {}
    for override in overrides:
        _apply_override(values, lines, override)
    spec = validate(values, lines, text)
    spec._origin = (text, tuple(overrides))
    return lock.pinned(spec, Path(text).parent) if pinned else spec


def _is_pipeline(target: str) -> bool:
    if ".py:" in target or target.endswith(".json"):
        return True
    try:
        with Path(target).open(encoding="utf-8", errors="replace") as file:
            head = file.read(_HEAD)
    except OSError:
        return False
    return re.search(r"^(pipelineInfo|pipelineSpec):", head, re.MULTILINE) is not None


def validate(values: Mapping[str, Any], lines: Mapping[KeyPath, str], origin: str) -> Spec:
    """`Spec` from plain values; `lines` says where each key stands."""
    try:
        spec = _strict(values)
    except ValidationError as error:
        problems = _problems(error.errors(include_url=False), lines, origin)
        problems += _checks_of_the_rest(values, error, lines, origin)
        raise SpecError(problems) from None
    found = [_located(path, what, fix, lines, origin) for path, what, fix in check(spec)]
    if found:
        raise SpecError(found)
    return spec


def _strict(values: Mapping[str, Any]) -> Spec:
    """Validated as JSON: a list may fill a tuple, but "3" is not turned into a number."""
    return Spec.model_validate_json(json.dumps(values), strict=True)


def _with_extends(path: Path, seen: tuple[Path, ...]) -> Document:
    if path.resolve() in seen or len(seen) >= MAX_EXTENDS:
        chain = " -> ".join(str(p) for p in (*seen, path))
        raise SpecError(
            f"`extends` goes in a circle: {chain}", where=str(path), fix="remove one of them"
        )
    document = read_document(path)
    base_name = document.values.pop("extends", None)
    _anchor_paths(document.values, path.parent)
    if base_name is None:
        return document
    if not isinstance(base_name, str):
        raise SpecError(
            "`extends` is the path of one YAML file",
            where=document.lines[("extends",)],
            fix="extends: base.yaml",
        )
    base = _with_extends(path.parent / base_name, (*seen, path.resolve()))
    return Document(_merge(base.values, document.values), {**base.lines, **document.lines})


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        merged[key] = _merge(old, value) if both and isinstance(old, dict) else value
    return merged


def _anchor_paths(values: dict[str, Any], folder: Path) -> None:
    for *parents, name in _PATH_FIELDS:
        section: Any = values
        for parent in parents:
            section = section.get(parent) if isinstance(section, dict) else None
        if isinstance(section, dict) and isinstance(section.get(name), str):
            section[name] = _anchored(str(name), section[name], folder)
    image = values.get("image")
    if isinstance(image, dict) and isinstance(image.get("include"), list):
        image["include"] = [
            str((folder / Path(item).expanduser()).absolute()) if isinstance(item, str) else item
            for item in image["include"]
        ]


def _anchored(field: str, value: str, folder: Path) -> str:
    """An absolute path where `value` means a local file; hub names, URIs and registered names stay
    as they are.
    """
    if field == "entrypoint":
        return _anchored_script(value, folder)
    if "://" in value or value.startswith(("sklearn:", "hub:", "run:")):
        return value
    is_path = {
        "task": ".py:" in value,
        "init_from": value.startswith((".", "~", "/")),
        "source": not _is_hub_name(value, folder),
        "tokenizer": not _is_hub_name(value, folder),
    }.get(field, True)
    if not is_path:
        return value
    path = Path(value).expanduser()
    return str(path if path.is_absolute() else Path(f"{folder}/{value}").absolute())


def _anchored_script(words: str, folder: Path) -> str:
    """The words of a command whose first one is a script (or `-m`, a module)."""
    script, space, rest = words.strip().partition(" ")
    if script == "-m" or Path(script).is_absolute() or script[:1] in {"'", '"', ""}:
        return words
    return shlex.quote(str(Path(f"{folder}/{script}").absolute())) + space + rest


def _is_hub_name(value: str, folder: Path) -> bool:
    """`bert-base-uncased` and `org/name` are hub names unless such a file or folder lies here."""
    looks_local = (
        value.startswith((".", "~", "/")) or "*" in value or "{" in value or value.count("/") > 1
    )
    has_suffix = Path(value).suffix in {".csv", ".jsonl", ".json", ".parquet", ".gz", ".tsv"}
    return not (looks_local or has_suffix or (folder / value).exists())


def _apply_override(values: dict[str, Any], lines: dict[KeyPath, str], override: str) -> None:
    key, equals, text = override.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise SpecError(
            f"`--set {override[:20]}` is not of the form a.b=c",
            where="--set",
            fix="--set train.lr=1e-4",
        )
    section: dict[str, Any] = values
    for part in path[:-1]:
        child = section.get(part)
        if not isinstance(child, dict):
            child = section[part] = {}
        section = child
    section[path[-1]] = parse_value(text)
    for known in [known for known in lines if known[: len(path)] == path]:
        del lines[known]
    lines[path] = f"--set {key}"  # the value may be a secret
    _anchor_paths(values, Path.cwd())


def _where(path: KeyPath, lines: Mapping[KeyPath, str], origin: str) -> str:
    for end in range(len(path), 0, -1):
        if path[:end] in lines:
            return lines[path[:end]]
    return origin


def _located(
    path: KeyPath, what: str, fix: str, lines: Mapping[KeyPath, str], origin: str
) -> Problem:
    return Problem(f"{_dotted(path)}: {what}" if path else what, _where(path, lines, origin), fix)


def _dotted(path: Iterable[str | int]) -> str:
    return ".".join(str(part) for part in path)


def _problems(
    errors: Iterable[Mapping[str, Any]], lines: Mapping[KeyPath, str], origin: str
) -> list[Problem]:
    """One a place: of the members of a union, those that a section's own errors leave."""
    places: dict[KeyPath, list[Mapping[str, Any]]] = {}
    for error in errors:
        places.setdefault(_key_path(error["loc"]), []).append(error)
    return [
        _problem(path, members, lines, origin)
        for path, members in places.items()
        if not any(len(path) < len(other) and other[: len(path)] == path for other in places)
    ]


def _problem(
    path: KeyPath, members: list[Mapping[str, Any]], lines: Mapping[KeyPath, str], origin: str
) -> Problem:
    error = members[0]
    if error["type"] == "extra_forbidden":
        return _unknown_key(path, lines, origin)
    if error["type"] == "missing":
        return _located(path, "is missing", f"add `{path[-1]}:`", lines, origin)
    if "secrets" in path or path[-1:] == ("token",):  # it may be one, and errors end up in logs
        fix = f"{_hint(path[:-1]).rstrip(':')}; keep the value out of the config"
        return _located(path, "is not a secret reference", fix, lines, origin)
    shown = repr(error.get("input"))
    said = [str(e["msg"]).removeprefix("Input ").removeprefix("String ") for e in members]
    message = " or ".join([said[0], *(text.removeprefix("should be ") for text in said[1:])])
    what = f"{message}, not {shown[:80]}"
    if error["type"] == "string_pattern_mismatch":
        what = f"{shown[:80]} has the wrong form"
    return _located(path, what, _fix(members, path), lines, origin)


# what to write, by the beginning of pydantic's name of the error
_WRITE = {
    "int": "write a whole number", "float": "write a number", "bool": "write true or false",
    "string": "write text", "dict": "write a mapping, {a: b}", "list": "write a list, [a, b]",
    "tuple": "write a list, [a, b]", "model": "write a section, {field: value}",
}  # fmt: skip
# the same by the whole name, with the bound of the field
_WITHIN = {
    "greater_than": ("above", "gt"), "greater_than_equal": ("of at least", "ge"),
    "less_than": ("below", "lt"), "less_than_equal": ("of at most", "le"),
}  # fmt: skip
# what a pattern asks for
_FORMS = {
    get_args(form)[1].pattern: words
    for form, words in (
        (Name, "use lower-case letters, digits, `.`, `_`, `-`, at most 63; begin and end with a "
               "letter or digit"),
        (Duration, "use a number and a unit, such as `6 months`"),
        (PartialDate, "use `latest`, or a date such as 2026-06 or 2026-06-30"),
    )
}  # fmt: skip


def _fix(errors: list[Mapping[str, Any]], path: KeyPath) -> str:
    """The word that was meant, or what to write, and what the field is."""
    writes = []
    for error in errors:
        if error["type"] in ("literal_error", "enum"):
            words = re.findall(r"'([^']*)'", str(error["ctx"]["expected"]))
            if meant := did_you_mean(str(error.get("input")), words, cutoff=0.5):
                return meant
            writes.append(f"write one of {', '.join(words)}" if words[1:] else f"write {words[0]}")
        elif error["type"] == "string_pattern_mismatch":
            return _FORMS.get(error["ctx"]["pattern"]) or _hint(path)
        elif error["type"] in _WITHIN:
            word, name = _WITHIN[error["type"]]
            bound = error["ctx"][name]
            writes.append(f"write a number {word} {int(bound) if bound == int(bound) else bound:,}")
        else:
            writes.append(_WRITE.get(error["type"].partition("_")[0], ""))
    write = ", or ".join(filter(None, writes)).replace(", or write ", ", or ")
    return ": ".join(filter(None, (write, _hint(path))))


def _hint(path: KeyPath) -> str:
    """The first sentence on the field, or on the list that it is in."""
    while path and isinstance(path[-1], int):
        path = path[:-1]
    text = " ".join(_field_docs(path).split())
    first = re.split(r"(?<=[.;]) (?![^(]*\))", text)[0]  # not inside parentheses
    return first.rstrip(".;") if text else "see configs/README.md"


def _key_path(location: tuple[str | int, ...]) -> KeyPath:
    """Pydantic's location without the names it adds for the members of a union."""
    prefixes = ("literal[", "dict[", "constrained-")
    noise = {"str", "int", "float", "LayoutSpec", "TokenizerSpec", "[key]"}
    return tuple(
        part for part in location
        if not (isinstance(part, str) and (part in noise or part.startswith(prefixes)))
    )  # fmt: skip


def _section_at(path: KeyPath) -> type[BaseModel] | None:
    model: type[BaseModel] | None = Spec
    for part in path:
        if model is None:
            return None
        model = next(
            (
                _model_of(f.annotation)
                for n, f in model.model_fields.items()
                if (f.alias or n) == part
            ),
            None,
        )
    return model


def _model_of(annotation: Any) -> type[BaseModel] | None:
    candidates = [annotation, *getattr(annotation, "__args__", ())]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def _field_docs(path: KeyPath) -> str:
    section = _section_at(path[:-1]) if path else None
    if section is None:
        return ""
    return next(
        (
            f.description or ""
            for n, f in section.model_fields.items()
            if (f.alias or n) == path[-1]
        ),
        "",
    )


def _unknown_key(path: KeyPath, lines: Mapping[KeyPath, str], origin: str) -> Problem:
    section = _section_at(path[:-1])
    known = [f.alias or n for n, f in section.model_fields.items()] if section else []
    fix = did_you_mean(str(path[-1]), known, cutoff=0.5)
    if not fix and (elsewhere := _elsewhere(str(path[-1]))):
        fix = f"did you mean `{elsewhere[0]}`?"
    fix = fix or f"known here: {', '.join(known)}"
    return _located(path, "unknown key", fix, lines, origin)


def _elsewhere(name: str) -> list[str]:
    """Dotted names of fields called `name` in any section."""
    return [
        f"{section_field.alias or section}.{name}"
        for section, section_field in Spec.model_fields.items()
        if (model := _model_of(section_field.annotation)) and name in model.model_fields
    ]


def _checks_of_the_rest(
    values: Mapping[str, Any], error: ValidationError, lines: Mapping[KeyPath, str], origin: str
) -> list[Problem]:
    """Contradictions among the fields that are fine, so that one reading shows everything."""
    bad = {_key_path(item["loc"]) for item in error.errors(include_url=False)}
    try:
        spec = _strict({"name": "x", "task": BUILTIN_TASKS[0], **_without(values, bad, ())})
    except ValidationError:
        return []
    touched = {path[:2] for path in bad}
    return [
        _located(path, what, fix, lines, origin)
        for path, what, fix in check(spec)
        if path[:2] not in touched
    ]


def _without(values: Mapping[str, Any], bad: set[KeyPath], path: KeyPath) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in values.items():
        here = (*path, key)
        if here in bad:
            continue
        kept[key] = _without(value, bad, here) if isinstance(value, dict) else value
        if any(wrong[: len(here)] == here for wrong in bad) and not isinstance(value, dict):
            del kept[key]
    return kept
