"""Register the candidate with its evidence, and promote it: two components, because the gate stands
between them.
"""

from typing import NamedTuple

from kfp import dsl

from components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def register(
    name: str,
    task: str,
    register: str,
    code_commit: str,
    artifact_root: str,
    fingerprint: dsl.Input[dsl.Artifact],
    network: dsl.Input[dsl.Model],
    training: dsl.Input[dsl.Artifact],
    evidence: dsl.Input[dsl.Artifact],
    registration: dsl.Output[dsl.Artifact],
) -> NamedTuple("Registered", [("version", str), ("promote", bool)]):
    """Register the model as `challenger`; an exact rerun finds its version again.

    Args:
        name: Name of the registered model.
        task: Task name, or path.py:Class.
        register: The spec's section `register`, as JSON.
        code_commit: Commit of the user's code, for lineage.
        artifact_root: Folder or URI under which rekindle keeps state.
        fingerprint: The fingerprint record.
        network: The candidate.
        training: training.json and history.jsonl.
        evidence: The evidence record.
        registration: The registration record.

    Returns:
        version: Version in the registry.
        promote: Whether the gate passed and no approval is needed first.
    """
    from collections import namedtuple
    from pathlib import Path

    from rekindle.records import Fingerprint, TrainingSummary
    from rekindle.registry.models import Registry
    from rekindle.registry.models import register as register_model
    from rekindle.spec.model import RegisterSpec

    where = Registry(RegisterSpec.model_validate_json(register), name, artifact_root)
    found = register_model(
        where,
        Path(network.path),
        Path(evidence.path),
        Fingerprint.read(fingerprint.path),
        TrainingSummary.read(Path(training.path) / "training.json"),
        code_commit,
        where.code(task),
    )
    found.write(registration.path)
    registration.metadata["record"] = "registration"
    return namedtuple("Registered", ["version", "promote"])(
        found.version, found.decision in ("pending", "promoted")
    )


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def promote(
    name: str,
    register: str,
    artifact_root: str,
    publish: str,
    registered: dsl.Input[dsl.Artifact],
    evidence: dsl.Input[dsl.Artifact],
    registration: dsl.Output[dsl.Artifact],
):
    """Make the version the champion, after checking the evidence once more.

    Args:
        name: Name of the registered model.
        register: The spec's section `register`, as JSON.
        artifact_root: Folder or URI under which rekindle keeps state.
        publish: The spec's name, task, data and register, and the sections of the platforms of
            register.publish, as JSON; empty: the version is in no other registry.
        registered: The registration record of the candidate.
        evidence: The evidence record.
        registration: The registration record after the promotion.
    """
    import tempfile
    from pathlib import Path

    from rekindle.app import champion
    from rekindle.records import Registration
    from rekindle.registry.models import Registry
    from rekindle.registry.promotion import promote as promote_version
    from rekindle.spec.model import RegisterSpec, Spec

    where = Registry(RegisterSpec.model_validate_json(register), name, artifact_root)
    candidate = Registration.read(registered.path)
    promote_version(where, candidate, Path(evidence.path)).write(registration.path)
    if publish:
        home = tempfile.mkdtemp() if "://" in artifact_root else artifact_root
        champion.publish(Spec.model_validate_json(publish), Path(home))
    registration.metadata["record"] = "registration"
