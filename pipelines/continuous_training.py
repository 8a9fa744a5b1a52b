"""The shipped pipeline: fingerprint, ingest, shard, fine-tune, score, evaluate, register, and
promote if the gate passed.
"""

from kfp import dsl

from components.evaluate import evaluate as evaluate_step
from components.finetune import finetune as finetune_step
from components.fingerprint import fingerprint as fingerprint_step
from components.ingest import ingest as ingest_step
from components.register import promote as promote_step
from components.register import register as register_step
from components.score import score as score_step
from components.shard import shard as shard_step


def retrained(
    name, task, data, model, train, evaluate, register, artifact_root, code_commit, must_pass
):
    """The steps up to the gate; returns those that register and judge."""
    keys = fingerprint_step(
        name=name,
        task=task,
        data=data,
        model=model,
        train=train,
        register=register,
        artifact_root=artifact_root,
    )
    keys.set_caching_options(False)  # the world outside may have changed
    ingested = ingest_step(
        task=task,
        data=data,
        window=keys.outputs["window"],
        data_key=keys.outputs["data_key"],
        artifact_root=artifact_root,
    )
    examples = ingested.outputs["examples"]
    sharded = shard_step(
        task=task,
        data=data,
        model=model,
        tokenizing=keys.outputs["tokenizing"],
        artifact_root=artifact_root,
        examples=examples,
    )
    trained = finetune_step(
        name=name,
        task=task,
        model=model,
        train=train,
        register=keys.outputs["registry"],
        run_key=keys.outputs["run_key"],
        init_from=keys.outputs["init_from"],
        init_digest=keys.outputs["init_digest"],
        artifact_root=artifact_root,
        shards=sharded.outputs["shards"],
    )
    scored = score_step(
        name=name,
        task=task,
        train=train,
        register=keys.outputs["registry"],
        champion=keys.outputs["champion"],
        champion_digest=keys.outputs["champion_digest"],
        artifact_root=artifact_root,
        network=trained.outputs["network"],
        examples=examples,
        must_pass=must_pass,
    )
    judged = evaluate_step(data=data, evaluate=evaluate, scores=scored.outputs["scores"])
    registered = register_step(
        name=name,
        task=task,
        register=register,
        code_commit=code_commit,
        artifact_root=artifact_root,
        fingerprint=keys.outputs["record"],
        network=trained.outputs["network"],
        training=trained.outputs["training"],
        evidence=judged.outputs["evidence"],
    )
    registered.set_caching_options(False)  # idempotent by its own keys; the registry is the truth
    return registered, judged


def promoted(name, register, artifact_root, publish, registered, judged):
    """The step behind the gate."""
    promoted = promote_step(
        name=name,
        register=register,
        artifact_root=artifact_root,
        publish=publish,
        registered=registered.outputs["registration"],
        evidence=judged.outputs["evidence"],
    )
    promoted.set_caching_options(False)
    return promoted


@dsl.pipeline(name="continuous-training")
def continuous_training(
    name: str,
    task: str,
    data: str,
    model: str,
    train: str,
    evaluate: str,
    register: str,
    artifact_root: str,
    code_commit: str = "",
    publish: str = "",
    must_pass: str = "",
):
    """Retrain, judge and register a model; promote it only on evidence.

    Args:
        name: Name of the registered model.
        task: Task name, or path.py:Class.
        data: The spec's section `data`, as JSON.
        model: The spec's section `model`, as JSON.
        train: The spec's section `train`, as JSON.
        evaluate: The spec's section `evaluate`, as JSON.
        register: The spec's section `register`, as JSON.
        artifact_root: Folder or URI under which checkpoints and, by default, the registry live.
        code_commit: Commit of the user's code, for lineage.
        publish: What publishing a champion on platforms has to know of the config, as JSON.
        must_pass: Rows that a candidate has to predict right, and how they are read, as JSON.
    """
    registered, judged = retrained(
        name, task, data, model, train, evaluate, register, artifact_root, code_commit, must_pass
    )
    with dsl.If(registered.outputs["promote"] == True, name="gate"):
        promoted(name, register, artifact_root, publish, registered, judged)
