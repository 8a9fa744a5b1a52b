"""Distributed scoring with torchrun, in the layout of the fine-tune: candidate and champion on the
held-out examples. Goes on where it was interrupted.
"""

from kfp import dsl

from components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def score(
    name: str,
    task: str,
    train: str,
    register: str,
    champion: str,
    champion_digest: str,
    artifact_root: str,
    network: dsl.Input[dsl.Model],
    examples: dsl.Input[dsl.Dataset],
    scores: dsl.Output[dsl.Dataset],
    must_pass: str = "",
):
    """Score on all ranks of this node.

    Args:
        name: Name of the registered model.
        task: Task name, or path.py:Class.
        train: The spec's section `train`, as JSON: layout, precision, patience.
        register: The spec's section `register`, as JSON.
        champion: Registry version to beat, or empty.
        champion_digest: Hash of its files, or empty; the scores belong to these, not to a number
            that a registry may give out again.
        artifact_root: Folder or URI under which rekindle keeps state.
        network: The candidate.
        examples: What `ingest` wrote; the test split is scored.
        scores: One row an example, and scores.json.
        must_pass: Rows that the candidate has to predict right, and how they are read, as JSON.
    """
    import sys
    from pathlib import Path

    from rekindle.errors import PreemptedError
    from rekindle.registry.models import Registry, comparisons, fetch_model
    from rekindle.spec.model import MustPass, RegisterSpec, TrainSpec
    from rekindle.train.score import job_of
    from rekindle.train.score import score as score_models

    where = Registry(RegisterSpec.model_validate_json(register), name, artifact_root)
    job = job_of(
        Path(network.path),
        fetch_model(where, champion, champion_digest) if champion else None,
        champion,
        champion_digest,
        Path(examples.path),
        TrainSpec.model_validate_json(train),
        artifact_root,
        where.code(task),
        MustPass.model_validate_json(must_pass) if must_pass else None,
        comparisons(where, Path(network.path)) if champion else {},
    )
    try:
        record = score_models(job, Path(scores.path))
    except PreemptedError as stopped:
        sys.stdout.write(f"{stopped}\n")
        sys.exit(stopped.exit_code)
    if record is None:
        return  # the first node writes the outputs
    scores.metadata["record"] = "scores"
    scores.metadata["rows"] = record.rows
