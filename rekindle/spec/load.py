"""Config file + overrides -> `Spec`, with every problem found at once and each at its
line.

`extends: base.yaml` merges mappings key by key (lists and scalars replace); `--set a.b=c`
comes last. Relative paths in `data.source`, `model.source`, `model.tokenizer`,
`model.init_from`, `model.teacher.source`, `task`, `pipeline`, `train.entrypoint`,
`evaluate.must_pass` and `image.include` start at the folder of the file that names them.
Images that `rekindle.lock` beside the config knows are named by digest."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rekindle.engines.base import at
from rekindle.errors import SpecError
from rekindle.spec import lock
from rekindle.spec.checks import Finding, check
from rekindle.spec.model import BUILTIN_TASKS, Spec
from rekindle.spec.section_errors import SectionErrors, key_path, strict
from rekindle.spec.yaml_document import Document, KeyPath, parse_value, read_document

MAX_EXTENDS = 10
_HEAD = 1 << 20  # characters in which a compiled pipeline shows itself
_PATH_FIELDS: tuple[tuple[str, ...], ...] = (
    ("task",),
    ("pipeline",),
    ("data", "source"),
    ("model", "source"),
    ("model", "tokenizer"),
    ("model", "init_from"),
    ("model", "teacher", "source"),
    ("train", "entrypoint"),
    ("train", "engine_config"),
    ("evaluate", "must_pass"),
    ("monitor", "labels"),
    ("monitor", "log"),
)
# fields of sections that name a file to read, and what to do about none, and about another kind
_FILE_FIELDS = (
    ("train", "engine_config", "", "it has to be JSON, which knows no comments"),
    ("evaluate", "must_pass", "check the path", "write it as CSV or JSON in UTF-8"),
)


def load_target(target: str | Path, overrides: Sequence[str] = (), *, pinned: bool = True) -> Spec:
    """The frozen `Spec` of a config, or of a pipeline (`path.py:function`, or one
    compiled before), with `overrides` such as `train.lr=1e-4` applied. Images are named
    as written unless `pinned`.

    Raises SpecError (exit code 2) with all problems: syntax, types, bounds, unknown keys
    with the nearest known one, and contradictions between fields; TypeError for arguments
    of other types."""
    if not isinstance(target, str | Path):
        raise TypeError(f"a config is named by its path, not by a {type(target).__name__}")
    if isinstance(overrides, str | Mapping):
        raise TypeError(f"overrides are a list such as ['train.lr=1e-4'], not {overrides!r}")
    text = str(target)
    path = Path(target)
    if text.endswith(".py"):
        fix = f"name its pipeline: {text}:FUNCTION"
        raise SpecError(f"{text} is a module, not a config", fix=fix)
    _refuse_older_pipeline(text)
    if _is_pipeline(text):
        stem = Path(text.partition(".py:")[0]).stem.lower()
        name = re.sub(r"[^a-z0-9_.-]+", "-", stem).strip("-._")
        pipeline = _anchored("pipeline", text, Path.cwd())
        document = Document({"name": name or "pipeline", "pipeline": pipeline}, {})
    else:
        document = _with_extends(path, ())
    values = document.values
    lines = dict(document.lines)
    for override in overrides:
        _apply_override(values, lines, override)
    _read_files(values, lines)
    spec = validate(values, lines, text)
    spec._origin = (text, tuple(overrides))
    return lock.pinned(spec, path.parent) if pinned else spec


def _refuse_older_pipeline(target: str) -> None:
    """Raise SpecError for what KFP 1 compiled: a Workflow of Argo."""
    if re.search(r"^apiVersion: *[\"']?argoproj\.io/", _head_of(target), re.MULTILINE):
        raise SpecError(
            f"{target} is a Workflow of Argo, which KFP 1 compiles",
            where=target,
            fix="compile the pipeline with kfp 2.x, or name its path.py:function",
        )


def _is_pipeline(target: str) -> bool:
    if ".py:" in target or target.endswith(".json"):
        return True
    return re.search("^pipelineInfo:", _head_of(target), re.MULTILINE) is not None


def _head_of(target: str) -> str:
    """The beginning of a file; "" where there is none."""
    try:
        with Path(target).open(encoding="utf-8", errors="replace") as file:
            return file.read(_HEAD)
    except OSError:
        return ""


def validate(values: Mapping[str, Any], lines: Mapping[KeyPath, str], origin: str) -> Spec:
    """`Spec` from plain values; `lines` says where each key stands."""
    errors = SectionErrors(Spec, lines, origin)
    try:
        spec = strict(Spec, values)
    except ValidationError as error:
        problems = errors.problems(error)
        # so that one reading shows everything
        for finding in _contradictions_of_others(values, error):
            problems.append(errors.problem(*finding))
        raise SpecError(problems) from None
    if problems := [errors.problem(*finding) for finding in check(spec)]:
        raise SpecError(problems)
    return spec


def _contradictions_of_others(values: Mapping[str, Any], error: ValidationError) -> list[Finding]:
    """What is wrong among the fields that pydantic takes, as if those that it refuses
    were absent; without what may follow from their absence."""
    refused = {key_path(item["loc"]) for item in error.errors(include_url=False)}
    fine = {"name": "x", **_without(values, refused, ())}
    if ("task",) in refused:
        fine["task"] = BUILTIN_TASKS[0]
    try:
        findings = check(strict(Spec, fine))
    except ValidationError:
        return []
    touched = {path[:2] for path in refused}
    return [finding for finding in findings if finding[0][:2] not in touched]


def _with_extends(path: Path, seen: tuple[Path, ...]) -> Document:
    if path.resolve() in seen or len(seen) >= MAX_EXTENDS:
        chain = " -> ".join(str(p) for p in (*seen, path))
        message = f"`extends` goes in a circle: {chain}"
        raise SpecError(message, where=str(path), fix="remove one of them")
    document = read_document(path)
    base_name = document.values.pop("extends", None)
    _anchor_paths(document.values, path.parent)
    if base_name is None:
        return document
    if not isinstance(base_name, str):
        message = "`extends` is the path of one YAML file"
        raise SpecError(message, where=document.lines[("extends",)], fix="extends: base.yaml")
    base = _with_extends(path.parent / base_name, (*seen, path.resolve()))
    return Document(_merge(base.values, document.values), {**base.lines, **document.lines})


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        inherited = merged.get(key)
        if isinstance(inherited, dict) and isinstance(value, dict):
            merged[key] = _merge(inherited, value)
        else:
            merged[key] = value
    return merged


def _anchor_paths(values: dict[str, Any], folder: Path) -> None:
    for *parents, name in _PATH_FIELDS:
        section = at(values, *parents)
        if isinstance(section, dict) and isinstance(section.get(name), str) and section[name]:
            section[name] = _anchored(name, section[name], folder)
    parts = at(values, "data", "sources")
    if isinstance(parts, list):
        for part in parts:
            if isinstance(part, dict) and isinstance(part.get("source"), str):
                part["source"] = _anchored("source", part["source"], folder)
    included = at(values, "image", "include")
    if isinstance(included, list):
        for number, item in enumerate(included):
            if isinstance(item, str):
                included[number] = str((folder / Path(item).expanduser()).absolute())


def _read_files(values: Mapping[str, Any], lines: Mapping[KeyPath, str]) -> None:
    """Put what files say in the place of their paths, so that a run is identified by it."""
    for name, field, missing, malformed in _FILE_FIELDS:
        section = values.get(name)
        if not isinstance(section, dict) or not isinstance(section.get(field), str):
            continue
        path = Path(section[field])
        where = lines.get((name, field), "--set")
        try:
            raw = path.read_bytes()
            if field == "engine_config":
                content = json.loads(raw)
            else:
                content = {"format": path.suffix[1:], "content": raw.decode("utf-8-sig")}
        except (OSError, ValueError) as error:
            fix = missing if isinstance(error, OSError) else malformed
            raise SpecError(f"cannot read {path}: {error}", where=where, fix=fix) from None
        if not isinstance(content, dict):
            raise SpecError(f"{path} holds no JSON object", where=where)
        section[field] = content


def _anchored(field: str, value: str, folder: Path) -> str:
    """An absolute path where `value` means a local file; names and URIs stay as they are."""
    if field == "entrypoint":  # the words of a command: a script first, or `-m`, a module
        script, space, arguments = value.strip().partition(" ")
        if script == "-m" or Path(script).is_absolute() or script[:1] in {"'", '"', ""}:
            return value
        return shlex.quote(str(Path(f"{folder}/{script}").absolute())) + space + arguments
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
    return str((folder / Path(value).expanduser()).absolute())


def _is_hub_name(value: str, folder: Path) -> bool:
    """`bert-base-uncased` and `org/name` are hub names unless such a file or folder lies here."""
    is_path = value.startswith((".", "~", "/")) or value.count("/") > 1
    is_pattern = "*" in value or "{" in value
    has_suffix = Path(value).suffix in {".csv", ".jsonl", ".json", ".parquet", ".gz", ".tsv"}
    return not (is_path or is_pattern or has_suffix or (folder / value).exists())


def _apply_override(values: dict[str, Any], lines: dict[KeyPath, str], override: str) -> None:
    key, equals, text = override.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        message = f"`--set {override[:20]}` is not of the form a.b=c"
        raise SpecError(message, where="--set", fix="--set train.lr=1e-4")
    section: dict[str, Any] = values
    for part in path[:-1]:
        child = section.get(part)
        if not isinstance(child, dict):
            child = section[part] = {}
        section = child
    section[path[-1]] = parse_value(text)
    for replaced in [other for other in lines if other[: len(path)] == path]:
        del lines[replaced]
    lines[path] = f"--set {key}"  # the value may be a secret
    _anchor_paths(values, Path.cwd())


def _without(values: Mapping[str, Any], bad: set[KeyPath], path: KeyPath) -> dict[str, Any]:
    """The values without those at the `bad` paths."""
    fine: dict[str, Any] = {}
    for key, value in values.items():
        key_path_here = (*path, key)
        if isinstance(value, dict) and key_path_here not in bad:
            fine[key] = _without(value, bad, key_path_here)
        elif not any(bad_path[: len(key_path_here)] == key_path_here for bad_path in bad):
            fine[key] = value
    return fine
