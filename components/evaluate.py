"""Judge the candidate on held-out examples, beside the champion, and write down the evidence."""

from kfp import dsl

from components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def evaluate(
    name: str,
    data: str,
    evaluate: str,
    register: str,
    champion: str,
    artifact_root: str,
    network: dsl.Input[dsl.Model],
    examples: dsl.Input[dsl.Dataset],
    evidence: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
):
    """Write evidence.json: metrics, slices, the comparison with the champion, and whether to
    promote.

    Args:
        name: Name of the registered model.
        data: The spec's section `data`, as JSON; its slices are evaluated.
        evaluate: The spec's section `evaluate`, as JSON.
        register: The spec's section `register`, as JSON.
        champion: Registry version to beat, or empty.
        artifact_root: Folder or URI under which rekindle keeps state.
        network: The candidate.
        examples: What `ingest` wrote; the test split decides.
        evidence: The evidence record.
        metrics: The candidate's metrics.
    """
    from pathlib import Path

    from rekindle.evaluate.evaluate import evaluate as judge
    from rekindle.registry.models import Registry, fetch_model
    from rekindle.spec.model import DataSpec, EvaluateSpec, RegisterSpec

    where = Registry(RegisterSpec.model_validate_json(register), name, artifact_root)
    found = judge(
        EvaluateSpec.model_validate_json(evaluate),
        DataSpec.model_validate_json(data).slices,
        Path(network.path),
        Path(examples.path),
        fetch_model(where, champion) if champion else None,
        champion,
    )
    found.write(evidence.path)
    evidence.metadata["record"] = "evidence"
    for metric, value in found.metrics.items():
        metrics.log_metric(metric, value)
