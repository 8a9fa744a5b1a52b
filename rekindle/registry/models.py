"""Versions, aliases and lineage: a candidate becomes `challenger`, a proven one
`champion` (promotion.py), and a rerun makes nothing new; with all that a server of a
version needs.

A model is the digest of its files, in the evidence, as a tag and at every load: numbers
are given out again, and files can be replaced."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rekindle.data.fingerprint import ChampionState, content_behind
from rekindle.errors import ChangedModelError, DataError, RegistryError, RequestError
from rekindle.launch.events import emit
from rekindle.launch.process import owned
from rekindle.masking import masked
from rekindle.records import Decision, Evidence, Fingerprint, Registration, TrainingSummary
from rekindle.registry.client import DATABASE, PREFIX, registry, resolve_uri, tags_of, tracking_run
from rekindle.registry.signature import EVIDENCE, log_model
from rekindle.serve.messages import ServedModel
from rekindle.spec.identity import file_sha256
from rekindle.spec.model import DataSpec, RegisterSpec
from rekindle.train.modelfolder import ANY_CODE, DESCRIPTION, code_in, digest_of, may_run

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

CHAMPION = "champion"
CHALLENGER = "challenger"
FETCHED = "fetched"
"""Folder below a home of the models of registries elsewhere, a copy each."""
KEPT = "kept_evidence_sha256"
"""Tag: hash of the evidence that lies beside the model, which later evidence does not replace."""
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
_MOVE_THE_ALIAS = "move the champion alias to a version that rekindle registered"
_NO_REGISTRY = "there is no registry"
_MAKE_REGISTRY = "`rekindle run CONFIG` makes it with the first model; or name another --home"
_MOST_LINEAGE = 40  # SageMaker keeps 50 properties
_LINEAGE = (
    "run_key",
    "data_fingerprint",
    "window",
    "init_from",
    "code_commit",
    "versions",
    "seed",
    "weights_sha256",
    "model_digest",
    "evidence_sha256",
    "reason",
)


@dataclasses.dataclass(frozen=True)
class Registry:
    """Where: `spec.tracking_uri`, or the embedded database below `artifact_root`; and what."""

    spec: RegisterSpec
    name: str
    artifact_root: str

    @property
    def shown_uri(self) -> str:
        """The tracking URI without credentials."""
        return masked(resolve_uri(self.spec.tracking_uri, self.artifact_root))

    def error(self, message: str, fix: str) -> RegistryError:
        """What is wrong there, to raise."""
        return RegistryError(message, where=self.shown_uri, fix=fix)

    def missing(self) -> bool:
        """Whether nothing has been registered in the embedded database yet."""
        return not self.spec.tracking_uri and not Path(self.artifact_root, DATABASE).is_file()

    def code(self, task: str) -> str:
        """What models may bring beside rekindle's own code: see `open_model`."""
        return ANY_CODE if self.spec.trust_code else task

    def open(self, doing: str) -> contextlib.AbstractContextManager[MlflowClient]:
        """A client; see `registry`."""
        return registry(self.spec.tracking_uri, self.artifact_root, doing)

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """A lock: no other process on this machine changes this model meanwhile."""
        if "://" in self.artifact_root:
            return contextlib.nullcontext()
        folder = Path(self.artifact_root) / "locks" / f"register-{self.name}"
        waits = "another run is registering; waiting for it"
        return owned(folder, lambda: emit("notice", text=waits))


def champion_state(where: Registry, code: str = ANY_CODE) -> ChampionState | None:
    """What a new run has to know about the champion, or None. RegistryError where its
    version lacks a digest, or brings other code than `code`: `score` would refuse it
    hours later."""
    with where.open("ask for the champion") as client:
        version = by_alias(client, where, CHAMPION)
        if version is None:
            return None
        tags = tags_of(version)
        if not tags.get("model_digest"):
            message = f"version {version.version} of {where.name} has no tag rekindle.model_digest"
            raise where.error(message, _MOVE_THE_ALIAS)
        if not may_run(tags.get("task_code", ""), code):
            message = f"the champion, version {version.version} of {where.name}, brings code that "
            message += "is not the task of this config"
            fix = "take the task's file as it was when the champion was trained; or read what the "
            fix += "champion brings, and if it may run here, set register.trust_code: true"
            raise where.error(message, fix)
        return ChampionState(
            version=str(version.version),
            digest=tags["model_digest"],
            run_key=tags.get("run_key", ""),
            work_key=tags.get("work_key", ""),
            init_from=tags.get("init_from", ""),
            beaten=tags.get("beaten", ""),
            beaten_digest=tags.get("beaten_digest", ""),
            budget_hours=tags.get("budget_hours", ""),
        )


