"""The self-test of images, on this machine, and what it says of images that lack something."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from containers import selftest
from containers.selftest import Check
from rekindle.launch.rendezvous import Rendezvous
from rekindle.launch.worker_group import GroupStart, argv

ROOT = Path(__file__).parents[2]


def run(*words, path):
    return subprocess.run(
        [sys.executable, ROOT / "containers" / "selftest.py", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.slow
def test_all_but_the_user_is_as_it_has_to_be_on_this_machine():
    done = run("--json", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    said = json.loads(done.stdout)
    found = {check["name"]: check["ok"] for check in said["checks"]}
    is_root = os.getuid() == 0
    assert found.pop("user") is not is_root
    assert list(found) == ["python", "rekindle", "temporary", "kfp", "torch", "worker", "ranks"]
    assert all(found.values()), done.stdout
    assert (said["ok"], done.returncode) == (not is_root, int(is_root))


def test_platforms_call_python3():
    path = os.environ["PATH"]
    try:
        os.environ["PATH"] = "/nowhere"
        check = selftest.check_python()
    finally:
        os.environ["PATH"] = path
    assert not check.ok
    assert "python3 is not on PATH" in check.what
    assert "put " in str(check)


def test_an_image_says_what_was_built_into_it(tmp_path):
    assert selftest.read_image(tmp_path) == {}
    image = {"image": "train", "version": "9.9", "efa": "1.51.0"}
    (tmp_path / "image.json").write_text(json.dumps(image))
    assert selftest.read_image(tmp_path) == image
    check = selftest.check_rekindle(image)
    assert (check.ok, check.fix) == (False, "build the image from containers/ once more")


def test_there_has_to_be_a_place_to_write(tmp_path):
    assert selftest.check_temporary(tmp_path).ok
    check = selftest.check_temporary(tmp_path / "none")
    assert not check.ok
    assert "mount a volume" in check.fix


@pytest.fixture
def libraries(tmp_path):
    """A folder for a plugin: `whole` has one that loads, `broken` one that does not, `empty` none."""
    some = min(Path(sysconfig.get_path("stdlib"), "lib-dynload").glob("*.so"))
    for name in ("whole", "broken", "empty"):
        (tmp_path / name / "lib" / "x86_64-linux-gnu").mkdir(parents=True)
    place = Path("lib", "x86_64-linux-gnu", "libnccl-net.so")
    shutil.copy(some, tmp_path / "whole" / place)
    (tmp_path / "broken" / place).write_text("no library")
    return tmp_path


@pytest.mark.parametrize(
    ("image", "folder", "expected"),
    [
        ({"efa": ""}, "whole", []),
        ({}, "empty", []),
        ({"efa": "1.51.0"}, "whole", [""]),
        ({"efa": "1.51.0"}, "empty", ["build the image from containers/ once more"]),
        ({"efa": "1.51.0"}, "broken", ["give the image what the plugin links to"]),
    ],
)
def test_plugins_have_to_load_where_they_were_built_in(image, folder, expected, libraries):
    found = selftest.check_plugins(image, {"efa": libraries / folder})
    assert [check.fix for check in found] == expected


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="there is a vLLM here")
def test_an_image_on_vllm_has_to_import_it():
    check = selftest.check_vllm()
    assert check.what.endswith("No module named 'vllm'")
    assert "use a base with vLLM" in check.fix


def test_a_line_says_what_to_do():
    assert str(Check("user", "10001")) == "ok      user        10001"
    assert str(Check("user", "root", "do this")).splitlines() == [
        "not ok  user        root",
        " " * 20 + "do this",
    ]


@pytest.mark.slow
def test_a_torch_that_the_engine_cannot_import_is_named_with_the_range_that_works(
    tmp_path, monkeypatch
):
    """As the base image of a year had one: torch is there, and lacks a name that the engine imports."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("class Tensor: ...\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    check = selftest.check_worker()
    assert not check.ok
    assert check.what.startswith("ModuleNotFoundError: No module named 'torch.")
    assert re.search(r"use a torch that rekindle supports \(torch[<>]=?2\.", check.fix)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert selftest.check_worker().ok


BASES = {
    "2.9.1+cu128": 1,
    "2.10.0a0+b4e4ee81d3.nv25.12": 0,
    "2.11.0": 0,
    "2.13.1": 0,
    "2.14.0.dev20261101": 1,
    "": 0,
}


@pytest.mark.parametrize("version", BASES)
def test_a_base_image_whose_torch_is_out_of_range_is_refused_before_anything_is_installed(
    version, tmp_path
):
    if version:
        (tmp_path / "torch-0.dist-info").mkdir()
        (tmp_path / "torch-0.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
        )
    # neither site-packages nor the environment: the base has what lies in tmp_path
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    done = subprocess.run(
        [
            "sh",
            str(ROOT / "containers" / "install.sh"),
            "torch",
            str(python),
            str(ROOT / "containers" / "requirements.txt"),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == BASES[version], done.stderr
    if done.returncode:
        assert (
            f"the base image has torch {version}, and rekindle runs on 2.10 up to, but not including, 2.14"
            in done.stderr
        )
        assert "set BASE_IMAGE" in done.stderr


def test_ranks_of_one_node_meet_where_no_name_can_be_looked_up():
    assert "--local-addr=127.0.0.1" in argv(["-m", "x"], Rendezvous(), GroupStart(0))


@pytest.mark.parametrize("image", ["cpu", "train"])
def test_an_image_gets_the_file_that_it_runs_without_a_command(image):
    """What COPY names is in the context of the build, and the command is among it."""
    lines = (ROOT / "containers" / image / "Dockerfile").read_text().splitlines()
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines()}
    copied = {}
    for line in lines:
        if line.startswith("COPY "):
            *files, place = line.split()[1:]
            assert {file for file in files if (ROOT / file).is_file()} == set(files) & kept
            copied |= {
                place + Path(file).name if place.endswith("/") else place: file for file in files
            }
    (command,) = (json.loads(line[4:]) for line in lines if line.startswith("CMD "))
    (entry,) = (json.loads(line[11:]) for line in lines if line.startswith("ENTRYPOINT "))
    assert copied[command[-1]] == "containers/selftest.py"
    assert copied[entry[-1]] == "containers/entry.sh"
    assert f"{Path(command[-1]).parent}/{selftest.RANKS.name}" in copied
