"""The shipped pipeline with a deployment behind it: a model that passed its gate takes over where
the champion serves.
"""

from kfp import dsl

from components.deploy import deploy as deploy_step
from pipelines.continuous_training import promoted, retrained


@dsl.pipeline(name="continuous-deployment")
def continuous_deployment(
    name: str,
    task: str,
    data: str,
    model: str,
    train: str,
    evaluate: str,
    register: str,
    artifact_root: str,
    deploy: str,
    code_commit: str = "",
    publish: str = "",
    must_pass: str = "",
):
    """Retrain, judge, register and promote a model, and roll it out.

    Args:
        name: Name of the registered model.
        task: Task name, or path.py:Class.
        data: The spec's section `data`, as JSON.
        model: The spec's section `model`, as JSON.
        train: The spec's section `train`, as JSON.
        evaluate: The spec's section `evaluate`, as JSON.
        register: The spec's section `register`, as JSON.
        artifact_root: Folder or URI under which checkpoints and, by default, the registry live.
        deploy: What the component `deploy` has to know of the config, as JSON.
        code_commit: Commit of the user's code, for lineage.
        publish: What publishing a champion on platforms has to know of the config, as JSON.
        must_pass: Rows that a candidate has to predict right, and how they are read, as JSON.
    """
    registered, judged = retrained(
        name, task, data, model, train, evaluate, register, artifact_root, code_commit, must_pass
    )
    with dsl.If(registered.outputs["promote"] == True, name="gate"):
        champion = promoted(name, register, artifact_root, publish, registered, judged)
        deployed = deploy_step(config=deploy, artifact_root=artifact_root).after(champion)
        deployed.set_caching_options(False)
