"""Versions, aliases and lineage: a candidate becomes `challenger`, a proven one `champion`, and a
rerun makes nothing new.

The alias `champion` is moved last and alone decides what is served. Before it moves, the evidence
is read again and held against the version's tags and the champion of this moment, so that neither a
changed file nor a race can promote."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rekindle.data.fingerprint import ChampionState
from rekindle.errors import RegistryError
from rekindle.launch.events import emit
from rekindle.launch.process import owned
from rekindle.records import Decision, Evidence, Fingerprint, Registration, TrainingSummary
from rekindle.registry.client import PREFIX, registry, resolve_uri, tags_of, without_password
from rekindle.registry.tracking import tracking_run
from rekindle.spec.identity import file_sha256
from rekindle.spec.model import RegisterSpec
from rekindle.train.modelfolder import weights_sha256

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

log = logging.getLogger(__name__)

CHAMPION, CHALLENGER = "champion", "challenger"
PACKAGES = (
    "rekindle",
    "torch",
    "transformers",
    "tokenizers",
    "numpy",
    "pyarrow",
    "mlflow",
    "kfp",
    "scikit-learn",
)


@dataclasses.dataclass(frozen=True)
class Registry:
    """Where: `spec.tracking_uri`, or the embedded database under `artifact_root`; `name` is the
    registered model.
    """

    spec: RegisterSpec
    name: str
    artifact_root: str

    @property
    def shown_uri(self) -> str:
        """The tracking URI without credentials."""
        return without_password(resolve_uri(self.spec.tracking_uri, self.artifact_root))

    def open(self, doing: str) -> contextlib.AbstractContextManager[MlflowClient]:
        """A client; see `registry`."""
        return registry(self.spec.tracking_uri, self.artifact_root, doing)

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Nobody else on this machine changes this model meanwhile."""
        if "://" in self.artifact_root:
            return contextlib.nullcontext()
        folder = Path(self.artifact_root) / "locks" / f"register-{self.name}"
        return owned(
            folder, lambda: emit("notice", text="another run is registering; waiting for it")
        )


def champion_state(where: Registry) -> ChampionState | None:
    """What a new run has to know about the champion; None while there is none. Raises RegistryError
    where its version does not say which weights it has."""
    with where.open("ask for the champion") as client:
        version = _by_alias(client, where.name, CHAMPION)
        if version is None:
            return None
        tags = tags_of(version)
        if not tags.get("weights_sha256"):
            raise RegistryError(
                f"version {version.version} of {where.name} has no tag {PREFIX}weights_sha256",
                where=where.shown_uri,
                fix="move the champion alias to a version that rekindle registered",
            )
        return ChampionState(
            version=str(version.version),
            run_key=tags.get("run_key", ""),
            work_key=tags.get("work_key", ""),
            init_from=tags.get("init_from", ""),
            beaten=tags.get("beaten", ""),
            weights=tags["weights_sha256"],
            beaten_weights=tags.get("beaten_weights", ""),
        )


def fetch_model(where: Registry, version: str, weights: str = "") -> Path:
    """The model folder of a version, downloaded where it is not local. Raises RegistryError where
    it does not hold the `weights` with this hash, if any is given."""
    import mlflow

    with where.open(f"fetch version {version} of {where.name}") as client:
        tags = tags_of(client.get_model_version(where.name, version))
        folder = Path(mlflow.artifacts.download_artifacts(f"models:/{where.name}/{version}"))
    found = sorted(folder.rglob("rekindle.json"))
    if not found:
        raise RegistryError(
            f"version {version} of {where.name} holds no model of rekindle",
            where=where.shown_uri,
            fix="move the champion alias to a version that rekindle registered",
        )
    model = found[0].parent
    if weights and weights_sha256(model) != weights:
        if tags.get("weights_sha256") == weights:
            raise RegistryError(
                f"the weights of version {version} of {where.name} are not those that were "
                "registered: files are missing, damaged or replaced",
                where=str(model),
                fix="restore them from a copy; or delete the champion alias in the registry: the "
                "next candidate is then promoted if it reaches the floor",
            )
        raise RegistryError(
            f"version {version} of {where.name} holds other weights than when the run began",
            where=where.shown_uri,
            fix="run the same config again: it asks the registry for the champion first",
        )
    return model


def starting_weights(where: Registry, init_from: str) -> str:
    """The model folder that `init_from` (as the fingerprint resolved it) stands for; "" for the
    base model.
    """
    if init_from == "base":
        return ""
    return str(fetch_model(where, init_from)) if init_from.isdigit() else init_from


def register(
    where: Registry,
    model: Path,
    evidence_file: Path,
    fingerprint: Fingerprint,
    training: TrainingSummary,
    code_commit: str,
) -> Registration:
    """Put the model into the registry as `challenger` with its lineage; finds the version of an
    exact rerun again.
    """
    evidence = Evidence.read(evidence_file)
    tags = {
        f"{PREFIX}{k}": v
        for k, v in _lineage(fingerprint, training, evidence, evidence_file, code_commit).items()
    }
    with where.alone(), where.open(f"register {where.name}") as client:
        _ensure_model(client, where.name)
        version = _same_work(client, where.name, fingerprint.run_key, training.weights_sha256)
        created = version is None
        if version is None:
            version = _new_version(client, where, model, fingerprint.run_key, tags)
        else:
            _retag(client, where.name, version, tags)
        champion = _by_alias(client, where.name, CHAMPION)
        is_champion = champion is not None and champion.version == version.version
        if not is_champion:
            client.set_registered_model_alias(where.name, CHALLENGER, version.version)
        return _registration(
            client, where, version, created, _decision(where, evidence, is_champion)
        )


