"""A version where the containers of a platform read it: a folder, or a prefix of an
object store, that holds the model, its evidence and, written last, what a server has to
know of it."""

import dataclasses
from pathlib import Path

from pydantic import TypeAdapter

from rekindle.errors import RequestError
from rekindle.records import Evidence
from rekindle.serve.messages import ServedModel
from rekindle.spec.identity import digest
from rekindle.storage import Storage, about, storage_of
from rekindle.train.modelfolder import digest_of

SERVED = "served.json"
_MODEL = "model"
_EVIDENCE = "evidence.json"
_JSON = TypeAdapter(ServedModel)


def stage(model: ServedModel, root: str) -> str:
    """The URI below `root` at which the version lies, as it is to be served; copies it
    there if it does not yet."""
    shadow = model.shadow and model.shadow.identity
    log = model.log and dataclasses.astuple(model.log)
    settings = (model.precision, log, shadow)
    key = model.digest
    if any(settings):  # the same files served otherwise lie elsewhere
        key = digest([model.digest, *settings])
    place = f"{root.rstrip('/')}/deployments/{model.name}/v{model.version}-{key[:8]}"
    storage = storage_of(place, about("the copy of the model for the deployment"))
    if storage.size(SERVED) is None:
        # last: it is the commit, and says that all files are there
        storage.put_new(SERVED, _JSON.dump_json(_copy_version(model, storage, "")))
    return place


def _copy_version(model: ServedModel, storage: Storage, prefix: str) -> ServedModel:
    """Copy all files of a version; returns it with its paths in the storage."""
    folder = Path(model.path)
    storage.upload(folder, f"{prefix}{_MODEL}")
    evidence = ""
    if model.evidence:
        evidence = f"{prefix}{_EVIDENCE}"
        storage.upload(Path(model.evidence), evidence)
    shadow: ServedModel | None = None
    if model.shadow:
        shadow = _copy_version(model.shadow, storage, "shadow/")
    return dataclasses.replace(model, path=f"{prefix}{_MODEL}", evidence=evidence, shadow=shadow)


def staged_in(folder: Path) -> ServedModel:
    """The version in a folder that `stage` filled, wherever it lies now. Raises
    RequestError where its files are not those that were judged."""
    if not (folder / SERVED).is_file():
        message = f"{folder} holds no model that `rekindle deploy` put there"
        raise RequestError(message, fix=f"deploy again; it has to hold {SERVED}")
    return _checked_version(_JSON.validate_json((folder / SERVED).read_bytes()), folder)


def _checked_version(staged: ServedModel, folder: Path) -> ServedModel:
    evidence = str(folder / staged.evidence) if staged.evidence else ""
    shadow = _checked_version(staged.shadow, folder) if staged.shadow else None
    path = str(folder / staged.path)
    model = dataclasses.replace(staged, path=path, evidence=evidence, shadow=shadow)
    judged = Evidence.read(evidence).model_digest if evidence else model.digest
    if not digest_of(Path(model.path)) == model.digest == judged:
        message = f"the files of version {model.version} are not those that were judged"
        raise RequestError(message, where=model.path, fix="delete the folder and deploy again")
    return model
