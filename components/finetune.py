"""Distributed fine-tuning with torchrun: resumes from its own checkpoints wherever and however
often it is attempted.
"""

from kfp import dsl

from components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def finetune(
    name: str,
    task: str,
    model: str,
    train: str,
    register: str,
    run_key: str,
    init_from: str,
    init_digest: str,
    artifact_root: str,
    shards: dsl.Input[dsl.Dataset],
    network: dsl.Output[dsl.Model],
    training: dsl.Output[dsl.Artifact],
):
    """Train on all ranks of this node.

    Args:
        name: Name of the registered model.
        task: Task name, or path.py:Class.
        model: The spec's section `model`, as JSON.
        train: The spec's section `train`, as JSON.
        register: The spec's section `register`, as JSON; metrics go to its tracking server.
        run_key: Names the folder of checkpoints.
        init_from: Where the weights start.
        init_digest: Hash of the files there, or empty for the base model.
        artifact_root: Folder or URI under which rekindle keeps state.
        shards: What `shard` wrote.
        network: The trained model.
        training: training.json and history.jsonl.
    """
    import sys

    from rekindle.errors import PreemptedError
    from rekindle.registry.client import Tracker
    from rekindle.registry.models import Registry, starting_weights
    from rekindle.spec.model import ModelSpec, RegisterSpec, TrainSpec
    from rekindle.train.finetune import finetune as run_gang
    from rekindle.train.job import Job

    where = Registry(RegisterSpec.model_validate_json(register), name, artifact_root)
    job = Job.of(
        task=task,
        run_key=run_key,
        artifact_root=artifact_root,
        shards=shards.path,
        output=network.path,
        history=training.path,
        init=starting_weights(where, init_from, init_digest),
        init_from=init_from,
        model=ModelSpec.model_validate_json(model),
        train=TrainSpec.model_validate_json(train),
        code=where.code(task),
    )
    tracker = Tracker(where.spec.tracking_uri, artifact_root, name, run_key, job.parameters())
    try:
        summary = run_gang(job, tracker.log)
    except PreemptedError as stopped:
        sys.stdout.write(f"{stopped}\n")
        sys.exit(stopped.exit_code)
    finally:
        tracker.close()
    if summary is None:
        return  # the first node writes the outputs
    training.metadata["record"] = "training"
    network.metadata["weights_sha256"] = summary.weights_sha256
