"""A driver for abfs:// in processes of steps, in place of adlfs: a folder with each container as ACCOUNT/CONTAINER, as fsspec
finds one, by its entry point in a folder of PYTHONPATH."""

from __future__ import annotations

from pathlib import Path

_CODE = """
import os

from fsspec.implementations.local import LocalFileSystem


class Lake(LocalFileSystem):
    protocol = ("abfs", "abfss")

    def __init__(self, **kwargs):
        super().__init__(**{**kwargs, "auto_mkdir": True})

    @classmethod
    def _strip_protocol(cls, path):
        text = os.fspath(path)
        if "://" in text:
            container, _, rest = text.partition("://")[2].partition("@")
            host, _, below = rest.partition("/")
            text = os.path.join(LAKE, host.partition(".")[0], container, below)
        return super()._strip_protocol(text)
"""


def installed(folder: Path, lake: Path) -> Path:
    """The folder, which has it now."""
    about = folder / "lake_in_a_folder-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: lake-in-a-folder\nVersion: 1\n")
    names = "".join(f"{name} = lake_in_a_folder:Lake\n" for name in ("abfs", "abfss"))
    (about / "entry_points.txt").write_text(f"[fsspec.specs]\n{names}")
    (folder / "lake_in_a_folder.py").write_text(f"LAKE = {str(lake)!r}\n{_CODE}")
    return folder