def fetch_model(where: Registry, version: str, digest: str) -> Path:
    """The model folder of a version; RegistryError where its files have another `digest`."""
    with where.open(f"fetch version {version} of {where.name}") as client:
        tags = tags_of(client.get_model_version(where.name, version))
        folder = _files_of(where, version, digest, tags.get(KEPT, ""))
    model = _model_in(folder)
    if model is None:
        message = f"version {version} of {where.name} holds no model of rekindle"
        raise where.error(message, _MOVE_THE_ALIAS)
    if digest_of(model) != digest:
        if tags.get("model_digest") == digest:
            message = f"the files of version {version} of {where.name} are not those that were "
            message += "registered: some are missing, damaged, replaced or new"
            fix = "restore them from a copy; or delete the champion alias in the registry: the "
            fix += "next candidate is then promoted if it reaches the floor"
            raise ChangedModelError(message, where=str(model), fix=fix)
        message = f"version {version} of {where.name} is another model than when the run began"
        fix = "run the same config again: it asks the registry for the champion first"
        raise where.error(message, fix)
    return model


def _files_of(where: Registry, version: str, digest: str, evidence_sha256: str) -> Path:
    """The folder with the files of a version, inside `where.open`. Those of a registry
    that is not the home's own are downloaded once, and kept below the home by their
    digests: MLflow alone would leave another copy in the folder for temporary files each
    time."""
    import mlflow

    uri = f"models:/{where.name}/{version}"
    if not where.spec.tracking_uri or "://" in where.artifact_root:
        return Path(mlflow.artifacts.download_artifacts(uri))
    name = f"{digest}-{evidence_sha256[:8]}".rstrip("-")
    folder = Path(where.artifact_root) / FETCHED
    lock = Path(where.artifact_root) / "locks" / f"fetch-{name}"
    waits = f"another process fetches version {version} of {where.name}; waiting for it"
    with owned(lock, lambda: emit("notice", text=waits)):
        kept = folder / name
        draft = folder / f".{name}.starting"
        if _is_whole(kept, digest, evidence_sha256):
            os.utime(kept)  # `rekindle gc` goes by the last use
            return kept
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        mlflow.artifacts.download_artifacts(uri, dst_path=str(draft))
        if not _is_whole(draft, digest, evidence_sha256):
            return draft  # to be refused: what the registry has is not what it should be
        shutil.rmtree(kept, ignore_errors=True)
        draft.rename(kept)
        return kept


def _is_whole(folder: Path, digest: str, evidence_sha256: str) -> bool:
    """Whether a copy has the model with this digest, and the evidence with this hash, if any."""
    model = _model_in(folder)
    if model is None or digest_of(model) != digest:
        return False
    evidence = model.parent / EVIDENCE
    return not evidence_sha256 or (evidence.is_file() and file_sha256(evidence) == evidence_sha256)


def _model_in(folder: Path) -> Path | None:
    descriptions = sorted(folder.rglob(DESCRIPTION)) if folder.is_dir() else []
    return descriptions[0].parent if descriptions else None


def aliased(where: Registry) -> frozenset[str]:
    """The digests of the versions that have an alias. Raises RegistryError where the
    registry gives no answer."""
    with where.open(f"ask for the aliases of {where.name}") as client:
        digests = set()
        for version in set(client.get_registered_model(where.name).aliases.values()):
            tags = tags_of(client.get_model_version(where.name, str(version)))
            digests.add(tags.get("model_digest", ""))
        return frozenset(digests - {""})


def comparisons(where: Registry, model: Path) -> dict[str, int]:
    """How many versions were compared with a champion before that of the folder `model`,
    if it has one, by how their test split was drawn (`Evidence.epoch`)."""
    with where.open(f"count the comparisons of {where.name}") as client:
        versions = client.search_model_versions(f"name = '{where.name}'")
    tags_by_number = {int(version.version): tags_of(version) for version in versions}
    run_key = json.loads((model / DESCRIPTION).read_text())["run_key"]
    epochs = collections.Counter[str]()
    for _, tags in sorted(tags_by_number.items()):
        if tags.get("run_key") == run_key:
            break  # the first version of this model: it and those after it do not count
        if tags.get("epoch"):
            epochs[tags["epoch"]] += 1
    return dict(epochs)