def promote(where: Registry, registered: Registration, evidence_file: Path) -> Registration:
    """Make the registered version the champion if the evidence, the version's tags and the
    registry of this moment all agree."""
    version = registered.version
    with where.alone(), where.open(f"promote version {version} of {where.name}") as client:
        found = client.get_model_version(where.name, version)
        champion = _by_alias(client, where.name, CHAMPION)
        if champion is None or champion.version != found.version:
            _recheck(where, tags_of(found), evidence_file, champion)
            client.set_model_version_tag(where.name, version, f"{PREFIX}decision", "promoted")
            client.set_registered_model_alias(where.name, CHAMPION, version)
        challenger = _by_alias(client, where.name, CHALLENGER)
        if challenger is not None and challenger.version == found.version:
            client.delete_registered_model_alias(where.name, CHALLENGER)
        return _registration(client, where, found, registered.created, "promoted")


def _recheck(
    where: Registry, tags: Mapping[str, str], evidence_file: Path, champion: ModelVersion | None
) -> None:
    evidence = Evidence.read(evidence_file)
    now = str(champion.version) if champion is not None else ""
    weights = tags_of(champion).get("weights_sha256", "") if champion is not None else ""
    doubts = {
        "the evidence does not say `promote`": not evidence.promote,
        "the evidence belongs to another model": evidence.run_key != tags.get("run_key"),
        "the evidence was changed after it was registered": file_sha256(evidence_file)
        != tags.get("evidence_sha256"),
        f"the champion is now version {now or 'none'}, and the candidate was compared with version "
        f"{evidence.champion_version or 'none'}": now != evidence.champion_version,
        f"the champion, version {now}, has other weights now than those that the candidate was "
        "compared with": now == evidence.champion_version and weights != evidence.champion_weights,
        "a check of the gate did not pass": not all(check.passed for check in evidence.checks),
    }
    found = [doubt for doubt, true in doubts.items() if true]
    if found:
        raise RegistryError(
            f"not promoted: {'; '.join(found)}", where=where.shown_uri,
            fix="run the same config again: it is judged anew against the champion of that moment",
        )  # fmt: skip


def _decision(where: Registry, evidence: Evidence, is_champion: bool) -> Decision:
    if is_champion:
        return "promoted"
    if not evidence.promote:
        return "refused"
    return "approval_needed" if where.spec.approval == "manual" else "pending"


def _lineage(
    fingerprint: Fingerprint,
    training: TrainingSummary,
    evidence: Evidence,
    evidence_file: Path,
    code_commit: str,
) -> dict[str, str]:
    """What a version is made of, as tags; values are text."""
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "run_key": fingerprint.run_key,
        "work_key": fingerprint.work_key,
        "data_fingerprint": fingerprint.data,
        "window": fingerprint.window,
        "init_from": fingerprint.init_from,
        "beaten": evidence.champion_version,
        "beaten_weights": evidence.champion_weights,
        "code_commit": code_commit,
        "versions": json.dumps(versions, sort_keys=True),
        "seed": str(training.seed),
        "world_size": str(training.world_size),
        "weights_sha256": training.weights_sha256,
        "evidence_sha256": file_sha256(evidence_file),
        "decision": "passed" if evidence.promote else "refused",
        "reason": evidence.reason[:4_000],
        **{f"metric.{name}": f"{value:.6f}" for name, value in evidence.metrics.items()},
    }


def _new_version(
    client: MlflowClient, where: Registry, model: Path, run_key: str, tags: Mapping[str, str]
) -> ModelVersion:
    import mlflow

    from rekindle.registry.signature import log_model

    run = tracking_run(client, where.spec.tracking_uri, where.artifact_root, where.name, run_key)
    with mlflow.start_run(run_id=run):
        logged = log_model(model)
    return client.create_model_version(
        where.name, logged.model_uri, run_id=run, tags=dict(tags), model_id=logged.model_id
    )


def _retag(client: MlflowClient, name: str, version: ModelVersion, tags: Mapping[str, str]) -> None:
    """Update what may have changed since, such as the champion it was compared with; the world it
    came from stays.
    """
    old = dict(version.tags)
    for key, value in tags.items():
        if old.get(key) != value and not key.endswith(("code_commit", "versions")):
            client.set_model_version_tag(name, version.version, key, value)


def _same_work(client: MlflowClient, name: str, run_key: str, weights: str) -> ModelVersion | None:
    query = f"name = '{name}' and tag.`{PREFIX}run_key` = '{run_key}'"
    found = [
        v
        for v in client.search_model_versions(query)
        if tags_of(v).get("weights_sha256") == weights
    ]
    return min(found, key=lambda v: int(v.version)) if found else None


def _ensure_model(client: MlflowClient, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.get_registered_model(name)
    except MlflowException:
        client.create_registered_model(name)


def _by_alias(client: MlflowClient, name: str, alias: str) -> ModelVersion | None:
    from mlflow.exceptions import MlflowException

    try:
        return client.get_model_version_by_alias(name, alias)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


def _registration(
    client: MlflowClient, where: Registry, version: ModelVersion, created: bool, decision: Decision
) -> Registration:
    fresh: Any = client.get_model_version(where.name, version.version)
    return Registration(
        name=where.name,
        version=str(fresh.version),
        aliases=tuple(sorted(fresh.aliases)),
        created=created,
        decision=decision,
        tracking_uri=where.shown_uri,
        tags=tags_of(fresh),
    )
