"""What an engine or a launcher needs on this machine, said before anything starts."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from rekindle.app.preflight.machine import EngineCheck
from rekindle.engines import ENGINES
from rekindle.errors import StepError
from rekindle.launch.rendezvous import Rendezvous
from rekindle.launch.torchrun import torchrun
from rekindle.spec.model import Spec, TrainSpec

OFFLOADED = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}


def said(tmp_path, **train):
    spec = Spec.model_validate({"name": "x", "task": "causal_lm", "train": train})
    return [problem.what for problem in EngineCheck().problems(spec, tmp_path)]


@pytest.fixture
def path(tmp_path, monkeypatch):
    """An empty folder that alone is on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def test_mpirun_has_to_be_there_and_open_mpis(tmp_path, path):
    assert said(tmp_path, launcher="mpirun") == ["there is no mpirun"]
    mpirun = path / "mpirun"
    mpirun.write_text("#!/bin/sh\necho 'HYDRA build details: Version: 4.0.2'\n")
    mpirun.chmod(0o755)
    assert said(tmp_path, launcher="mpirun") == [f"{mpirun} is not Open MPI's"]
    mpirun.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1.4'\n")
    assert said(tmp_path, launcher="mpirun") == []


def test_an_image_without_mpirun_is_named_before_ranks_start(tmp_path, path):
    train = TrainSpec(launcher="mpirun")
    with pytest.raises(StepError, match="there is no mpirun here") as refused:
        torchrun(["x.py"], train, status=tmp_path / "status", rendezvous=Rendezvous())
    assert "in the image of the step" in refused.value.problems[0].fix


def test_offload_needs_a_compiler(tmp_path, path):
    pytest.importorskip("deepspeed", reason="the extra `deepspeed` is not installed")
    assert said(tmp_path, engine="deepspeed") == []
    (what,) = said(tmp_path, engine="deepspeed", engine_config=OFFLOADED)
    assert what == "the engine deepspeed needs g++ for these settings"


def test_a_base_in_4_bits_needs_its_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    given = {"name": "x", "task": "causal_lm", "model": {"lora": {"base": "4bit"}}}
    (problem,) = EngineCheck().problems(Spec.model_validate(given), tmp_path)
    assert problem.what == "a base in 4 bits needs the package bitsandbytes"
    assert problem.fix == "pip install 'rekindle[qlora]'"


def test_every_extra_that_an_error_or_a_page_names_can_be_installed():
    root = Path(__file__).parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    texts = [
        *root.glob("rekindle/**/*.py"),
        *root.glob("docs/*.md"),
        root / "README.md",
        *root.glob("configs/**/*.yaml"),
    ]
    named = {
        n
        for p in texts
        for found in re.findall(r"rekindle\[([a-z0-9,]+)\]", p.read_text())
        for n in found.split(",")
    }
    assert {"deepspeed", "trainer", "qlora", "fp8"} <= named
    assert named <= extras.keys()
    assert set(ENGINES) <= extras.keys()