def starting_weights(where: Registry, init_from: str, digest: str) -> str:
    """The model folder that `init_from`, resolved, stands for; "" for the base model.
    DataError or RegistryError where its files are not those with the `digest`."""
    if init_from == "base":
        return ""
    if init_from.isdigit():
        return str(fetch_model(where, init_from, digest))
    if content_behind(init_from) != digest:
        message = f"the files of {init_from} changed since the run began"
        raise DataError(message, where="model.init_from", fix="run the same config again")
    return init_from


def register(
    where: Registry,
    model: Path,
    evidence_file: Path,
    fingerprint: Fingerprint,
    training: TrainingSummary,
    code_commit: str,
    code: str = "",
) -> Registration:
    """Put the model into the registry as `challenger` with its lineage; finds the version
    of an exact rerun again. Raises RegistryError where the model is not the one that was
    judged."""
    evidence = Evidence.read(evidence_file)
    digest = digest_of(model)
    if digest != evidence.model_digest:
        message = f"not registered: the files in {model} are not those that were judged"
        raise where.error(message, "run the same config again: the model is judged again")
    lineage = _lineage(fingerprint, training, evidence, evidence_file, code_commit)
    tags = {f"{PREFIX}{name}": value for name, value in lineage.items()}
    tags[f"{PREFIX}task_code"] = code_in(model)
    with where.alone(), where.open(f"register {where.name}") as client:
        _ensure_model(client, where.name)
        version = _same_work(client, where.name, fingerprint.run_key, digest)
        created = version is None
        earlier_decision = tags_of(version).get("decision") if version else None
        if version is None:
            tags[f"{PREFIX}{KEPT}"] = file_sha256(evidence_file)
            version = _new_version(client, where, model, code, evidence_file, tags)
        elif _may_retag(earlier_decision, evidence):
            _retag(client, where.name, version, tags)
        is_champion = has_alias(client, where, CHAMPION, str(version.version))
        if not is_champion:
            client.set_registered_model_alias(where.name, CHALLENGER, version.version)
        decision: Decision
        if is_champion:
            decision = "promoted"
        elif earlier_decision == "rolled_back":
            decision = "rolled_back"
        elif not evidence.promote:
            decision = "refused"
        elif where.spec.approval == "manual":
            decision = "approval_needed"
        else:
            decision = "pending"
        return registration(client, where, version, created, decision)


def _may_retag(earlier_decision: str | None, evidence: Evidence) -> bool:
    """Whether the tags of a version may follow later evidence: one that was promoted or
    rolled back keeps what that was decided for."""
    if earlier_decision == "rolled_back":
        return False
    return evidence.promote or earlier_decision != "promoted"


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
        "beaten_digest": evidence.champion_digest,
        "epoch": evidence.epoch,
        "code_commit": code_commit,
        "versions": json.dumps(versions, sort_keys=True),
        "seed": str(training.seed),
        "world_size": str(training.world_size),
        "weights_sha256": training.weights_sha256,
        "model_digest": evidence.model_digest,
        "evidence_sha256": file_sha256(evidence_file),
        "budget_hours": str(training.budget_hours or ""),
        "decision": "passed" if evidence.promote else "refused",
        "reason": evidence.reason[:4_000],
        **{f"metric.{name}": f"{value:.6f}" for name, value in evidence.metrics.items()},
    }


def _new_version(
    client: MlflowClient,
    where: Registry,
    model: Path,
    code: str,
    evidence_file: Path,
    tags: Mapping[str, str],
) -> ModelVersion:
    import mlflow

    run_key = tags[f"{PREFIX}run_key"]
    uri = where.spec.tracking_uri
    run_id = tracking_run(client, uri, where.artifact_root, where.name, run_key)
    with mlflow.start_run(run_id=run_id):
        logged = log_model(model, code, evidence_file)
    return client.create_model_version(
        where.name, logged.model_uri, run_id=run_id, tags=dict(tags), model_id=logged.model_id
    )


def _retag(client: MlflowClient, name: str, version: ModelVersion, tags: Mapping[str, str]) -> None:
    """Update what may have changed since, but not the world that it came from."""
    old = dict(version.tags)
    for key, value in tags.items():
        if old.get(key) != value and not key.endswith(("code_commit", "versions")):
            client.set_model_version_tag(name, version.version, key, value)


