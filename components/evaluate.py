"""Judge the candidate by its scores on held-out examples, beside the champion's, and write down the
evidence.
"""

from kfp import dsl

from components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def evaluate(
    data: str,
    evaluate: str,
    scores: dsl.Input[dsl.Dataset],
    evidence: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
):
    """Write evidence.json: metrics, slices, the comparison with the champion, and whether to
    promote.

    Args:
        data: The spec's section `data`, as JSON: its slices, and how it is split.
        evaluate: The spec's section `evaluate`, as JSON.
        scores: What `score` wrote.
        evidence: The evidence record.
        metrics: The candidate's metrics.
    """
    from pathlib import Path

    from rekindle.evaluate.evaluate import evaluate as judge
    from rekindle.spec.model import DataSpec, EvaluateSpec

    found = judge(
        EvaluateSpec.model_validate_json(evaluate),
        DataSpec.model_validate_json(data),
        Path(scores.path),
    )
    found.write(evidence.path)
    evidence.metadata["record"] = "evidence"
    for metric, value in found.metrics.items():
        metrics.log_metric(metric, value)
