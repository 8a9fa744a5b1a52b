"""Files of rekindle's own in folders and object stores: checkpoints, pieces of data,
deployments, logs, and the artifacts of nodes that mount nothing.

`protocol.py` says what a storage does, and what is promised when processes are killed or
write at once. `Folder` and `ObjectStore` do it. Sources of data, which belong to the user,
are read by data/files.py."""

from pathlib import Path

from rekindle.storage.folder import Folder
from rekindle.storage.object_store import DEAD_AFTER, ObjectStore
from rekindle.storage.protocol import (
    Action,
    ExistsError,
    Explain,
    Failure,
    Storage,
    about,
)

__all__ = [
    "DEAD_AFTER",
    "Action",
    "ExistsError",
    "Explain",
    "Failure",
    "Folder",
    "ObjectStore",
    "Storage",
    "about",
    "storage_of",
]


def storage_of(root: str | Path, explain: Explain | None = None) -> Storage:
    """The folder or the object store at a path or URI.

    `explain` makes the error that is raised of a failure; see `about`. Nothing is read or
    written yet. Raises what `explain` makes of a URI that no installed driver opens."""
    text = str(root).removeprefix("file://")
    if explain is None:
        explain = about("the files")
    return ObjectStore(text, explain) if "://" in text else Folder(Path(text), explain)