def _same_work(client: MlflowClient, name: str, run_key: str, digest: str) -> ModelVersion | None:
    question = f"name = '{name}' and tag.`{PREFIX}run_key` = '{run_key}'"
    same_versions = []
    for version in client.search_model_versions(question):
        if tags_of(version).get("model_digest") == digest:
            same_versions.append(version)
    # as numbers: MLflow's versions may be texts, of which "10" comes before "9"
    return min(same_versions, key=lambda version: int(version.version), default=None)


def _ensure_model(client: MlflowClient, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.get_registered_model(name)
    except MlflowException:
        client.create_registered_model(name)


def by_alias(client: MlflowClient, where: Registry, alias: str) -> ModelVersion | None:
    """The version with this alias; None if the model has none. Raises RegistryError where
    the alias names a version that is gone: that is not the same as no champion."""
    from mlflow.exceptions import MlflowException

    try:
        version = client.get_registered_model(where.name).aliases.get(alias)
        if version is None:
            return None
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise
    try:
        return client.get_model_version(where.name, str(version))
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        message = f"the alias {alias} of {where.name} names version {version}, which does not exist"
        fix = "give the alias to a version that exists, or delete it: the next candidate that "
        fix += "reaches the floor is then promoted"
        raise where.error(message, fix) from None


def has_alias(client: MlflowClient, where: Registry, alias: str, version: str) -> bool:
    """Whether the version is the one with this alias. Raises RegistryError as `by_alias`."""
    holder = by_alias(client, where, alias)
    return holder is not None and str(holder.version) == version


def aliases(where: Registry) -> dict[str, str]:
    """Versions by alias. Raises RegistryError where the model or the registry is not there."""
    if where.missing():
        raise where.error(_NO_REGISTRY, _MAKE_REGISTRY)
    with where.open(f"ask for the aliases of {where.name}") as client:
        by_name = client.get_registered_model(where.name).aliases
        return {alias: str(version) for alias, version in by_name.items()}


def registration(
    client: MlflowClient, where: Registry, version: ModelVersion, created: bool, decision: Decision
) -> Registration:
    """What the registry holds now for a version."""
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


def served_model(
    where: Registry, data: DataSpec | None, task: str, version: str = ""
) -> ServedModel:
    """The champion, or the `version` that is asked for. Raises RequestError where there
    is none, or where its files are not those that were registered."""
    if data is None:
        raise RequestError(f"the config of {where.name} names no data, and so no input columns")
    if where.missing():
        raise RequestError(_NO_REGISTRY, where=where.shown_uri, fix=_MAKE_REGISTRY)
    with where.open(f"ask for the champion of {where.name}") as client:
        model_version: ModelVersion | None
        if version:
            model_version = client.get_model_version(where.name, version)
        else:
            model_version = by_alias(client, where, CHAMPION)
    tags = tags_of(model_version) if model_version else {}
    if model_version is None or not tags.get("model_digest"):
        message = f"{where.name} has no champion that rekindle registered"
        fix = "`rekindle run CONFIG` trains one; `rekindle runs` shows what the gate decided"
        raise RequestError(message, where=where.shown_uri, fix=fix)
    try:
        folder = fetch_model(where, str(model_version.version), tags["model_digest"])
        evidence = folder.parent / EVIDENCE
        if KEPT in tags:
            is_whole = evidence.is_file() and file_sha256(evidence) == tags[KEPT]
            if not is_whole:
                message = "the evidence beside the model is not what was registered"
                raise ChangedModelError(message, where=str(evidence), fix="restore it")
    except ChangedModelError as error:
        raise RequestError(error.problems) from error
    return ServedModel(
        name=where.name,
        version=str(model_version.version),
        digest=tags["model_digest"],
        path=str(folder),
        evidence=str(evidence) if KEPT in tags else "",
        code=where.code(task),
        columns=data.columns,
        image_size=data.image_size,
    )


def lineage_of(where: Registry, version: str) -> dict[str, str]:
    """Where a version is registered, and what it was made of, for other registries."""
    with where.open(f"ask for version {version} of {where.name}") as client:
        tags = tags_of(client.get_model_version(where.name, version))
    names = [name for name in tags if name in _LINEAGE or name.startswith("metric.")]
    lineage = {"registry": where.shown_uri, "version": version}
    lineage |= {name: tags[name] for name in names}
    return dict(list(lineage.items())[:_MOST_LINEAGE])


def note_published(where: Registry, version: str, platform: str, name: str) -> None:
    """Tag the version with its name in the registry of a platform."""
    with where.open(f"note where version {version} of {where.name} is") as client:
        client.set_model_version_tag(where.name, version, f"{PREFIX}published.{platform}", name)
