"""The embedded registry survives being killed while it is made."""

import contextlib
import dataclasses
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time

import pytest

from rekindle.errors import RegistryError
from rekindle.registry.models import champion_state, fetch_model
from rekindle.registry.promotion import promote
from tests.quick import first
from tests.registry.versions import model_in, registered, registry_in

MAKE = """
import sys
from rekindle.registry.models import Registry
from rekindle.spec.model import RegisterSpec
with Registry(RegisterSpec(), "m", sys.argv[1]).open("make it") as client:
    print(len(client.search_experiments()))
"""


@pytest.mark.slow
def test_a_broken_database_that_holds_models_is_left_alone(tmp_path):
    where = registry_in(tmp_path)
    promote(where, *registered(where, model_in(tmp_path / "1", b"one")))
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as opened, opened:
        opened.execute("update alembic_version set version_num = '451aebb31d03'")
    before = (tmp_path / "mlflow.db").read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", MAKE, str(tmp_path)], capture_output=True, text=True, check=False
    )  # a process of its own: this one has it open
    assert RegistryError.__name__ in done.stderr
    assert (tmp_path / "mlflow.db").read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("move", first(1, [shutil.move, shutil.copytree]), ids=["moved", "copied"])
def test_in_a_home_that_was_moved_or_copied_a_version_is_read_from_there(tmp_path, move):
    home, there = tmp_path / "a home", tmp_path / "elsewhere"
    where = registry_in(home)
    promote(where, *registered(where, model_in(tmp_path / "1", b"one")))
    digest = champion_state(where).digest
    assert fetch_model(where, "1", digest).is_relative_to(home)
    move(home, there)
    shutil.rmtree(home / "mlartifacts", ignore_errors=True)
    moved = dataclasses.replace(where, artifact_root=str(there))
    assert fetch_model(moved, "1", digest).is_relative_to(there)
    beaten = {"champion_version": "1", "champion_digest": digest}
    promote(moved, *registered(moved, model_in(tmp_path / "2", b"two"), **beaten))
    second = fetch_model(moved, "2", champion_state(moved).digest)
    assert second.is_relative_to(there)


def largest(home):
    """Bytes of the draft and its journal, which comes and goes; -1 for none."""
    sizes = [-1]
    for file in home.glob(".mlflow.db.*"):
        with contextlib.suppress(FileNotFoundError):
            sizes.append(file.stat().st_size)
    return max(sizes)


@pytest.mark.slow
@pytest.mark.timeout(900)  # eight databases, a minute each on a slow machine
def test_killed_at_any_moment_of_its_making_it_is_whole_the_next_time(tmp_path):
    """The draft grows with each migration: a kill at some sizes of it."""
    for number, size in enumerate((0, 60_000, 200_000, 400_000)):
        home = tmp_path / str(number)
        making = subprocess.Popen(
            [sys.executable, "-c", MAKE, str(home)], stdout=subprocess.DEVNULL
        )
        while making.poll() is None and largest(home) < size:
            time.sleep(0.002)
        making.send_signal(signal.SIGKILL)
        assert making.wait() == -signal.SIGKILL, "it was too fast"
        assert not (home / "mlflow.db").exists()
        done = subprocess.run(
            [sys.executable, "-c", MAKE, str(home)], capture_output=True, text=True, check=True
        )
        assert done.stdout == "1\n"
        assert sorted(p.name for p in home.iterdir()) == ["locks", "mlflow.db"]


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["tracking", "", "registry", "environment"])
def test_what_mlflow_means_in_a_notebook_stays_what_it_was(tmp_path, asked):
    theirs = f"sqlite:///{tmp_path}/theirs.db"
    program = f"""
import os, mlflow
from rekindle.registry.client import registry
def facts():
    names = ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI")
    return mlflow.is_tracking_uri_set(), mlflow.get_tracking_uri(), mlflow.get_registry_uri(), [os.environ.get(n) for n in names]
if {asked!r} == "tracking":
    mlflow.set_tracking_uri({theirs!r})
elif {asked!r} == "registry":
    mlflow.set_registry_uri({theirs!r})
before = facts()
for _ in range(2):
    with registry("", {str(tmp_path / "home")!r}, "look") as client:
        assert "/home/" in mlflow.get_tracking_uri() and "/home/" in mlflow.get_registry_uri()
    assert facts() == before, (before, facts())
try:
    with registry("", {str(tmp_path / "home")!r}, "look"):
        raise ValueError
except Exception as error:
    assert "cannot look" in str(error)
assert facts() == before, (before, facts())
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW_")}
    if asked == "environment":
        environment |= dict.fromkeys(("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"), theirs)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
