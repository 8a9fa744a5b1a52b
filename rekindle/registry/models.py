"""Versions, aliases and lineage: a candidate becomes `challenger`, a proven one `champion`
(promotion.py), and a rerun makes nothing new; with all that a server of a version needs.

A model is the digest of its files, in the evidence, as a tag and at every load: numbers are given
out again, and files can be replaced."""

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
from rekindle.tables import problems_in
from rekindle.train.modelfolder import ANY_CODE, DESCRIPTION, code_in, digest_of, may_run

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

CHAMPION, CHALLENGER = "champion", "challenger"
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
_problem = problems_in(__file__)


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

    def error(self, name: str, **about: Any) -> RegistryError:
        """What is wrong there, by its name in problems.yaml, to raise."""
        return RegistryError([_problem(name, where=self.shown_uri, at=self, **about)])

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
    """What a new run has to know about the champion, or None. RegistryError where its version lacks
    a digest, or brings other code than `code`: `score` would refuse it hours later."""
    with where.open("ask for the champion") as client:
        version = by_alias(client, where, CHAMPION)
        if version is None:
            return None
        tags = tags_of(version)
        if not tags.get("model_digest"):
            raise where.error("unmarked", version=version.version)
        if not may_run(tags.get("task_code", ""), code):
            raise where.error("foreign_code", version=version.version)
        names = ("run_key", "work_key", "init_from", "beaten", "beaten_digest", "budget_hours")
        known = {name: tags.get(name, "") for name in names}
        return ChampionState(version=str(version.version), digest=tags["model_digest"], **known)


def fetch_model(where: Registry, version: str, digest: str) -> Path:
    """The model folder of a version; RegistryError where its files have another `digest`."""
    with where.open(f"fetch version {version} of {where.name}") as client:
        tags = tags_of(client.get_model_version(where.name, version))
        folder = _files_of(where, version, digest, tags.get(KEPT, ""))
    model = _model_in(folder)
    if model is None:
        raise where.error("no_model_of_ours", version=version)
    if digest_of(model) != digest:
        if tags.get("model_digest") == digest:
            changed = _problem("changed_files", where=str(model), at=where, version=version)
            raise ChangedModelError([changed])
        raise where.error("other_model", version=version)
    return model


def _files_of(where: Registry, version: str, digest: str, evidence_sha256: str) -> Path:
    """The folder with the files of a version, inside `where.open`. Those of a registry that is not
    the home's own are downloaded once, and kept below the home by their digests: MLflow alone would
    leave another copy in the folder for temporary files each time."""
    import mlflow

    uri = f"models:/{where.name}/{version}"
    if not where.spec.tracking_uri or "://" in where.artifact_root:
        return Path(mlflow.artifacts.download_artifacts(uri))
    name = f"{digest}-{evidence_sha256[:8]}".rstrip("-")
    folder = Path(where.artifact_root) / FETCHED
    lock = Path(where.artifact_root) / "locks" / f"fetch-{name}"
    waits = f"another process fetches version {version} of {where.name}; waiting for it"
    with owned(lock, lambda: emit("notice", text=waits)):
        kept, draft = folder / name, folder / f".{name}.starting"
        if _is_whole(kept, digest, evidence_sha256):
            os.utime(kept)
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
    found = sorted(folder.rglob(DESCRIPTION)) if folder.is_dir() else []
    return found[0].parent if found else None


def aliased(where: Registry) -> frozenset[str]:
    """The digests of the versions that have an alias. Raises RegistryError where the registry gives
    no answer."""
    with where.open(f"ask for the aliases of {where.name}") as client:
        versions = set(client.get_registered_model(where.name).aliases.values())
        found = (client.get_model_version(where.name, str(version)) for version in versions)
        return frozenset(filter(None, (tags_of(one).get("model_digest", "") for one in found)))


def comparisons(where: Registry, model: Path) -> dict[str, int]:
    """How many versions were compared with a champion before that of the folder `model`, if it has
    one, by how their test split was drawn (`Evidence.epoch`)."""
    with where.open(f"count the comparisons of {where.name}") as client:
        found = client.search_model_versions(f"name = '{where.name}'")
    own = json.loads((model / DESCRIPTION).read_text())["run_key"]
    before = min((int(v.version) for v in found if tags_of(v).get("run_key") == own), default=None)
    epochs = (tags_of(v).get("epoch") for v in found if before is None or int(v.version) < before)
    return dict(collections.Counter(filter(None, epochs)))


