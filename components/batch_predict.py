"""Predictions of a registered model for a whole source."""

from typing import NamedTuple

from kfp import dsl

from components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def batch_predict(
    name: str,
    task: str,
    data: str,
    register: str,
    artifact_root: str,
    source: str,
    output: str,
    version: str = "",
) -> NamedTuple("Predicted", [("rows", int), ("version", str)]):
    """Write predictions in parts; goes on behind those that are there already.

    Args:
        name: Name of the registered model.
        task: Task name, or path.py:Class.
        data: The spec's section `data`, as JSON: columns, and how images are read.
        register: The spec's section `register`, as JSON.
        artifact_root: Folder or URI under which rekindle keeps state.
        source: What `data.source` may be: the same columns, without labels.
        output: Folder or URI of the parts, called NAME.parquet or NAME.jsonl.
        version: Version in the registry; empty for the champion.

    Returns:
        rows: Number of predictions.
        version: Version that made them.
    """
    import sys
    from collections import namedtuple

    from rekindle.registry.models import Registry, served_model
    from rekindle.serve.batch import predict
    from rekindle.spec.model import DataSpec, RegisterSpec

    columns = DataSpec.model_validate_json(data)
    where = Registry(RegisterSpec.model_validate_json(register), name, artifact_root)
    done = predict(
        served_model(where, columns, task, version),
        columns,
        source,
        output,
        lambda parts, rows: sys.stdout.write(f"part {parts}: {rows:,} rows\n"),
    )
    return namedtuple("Predicted", ["rows", "version"])(done.rows, done.version)
