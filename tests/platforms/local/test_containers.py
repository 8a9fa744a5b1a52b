"""Steps that docker runs: what they see, how they end, what is left of them. Against a real daemon,
where one answers."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rekindle.errors import PreemptedError, RequestError, StepError
from rekindle.ir.graph import Graph
from rekindle.platforms.docker import Docker, find
from rekindle.platforms.local.containers import NO_CONTAINERS, When, prepare
from rekindle.platforms.local.execute import ignored
from rekindle.records import RunRecord
from tests.platforms.local import runs
from tests.platforms.local.images import make
from tests.platforms.local.runs import module, stored
from tests.support.local_interruption import eventually
from tests.support.results import outputs

IMAGE = module("containers").IMAGE


@pytest.fixture(scope="session")
def docker() -> Iterator[Docker]:
    try:
        found = find(os.environ)
    except RequestError as error:
        pytest.skip(f"{error.problems[0].what}; `make test-containers` starts it")
    make(found, IMAGE)
    yield found
    discard(found, IMAGE)


def discard(docker: Docker, image: str) -> None:
    subprocess.run(docker.words("image", "rm", "--force", image), capture_output=True, check=True)


@pytest.fixture(autouse=True)
def nothing_is_left(home: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    """No test leaves a container behind."""
    yield
    if "docker" in request.fixturenames:
        assert request.getfixturevalue("docker").containers(str(home)) == []


def graph(name: str) -> Graph:
    return runs.graph(name, "containers")


def run(
    name: str, home: Path, arguments: dict[str, Any] | None = None, when: When = "auto", **more: Any
) -> RunRecord:
    containers = prepare(graph(name), when, os.environ)
    return runs.run(graph(name), home, arguments, containers=containers, **more)


def log_of(record: RunRecord, step: str) -> str:
    return Path(record.step(step).log).read_text()


def test_a_container_component_runs_in_its_image_on_artifacts_from_here(
    docker: Docker, home: Path
) -> None:
    record = run("counted", home)
    assert outputs(graph("counted"), record) == {"Output": 3}
    assert "Read-only file system" in log_of(record, "count")
    copy = Path(record.step("count").artifacts["copy"].uri)
    assert copy.read_text() == "1\n2\n3\n"
    assert (copy.stat().st_uid, copy.stat().st_gid) == (os.getuid(), os.getgid())


def test_a_step_sees_its_own_variables_and_limits_and_nothing_else(
    docker: Docker, home: Path, tmp_path: Path
) -> None:
    pipeline, secrets = graph("looking"), ("TOKEN",)
    env = {**os.environ, "TOKEN": "s3cret", "CLUSTER_TOKEN": "cl5ster", "OTHER": "x"}
    containers = prepare(pipeline, "auto", env, secrets)
    containers = dataclasses.replace(containers, user="4321:4321")
    (tmp_path / "file").touch()
    arguments = {"file": str(tmp_path / "file")}
    record = runs.run(pipeline, home, arguments, containers=containers, env=env)
    assert log_of(record, "look").splitlines()[:9] == [
        "user 4321",
        "home /tmp",
        "token s3cret",
        "cluster cl5ster",
        "mode a b=c",
        "other ",
        "path /bin:/usr/bin",
        "file unseen",
        str(64 << 20),
    ]
    texts = [p.read_text() for p in home.rglob("*.json")]
    assert not [text for text in texts if "s3cret" in text or "cl5ster" in text]
    said = {row.what for row in ignored(pipeline, containers)}
    assert said == {"Secrets of a cluster are not read, the variables come from this environment"}


def test_the_exit_code_is_the_containers_and_a_failed_attempt_is_retried(
    docker: Docker, home: Path
) -> None:
    with pytest.raises(StepError, match="exit code 3: leaving"):
        run("leaving", home, {"code": 3}, run_id="r")
    assert stored(home, "r").step("leave").attempts == 2


def test_exit_code_75_means_preempted(docker: Docker, home: Path) -> None:
    with pytest.raises(PreemptedError):
        run("leaving", home, {"code": 75}, run_id="r")
    assert stored(home, "r").step("leave").attempts == 1


def test_a_container_over_its_time_is_killed(docker: Docker, home: Path) -> None:
    with pytest.raises(StepError, match="timed out after 2 s"):
        run("deaf_and_limited", home, grace_seconds=0.5)


def test_a_step_over_its_memory_is_said_to_be(docker: Docker, home: Path) -> None:
    with pytest.raises(StepError, match=r"killed by signal 9 \(out of memory\?\)"):
        run("hungry", home)


CHILD = [sys.executable, "-m", "tests.platforms.local.run_contained"]


def start(home: Path, pipeline: str) -> subprocess.Popen[str]:
    """A run in a process of its own, returned once its container is at work."""
    process = subprocess.Popen(
        [*CHILD, str(home), "r", pipeline], stdout=subprocess.PIPE, text=True
    )
    assert eventually(
        lambda: list(home.glob("artifacts/*/*/begun")) or process.poll() is not None, seconds=90
    )
    assert process.poll() is None
    return process


def test_sigterm_reaches_the_command_which_may_save(docker: Docker, home: Path) -> None:
    process = start(home, "waiting")
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 75
    assert log_of(stored(home, "r"), "wait-for-term") == "saved\n"


def test_a_command_that_knows_nothing_of_signals_ends_at_sigterm(
    docker: Docker, home: Path
) -> None:
    process = start(home, "sleeping")
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 130  # the grace period is 30 s


def test_a_killed_run_takes_its_container_along(docker: Docker, home: Path) -> None:
    process = start(home, "deaf")
    assert docker.containers(str(home))
    process.kill()
    process.wait()
    assert eventually(lambda: not docker.containers(str(home)))


def test_what_a_killed_run_and_its_killed_shim_left_goes_when_the_next_begins(
    docker: Docker, home: Path
) -> None:
    process = start(home, "deaf")
    ((name, run_id),) = docker.containers(str(home))
    for pid in _shims(home):
        os.kill(pid, signal.SIGSTOP)  # so that none of them notices
    process.kill()
    process.wait()
    for pid in _shims(home):
        os.kill(pid, signal.SIGKILL)
    assert docker.containers(str(home)) == [(name, run_id)] == [(name, "r")]
    run("counted", home)
    assert docker.containers(str(home)) == []


def _shims(home: Path) -> list[int]:
    entries = [p for p in Path("/proc").glob("[0-9]*/cmdline") if p.parent.name != str(os.getpid())]
    needle = f"{home}/runs/r/steps".encode()
    found = []
    for entry in entries:
        try:
            words = entry.read_bytes()
        except OSError:
            continue
        if b"rekindle.launch.shim" in words and needle in words:
            found.append(int(entry.parent.name))
    return found


def test_another_image_of_the_same_name_is_other_work(docker: Docker, home: Path) -> None:
    before = docker.image_id(IMAGE)
    run("counted", home)
    assert run("counted", home).step("count").cached
    try:
        other = make(docker, IMAGE, mark="another")
        step = run("counted", home).step("count")
    finally:
        discard(docker, other)
        subprocess.run(docker.words("tag", before, IMAGE), check=True)
    assert not step.cached
    assert step.reason == "the image it runs in changed"


def test_always_means_python_components_too(docker: Docker, home: Path) -> None:
    pipeline = graph("python_inside")
    record = run("python_inside", home, when="always")
    assert outputs(pipeline, record) == {"Output": "inside"}
    made = record.step("where-am-i").artifacts["made"]
    assert Path(made.uri).read_text() == "a, b.txt"
    assert made.metadata["seen"] == 1
    assert outputs(pipeline, run("python_inside", home)) == {"Output": "outside"}


def test_packages_are_installed_inside_of_the_container_by_the_pipelines_own_command(
    docker: Docker, home: Path
) -> None:
    record = run("installing", home, when="always")
    assert outputs(graph("installing"), record) == {"Output": "ran"}
    assert "pip install --quiet" in log_of(record, "with-packages")
    assert "no-such-package==1.2" in log_of(record, "with-packages")
    with pytest.raises(RequestError, match="no-such-package"):
        run("installing", home, env={**os.environ, "PIP_NO_INDEX": "1"})


def test_the_nodes_of_a_distributed_step_meet(docker: Docker, home: Path) -> None:
    record = run("met", home)
    assert outputs(graph("met"), record) == {"Output": "hello from node 1"}


def test_an_image_that_cannot_be_had_is_said_or_refused(docker: Docker) -> None:
    pipeline = graph("unobtainable")
    (row,) = ignored(pipeline, prepare(pipeline, "auto", os.environ))
    assert row.asked_by == ("localhost:1/no-such-image:1",)
    assert row.what.startswith("Runs as a process here, not in its image: Error response")
    with pytest.raises(
        RequestError, match="image localhost:1/no-such-image:1 cannot be had"
    ) as caught:
        prepare(pipeline, "always", os.environ)
    assert "docker pull localhost:1/no-such-image:1" in caught.value.problems[0].fix


def test_the_command_line_hands_secrets_on_and_says_what_it_ignores(
    docker: Docker, tmp_path: Path
) -> None:
    config = {
        "name": "looking",
        "pipeline": f"{runs.PIPELINES / 'containers.py'}:looking",
        "arguments": {"file": "x"},
        "platforms": {"local": {"secrets": {"TOKEN": "env:MY_TOKEN"}}},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    done = rekindle(tmp_path, "run", "config.yaml", "--json", MY_TOKEN="s3cret")
    assert done.returncode == 0, done.stderr
    assert [row["asked_by"] for row in json.loads(done.stdout)["ignored"]] == [["look"]]
    (log,) = tmp_path.glob(".rekindle/runs/*/steps/look/log.txt")
    assert "token ***" in log.read_text(), "it was handed on, and is masked"


def rekindle(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rekindle.cli.main", *words],
        cwd=folder,
        text=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(runs.PIPELINES.parents[2]), **env},
    )


def test_doctor_says_that_docker_is_missing(tmp_path: Path) -> None:
    config = {"name": "x", "pipeline": f"{runs.PIPELINES / 'containers.py'}:looking"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    words = ("doctor", "config.yaml", "--set", "platforms.local.containers=always")
    done = rekindle(tmp_path, *words, DOCKER_HOST="unix:///nowhere/docker.sock")
    assert done.returncode == 2
    assert "where: platforms.local.containers" in done.stderr


def test_without_docker_a_container_component_runs_as_a_process_and_the_run_says_so(
    home: Path, tmp_path: Path
) -> None:
    pipeline = runs.graph("containers")
    containers = prepare(pipeline, "auto", {"PATH": str(tmp_path)})
    assert [str(row) for row in ignored(pipeline, containers)] == [
        "Runs as a process here, not in its image: there is no docker command here: busybox"
    ]
    record = runs.run(pipeline, home, containers=containers)
    assert outputs(pipeline, record) == {"Output": "<a b>"}


def test_a_daemon_of_another_machine_is_none(tmp_path: Path) -> None:
    client = tmp_path / "docker"
    client.write_text("#!/bin/sh\necho tcp://far.example:2375\n")
    client.chmod(0o755)
    with pytest.raises(RequestError, match=r"not on this machine: tcp://far\.example:2375"):
        find({"PATH": f"{tmp_path}:/usr/bin:/bin"})


def test_a_rootless_daemon_calls_us_root(tmp_path: Path) -> None:
    client = tmp_path / "docker"
    client.write_text(
        "#!/bin/sh\necho unix:///run/user/1000/docker.sock name=seccomp name=rootless\n"
    )
    client.chmod(0o755)
    found = find({"PATH": str(tmp_path)})
    assert (found.rootless, found.user) == (True, "0:0")


def test_a_step_beside_that_is_no_container_is_said_to_run_here(docker: Docker) -> None:
    pipeline = graph("counted")
    (row,) = ignored(pipeline, prepare(pipeline, "auto", os.environ))
    assert str(row) == f"Python components run in this environment, not in their image: {IMAGE}"
    assert ignored(pipeline, prepare(pipeline, "always", os.environ)) == ()


def test_always_without_docker_is_refused_with_its_fix(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="there is no docker command here") as caught:
        prepare(graph("python_inside"), "always", {"PATH": str(tmp_path)})
    (problem,) = caught.value.problems
    assert problem.where == "platforms.local.containers"
    assert "set platforms.local.containers to never" in problem.fix


def test_docker_is_asked_for_only_where_a_step_needs_it(tmp_path: Path) -> None:
    assert prepare(graph("python_inside"), "auto", {"PATH": str(tmp_path)}) is NO_CONTAINERS
    assert prepare(graph("counted"), "never", {"PATH": str(tmp_path)}) is NO_CONTAINERS
