"""What a training says where its checkpoints cannot be read or written, word for word."""

import errno
import os

import pytest

from rekindle.errors import CheckpointError
from rekindle.storage import Failure
from rekindle.train.checkpoint_storage import checkpoint_error, checkpoint_storage
from tests.support.refusing_store import refusing_root

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/data/x")
BEFORE = "the same command goes on from the checkpoint before"
FAILURES = {
    "a full disk": (
        Failure("/data", "step/0", "write", "full", FULL, 12_000_000),
        "No space left on device: a checkpoint in /data needs 12,000,000 bytes",
        f"make room there or lower train.checkpoint.keep; {BEFORE}",
    ),
    "a disk that is too small": (
        Failure("/data", "", "write", "full", FULL, 12_000_000, 7_000),
        "No space left on device: a checkpoint in /data needs 12,000,000 bytes, 7,000 are free",
        f"make room there or lower train.checkpoint.keep; {BEFORE}",
    ),
    "a folder without permission": (
        Failure("/data", "a", "write", "forbidden", PermissionError(13, "Permission denied", "a")),
        "cannot write a checkpoint to /data: Permission denied",
        BEFORE,
    ),
    "a bucket that is missing": (
        Failure("s3://b/c", "a", "write", "missing", FileNotFoundError("no such bucket")),
        "cannot write a checkpoint to s3://b/c: no such bucket",
        BEFORE,
    ),
    "a store that is away": (
        Failure("s3://b/c", "a", "read", "other", ConnectionError("reset")),
        "the checkpoint store s3://b/c cannot be used: ConnectionError: reset",
        "check that it can be reached and written from here; the same command goes on from the "
        "last checkpoint",
    ),
    "a store that says nothing": (
        Failure("s3://b/c", "a", "read", "other", TimeoutError()),
        "the checkpoint store s3://b/c cannot be used: TimeoutError",
        "check that it can be reached and written from here; the same command goes on from the "
        "last checkpoint",
    ),
    "another attempt": (
        Failure("s3://b/c", "step/manifest.json", "write", "exists", FileExistsError()),
        "s3://b/c/step/manifest.json was written by another attempt",
        "stop the other attempt at the same work",
    ),
    "a protocol without a driver": (
        Failure("nothing://x", "", "open", "other", ValueError("Protocol not known: nothing")),
        "cannot open nothing://x: Protocol not known: nothing",
        "use a path or an fsspec URI, and install the driver of its protocol",
    ),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_failure_of_the_storage_says(case):
    failure, what, fix = FAILURES[case]
    error = checkpoint_error(failure)
    assert type(error) is CheckpointError
    (problem,) = error.problems
    found = (problem.what, problem.where, problem.fix, problem.code)
    assert found == (what, failure.root, fix, "E-CHECKPOINT")


def test_a_store_that_refuses_a_checkpoint():
    root = refusing_root()
    message = f"the checkpoint store {root} cannot be used: PermissionError: Access Denied"
    with pytest.raises(CheckpointError) as refused:
        checkpoint_storage(root).put_new("manifest.json", b"{}")
    assert refused.value.problems[0].what == message
