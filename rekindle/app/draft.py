"""A first config for a file of the user's: what its columns are is guessed from their names and
the values of the first rows, and comments say why."""

import collections
import contextlib
import csv
import datetime as dt
import gzip
import io
import itertools
import json
import lzma
import math
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fsspec
import jinja2
import yaml

from rekindle.data.files import delimiter_of
from rekindle.errors import RequestError
from rekindle.spec.checks import RESERVED
from rekindle.tables import problems_in

_ROWS, _HEAD_BYTES = 50_000, 16 << 20
_IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
_TEXT_NAMES = r"text|body|content|message|review|comment|description|title|question|sentence"
_LABEL_NAMES = r"label|class|category|target|sentiment|verdict|intent|topic|team|rating|y"
_TARGET_NAMES = r"target|price|cost|amount|value|score|duration|days|hours|minutes|seconds"
_PROMPT_NAMES, _INPUT_NAMES = r"prompt|instruction|question|query", r"input|context"
_COMPLETION_NAMES = r"completion|output|response|answer|reply"
Column = list[Any]
_problem = problems_in(__file__)


def draft_config(path: Path, named: str) -> tuple[str, str]:
    """The text of a config for a file, or a folder of images by class, that it calls `named`, and
    its task; raises RequestError where no column can be what a task reads."""
    if path.is_dir():
        found: dict[str, Any] = {"task": "image_classification", **_usual(_images(path))}
    else:
        rows, reading = _rows(path)
        if not rows:
            raise RequestError([_problem("no_rows", name=path.name)])
        columns = {name: [row.get(name) for row in rows] for name in rows[0]}
        found = {"reading": reading, **_tabular(path, columns)}
    name = re.sub(r"[^a-z0-9_.-]+", "-", path.stem.lower()).strip("-._")[:60] or "model"
    environment = jinja2.Environment(  # noqa: S701 - YAML, in which names are quoted
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["quoted"] = _quoted
    template = environment.get_template("draft.yaml.j2")
    return template.render(most=f"{_ROWS:,}", name=name, source=named, **found), found["task"]


def _rows(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The first rows, and what a config has to say of how they are read."""
    name, reading = re.sub(r"\.(gz|bz2|xz)$", "", path.name.lower()), list[str]()
    if name.endswith(".parquet"):
        import pyarrow.parquet

        try:
            batch = next(pyarrow.parquet.ParquetFile(path).iter_batches(_ROWS), None)
        except (OSError, pyarrow.ArrowInvalid) as error:
            raise RequestError([_problem("unreadable", name=path.name, error=error)]) from None
        return batch.to_pylist() if batch is not None else [], reading
    if not name.endswith((".csv", ".tsv", ".jsonl", ".ndjson")):
        raise RequestError([_problem("form", name=path.name)])
    head = _head(path)
    encoding = "utf-16" if head.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    try:
        text = head.decode(encoding)
    except UnicodeDecodeError:
        encoding, text = "cp1252", head.decode("cp1252", errors="replace")
    if encoding != "utf-8-sig":
        reading.append(f"encoding: {encoding}  # its bytes are not UTF-8; this is a guess")
    if name.endswith((".jsonl", ".ndjson")):
        lines = itertools.islice(filter(str.strip, text.split("\n")), _ROWS)
        with contextlib.suppress(ValueError):
            found = [json.loads(line) for line in lines]
            if all(isinstance(row, dict) for row in found):
                return found, reading
        raise RequestError([_problem("json_lines", name=path.name)])
    rows, delimiter = _csv_rows(text, "\t" if name.endswith(".tsv") else ",")
    # what "auto" finds by itself is not said, so that files with others can be read, too
    if delimiter != delimiter_of(name, text.lstrip("\r\n").encode()):
        reading.append(f"delimiter: {json.dumps(delimiter)}")
    return rows, reading


def _head(path: Path) -> bytes:
    """The first bytes, decompressed; whole lines of a file with more."""
    try:
        with fsspec.open(str(path), "rb", compression="infer") as file:
            head: bytes = file.read(_HEAD_BYTES)
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise RequestError([_problem("unreadable", name=path.name, error=error)]) from None
    return head[: head.rfind(b"\n")] if len(head) == _HEAD_BYTES else head


def _csv_rows(text: str, usual: str) -> tuple[list[dict[str, Any]], str]:
    """The first rows of a CSV, and the mark that divides most lines as it divides the first."""
    first, *others = text[: 1 << 16].splitlines()[:50] or [""]
    delimiter = max(
        usual,
        ";",
        "\t",
        "|",
        key=lambda mark: (
            mark in first and sum(line.count(mark) == first.count(mark) for line in others),
            first.count(mark),
        ),
    )
    before = csv.field_size_limit(_HEAD_BYTES)  # of the process
    try:
        read = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
        rows = itertools.islice(read, _ROWS)
        return [{k: v for k, v in row.items() if k is not None} for row in rows], delimiter
    finally:
        csv.field_size_limit(before)


def _images(folder: Path) -> list[str]:
    """The class of each image."""
    found = (path for path in folder.rglob("*") if path.suffix.lower() in _IMAGES)
    labels = [path.parent.name for path in itertools.islice(found, _ROWS) if path.parent != folder]
    if len(set(labels)) < 2:
        raise RequestError([_problem("images", folder=folder)])
    return labels


def _tabular(path: Path, columns: dict[str, Column]) -> dict[str, Any]:
    """The task, what `data` and `evaluate` say of the columns, and of their values."""
    texts = {name: mean for name, values in columns.items() if (mean := _words(values)) > 0}

    def pick(names: str, among: Sequence[str]) -> str | None:
        return next((name for name in among if re.fullmatch(names, name.lower())), None)

    def is_many(name: str) -> bool:
        """Whether a column holds numbers, of which there are too many to be classes."""
        return _all(columns[name], _is_number) and len(set(map(str, columns[name]))) > 20

    roles = dict[str, tuple[str, str]]()
    time = next((n for n, values in columns.items() if _all(values, _is_time)), None)
    if time:
        roles["time"] = time, "dates"
    if chat := next((n for n, values in columns.items() if _all(values, _is_chat)), None):
        roles["messages"] = chat, "chats"
        return _data("causal_lm", roles, columns)
    prompt, completion = pick(_PROMPT_NAMES, [*texts]), pick(_COMPLETION_NAMES, [*texts])
    if prompt and completion:
        roles |= {"prompt": (prompt, "its name"), "completion": (completion, "its name")}
        if given := pick(_INPUT_NAMES, [*texts]):
            roles["input"] = given, "its name"
        return _data("causal_lm", roles, columns)
    labels = [name for name, values in columns.items() if name != time and _is_label(values)]
    others = [name for name in texts if name not in (*labels, time)]
    text = pick(_TEXT_NAMES, others) or max(others, key=lambda name: texts[name], default=None)
    if text is None:
        about = {"name": path.name, "columns": ", ".join(columns) or "none"}
        raise RequestError([_problem("no_text", **about)])
    roles["text"] = text, f"{texts[text]:.0f} words a row"
    label = pick(_LABEL_NAMES, labels)
    if label is None and (target := pick(_TARGET_NAMES, [*filter(is_many, columns)])):
        roles["target"] = target, "numbers"
        return _data("text_regression", roles, columns)
    label = label or next(iter(labels), None)
    if label is None:
        return _data("causal_lm", roles, columns)
    values = [str(value) for value in columns[label] if value not in (None, "")]
    roles["label"] = label, f"{len(set(values))} values"
    return _data("text_classification", roles, columns) | _usual(values)


def _data(
    task: str, roles: dict[str, tuple[str, str]], columns: dict[str, Column]
) -> dict[str, Any]:
    """What the template says of columns, by the names that it has for it."""
    rest = [name for name in columns if name not in {name for name, _ in roles.values()}]
    slices = [
        name
        for name in rest
        if name not in RESERVED
        and _is_label(columns[name])
        and len(set(map(str, columns[name]))) <= 20
    ]
    needed = [columns[name] for role, (name, _) in roles.items() if role != "input"]
    empty = [any(value in (None, "") for value in row) for row in zip(*needed, strict=True)]
    bad_rows = max(0.01, math.ceil(150 * sum(empty) / len(empty)) / 100)
    times = columns[roles["time"][0]] if "time" in roles else []
    return {
        "task": task,
        "roles": roles,
        "rest": rest,
        "slices": slices,
        "empty": sum(empty),
        "rows": len(empty),
        "bad_rows": bad_rows,
        "by_time": len(set(map(str, times))) >= 10,
    }


def _quoted(name: str) -> str:
    """A name as YAML, on one line."""
    return str(yaml.safe_dump(name, default_style='"', allow_unicode=True, width=1 << 20)).strip()


def _usual(labels: Sequence[str]) -> dict[str, Any]:
    """The most frequent label, how often it is right, and the floor that this makes."""
    (label, count), *_ = collections.Counter(labels).most_common(1)
    floor = math.floor(min(100 * count / len(labels), 99)) / 100
    return {"usual": label, "reached": count / len(labels), "floor": floor}


def _all(values: Column, holds: Callable[[Any], bool]) -> bool:
    known = [value for value in values if value not in (None, "")]
    return bool(known) and sum(map(holds, known)) >= 0.95 * len(known)


def _words(values: Column) -> float:
    """Words a row where a column holds texts, else 0."""
    known = [value for value in values if isinstance(value, str) and value.strip()]
    mean = sum(len(value.split()) for value in known) / max(len(known), 1)
    return mean if len(set(known)) > 1 and mean >= 1 and not _all(values, _is_number) else 0.0


def _is_label(values: Column) -> bool:
    known = [str(value) for value in values if isinstance(value, str | int) and str(value).strip()]
    short = all(len(value.split()) <= 5 for value in set(known))
    return short and 2 <= len(set(known)) <= min(500, len(known) // 4)


def _is_number(value: Any) -> bool:
    with contextlib.suppress(TypeError, ValueError):
        float(value)
        return True
    return False


def _is_time(value: Any) -> bool:
    if isinstance(value, dt.date):
        return True
    found = re.fullmatch(r"((?:19|20)\d\d-\d\d)(-\d\d)?([T ]\d\d:\d\d.*)?", str(value))
    with contextlib.suppress(ValueError):
        return bool(found and dt.date.fromisoformat(found[1] + (found[2] or "-01")))
    return False


def _is_chat(value: Any) -> bool:
    turns = value if isinstance(value, list) else []
    return bool(turns) and all(isinstance(t, dict) and {"role", "from"} & set(t) for t in turns)
