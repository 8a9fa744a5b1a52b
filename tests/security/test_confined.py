"""A step in docker sees its own folders only and gains no rights (M1)."""

import pytest

from rekindle.platforms.docker import Docker
from rekindle.platforms.local.containers import Containers
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
        "run": {"workspace_path": str(tmp_path / "workspace")},
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
