"""A result is served again only while all that it came from is what it was: code and files of one's
own wherever a step finds them, in loops, on PYTHONPATH, behind links."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rekindle.app.pipeline import pipeline_of
from rekindle.data.fingerprint import fingerprint
from rekindle.ir.compile import compile_pipeline
from rekindle.ir.graph import FromTask
from rekindle.ir.read.pipeline import read
from rekindle.platforms.local.content import describe, digest
from rekindle.platforms.user_code import hashes
from rekindle.spec.imports import INCLUDED
from rekindle.spec.model import DataSpec, ModelSpec, Spec, TrainSpec
from tests.quick import first

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
        "name": "words",
        "pipeline": "p.py:words",
        "arguments": {"folder": str(folder / "data")},
        "image": {"include": ["prompt.txt"]},
    }
    (folder / "project" / "words.yaml").write_text(json.dumps(config))
    assert ran(folder) == EVERY
    assert ran(folder) == set()
    return folder


def ran(folder: Path) -> set[str]:
    """The steps of a run that were not served from the cache."""
    done = subprocess.run(
        [sys.executable, "-m", "rekindle.cli.main", "run", "words.yaml", "--json"],
        cwd=folder / "project",
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{folder / 'library'}"},
    )
    record: dict[str, Any] = json.loads(done.stdout)
    return {step["name"] for step in record["steps"] if not step["cached"]} & EVERY


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "readers"),
    first(
        1,
        [
            ("project/script.py", {"say"}),
            ("words/words.txt", {"use"}),
            ("project/beside.py", EVERY),
            ("project/prompt.txt", EVERY),  # which of them reads it nobody knows
            ("library/far.py", {"use"}),
        ],
    ),
)
def test_a_file_that_changed_runs_what_reads_it(
    project: Path, name: str, readers: set[str]
) -> None:
    (project / name).write_text((project / name).read_text().replace("old", "new"))
    assert ran(project) == readers
    assert ran(project) == set()


@pytest.mark.slow
def test_what_a_step_left_names_links_and_does_not_follow_them(project: Path) -> None:
    before = digest(describe(project / "data"))
    (project / "words" / "more.txt").write_text("more")
    assert digest(describe(project / "data")) == before
    assert set(describe(project / "data", follow=True)) == {
        "linked/words.txt",
        "linked/more.txt",
        "linked/up",
    }


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


PLACES = """
from kfp import dsl

@dsl.component(base_image="python:3.11", install_kfp_package=False)
def shadowed() -> str:
    import helper
    return helper.WORD

@dsl.component(base_image="python:3.11", install_kfp_package=False)
def builtin() -> str:
    import profile
    return profile.WORD

@dsl.component(base_image="python:3.11", install_kfp_package=False)
def folder() -> str:
    from utils import load
    return load

@dsl.component(base_image="python:3.11", install_kfp_package=False)
def elsewhere() -> str:
    import other
    return other.WORD

@dsl.container_component
def beside_script(said: dsl.OutputPath(str)):
    return dsl.ContainerSpec("python:3.11", ["python3", "scripts/run.py"], [said])

@dsl.container_component
def module(said: dsl.OutputPath(str)):
    return dsl.ContainerSpec("python:3.11", ["python3", "-m", "mymod"], [said])

@dsl.container_component
def far(said: dsl.OutputPath(str)):
    return dsl.ContainerSpec("python:3.11", ["python3", "FAR/tool.py"], [said])

@dsl.container_component
def shell(said: dsl.OutputPath(str)):
    return dsl.ContainerSpec("python:3.11", ["sh", "-c", "python3 sh.py $0"], [said])

@dsl.container_component
def program(said: dsl.OutputPath(str)):
    return dsl.ContainerSpec("python:3.11", ["python3", "app"], [said])

@dsl.container_component
def line(said: dsl.OutputPath(str)):
    return dsl.ContainerSpec("python:3.11", ["python3", "-c", "import inline; print(inline.WORD)"], [said])

@dsl.container_component
def option(said: dsl.OutputPath(str)):
    return dsl.ContainerSpec("python:3.11", ["tool", "--script=option.py"], [said])

@dsl.pipeline(name="places")
def places():
    shadowed(); builtin(); folder(); beside_script(); module(); far(); shell(); program(); option(); line()
    elsewhere().set_env_variable("PYTHONPATH", "FAR")
