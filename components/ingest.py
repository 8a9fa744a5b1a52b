"""Read the source, check it, divide it: examples in one form, whatever they came from."""

from kfp import dsl

from components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def ingest(
    task: str,
    data: str,
    window: str,
    data_key: str,
    artifact_root: str,
    examples: dsl.Output[dsl.Dataset],
):
    """Write the validated, split examples of the window.

    Args:
        task: Task name, or path.py:Class.
        data: The spec's section `data`, as JSON.
        window: Resolved data window.
        data_key: Hash of the source's content; a changed source makes a new input and so a new
        execution.
        artifact_root: Folder or URI under which rekindle keeps state, such as pieces of the source.
        examples: Arrow files of each split, and summary.json.
    """
    from pathlib import Path

    from rekindle.data.ingest import ingest as read_source
    from rekindle.spec.model import DataSpec
    from rekindle.tasks import load_task

    summary = read_source(
        DataSpec.model_validate_json(data),
        load_task(task).modality,
        window,
        Path(examples.path),
        source=data_key,
        store=f"{artifact_root.rstrip('/')}/pieces",
    )
    if summary is not None:  # the first node writes the outputs
        examples.metadata["rows"] = dict(summary.rows)
        if summary.pieces:
            examples.metadata["pieces"] = summary.pieces
