"""A first config for a file of the user's: what its columns are is guessed from their
names and the values of the first rows, and comments say why."""

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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import fsspec
import jinja2
import yaml

from rekindle.data.files import delimiter_of
from rekindle.errors import RequestError
from rekindle.spec.checks import RESERVED

_ROWS = 50_000
_HEAD_BYTES = 16 << 20
_MOST_CLASSES = 20  # of numbers, and of values that a metric is reported for
_IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
_TEXT_NAMES = r"text|body|content|message|review|comment|description|title|question|sentence"
_LABEL_NAMES = r"label|class|category|target|sentiment|verdict|intent|topic|team|rating|y"
_TARGET_NAMES = r"target|price|cost|amount|value|score|duration|days|hours|minutes|seconds"
_PROMPT_NAMES = r"prompt|instruction|question|query"
_INPUT_NAMES = r"input|context"
_COMPLETION_NAMES = r"completion|output|response|answer|reply"
Column = list[Any]
Roles = dict[str, tuple[str, str]]  # role -> name of the column, and why it has that role


def draft_config(path: Path, source: str) -> tuple[str, str]:
    """The text of a config for a file, or a folder of images by class, and its task;
    `source` is what the config calls the file. RequestError where no column can be what a
    task reads."""
    if path.is_dir():
        values: dict[str, Any] = {"task": "image_classification", **_usual(_images(path))}
    else:
        rows, reading = _rows(path)
        if not rows:
            raise RequestError(
                f"{path.name} holds no rows", where="--data", fix="name a file with rows"
            )
        columns = {name: _column(rows, name) for name in rows[0]}
        values = {"reading": reading, **_tabular(path, columns)}
    stem = re.sub(r"[^a-z0-9_.-]+", "-", path.stem.lower())
    name = stem.strip("-._")[:60] or "model"
    environment = jinja2.Environment(  # noqa: S701 - YAML, in which names are quoted
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["quoted"] = _quoted
    template = environment.get_template("draft.yaml.j2")
    text = template.render(most=f"{_ROWS:,}", name=name, source=source, **values)
    return text, values["task"]


def _column(rows: Sequence[dict[str, Any]], name: str) -> Column:
    return [row.get(name) for row in rows]


def _unreadable(path: Path, error: Exception) -> RequestError:
    message = f"{path.name} cannot be read: {error}"
    return RequestError(message, where="--data", fix="check the file")


def _rows(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The first rows, and what a config has to say of how they are read."""
    name = re.sub(r"\.(gz|bz2|xz)$", "", path.name.lower())
    if name.endswith(".parquet"):
        return _parquet_rows(path), []
    if not name.endswith((".csv", ".tsv", ".jsonl", ".ndjson")):
        raise RequestError(
            f"{path.name} is neither CSV, JSON lines nor Parquet, nor a folder of images",
            where="--data",
            fix="convert it to one of them",
        )
    text, encoding = _decoded(_head(path))
    reading: list[str] = []
    if encoding != "utf-8-sig":
        reading.append(f"encoding: {encoding}  # its bytes are not UTF-8; this is a guess")
    if name.endswith((".jsonl", ".ndjson")):
        return _json_rows(path, text), reading
    usual_delimiter = "\t" if name.endswith(".tsv") else ","
    rows, delimiter = _csv_rows(text, usual_delimiter)
    # what "auto" finds by itself is not written, so that files with others can be read, too
    if delimiter != delimiter_of(name, text.lstrip("\r\n").encode()):
        reading.append(f"delimiter: {json.dumps(delimiter)}")
    return rows, reading


def _parquet_rows(path: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet

    try:
        batch = next(pyarrow.parquet.ParquetFile(path).iter_batches(_ROWS), None)
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise _unreadable(path, error) from None
    if batch is None:
        return []
    rows: list[dict[str, Any]] = batch.to_pylist()
    return rows


def _json_rows(path: Path, text: str) -> list[dict[str, Any]]:
    lines = itertools.islice(filter(str.strip, text.split("\n")), _ROWS)
    with contextlib.suppress(ValueError):
        rows = [json.loads(line) for line in lines]
        if all(isinstance(row, dict) for row in rows):
            return rows
    raise RequestError(
        f"a line of {path.name} is not a JSON object",
        where="--data",
        fix="write an object a line",
    )


def _head(path: Path) -> bytes:
    """The first bytes, decompressed; whole lines of a file with more."""
    try:
        with fsspec.open(str(path), "rb", compression="infer") as file:
            head: bytes = file.read(_HEAD_BYTES)
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise _unreadable(path, error) from None
    if len(head) == _HEAD_BYTES:
        return head[: head.rfind(b"\n")]
    return head


def _decoded(head: bytes) -> tuple[str, str]:
    """The text of bytes, and its encoding as far as that can be guessed."""
    has_utf_16_mark = head.startswith((b"\xff\xfe", b"\xfe\xff"))
    encoding = "utf-16" if has_utf_16_mark else "utf-8-sig"
    try:
        return head.decode(encoding), encoding
    except UnicodeDecodeError:
        return head.decode("cp1252", errors="replace"), "cp1252"


def _csv_rows(text: str, usual: str) -> tuple[list[dict[str, Any]], str]:
    """The first rows of a CSV, and its delimiter.

    That is the mark which divides most lines as it divides the first."""
    first, *next_lines = text[: 1 << 16].splitlines()[:50] or [""]

    def lines_alike(mark: str) -> tuple[int, int]:
        """How many lines have this mark as often as the first line, and how often."""
        in_first = first.count(mark)
        if not in_first:
            return 0, 0
        return sum(line.count(mark) == in_first for line in next_lines), in_first

    delimiter = max(usual, ";", "\t", "|", key=lines_alike)  # the usual one, where all are alike
    limit_before = csv.field_size_limit(_HEAD_BYTES)  # of the process
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
        rows = list(itertools.islice(reader, _ROWS))
    finally:
        csv.field_size_limit(limit_before)
    for row in rows:
        row.pop(None, None)  # DictReader keeps there what lies behind the last column
    return rows, delimiter


def _images(folder: Path) -> list[str]:
    """The class of each image, which is the name of its folder."""
    images = (path for path in folder.rglob("*") if path.suffix.lower() in _IMAGES)
    first_images = itertools.islice(images, _ROWS)
    labels = [path.parent.name for path in first_images if path.parent != folder]
    if len(set(labels)) < 2:
        raise RequestError(
            f"{folder} has no two folders of images, one for each class",
            where="--data",
            fix="name a file, or put images into such folders",
        )
    return labels


def _tabular(path: Path, columns: dict[str, Column]) -> dict[str, Any]:
    """The task, what `data` and `evaluate` say of the columns, and of their values.

    A chat, and a prompt with its completion, go before a text with a label."""
    words_per_row = {}
    for name, values in columns.items():
        mean = _words(values)
        if mean > 0:
            words_per_row[name] = mean
    roles: Roles = {}
    time = _first_column(columns, _is_time)
    if time:
        roles["time"] = time, "dates"
    chat = _first_column(columns, _is_chat)
    if chat:
        roles["messages"] = chat, "chats"
        return _data("causal_lm", roles, columns)
    prompt = _named_like(_PROMPT_NAMES, words_per_row)
    completion = _named_like(_COMPLETION_NAMES, words_per_row)
    if prompt and completion:
        roles["prompt"] = prompt, "its name"
        roles["completion"] = completion, "its name"
        context = _named_like(_INPUT_NAMES, words_per_row)
        if context:
            roles["input"] = context, "its name"
        return _data("causal_lm", roles, columns)
    # a column of dates without a name has no role, and is neither text nor label all the same
    candidates = {name: values for name, values in columns.items() if name != time}
    return _text_with_label(path, columns, candidates, words_per_row, roles)


def _text_with_label(
    path: Path,
    columns: dict[str, Column],
    candidates: dict[str, Column],
    words_per_row: dict[str, float],
    roles: Roles,
) -> dict[str, Any]:
    """The same for a column of texts among the `candidates`, with labels or numbers to
    learn where there are some."""
    labels = [name for name, values in candidates.items() if _is_label(values)]
    texts = [name for name in words_per_row if name in candidates and name not in labels]
    longest = max(texts, key=lambda name: words_per_row[name], default=None)
    text = _named_like(_TEXT_NAMES, texts) or longest
    if text is None:
        raise RequestError(
            f"no column of {path.name} holds texts: it has {', '.join(columns) or 'none'}",
            where="--data",
            fix="write a config by hand: `rekindle init`; lists of words and of their tags are "
            "task: token_classification",
        )
    roles["text"] = text, f"{words_per_row[text]:.0f} words a row"
    label = _named_like(_LABEL_NAMES, labels)
    if label is None:
        numbers = [name for name, values in columns.items() if _is_measured(values)]
        target = _named_like(_TARGET_NAMES, numbers)
        if target:
            roles["target"] = target, "numbers"
            return _data("text_regression", roles, columns)
        label = next(iter(labels), None)
    if label is None:
        return _data("causal_lm", roles, columns)
    values = [str(value) for value in columns[label] if not _is_empty(value)]
    roles["label"] = label, f"{len(set(values))} values"
    return _data("text_classification", roles, columns) | _usual(values)


def _first_column(columns: dict[str, Column], holds: Callable[[Any], bool]) -> str | None:
    """The first column of whose values nearly all are of a kind."""
    for name, values in columns.items():
        if _all(values, holds):
            return name
    return None


def _named_like(pattern: str, names: Iterable[str]) -> str | None:
    return next((name for name in names if re.fullmatch(pattern, name.lower())), None)


def _data(task: str, roles: Roles, columns: dict[str, Column]) -> dict[str, Any]:
    """What the template says of columns, by the names that it has for it."""
    used = {name for name, _ in roles.values()}
    unused = [name for name in columns if name not in used]
    slices = [name for name in unused if _is_slice(name, columns[name])]
    # a prompt may have no input
    needed = [columns[name] for role, (name, _) in roles.items() if role != "input"]
    rows = list(zip(*needed, strict=True))
    empty_rows = sum(any(map(_is_empty, row)) for row in rows)
    # half as many again may come as these rows have, in whole percents
    bad_rows = max(0.01, math.ceil(150 * empty_rows / len(rows)) / 100)
    times: Column = []
    if "time" in roles:
        times = columns[roles["time"][0]]
    return {
        "task": task,
        "roles": roles,
        "rest": unused,
        "slices": slices,
        "empty": empty_rows,
        "rows": len(rows),
        "bad_rows": bad_rows,
        "by_time": len(set(map(str, times))) >= 10,
    }


def _is_slice(name: str, values: Column) -> bool:
    """Whether the metric can be reported for each value of this column."""
    if name in RESERVED or not _is_label(values):
        return False
    return len(set(map(str, values))) <= _MOST_CLASSES


def _quoted(name: str) -> str:
    """A name as YAML, on one line."""
    return str(yaml.safe_dump(name, default_style='"', allow_unicode=True, width=1 << 20)).strip()


def _usual(labels: Sequence[str]) -> dict[str, Any]:
    """The most frequent label, how often it is right, and the floor that this makes."""
    label, count = collections.Counter(labels).most_common(1)[0]
    percent = 100 * count / len(labels)
    floor = math.floor(min(percent, 99)) / 100
    return {"usual": label, "reached": count / len(labels), "floor": floor}


def _is_empty(value: Any) -> bool:
    return value in (None, "")


def _all(values: Column, holds: Callable[[Any], bool]) -> bool:
    """Whether nearly all values are of a kind: a few may be wrong in a file of a user."""
    filled = [value for value in values if not _is_empty(value)]
    return bool(filled) and sum(map(holds, filled)) >= 0.95 * len(filled)


def _words(values: Column) -> float:
    """Words a row where a column holds texts, else 0."""
    texts = [value for value in values if isinstance(value, str) and value.strip()]
    mean = sum(len(value.split()) for value in texts) / max(len(texts), 1)
    if len(set(texts)) <= 1 or mean < 1 or _all(values, _is_number):
        return 0.0
    return mean


def _is_label(values: Column) -> bool:
    """Whether a column holds a few short values that come again and again."""
    labels = [str(value) for value in values if isinstance(value, str | int) and str(value).strip()]
    distinct = set(labels)
    are_short = all(len(label.split()) <= 5 for label in distinct)
    return are_short and 2 <= len(distinct) <= min(500, len(labels) // 4)


def _is_measured(values: Column) -> bool:
    """Whether a column holds numbers, of which there are too many to be classes."""
    return _all(values, _is_number) and len(set(map(str, values))) > _MOST_CLASSES


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _is_time(value: Any) -> bool:
    if isinstance(value, dt.date):
        return True
    match = re.fullmatch(r"((?:19|20)\d\d-\d\d)(-\d\d)?([T ]\d\d:\d\d.*)?", str(value))
    if match is None:
        return False
    month = match[1]
    day = match[2] or "-01"  # a month alone is a time, too
    try:
        dt.date.fromisoformat(month + day)
    except ValueError:
        return False
    return True


def _is_chat(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(turn, dict) and {"role", "from"} & set(turn) for turn in value)