"""
# what Python finds when the step runs, whatever lies in a folder that is looked at first -> its reader
FOUND = {
    "w/helper.py": "shadowed",
    "lib/profile.py": "builtin",
    "lib/utils.py": "folder",
    "far/other.py": "elsewhere",
    "w/scripts/near.py": "beside-script",
    "w/mymod.py": "module",
    "far/tool.py": "far",
    "w/sh.py": "shell",
    "w/app/__main__.py": "program",
    "w/option.py": "option",
    "w/inline.py": "line",
}


@pytest.mark.slow
def test_a_file_counts_wherever_python_finds_it_when_the_step_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = dict.fromkeys(FOUND, "WORD = load = 'old'\n") | {
        "w/pipes/helper.py": "WORD = 'unused'\n",
        "w/pipes/utils/load.py": "",
        "w/scripts/run.py": "from near import WORD\n",
        "w/pipes/p.py": PLACES.replace("FAR", str(tmp_path / "far")),
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path / "w")
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    spec = Spec(name="places", pipeline=f"{tmp_path}/w/pipes/p.py:places")
    graph = read(compile_pipeline(spec.pipeline))
    for name, reader in FOUND.items():
        before = hashes(spec, graph)
        (tmp_path / name).write_text("WORD = load = 'new'\n")
        after = hashes(spec, graph)
        assert {k for k in after if after[k] != before.get(k)} == {reader}, name


EDITED = """
from kfp import dsl

@dsl.component(base_image="python:3.11", install_kfp_package=False)
def slow(folder: dsl.Input[dsl.Dataset], busy: str) -> str:
    import pathlib, time
    import beside
    with open(folder.path + "/words.txt") as words:
        found = beside.WORD + words.read()
    pathlib.Path(busy, "ready").touch()
    while not pathlib.Path(busy, "go").exists():
        time.sleep(0.05)
    return found

@dsl.pipeline(name="edited")
def edited(folder: str, busy: str):
    data = dsl.importer(artifact_uri=folder, artifact_class=dsl.Dataset, reimport=True)
    slow(folder=data.output, busy=busy)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text"),
    [("beside.py", "WORD = 'new'\n"), ("data/words.txt", "WORD = 'new'\n"), ("prompt.txt", None)],
)
def test_what_changed_while_a_step_ran_is_not_served_under_what_was_before(
    name: str, text: str | None, tmp_path: Path
) -> None:
    files = {
        "p.py": EDITED,
        "prompt.txt": "a",
        "beside.py": "WORD = 'old'\n",
        "data/words.txt": "WORD = 'old'\n",
    }
    for folder in ("data", "busy"):
        (tmp_path / folder).mkdir()
    for file, content in files.items():
        (tmp_path / file).write_text(content)
    arguments = {"folder": str(tmp_path / "data"), "busy": str(tmp_path / "busy")}
    config = {
        "name": "edited",
        "pipeline": "p.py:edited",
        "arguments": arguments,
        "image": {"include": ["prompt.txt"]},
    }
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    words = [sys.executable, "-m", "rekindle.cli.main", "run", "c.yaml", "--json"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL) as run:
        while not (tmp_path / "busy" / "ready").exists():
            assert run.poll() is None
            time.sleep(0.02)
        (tmp_path / name).unlink() if text is None else (tmp_path / name).write_text(text)
        (tmp_path / "busy" / "go").touch()
    assert run.returncode == 0, "the step itself succeeded"
    (tmp_path / name).write_text(files[name])
    subprocess.run(words, cwd=tmp_path, env=env, check=True, stdout=subprocess.DEVNULL)
    records = sorted((tmp_path / ".rekindle" / "runs").glob("*/run.json"))
    steps = [json.loads(record.read_text())["steps"] for record in records]
    assert [[s["cached"] for s in found if s["name"] == "slow"] for found in steps] == [
        [False],
        [False],
    ]


@pytest.mark.slow
def test_shards_are_known_by_the_tokenizer_that_encoded_them(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    data = DataSpec(source="sklearn:digits")
    train = TrainSpec(lr=1e-3)

    def of(model: ModelSpec) -> str:
        found = fingerprint("image_classification", data, model, train, champion=None)
        return found.tokenizing

    found = []
    for words in ("old", "old", "new"):
        (tmp_path / "tokenizer" / "tokenizer.json").write_text(words)
        found.append(of(ModelSpec(tokenizer=str(tmp_path / "tokenizer"))))
    assert found[0] == found[1] != found[2]
    assert of(ModelSpec()) == ""
    graph = read(compile_pipeline(pipeline_of(Spec(name="digits", task="image_classification"))))
    (shard,) = (step for step in graph.steps() if step.name == "shard")
    assert shard.parameters["tokenizing"] == FromTask("fingerprint", "tokenizing")
