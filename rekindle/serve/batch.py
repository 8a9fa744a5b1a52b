"""Predictions for a whole source, as files of `PART_ROWS` rows under a folder or URI.

A part is there whole or not at all, and parts follow from the input and the model alone:
the same command goes on behind the parts that a killed one left, and ends with the same
bytes. `_predictions.json`, written last, says that all are there."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rekindle.data.roles import wanted_columns
from rekindle.data.source import FileSource, asked_for_by, open_source
from rekindle.errors import DataError, Problem, RequestError, StepError
from rekindle.outputs import Predicted
from rekindle.rows.columns import RawBatch, Source, texts
from rekindle.rows.findings import Findings
from rekindle.serve.inputs import Inputs
from rekindle.serve.load import load_served
from rekindle.serve.messages import ServedModel
from rekindle.serve.wire import json_bytes
from rekindle.serve.work import Model, Prediction, RefusedError, WritingOptions
from rekindle.spec.identity import digest
from rekindle.spec.model import ColumnsSpec, DataSpec, SplitSpec
from rekindle.storage import Storage, about, storage_of

PART_ROWS = 1_000
SHOWN = 5  # rows that cannot be read, in the message that refuses them
# readers of Parquet leave out `_` names
WORK = "_work.json"
DONE = "_predictions.json"
_COLUMNS = {
    "id": pa.string(),
    "label": pa.string(),
    "probability": pa.float64(),
    "tags": pa.list_(pa.string()),
    "probabilities": pa.list_(pa.float64()),
    "value": pa.float64(),
    "text": pa.string(),
    "prompt_tokens": pa.int64(),
    "tokens": pa.int64(),
    "finish_reason": pa.string(),
    "truncated": pa.bool_(),
}
Row = tuple[str, str, Any]
"""Where it stands, its id, and the value that the model reads."""


@asked_for_by("--input")
def predict(
    served: ServedModel,
    data: DataSpec,
    source: str,
    output: str,
    on_part: Callable[[int, int], None],
) -> Predicted:
    """Write the predictions for `source`, which is read as `data.source` is, with ids as
    `ingest` gives them; `on_part` gets the numbers of parts and of rows so far. Raises
    RequestError where `output` holds others, DataError for rows that cannot be read."""
    suffix = _suffix_of(output)
    model, inputs, _ = load_served(served)
    data = _spec_of_input(data, source)
    modality = inputs.modality.field.name
    findings = Findings()
    storage = storage_of(output, about("the predictions"))
    opened = open_source(data, modality)
    content = opened.fingerprint()
    names = _names_of(inputs, data.columns.key)
    settings = [*names, data.delimiter, data.encoding, suffix, *_ids_from(opened, data)]
    work = digest([content, served.identity, settings])
    _check_work(storage, output, work)
    kinds = wanted_columns(data, modality)
    columns = {name: kinds[name] for name in names if name in kinds}
    batches = opened.read(columns, findings)
    rows = (row for raw in batches for row in _rows(raw, inputs, data.columns, findings))
    total = 0
    parts_before = 0
    for number in itertools.count():
        part = list(itertools.islice(rows, PART_ROWS))
        # before the part is written, whose rows would be missing
        findings.raise_if_any()
        if not part:
            break
        name = f"part-{number:05}{suffix}"
        if storage.size(name) is None:
            part_file = _file_of(_answered_rows(model, inputs, part), suffix)
            if storage.read(WORK) is None:  # rows that cannot be read leave nothing behind
                storage.put_new(WORK, work.encode())
            _check_work(storage, output, work)  # another command may write there, too
            storage.put_new(name, part_file)
        else:
            parts_before += 1
        total += len(part)
        on_part(number + 1, total)
    if isinstance(opened, FileSource) and open_source(data, modality).fingerprint() != content:
        fix = "delete the output and run again"
        raise DataError("the input changed while it was read", where=source, fix=fix)
    done = Predicted(
        output=output,
        rows=total,
        parts=number,
        parts_before=parts_before,
        model=served.name,
        version=served.version,
    )
    # an earlier command may have written it: what it says stays
    if storage.size(DONE) is None:
        storage.put_new(DONE, done.to_json().encode())
    return done


def _names_of(inputs: Inputs, key: str | None) -> list[str | None]:
    """The columns that make an instance, and the key; None for what no column has."""
    names: list[str | None] = [*inputs.question.columns]
    if len(names) == 1:
        names.append(None)  # outputs that an earlier version has begun count a second one in
    return [*names, key]


def _spec_of_input(data: DataSpec, source: str) -> DataSpec:
    """The config's data section for the input, without the format, window and split."""
    update = {"format": "auto", "split": SplitSpec(), "window": None, "slices": ()}
    return data.model_copy(update={**update, "source": source})


def _suffix_of(output: str) -> str:
    suffix = PurePosixPath(output).suffix
    if suffix not in (".parquet", ".jsonl"):
        message = f"the name {output} does not say how predictions are written"
        raise RequestError(message, where="--output", fix="end it with .parquet or .jsonl")
    return suffix


def _ids_from(opened: Source, data: DataSpec) -> list[str]:
    """The names that are parts of ids where rows have no key."""
    if not isinstance(opened, FileSource) or data.columns.key:
        return []
    return [file.name for file in opened.files.files]


def _check_work(storage: Storage, output: str, work: str) -> None:
    """Raise RequestError where this output is of something else."""
    if storage.read(WORK) not in (None, work.encode()):
        message = f"{output} holds predictions of another input, model or config"
        raise RequestError(message, where="--output", fix="name another output, or delete this one")


def _rows(raw: RawBatch, inputs: Inputs, names: ColumnsSpec, findings: Findings) -> Iterator[Row]:
    ids = raw.ids()
    if names.key:
        keys = texts(raw, names.key, "scalar", findings)
        ids = keys.values
        for row in np.flatnonzero(keys.blank).tolist():
            findings.add("empty key", raw.place(row))
    for i, value in enumerate(inputs.question.values(raw, findings)):
        yield raw.place(i), str(ids[i]), value


def _answered_rows(model: Model, inputs: Inputs, part: list[Row]) -> list[Prediction]:
    """A row of the output for each.
    Raises DataError with rows that the model cannot read."""
    contents = list[Any]()
    bad = list[Problem]()
    for place, _, value in part:
        try:
            contents.append(inputs.content({inputs.column: value}, place))
        except RefusedError as error:
            bad.append(Problem(str(error), fix="correct the row, or leave it out"))
    if bad:
        problems = bad[:SHOWN]
        if len(bad) > SHOWN:
            problems.append(Problem(f"and {len(bad) - SHOWN} more rows like these"))
        raise DataError(problems)
    rows = list[Prediction]()
    answers = model.answers(contents, WritingOptions())
    for (place, row_id, _), answer in zip(part, answers, strict=True):
        if isinstance(answer, RefusedError):
            raise StepError(f"no prediction: {answer}", where=place)
        rows.append({"id": row_id, "truncated": False, **answer})
    return rows


def _file_of(rows: list[Prediction], suffix: str) -> bytes:
    names = [name for name in _COLUMNS if name in rows[0]]
    if suffix == ".jsonl":
        lines = bytearray()
        for row in rows:
            lines += json_bytes({name: row[name] for name in names}) + b"\n"
        return bytes(lines)
    sink = pa.BufferOutputStream()
    schema = pa.schema([(name, _COLUMNS[name]) for name in names])
    pq.write_table(pa.Table.from_pylist(rows, schema), sink, compression="zstd")
    content: bytes = sink.getvalue().to_pybytes()
    return content
