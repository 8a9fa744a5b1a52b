"""The storage of checkpoints, and what its failures mean for a training."""

from pathlib import Path

from rekindle.errors import CheckpointError
from rekindle.storage import Failure, Storage, storage_of
from rekindle.storage.protocol import HOW_TO_OPEN

_GOES_ON = "the same command goes on from the checkpoint before"


def checkpoint_storage(root: str | Path) -> Storage:
    """The folder or object store at a path or URI; it raises CheckpointError."""
    return storage_of(root, checkpoint_error)


def checkpoint_error(failure: Failure) -> CheckpointError:
    """The error of a training whose checkpoints cannot be read or written."""
    root = failure.root
    if failure.action == "open":
        return CheckpointError(f"cannot open {root}: {failure.error}", where=root, fix=HOW_TO_OPEN)
    if failure.reason == "exists":
        message = f"{failure.place} was written by another attempt"
        return CheckpointError(message, where=root, fix="stop the other attempt at the same work")
    is_away = "://" in root
    if is_away and failure.reason != "missing":
        cause = type(failure.error).__name__
        if str(failure.error):
            cause += f": {failure.error}"
        message = f"the checkpoint store {root} cannot be used: {cause}"
        fix = "check that it can be reached and written from here; "
        fix += "the same command goes on from the last checkpoint"
        return CheckpointError(message, where=root, fix=fix)
    if failure.reason == "full":
        return _no_room(failure)
    cause = getattr(failure.error, "strerror", None) or str(failure.error)
    problem = f"cannot write a checkpoint to {root}"
    if failure.action in ("read", "list"):
        problem = f"cannot read the checkpoints in {root}"
    return CheckpointError(f"{problem}: {cause}", where=root, fix=_GOES_ON)


def _no_room(failure: Failure) -> CheckpointError:
    message = f"No space left on device: a checkpoint in {failure.root} "
    if failure.needed_bytes is None:
        message += "does not fit"
    else:
        message += f"needs {failure.needed_bytes:,} bytes"
    if failure.free_bytes is not None:
        message += f", {failure.free_bytes:,} are free"
    fix = f"make room there or lower train.checkpoint.keep; {_GOES_ON}"
    return CheckpointError(message, where=failure.root, fix=fix)
