"""A version with all that a server of it needs: its files, checked, and the evidence that is kept
beside them."""

from pathlib import Path

from rekindle.errors import ChangedModelError, RequestError
from rekindle.registry.client import DATABASE, PREFIX, tags_of
from rekindle.registry.models import CHAMPION, KEPT, Registry, by_alias, fetch_model
from rekindle.registry.signature import EVIDENCE
from rekindle.serve.model import ServedModel
from rekindle.spec.identity import file_sha256
from rekindle.spec.model import DataSpec

_MOST_LINEAGE = 40  # SageMaker keeps 50 properties
_LINEAGE = (
    "run_key", "data_fingerprint", "window", "init_from", "code_commit", "versions", "seed",
    "weights_sha256", "model_digest", "evidence_sha256", "reason",
)  # fmt: skip


def served_model(
    where: Registry, data: DataSpec | None, task: str, version: str = ""
) -> ServedModel:
    """The champion, or the `version` that is asked for. Raises RequestError where there is none, or
    where its files are not those that were registered."""
    if data is None:
        raise RequestError(f"the config of {where.name} names no data, and so no input columns")
    if not where.spec.tracking_uri and not Path(where.artifact_root, DATABASE).is_file():
        raise RequestError("there is no registry", where=where.shown_uri, fix="name another --home")
    with where.open(f"ask for the champion of {where.name}") as client:
        asked = client.get_model_version(where.name, version) if version else None
        found = asked or by_alias(client, where, CHAMPION)
    tags = tags_of(found) if found else {}
    if found is None or not tags.get("model_digest"):
        what = f"{where.name} has no champion that rekindle registered"
        fix = "`rekindle run CONFIG` trains one; `rekindle runs` shows what the gate decided"
        raise RequestError(what, where=where.shown_uri, fix=fix)
    try:
        folder = fetch_model(where, str(found.version), tags["model_digest"])
        evidence = folder.parent / EVIDENCE
        if KEPT in tags and not (evidence.is_file() and file_sha256(evidence) == tags[KEPT]):
            what, fix = "the evidence beside the model is not what was registered", "restore it"
            raise ChangedModelError(what, where=str(evidence), fix=fix)
    except ChangedModelError as error:
        raise RequestError(error.problems) from error
    return ServedModel(
        name=where.name, version=str(found.version), digest=tags["model_digest"], path=str(folder),
        evidence=str(evidence) if KEPT in tags else "", code=where.code(task),
        columns=data.columns, image_size=data.image_size,
    )  # fmt: skip


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
