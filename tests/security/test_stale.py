"""A result is served again only while all that it came from is what it was: code and files of one's
own wherever a step finds them, in loops, on PYTHONPATH, behind links."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rekindle.data.fingerprint import fingerprint
from rekindle.platforms.local.content import describe, digest
from rekindle.spec.imports import INCLUDED
from rekindle.spec.model import DataSpec, ModelSpec, TrainSpec

ROOT = Path(__file__).parents[2]
PIPELINE = """
from kfp import dsl

@dsl.component(base_image="python:3.11", install_kfp_package=False)
def use(folder: dsl.Input[dsl.Dataset]) -> str:
    import beside
    import far
    with open("prompt.txt") as file, open(folder.path + "/linked/words.txt") as words:
        return " ".join([beside.WORD, far.WORD, file.read(), words.read()])

@dsl.component(base_image="python:3.11", install_kfp_package=False)
def repeat(item: str) -> str:
    import beside
    return beside.WORD

@dsl.container_component
def say(said: dsl.OutputPath(str)):
    return dsl.ContainerSpec("python:3.11", ["python3", "script.py"], [said])

@dsl.pipeline(name="words")
def words(folder: str):
    data = dsl.importer(artifact_uri=folder, artifact_class=dsl.Dataset, reimport=True)
    use(folder=data.output)
    say()
    with dsl.ParallelFor(["a"]) as item:
        repeat(item=item)
"""
SCRIPT = "import sys\nfrom beside import WORD\nopen(sys.argv[1], 'w').write('old ' + WORD)\n"
FILES = {
    "project/p.py": PIPELINE,
    "project/beside.py": "WORD = 'old'\n",
    "project/prompt.txt": "old",
    "project/script.py": SCRIPT,
    "library/far.py": "WORD = 'old'\n",
    "words/words.txt": "old",
}
EVERY = {"use", "say", "for-loop-2/0/repeat"}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run of the pipeline; a test changes a file and runs it once more."""
    folder = tmp_path_factory.mktemp("stale")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "data").mkdir()
    (folder / "data" / "linked").symlink_to(folder / "words")
    (folder / "data" / "linked" / "up").symlink_to(folder / "data")  # a way round in circles
    config = {
        "name": "words", "pipeline": "p.py:words", "arguments": {"folder": str(folder / "data")},
        "image": {"include": ["prompt.txt"]},
    }  # fmt: skip
    (folder / "project" / "words.yaml").write_text(json.dumps(config))
    assert ran(folder) == EVERY
    assert ran(folder) == set()
    return folder


def ran(folder: Path) -> set[str]:
    """The steps of a run that were not served from the cache."""
    done = subprocess.run(
        [sys.executable, "-m", "rekindle.cli.main", "run", "words.yaml", "--json"],
        cwd=folder / "project", capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{folder / 'library'}"},
    )  # fmt: skip
    record: dict[str, Any] = json.loads(done.stdout)
    return {step["name"] for step in record["steps"] if not step["cached"]} & EVERY


@pytest.mark.parametrize(
    ("name", "readers"),
    [
        ("project/beside.py", EVERY),
        ("project/prompt.txt", EVERY),  # which of them reads it nobody knows
        ("project/script.py", {"say"}),
        ("library/far.py", {"use"}),
        ("words/words.txt", {"use"}),
    ],
)
def test_a_file_that_changed_runs_what_reads_it(
    project: Path, name: str, readers: set[str]
) -> None:
    (project / name).write_text((project / name).read_text().replace("old", "new"))
    assert ran(project) == readers
    assert ran(project) == set()


def test_what_a_step_left_names_links_and_does_not_follow_them(project: Path) -> None:
    before = digest(describe(project / "data"))
    (project / "words" / "more.txt").write_text("more")
    assert digest(describe(project / "data")) == before
    assert set(describe(project / "data", follow=True)) == {
        "linked/words.txt", "linked/more.txt", "linked/up",
    }  # fmt: skip


@pytest.mark.parametrize("how", ["module", "swapped", "argument", "included"])
def test_a_training_of_ones_own_is_known_by_all_its_files(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_training.py").write_text("import my_parts, my_rest\n")
    (tmp_path / "my_parts.py").write_text("RATE = 1\n")
    (tmp_path / "my_rest.py").write_text("RATE = 3\n")
    (tmp_path / "settings.json").write_text("{}")
    train = TrainSpec(lr=1e-3, entrypoint=f"-m my_training --settings={tmp_path}/settings.json")

    def key() -> str:
        data = DataSpec(source="sklearn:digits")
        return fingerprint("image_classification", data, ModelSpec(), train, champion=None).run_key

    before = key()
    assert key() == before
    match how:
        case "module":
            (tmp_path / "my_parts.py").write_text("RATE = 2\n")
        case "swapped":
            (tmp_path / "my_parts.py").write_text("RATE = 3\n")
            (tmp_path / "my_rest.py").write_text("RATE = 1\n")
        case "argument":
            (tmp_path / "settings.json").write_text('{"rate": 2}')
        case "included":
            monkeypatch.setenv(INCLUDED, "another")
    assert key() != before


def test_files_for_code_of_ones_own_are_no_part_of_a_training_by_rekindle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def key() -> str:
        data, train = DataSpec(source="sklearn:digits"), TrainSpec(lr=1e-3)
        return fingerprint("image_classification", data, ModelSpec(), train, champion=None).run_key

    before = key()
    monkeypatch.setenv(INCLUDED, "another")
    assert key() == before
