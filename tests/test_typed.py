"""A user's type checker sees the types of the public API (PEP 561)."""

import subprocess
import sys
from pathlib import Path

import pytest

import rekindle

PROGRAM = """
import rekindle

spec = rekindle.load("configs/digits.yaml")
reveal_type(spec)
reveal_type(rekindle.run(spec))
"""


def test_the_package_says_that_it_has_types():
    assert (Path(rekindle.__file__).parent / "py.typed").is_file()


@pytest.mark.slow
@pytest.mark.timeout(900)  # all that `import rekindle` leads to, without a cache
def test_a_users_type_checker_sees_the_public_api(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", tmp_path / "cache", "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    revealed = [line for line in done.stdout.splitlines() if "Revealed type" in line]
    assert [line.split('"')[1] for line in revealed] == [
        "rekindle.spec.model.Spec",
        "rekindle.app.api.Run",
    ], done.stdout