def starting_weights(where: Registry, init_from: str, digest: str) -> str:
    """The model folder that `init_from`, resolved, stands for; "" for the base model. DataError or
    RegistryError where its files are not those with the `digest`."""
    if init_from == "base":
        return ""
    if init_from.isdigit():
        return str(fetch_model(where, init_from, digest))
    if content_behind(init_from) != digest:
        what = f"the files of {init_from} changed since the run began"
        raise DataError(what, where="model.init_from", fix="run the same config again")
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
    """Put the model into the registry as `challenger` with its lineage; finds the version of an
    exact rerun again. Raises RegistryError where the model is not the one that was judged."""
    evidence, digest = Evidence.read(evidence_file), digest_of(model)
    if digest != evidence.model_digest:
        raise where.error("not_judged", folder=model)
    lineage = _lineage(fingerprint, training, evidence, evidence_file, code_commit)
    tags = {f"{PREFIX}{name}": value for name, value in lineage.items()}
    tags[f"{PREFIX}task_code"] = code_in(model)
    with where.alone(), where.open(f"register {where.name}") as client:
        _ensure_model(client, where.name)
        version = _same_work(client, where.name, fingerprint.run_key, digest)
        created = version is None
        before = tags_of(version).get("decision") if version else None
        if version is None:
            tags[f"{PREFIX}{KEPT}"] = file_sha256(evidence_file)
            version = _new_version(client, where, model, code, evidence_file, tags)
        elif before != "rolled_back" and (evidence.promote or before != "promoted"):
            # else it keeps what it once was promoted, or rolled back, for
            _retag(client, where.name, version, tags)
        is_champion = has_alias(client, where, CHAMPION, str(version.version))
        if not is_champion:
            client.set_registered_model_alias(where.name, CHALLENGER, version.version)
        decision: Decision = "approval_needed" if where.spec.approval == "manual" else "pending"
        if is_champion:
            decision = "promoted"
        elif before == "rolled_back":
            decision = "rolled_back"
        elif not evidence.promote:
            decision = "refused"
        return registration(client, where, version, created, decision)


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

    run_key, uri = tags[f"{PREFIX}run_key"], where.spec.tracking_uri
    run = tracking_run(client, uri, where.artifact_root, where.name, run_key)
    with mlflow.start_run(run_id=run):
        logged = log_model(model, code, evidence_file)
    return client.create_model_version(
        where.name, logged.model_uri, run_id=run, tags=dict(tags), model_id=logged.model_id
    )


def _retag(client: MlflowClient, name: str, version: ModelVersion, tags: Mapping[str, str]) -> None:
    """Update what may have changed since, but not the world that it came from."""
    old = dict(version.tags)
    for key, value in tags.items():
        if old.get(key) != value and not key.endswith(("code_commit", "versions")):
            client.set_model_version_tag(name, version.version, key, value)


def _same_work(client: MlflowClient, name: str, run_key: str, digest: str) -> ModelVersion | None:
    found = client.search_model_versions(f"name = '{name}' and tag.`{PREFIX}run_key` = '{run_key}'")
    same = (version for version in found if tags_of(version).get("model_digest") == digest)
    return min(same, key=lambda version: int(version.version), default=None)


def _ensure_model(client: MlflowClient, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.get_registered_model(name)
    except MlflowException:
        client.create_registered_model(name)


def by_alias(client: MlflowClient, where: Registry, alias: str) -> ModelVersion | None:
    """The version with this alias; None if the model has none. Raises RegistryError where the alias
    names a version that is gone: that is not the same as no champion."""
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
        raise where.error("lost_version", alias=alias, version=version) from None


def has_alias(client: MlflowClient, where: Registry, alias: str, version: str) -> bool:
    """Whether the version is the one with this alias. Raises RegistryError as `by_alias`."""
    found = by_alias(client, where, alias)
    return found is not None and str(found.version) == version


def aliases(where: Registry) -> dict[str, str]:
    """Versions by alias. Raises RegistryError where the model or the registry is not there."""
    if not where.spec.tracking_uri and not Path(where.artifact_root, DATABASE).is_file():
        raise where.error("no_registry")
    with where.open(f"ask for the aliases of {where.name}") as client:
        known = client.get_registered_model(where.name).aliases
        return {alias: str(version) for alias, version in known.items()}


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
    """The champion, or the `version` that is asked for. Raises RequestError where there is none, or
    where its files are not those that were registered."""
    if data is None:
        raise RequestError(f"the config of {where.name} names no data, and so no input columns")
    if not where.spec.tracking_uri and not Path(where.artifact_root, DATABASE).is_file():
        raise RequestError([_problem("no_registry", where=where.shown_uri)])
    with where.open(f"ask for the champion of {where.name}") as client:
        asked = client.get_model_version(where.name, version) if version else None
        found = asked or by_alias(client, where, CHAMPION)
    tags = tags_of(found) if found else {}
    if found is None or not tags.get("model_digest"):
        raise RequestError([_problem("none_of_ours", where=where.shown_uri, at=where)])
    try:
        folder = fetch_model(where, str(found.version), tags["model_digest"])
        evidence = folder.parent / EVIDENCE
        if KEPT in tags and not (evidence.is_file() and file_sha256(evidence) == tags[KEPT]):
            raise ChangedModelError([_problem("changed_evidence", where=str(evidence))])
    except ChangedModelError as error:
        raise RequestError(error.problems) from error
    return ServedModel(
        name=where.name,
        version=str(found.version),
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
    known = {k: v for k, v in tags.items() if k in _LINEAGE or k.startswith("metric.")}
    lineage = {"registry": where.shown_uri, "version": version, **known}
    return dict(list(lineage.items())[:_MOST_LINEAGE])


def note_published(where: Registry, version: str, platform: str, name: str) -> None:
    """Tag the version with its name in the registry of a platform."""
    with where.open(f"note where version {version} of {where.name} is") as client:
        client.set_model_version_tag(where.name, version, f"{PREFIX}published.{platform}", name)
