"""A version where the containers of a platform read it: a folder, or a prefix of an object store,
that holds the model, its evidence and, written last, what a server has to know of it."""

import dataclasses
from pathlib import Path

from pydantic import TypeAdapter

from rekindle.errors import RequestError
from rekindle.records import Evidence
from rekindle.serve.messages import ServedModel
from rekindle.spec.identity import digest
from rekindle.train.modelfolder import digest_of
from rekindle.train.storage import Storage, put_file, storage_of

SERVED, _MODEL, _EVIDENCE = "served.json", "model", "evidence.json"
_JSON = TypeAdapter(ServedModel)


def stage(model: ServedModel, root: str) -> str:
    """The URI below `root` at which the version lies, as it is to be served; copies it there if it
    does not yet."""
    shadow = model.shadow and model.shadow.identity
    how = (model.precision, model.log and dataclasses.astuple(model.log), shadow)
    key = digest([model.digest, *how]) if any(how) else model.digest
    place = f"{root.rstrip('/')}/deployments/{model.name}/v{model.version}-{key[:8]}"
    storage = storage_of(place)
    if storage.size(SERVED) is None:
        storage.put_new(SERVED, _JSON.dump_json(_copied(model, storage, "")))
    return place


def _copied(model: ServedModel, storage: Storage, below: str) -> ServedModel:
    """The version with its paths in the storage, once all its files are there."""
    folder, kept = Path(model.path), f"{below}{_EVIDENCE}" if model.evidence else ""
    files = {
        f"{below}{_MODEL}/{path.relative_to(folder).as_posix()}": path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    if kept:
        files[kept] = Path(model.evidence)
    for name, path in files.items():
        put_file(storage, name, path)
    shadow = _copied(model.shadow, storage, "shadow/") if model.shadow else None
    return dataclasses.replace(model, path=f"{below}{_MODEL}", evidence=kept, shadow=shadow)


def staged_in(folder: Path) -> ServedModel:
    """The version in a folder that `stage` filled, wherever it lies now. Raises RequestError where
    its files are not those that were judged."""
    if not (folder / SERVED).is_file():
        what = f"{folder} holds no model that `rekindle deploy` put there"
        raise RequestError(what, fix=f"deploy again; it has to hold {SERVED}")
    return _checked(_JSON.validate_json((folder / SERVED).read_bytes()), folder)


def _checked(staged: ServedModel, folder: Path) -> ServedModel:
    evidence = str(folder / staged.evidence) if staged.evidence else ""
    shadow = _checked(staged.shadow, folder) if staged.shadow else None
    path = str(folder / staged.path)
    model = dataclasses.replace(staged, path=path, evidence=evidence, shadow=shadow)
    judged = Evidence.read(evidence).model_digest if evidence else model.digest
    if not digest_of(Path(model.path)) == model.digest == judged:
        what = f"the files of version {model.version} are not those that were judged"
        raise RequestError(what, where=model.path, fix="delete the folder and deploy again")
    return model
