"""Artifacts between their URIs and the disk of a node, for platforms that mount nothing.

What a step reads is fetched before it starts, what it made is uploaded when it is done. Files go
through fsspec, several at a time. An artifact that does not exist stays so, as KFP has it. KFP's
own `minio://` is S3 at the endpoint that AWS_ENDPOINT_URL names.

And a secret for nodes to which their platform gives none: node rank 0 makes one and leaves it below
the artifact root. So it is as safe as the checkpoints: who reads the root while the job runs can
speak as a node of it. Kubernetes and Vertex AI have a better place, and platforms.P.secrets may
name one of the platform's own store as REKINDLE_JOB_SECRET."""

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


def localised(executor_input: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """KFP's ExecutorInput with every place in `folder`, where its inputs now are."""
    made = copy.deepcopy(dict(executor_input))
    inputs, outputs = made.setdefault("inputs", {}), made.setdefault("outputs", {})
    inputs.setdefault("parameterValues", {})
    groups = inputs.setdefault("artifacts", {}).values()
    for i, artifact in enumerate(a for group in groups for a in group.get("artifacts", [])):
        uri = artifact["uri"]
        if "://" not in uri and not Path(uri).is_absolute():
            continue  # the name of something else, which its component gave it
        place = folder / "inputs" / f"{i}-{Path(uri.rstrip('/')).name or 'artifact'}"
        fetch(uri, place)
        artifact["uri"] = str(place)
    for name, group in outputs.setdefault("artifacts", {}).items():
        for artifact in group["artifacts"]:
            artifact["uri"] = str(folder / "outputs" / name)
    for name, parameter in outputs.setdefault("parameters", {}).items():
        parameter["outputFile"] = str(folder / "parameters" / name)
    outputs["outputFile"] = str(folder / "executor_output.json")
    return made


def delivered(
    made: Mapping[str, Mapping[str, Any]], executor_input: Mapping[str, Any]
) -> dict[str, Any]:
    """Upload what a step made (`made`, as launch/shim.py reports it): `artifacts` of KFP's executor
    output. One that the step left under a URI of its own, or gave a name, stays there."""
    planned = executor_input.get("outputs", {}).get("artifacts", {})
    found = {}
    for name, artifact in made.items():
        uri = artifact["uri"]
        if Path(uri).is_absolute():
            uri = planned[name]["artifacts"][0]["uri"]
            store(Path(artifact["uri"]), uri)
        title, version = artifact["schema_title"], artifact["schema_version"]
        kind = {"schemaTitle": title, "schemaVersion": version}
        one = {"name": name, "type": kind, "uri": uri, "metadata": artifact["metadata"]}
        found[name] = {"artifacts": [one]}
    return found


def fetch(uri: str, place: Path) -> None:
    """Copy the file or folder at `uri` to `place`."""
    system, root = _opened(uri)
    if system.isfile(root):
        files = {root: place}
    else:
        prefix = root.rstrip("/") + "/"
        files = {f: place / f.removeprefix(prefix) for f in system.find(root)}
    for target in files.values():
        target.parent.mkdir(parents=True, exist_ok=True)
    if files:
        system.get(list(files), [str(target) for target in files.values()])


def store(place: Path, uri: str) -> None:
    """Copy the file or folder at `place` to `uri`, in place of what an earlier attempt left."""
    if not place.exists():
        return
    system, root = _opened(uri)
    if system.exists(root):
        system.rm(root, recursive=True)
    paths = [place] if place.is_file() else sorted(p for p in place.rglob("*") if p.is_file())
    targets = [
        root if path == place else f"{root.rstrip('/')}/{path.relative_to(place).as_posix()}"
        for path in paths
    ]
    if isinstance(system, LocalFileSystem):  # elsewhere folders need not be made
        for target in targets:
            Path(target).parent.mkdir(parents=True, exist_ok=True)
    if paths:
        system.put([str(path) for path in paths], targets)


def write_text(uri: str, text: str, mode: int = 0o666) -> None:
    """Put a small file there, whole or not at all where the store can; in a folder with `mode`."""
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
    """The place with a secret, which `root` holds; PreemptedError if node rank 0 leaves none."""
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
                write_text(uri, made := secrets.token_hex(32), mode=0o600)
                return made
            if time.monotonic() > deadline:
                what = f"node {place.node_rank} waited {place.patience_seconds:g} s for node 0"
                fix = "all nodes have to read and write below the artifact root"
                raise PreemptedError(what, where=uri, fix=fix) from None
        time.sleep(_POLL_SECONDS)
