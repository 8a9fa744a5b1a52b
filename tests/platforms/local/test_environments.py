"""Steps whose packages are not installed here get an environment of their own from pip."""

import os
import zipfile
from importlib import metadata, util

import pytest
from kfp import dsl

from rekindle.errors import RequestError
from rekindle.ir.compile import compile_function
from rekindle.ir.read.pipeline import read
from tests.platforms.local.runs import run

component = dsl.component(base_image="python:3.11", packages_to_install=["sparkling-water==1.5"])


@component
def sparkles() -> str:
    import iniconfig  # installed here, and not asked for
    import sparkling_water

    return f"{sparkling_water.LEVEL} {iniconfig.__name__}"


@dsl.component(base_image="python:3.11", packages_to_install=["iniconfig>=99"])
def newer() -> str:
    from importlib import metadata

    return metadata.version("iniconfig")


@dsl.component(base_image="python:3.11", packages_to_install=["no-such-package==1.2"])
def never():
    print("never printed")


@dsl.pipeline
def both():
    sparkles()
    newer()


@dsl.pipeline
def missing():
    never()
    sparkles()


def wheel(folder, name, version, source):
    """A wheel that pip accepts, of one module."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{module}.py", source)
        file.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(
            f"{info}/RECORD", f"{module}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n"
        )


@pytest.fixture
def env(tmp_path):
    """An environment in which pip finds two wheels and nothing else."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel(wheels, "sparkling-water", "1.5", "LEVEL = 'fizzy'\n")
    wheel(wheels, "iniconfig", "99.0", "")
    return {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}


def values(record):
    return {step.name: dict(step.parameters).get("Output") for step in record.steps}


@pytest.mark.slow
def test_packages_are_installed_beside_what_is_here_and_leave_it_alone(tmp_path, env):
    home, before = tmp_path / "home", metadata.version("iniconfig")
    heard = []
    graph = read(compile_function(both))
    record = run(graph, home, env=env, on_event=lambda step, event: heard.append((step, event)))
    assert values(record) == {"sparkles": "fizzy iniconfig", "newer": "99.0"}
    assert [
        (step, event["text"]) for step, event in heard if "installing" in event.get("text", "")
    ] == [
        ("newer", "installing 'iniconfig>=99' into an environment of its own"),
        ("sparkles", "installing sparkling-water==1.5 into an environment of its own"),
    ]
    assert metadata.version("iniconfig") == before
    assert util.find_spec("sparkling_water") is None
    # the environments are kept: without wheels pip would fail now
    again = run(graph, home, env={**env, "PIP_FIND_LINKS": "/nowhere"}, fresh=True)
    assert values(again) == values(record)
    # one that was not finished is made again
    made = next((home / "environments").glob("*/lib/*/site-packages/sparkling_water.py"))
    made.unlink()
    (made.parents[3] / "made").unlink()
    assert values(run(graph, home, env=env, fresh=True)) == values(record)


@pytest.mark.slow
def test_what_cannot_be_installed_ends_the_run_before_its_first_step(tmp_path, env):
    home = tmp_path / "home"
    with pytest.raises(RequestError) as caught:
        run(read(compile_function(missing)), home, env=env, run_id="run-1")
    (problem,) = caught.value.problems
    assert "the packages of the step `never` cannot be installed" in problem.what
    assert "No matching distribution found for no-such-package==1.2" in problem.what
    assert problem.fix.endswith("pip install no-such-package==1.2")
    assert not (home / "runs").exists()
    # the other step's environment stays
    assert len([p for p in (home / "environments").iterdir() if p.is_dir()]) == 1
