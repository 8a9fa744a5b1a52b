"""Encode the examples for the model, in parallel, into Arrow shards with a manifest."""

from kfp import dsl

from components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def shard(
    task: str,
    data: str,
    model: str,
    tokenizing: str,
    artifact_root: str,
    examples: dsl.Input[dsl.Dataset],
    shards: dsl.Output[dsl.Dataset],
):
    """Write shards that training reads.

    Args:
        task: Task name, or path.py:Class.
        data: The spec's section `data`, as JSON.
        model: The spec's section `model`, as JSON.
        tokenizing: Hash of the folders that it names; a changed tokenizer makes a new input and so
        a new execution.
        examples: What `ingest` wrote.
        shards: Shards, assets such as the tokenizer, and manifest.json.
    """
    from pathlib import Path

    from rekindle.data.shard import shard as write_shards
    from rekindle.spec.model import DataSpec, ModelSpec

    write_shards(
        Path(examples.path),
        DataSpec.model_validate_json(data),
        ModelSpec.model_validate_json(model),
        task,
        Path(shards.path),
        store=f"{artifact_root.rstrip('/')}/pieces",
    )
    shards.metadata["record"] = "shards"
