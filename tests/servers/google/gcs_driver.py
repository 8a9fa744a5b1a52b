"""A driver for gs:// that takes the mount at /gcs for the store, in place of gcsfs, as fsspec finds
one: by its entry point, in a folder of PYTHONPATH."""

from __future__ import annotations

from pathlib import Path

_CODE = """
import os

from fsspec.implementations.local import LocalFileSystem


class Mounted(LocalFileSystem):
    protocol = ("gs", "gcs")

    def __init__(self, **kwargs):
        super().__init__(**{**kwargs, "auto_mkdir": True})

    @classmethod
    def _strip_protocol(cls, path):
        text = os.fspath(path)
        text = "/gcs/" + text[5:] if text.startswith("gs://") else text
        return super()._strip_protocol(text)
"""


def installed(folder: Path) -> Path:
    """The folder, which has it now."""
    about = folder / "gcs_mounted-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: gcs-mounted\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[fsspec.specs]\ngs = gcs_mounted:Mounted\n")
    (folder / "gcs_mounted.py").write_text(_CODE)
    return folder
