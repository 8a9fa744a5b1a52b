"""A store that may be read and not written, as one without the right to put objects."""

import uuid

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class Refusing(MemoryFileSystem):
    protocol = "refusing"

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        raise PermissionError("Access Denied")

    def open(self, path, mode="rb", **kwargs):
        if mode != "rb":
            raise PermissionError("Access Denied")
        return super().open(path, mode, **kwargs)


def refusing_root():
    """A URI in such a store, with nothing below it."""
    fsspec.register_implementation("refusing", Refusing, clobber=True)
    return f"refusing://bucket/{uuid.uuid4().hex}"
