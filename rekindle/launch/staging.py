"""Artifacts between their URIs and the disk of a node, for platforms that mount nothing.

What a step reads is fetched before it starts, what it made is uploaded when it is done.
Files go through `storage/`, several at a time. An artifact that does not exist stays so, as
KFP has it. storage/minio.py says which store KFP's own `minio://` is.

And a secret for nodes to which their platform gives none: node rank 0 makes one and
leaves it below the artifact root. So it is as safe as the checkpoints: who reads the root
while the job runs can speak as a node of it. Kubernetes and Vertex AI have a better
place, and platforms.P.secrets may name one of the platform's own store as
REKINDLE_JOB_SECRET."""

import contextlib
import copy
import dataclasses
import hashlib
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rekindle.errors import PreemptedError, StorageError
from rekindle.launch.rendezvous import Rendezvous
from rekindle.protojson import Json
from rekindle.storage import Storage, about, storage_of


def localised(executor_input: Mapping[str, Any], folder: Path) -> Json:
    """KFP's ExecutorInput with every place in `folder`; fetches its inputs there."""
    localised_input = copy.deepcopy(dict(executor_input))
    inputs = localised_input.setdefault("inputs", {})
    inputs.setdefault("parameterValues", {})
    artifacts: list[Json] = []
    for group in inputs.setdefault("artifacts", {}).values():
        artifacts += group.get("artifacts", [])
    for number, artifact in enumerate(artifacts):
        uri = artifact["uri"]
        if "://" not in uri and not Path(uri).is_absolute():
            continue  # the name of something else, which its component gave it
        # numbered: two artifacts may have the same last name
        name = Path(uri.rstrip("/")).name or "artifact"
        local_path = folder / "inputs" / f"{number}-{name}"
        fetch(uri, local_path)
        artifact["uri"] = str(local_path)
    outputs = localised_input.setdefault("outputs", {})
    for name, group in outputs.setdefault("artifacts", {}).items():
        for artifact in group["artifacts"]:
            artifact["uri"] = str(folder / "outputs" / name)
    for name, parameter in outputs.setdefault("parameters", {}).items():
        parameter["outputFile"] = str(folder / "parameters" / name)
    outputs["outputFile"] = str(folder / "executor_output.json")
    return localised_input


def delivered(artifacts: Mapping[str, Json], executor_input: Mapping[str, Any]) -> Json:
    """Upload the artifacts that a step made, as launch/shim.py reports them; returns
    `artifacts` of KFP's executor output. One that the step left under a URI of its own,
    or gave a name, stays there."""
    planned = executor_input.get("outputs", {}).get("artifacts", {})
    groups = {}
    for name, artifact in artifacts.items():
        uri = artifact["uri"]
        if Path(uri).is_absolute():
            uri = planned[name]["artifacts"][0]["uri"]
            store(Path(artifact["uri"]), uri)
        kind = {
            "schemaTitle": artifact["schema_title"],
            "schemaVersion": artifact["schema_version"],
        }
        uploaded = {"name": name, "type": kind, "uri": uri, "metadata": artifact["metadata"]}
        groups[name] = {"artifacts": [uploaded]}
    return groups


def fetch(uri: str, place: Path) -> None:
    """Copy the file or folder at `uri` to `place`."""
    # an artifact that does not exist stays so
    _storage_at(uri, "the artifact").download("", place)


def store(place: Path, uri: str) -> None:
    """Copy the file or folder at `place` to `uri`, in place of what an earlier attempt
    left."""
    if not place.exists():
        return
    storage = _storage_at(uri, "the artifact")
    storage.remove("")
    storage.upload(place, "")


def write_text(uri: str, text: str, mode: int = 0o666) -> None:
    """Put a small file there, whole or not at all; in a folder with `mode`."""
    _storage_at(uri, "the file").put("", text.encode(), mode)


def remove(uri: str) -> None:
    """Remove a small file, if it is there."""
    _storage_at(uri, "the file").remove_file("")


def read_text(uri: str) -> str:
    """A small file; FileNotFoundError if there is none."""
    content = _storage_at(uri, "the file").read("")
    if content is None:
        raise FileNotFoundError(uri)
    return content.decode()


def _storage_at(uri: str, subject: str) -> Storage:
    return storage_of(uri, about(subject))


_POLL_SECONDS = 1.0


@contextlib.contextmanager
def shared_secret(place: Rendezvous, root: str) -> Iterator[Rendezvous]:
    """The place with a secret, which `root` holds; PreemptedError if node rank 0 leaves
    none."""
    if place.nodes == 1 or place.secret or not place.job:
        yield place
        return
    name = hashlib.sha256(place.job.encode()).hexdigest()[:32]
    uri = f"{root.rstrip('/')}/meetings/{name}"
    yield dataclasses.replace(place, secret=_agreed(place, uri)).checked(uri)
    if place.node_rank == 0:
        remove(uri)


def _agreed(place: Rendezvous, uri: str) -> str:
    deadline = time.monotonic() + place.patience_seconds
    while True:
        secret = _secret_at(uri)
        if secret is not None:
            return secret
        if place.node_rank == 0:
            secret = secrets.token_hex(32)
            write_text(uri, secret, mode=0o600)
            return secret
        if time.monotonic() > deadline:
            message = f"node {place.node_rank} waited {place.patience_seconds:g} s for node 0"
            fix = "all nodes have to read and write below the artifact root"
            raise PreemptedError(message, where=uri, fix=fix)
        time.sleep(_POLL_SECONDS)


def _secret_at(uri: str) -> str | None:
    """What node rank 0 left there; None where there is nothing yet."""
    try:
        return read_text(uri)
    except FileNotFoundError:
        return None
    except StorageError as error:
        # S3's word for what is not there, where it may not be listed
        if isinstance(error.__cause__, PermissionError):
            return None
        raise
