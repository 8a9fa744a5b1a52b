"""A small image of this machine's own programs: no registry is needed to run a container."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import kfp

from rekindle.platforms.docker import Docker

PROGRAMS = ("sh", "cat", "ls", "grep", "id", "touch", "sleep", "mkdir", "dirname", "mktemp", "sed")
_LEFT_OUT = re.compile(
    r"/(__pycache__|test|idlelib|tkinter|lib2to3|ensurepip|site-packages|config-.*)$"
)


def make(docker: Docker, name: str, mark: str = "") -> str:
    """The id of a new image: a shell, Python with KFP's executor, a `pip` that only says what it
    is asked for, and the file /made-for-tests with the `mark` in it."""
    command = docker.words("import", "--change=ENV PYTHONPATH=/packages", "-", name)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        with tarfile.open(fileobj=process.stdin, mode="w|", dereference=True) as tar:
            _fill(tar, mark)
        process.stdin.close()
        told = process.stdout.read().decode().strip()
    assert process.returncode == 0
    return told


def _fill(tar: tarfile.TarFile, mark: str) -> None:
    _folder(tar, "tmp", 0o1777)
    _file(tar, "made-for-tests", mark)
    _file(tar, "bin/pip", "")
    _file(tar, "packages/pip.py", "import sys; print('pip', *sys.argv[1:])")
    python, library = Path(sys.executable).resolve(), Path(sysconfig.get_path("stdlib"))
    programs = {
        f"bin/{name}": Path(str(shutil.which(name, path="/usr/bin:/bin"))) for name in PROGRAMS
    }
    programs[str(python)] = python
    for place, file in programs.items():
        tar.add(file, place, filter=_plain)
    linked = [*programs.values(), *library.glob("lib-dynload/*.so")]
    for needed in _libraries(linked):
        tar.add(needed, needed, filter=_plain)
    tar.add(library, str(library), filter=_plain)
    tar.add(Path(kfp.__file__).parent, "packages/kfp", filter=_plain)
    link = tarfile.TarInfo("bin/python3")
    link.type, link.linkname = tarfile.SYMTYPE, str(python)
    tar.addfile(link)


def _folder(tar: tarfile.TarFile, name: str, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, mode
    tar.addfile(entry)


def _file(tar: tarfile.TarFile, name: str, text: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(text.encode()), 0o755
    tar.addfile(entry, io.BytesIO(text.encode()))


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Nobody's and of no time; without what is not needed."""
    entry.uid = entry.gid = entry.mtime = 0
    return None if _LEFT_OUT.search(f"/{entry.name}") else entry


def _libraries(programs: list[Path]) -> list[str]:
    said = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False).stdout
    return sorted(set(re.findall(r"(?:=> |^\s)(/\S+) \(", said, re.MULTILINE)))
