"""Rows that a candidate has to predict right (`evaluate.must_pass`),
read like a source's.

Reading the config puts the rows in the place of their path, so that every platform
carries them and what is cached follows their bytes. `score` receives them in a parameter
of their own and keeps their scores beside the others; `evaluate` refuses where the rows
that were scored are not those of its config. Rejected: a split of `ingest`, because other
rows would train again; the section `evaluate` as an input of `score`, because another
floor would occupy the machines again; predictions in `evaluate`, which loads no model; a
URI that the step reads, which may be another file by then. The cost: at most 65,536
characters, and a run's record and card hold the rows."""

import tempfile
from pathlib import Path

import pyarrow as pa

from rekindle.data.normalise import Normaliser
from rekindle.data.roles import wanted_columns
from rekindle.data.source import FileSource
from rekindle.modalities.base import Shape
from rekindle.rows.findings import Findings
from rekindle.spec.model import DataSpec, MustPass


def examples_of(
    must_pass: MustPass,
    modality: str,
    findings: Findings,
    shape: Shape | None = None,
    labels: tuple[str, ...] = (),
) -> pa.Table:
    """The examples, with `id`, `hash`, the content and `label`; `findings` receives what
    is wrong with them. `shape` is that of the model's images, `labels` the classes, where
    they are known."""
    part = must_pass.data.parts[0]
    # golden rows need no ids of their own, no groups and no times
    columns = part.columns.model_copy(update=dict.fromkeys(("key", "group", "time")))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"must_pass.{must_pass.rows.format}")
        file.write_bytes(must_pass.rows.content.encode())
        settings = {"labels": part.labels or labels, "image_size": part.image_size}
        data = DataSpec(source=str(file), columns=columns).model_copy(update=settings)
        normaliser = Normaliser(data, modality, findings, shape)
        batches = FileSource(data, modality).read(wanted_columns(data, modality), findings)
        tables = [normaliser(raw)[0] for raw in batches]
    if not findings and not any(map(len, tables)):
        findings.note("the file holds no rows", fix="add rows, or remove evaluate.must_pass")
    return pa.concat_tables(tables) if tables else pa.table({})
