"""A step in docker sees its own folders only and gains no rights (M1); a checkpoint's curve does not fill the memory (M6)."""

import gzip

import pytest

from rekindle.platforms.local.containers import Containers
from rekindle.platforms.local.docker import Docker
from rekindle.train import manifest
from tests.platforms.local.runs import graph


@pytest.fixture
def words(tmp_path):
    """What docker is asked to do for a step that was given one artifact."""
    for name in ("outputs", "given", "secret"):
        (tmp_path / name).mkdir()
    (step,) = (s for s in graph("counted", "containers").steps() if s.name == "count")
    artifact = {"uri": str(tmp_path / "given")}
    task = {
        "executor_input": {"inputs": {"artifacts": {"data": {"artifacts": [artifact]}}}},
        "env": {},
    }
    here = Containers(
        Docker("docker", "unix:///x", {}), {step.container.image: "sha256:5"}, user="1000:1000"
    )
    made = here.contained(task, step, tmp_path / "outputs", {})
    return [word for word in made["command"] if isinstance(word, str)]


def test_only_what_it_was_given_and_where_it_writes_is_mounted(words, tmp_path):
    assert [word for word in words if word.startswith("--mount")] == [
        f'--mount=type=bind,"source={tmp_path / "given"}","target={tmp_path / "given"}",readonly',
        f'--mount=type=bind,"source={tmp_path / "outputs"}","target={tmp_path / "outputs"}"',
    ]
    assert not [
        word for word in words if word.startswith(("--volume", "-v", "--privileged", "--network"))
    ]


def test_it_is_the_user_without_capabilities_and_with_a_limit_of_processes(words):
    image = words.index("sha256:5")
    for option in (
        "--user=1000:1000",
        "--cap-drop=ALL",
        "--security-opt=no-new-privileges",
        "--pids-limit=8192",
        "--pull=never",
    ):
        assert option in words[:image]


def test_a_curve_that_unpacks_to_more_than_any_training_writes_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "_MOST_HISTORY_BYTES", 1000)
    name = "step-000000001.ab"
    (tmp_path / name).mkdir()
    (tmp_path / name / manifest.HISTORY).write_bytes(gzip.compress(b"x" * 10**7))
    file = manifest.File(manifest.HISTORY, 1, "")
    found = manifest.Checkpoint(str(tmp_path), name, 1, {}, (file,)).history()
    assert len(found) == 1000
