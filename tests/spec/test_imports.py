"""Which files a piece of Python needs, read off its imports."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rekindle.errors import RequestError
from rekindle.spec.imports import closure, contents, folders_of

ROOT = Path(__file__).parents[2]
FILES = {
    "src/task.py": "import json\nimport numpy\nfrom beside import x\nimport rekindle.tasks\n",
    "src/beside.py": "def f():\n    from tools.words import split\nx = 1\n",
    "tools/__init__.py": "",
    "tools/words.py": "from . import letters\nfrom .deep.inner import thing\n",
    "tools/letters.py": "from tools import words\n",
    "tools/deep/inner.py": "thing = 1\n",
    "tools/unused.py": "raise RuntimeError\n",
    "src/unused.py": "",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def names(project: Path, found: dict[Path, Path]) -> dict[str, str]:
    return {
        file.relative_to(project).as_posix(): folder.relative_to(project).as_posix()
        for file, folder in found.items()
    }


def test_a_file_comes_with_all_that_it_imports_and_nothing_else(project: Path) -> None:
    task = project / "src" / "task.py"
    assert names(project, closure([task], {}, folders_of(task))) == {
        "src/task.py": "src",
        "src/beside.py": "src",
        "tools/__init__.py": ".",
        "tools/words.py": ".",
        "tools/letters.py": ".",
        "tools/deep/inner.py": ".",
    }


def test_what_was_found_is_enough_to_import_it_elsewhere(project: Path, tmp_path: Path) -> None:
    found = closure([], {"step": "def step():\n    import tools.words\n"}, [project])
    elsewhere = tmp_path / "elsewhere"
    for file in found:
        path = elsewhere / file.relative_to(project)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.read_bytes())
    command = [sys.executable, "-c", "import tools.words as w; print(w.thing, w.__file__)"]
    done = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", str(elsewhere / "tools" / "words.py")]


def test_packages_installed_for_another_python_do_not_count_as_the_users_files(
    tmp_path: Path,
) -> None:
    mine = tmp_path / "mine"
    others = [tmp_path / "base" / name for name in ("site-packages", "dist-packages")]
    script = "from rekindle.spec.imports import own_folders as own; print(*own(), sep='\\n')"
    path = os.pathsep.join(map(str, [str(ROOT), mine, *others]))
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    found = done.stdout.split("\n")
    assert str(mine) in found
    assert not [folder for folder in found if "-packages" in folder]


def test_a_file_that_is_no_python_is_named_with_its_line(project: Path) -> None:
    (project / "src" / "beside.py").write_text("x = 1\nx = = 2\n")
    task = project / "src" / "task.py"
    with pytest.raises(RequestError) as caught:
        closure([task], {}, folders_of(task))
    assert caught.value.problems[0].where == f"{project / 'src' / 'beside.py'}:2"


def read_bytes():
    """What this process has read so far, from whatever file."""
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


def test_a_large_file_is_read_once_and_again_when_it_changed(tmp_path):
    data = tmp_path / "rows.bin"
    data.write_bytes(bytes(65 << 20))
    found = closure([data], {}, [])
    start = read_bytes()
    first = contents(found)
    once = read_bytes() - start
    assert contents(found) == first
    assert once > 65 << 20 > read_bytes() - start - once
    before = data.stat()
    with data.open("r+b") as file:
        file.write(b"x")
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))  # its ctime tells
    assert contents(found) != first
