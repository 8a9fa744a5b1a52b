"""Files beside a config that are called like modules: they stand in for none, and do not run."""

import sys

import pytest
import yaml
from click.testing import CliRunner

from rekindle.cli.main import cli
from tests.quick import first

# Python's own, a library's, one that a library imports if it is there, and rekindle itself
NAMES = (
    "queue",
    "statistics",
    "alembic",
    "torch",
    "kfp",
    "socketserver",
    "rekindle",
    "sitecustomize",
    "numpy",
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory full of them; each leaves a mark if it runs."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(
            f"import pathlib; pathlib.Path({str(tmp_path)!r}, '{name}.ran').touch()\nraise SystemExit(3)\n"
        )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_beside_such_files_is_like_any_other(folder):
    config = {
        "name": "m",
        "task": "image_classification",
        "data": {"source": "sklearn:digits"},
        "train": {"steps": 3, "global_batch_size": 64, "layout": {"dp": 2}},
        "evaluate": {"floor": {"accuracy": 0.01}},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    done = CliRunner().invoke(cli, ["run", "config.yaml", "--home", str(folder / "home"), "--json"])
    assert done.exit_code == 0, done.output
    assert not list(folder.glob("*.ran"))


PIPELINE = """
from kfp import dsl

@dsl.component
def count() -> int:
    import queue, mine
    assert hasattr(queue, "Queue") and mine.ANSWER == 42
    return mine.ANSWER

@dsl.pipeline(name="p")
def p() -> int:
    return count().output
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("long", first(1, [True, False]))
def test_modules_of_ones_own_are_found_there_all_the_same(folder, long):
    (folder / "mine.py").write_text("ANSWER = 42\n")
    text = PIPELINE
    if long:  # arguments that go through a file
        text = text.replace("def count() -> int:", "def count(x: str) -> int:").replace(
            "count()", "count(x='x' * 200_000)"
        )
    (folder / "p.py").write_text(text)
    (folder / "config.yaml").write_text(yaml.safe_dump({"name": "p", "pipeline": "p.py:p"}))
    home = str(folder / "home")
    done = CliRunner().invoke(cli, ["run", "config.yaml", "--home", home, "--json"])
    assert done.exit_code == 0, done.output
    assert not list(folder.glob("*.ran"))
