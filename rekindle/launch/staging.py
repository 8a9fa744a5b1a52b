"""Artifacts between their URIs and the disk of a node, for platforms that mount nothing.

What a step reads is fetched before it starts, what it made is uploaded when it is done.
Files go through fsspec, several at a time. An artifact that does not exist stays so, as
KFP has it. KFP's own `minio://` is S3 at the endpoint that AWS_ENDPOINT_URL names.

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

import fsspec
from fsspec.implementations.local import LocalFileSystem

from rekindle.errors import PreemptedError
from rekindle.launch.rendezvous import Rendezvous
from rekindle.protojson import Json


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
    system, root = _opened(uri)
    targets: dict[str, Path] = {}
    if system.isfile(root):
        targets[root] = place
    else:
        prefix = root.rstrip("/") + "/"
        for file in system.find(root):
            targets[file] = place / file.removeprefix(prefix)
    for target in targets.values():
        target.parent.mkdir(parents=True, exist_ok=True)
    if targets:  # an artifact that does not exist stays so
        system.get(list(targets), [str(target) for target in targets.values()])


def store(place: Path, uri: str) -> None:
    """Copy the file or folder at `place` to `uri`, in place of what an earlier attempt
    left."""
    if not place.exists():
        return
    system, root = _opened(uri)
    if system.exists(root):
        system.rm(root, recursive=True)
    paths = []
    targets = []
    if place.is_file():
        paths.append(place)
        targets.append(root)
    else:
        for path in sorted(place.rglob("*")):
            if path.is_file():
                paths.append(path)
                targets.append(f"{root.rstrip('/')}/{path.relative_to(place).as_posix()}")
    if isinstance(system, LocalFileSystem):  # elsewhere folders need not be made
        for target in targets:
            Path(target).parent.mkdir(parents=True, exist_ok=True)
    if paths:
        system.put([str(path) for path in paths], targets)


def write_text(uri: str, text: str, mode: int = 0o666) -> None:
    """Put a small file there, whole or not at all where the store can; in a folder with
    `mode`."""
    system, path = _opened(uri)
    if isinstance(system, LocalFileSystem):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        draft = Path(f"{path}.draft")
        draft.touch(mode)  # which it has from the start
        draft.write_text(text)
        draft.replace(path)
    else:
        system.pipe_file(path, text.encode())


def remove(uri: str) -> None:
    """Remove a small file, if it is there."""
    system, path = _opened(uri)
    with contextlib.suppress(FileNotFoundError):
        system.rm_file(path)


def read_text(uri: str) -> str:
    """A small file; FileNotFoundError if there is none."""
    system, path = _opened(uri)
    return bytes(system.cat_file(path)).decode()


def _opened(uri: str) -> tuple[Any, str]:
    system, path = fsspec.core.url_to_fs(uri.replace("minio://", "s3://", 1))
    system.invalidate_cache()  # a listing from before another process wrote
    return system, path


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
        try:
            return read_text(uri)
        except (FileNotFoundError, PermissionError):  # S3's word for what may not be listed
            if place.node_rank == 0:
                secret = secrets.token_hex(32)
                write_text(uri, secret, mode=0o600)
                return secret
            if time.monotonic() > deadline:
                message = f"node {place.node_rank} waited {place.patience_seconds:g} s for node 0"
                fix = "all nodes have to read and write below the artifact root"
                raise PreemptedError(message, where=uri, fix=fix) from None
        time.sleep(_POLL_SECONDS)
