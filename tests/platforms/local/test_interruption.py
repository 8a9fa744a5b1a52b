"""Ctrl-C, SIGTERM, kill -9, full disks: what is left is true, and nothing keeps running."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rekindle.errors import RekindleError
from rekindle.platforms.local.store import HomeStore, clear_killed_attempts, is_alive, owner
from tests.platforms.local.runs import run, stored
from tests.support.local_execute import alive
from tests.support.local_interruption import eventually

CHILD = [sys.executable, "-m", "tests.platforms.local.run_child"]


def test_an_attempt_is_never_seen_before_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, lock = HomeStore(tmp_path), fcntl.flock

    def others_clear_up_meanwhile(handle: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        clear_killed_attempts(store.artifacts("step"))
        lock(handle, how)

    store.artifacts("step").mkdir(parents=True)
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", others_clear_up_meanwhile)
        with store.attempt("step", "key") as folder:
            (folder / "result").touch()
            assert folder.with_name(f"{folder.name}.partial").exists()
            clear_killed_attempts(store.artifacts("step"))
            assert (folder / "result").exists()
    assert [path.name for path in store.artifacts("step").iterdir()] == [folder.name]


def start(home: Path, pipeline: str, folder: Path, grace: float = 30) -> subprocess.Popen[str]:
    """A run in a process of its own, returned once its last step runs."""
    command = [*CHILD, str(home), "r", pipeline, str(folder), str(grace)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert eventually(lambda: (folder / "pids").exists() or process.poll() is not None, 120)
    assert process.poll() is None
    return process


def test_ctrl_c_lets_steps_end_in_order_and_the_run_can_be_resumed(
    home: Path, folder: Path
) -> None:
    process = start(home, "hanging", folder)
    assert owner(home, "r") == process.pid
    process.send_signal(signal.SIGINT)
    told, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "InterruptedRunError" in told
    assert "resumes" in told
    assert (folder / "terminated").exists()
    assert not alive(folder)
    record = stored(home, "r")
    assert record.status == "cancelled"
    assert [step.status for step in record.steps] == ["succeeded", "cancelled"]
    assert owner(home, "r") is None


@pytest.mark.slow
def test_a_second_ctrl_c_kills_what_does_not_listen(home: Path, folder: Path) -> None:
    process = start(home, "stubbornly_hanging", folder)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(4) == 130
    assert not alive(folder)
    assert stored(home, "r").steps[0].status == "cancelled"


@pytest.mark.slow
def test_what_does_not_listen_is_killed_after_the_grace_period(home: Path, folder: Path) -> None:
    process = start(home, "stubbornly_hanging", folder, grace=0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 130
    assert not alive(folder)


@pytest.mark.slow
def test_a_step_may_save_before_it_goes(home: Path, folder: Path) -> None:
    process = start(home, "saving", folder)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 75
    assert stored(home, "r").status == "preempted"
    assert (folder / "saved").exists()
    assert "what the step saved last is kept" in stored(home, "r").steps[0].reason


@pytest.mark.slow
def test_kill_9_leaves_no_process_and_a_run_that_resumes(home: Path, folder: Path) -> None:
    process = start(home, "hanging", folder)
    assert is_alive(home, "r")
    assert list((home / "artifacts").rglob("*.partial"))
    process.kill()
    process.wait()
    assert eventually(lambda: not alive(folder)), alive(folder)
    assert stored(home, "r").status == "running"
    assert not is_alive(home, "r")

    (folder / "pids").unlink()
    again = start(home, "hanging", folder)
    assert stored(home, "r").steps[0].cached
    assert len(list((home / "artifacts").rglob("*.partial"))) == 1
    again.send_signal(signal.SIGINT)
    again.wait(120)
    assert not list((home / "artifacts" / "hanging.hang").iterdir())


@pytest.mark.slow
def test_a_shim_that_is_killed_takes_its_step_with_it(home: Path, folder: Path) -> None:
    process = start(home, "hanging", folder)
    executor = int((folder / "pids").read_text().split()[0])
    shim = int(Path(f"/proc/{executor}/stat").read_text().rsplit(")", 1)[1].split()[1])
    os.kill(shim, signal.SIGKILL)
    told, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "killed by signal 9" in told
    assert not is_running_any(folder, 2), "the executor and its child"


def is_running_any(folder: Path, first: int) -> list[int]:
    pids = set(map(int, (folder / "pids").read_text().split()[:first]))
    return [pid for pid in alive(folder) if pid in pids]


def test_a_home_that_cannot_be_written_is_refused_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RekindleError) as caught:
        run("speaking", tmp_path / "file" / "home")
    assert "cannot keep the run under" in str(caught.value)
    assert "choose another home" in str(caught.value)


FULL_DISK = """
import sys
from pathlib import Path
from rekindle.errors import RekindleError
from tests.platforms.local.runs import run, stored
home = Path(sys.argv[1])
filler = home / "filler"
def fill(record):
    if record.steps[0].status == "running" and not filler.exists():
        with filler.open("wb") as file:
            try:
                while True:
                    file.write(b"x" * 4096); file.flush()
            except OSError:
                pass
try:
    run("chain", home, {"folder": sys.argv[2]}, run_id="r", on_change=fill)
    print("succeeded")
except RekindleError as error:
    print(type(error).__name__, error)
filler.unlink()
record = run("chain", home, {"folder": sys.argv[2]})
print([(s.cached, s.status) for s in record.steps])
"""


@pytest.mark.slow
def test_a_full_disk_is_an_error_and_nothing_half_written_counts(home: Path, folder: Path) -> None:
    home.mkdir()
    mount = f'mount -t tmpfs -o size=1m tmpfs {home} && exec "$0" "$@"'
    command = [
        "unshare",
        "-rm",
        "sh",
        "-c",
        mount,
        sys.executable,
        "-c",
        FULL_DISK,
        str(home),
        str(folder),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip("this machine lets us mount no small disk")
    assert "No space left on device" in done.stdout, done
    assert "[(False, 'succeeded'), (False, 'succeeded'), (False, 'succeeded')]" in done.stdout, done
