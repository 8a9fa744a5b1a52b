"""First step of every run, never cached: what does the source hold now, and which work follows from
that?
"""

from typing import NamedTuple

from kfp import dsl

from components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def fingerprint(
    name: str,
    task: str,
    data: str,
    model: str,
    train: str,
    register: str,
    artifact_root: str,
    record: dsl.Output[dsl.Artifact],
) -> NamedTuple(
    "Keys",
    [
        ("window", str),
        ("data_key", str),
        ("tokenizing", str),
        ("run_key", str),
        ("init_from", str),
        ("init_digest", str),
        ("champion", str),
        ("champion_digest", str),
        ("registry", str),
    ],
):
    """Resolve the data window, hash the bytes in it, and derive the keys of the work.

    Args:
        name: Name of the registered model.
        task: Task name, or path.py:Class.
        data: The spec's section `data`, as JSON.
        model: The spec's section `model`, as JSON.
        train: The spec's section `train`, as JSON.
        register: The spec's section `register`, as JSON.
        artifact_root: Folder or URI under which rekindle keeps state.
        record: The fingerprint record.

    Returns:
        window: Resolved data window, `start/end`, or empty.
        data_key: Hash of the source's content in the window.
        tokenizing: Hash of the folders that examples are encoded by, or empty.
        run_key: Identifies the training exactly; its checkpoints live under it.
        init_from: Where the weights start.
        init_digest: Hash of the files there, or empty for the base model.
        champion: Registry version to beat, or empty.
        champion_digest: Hash of its files, or empty.
        registry: `register` but for who approves, on which no result before the gate depends.
    """
    from collections import namedtuple

    from rekindle.data.fingerprint import fingerprint as take_fingerprint
    from rekindle.registry.models import Registry, champion_state
    from rekindle.spec.model import DataSpec, ModelSpec, RegisterSpec, TrainSpec

    where = Registry(RegisterSpec.model_validate_json(register), name, artifact_root)
    found = take_fingerprint(
        task,
        DataSpec.model_validate_json(data),
        ModelSpec.model_validate_json(model),
        TrainSpec.model_validate_json(train),
        champion=champion_state(where, where.code(task)),
    )
    found.write(record.path)
    record.metadata["record"] = "fingerprint"
    names = "window data_key tokenizing run_key init_from init_digest champion champion_digest"
    registry = where.spec.model_copy(update={"approval": "auto"})
    return namedtuple("Keys", f"{names} registry")(
        found.window,
        found.data,
        found.tokenizing,
        found.run_key,
        found.init_from,
        found.init_digest,
        found.champion,
        found.champion_digest,
        registry.model_dump_json(),
    )
