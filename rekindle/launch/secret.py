"""A secret for nodes to which their platform gives none: node rank 0 makes one and leaves it where
all nodes read and write anyway, below the artifact root.

So it is as safe as the checkpoints: who reads the root while the job runs can speak as a node of
it. Kubernetes and Vertex AI have a better place, and platforms.P.secrets may name one of the
platform's own store as REKINDLE_JOB_SECRET."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import secrets
import time
from collections.abc import Iterator

from rekindle.errors import PreemptedError
from rekindle.launch import staging
from rekindle.launch.rendezvous import Rendezvous

_POLL_SECONDS = 1.0


@contextlib.contextmanager
def shared_secret(place: Rendezvous, root: str) -> Iterator[Rendezvous]:
    """The place with a secret, which `root` holds until node rank 0 is done; raises PreemptedError
    if that node leaves none within the patience of nodes."""
    if place.nodes == 1 or place.secret or not place.job:
        yield place
        return
    name = hashlib.sha256(place.job.encode()).hexdigest()[:32]
    uri = f"{root.rstrip('/')}/meetings/{name}"
    yield dataclasses.replace(place, secret=_agreed(place, uri)).checked(uri)
    if place.node_rank == 0:
        staging.remove(uri)


def _agreed(place: Rendezvous, uri: str) -> str:
    deadline = time.monotonic() + place.patience_seconds
    while True:
        try:
            return staging.read_text(uri)
        except (FileNotFoundError, PermissionError):  # S3's word for what may not be listed
            if place.node_rank == 0:
                staging.write_text(uri, made := secrets.token_hex(32), mode=0o600)
                return made
            if time.monotonic() > deadline:
                what = f"node {place.node_rank} waited {place.patience_seconds:g} s for node 0"
                fix = "all nodes have to read and write below the artifact root"
                raise PreemptedError(what, where=uri, fix=fix) from None
        time.sleep(_POLL_SECONDS)
