"""The shim alone: what it runs, what it reports, how it ends, on real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rekindle.launch import events, shim
from tests.support.launch_shim import task

# without site-packages: as in a bundle, it has Python's own library and what it brings
ROOT = Path(shim.__file__).parents[2]
START = (
    f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
    "from rekindle.launch.shim import main; sys.exit(main(sys.argv))"
)
SHIM = [sys.executable, "-I", "-S", "-c", START]


def python(code: str, *args: Any) -> list[Any]:
    return ["python3", "-c", code, *args]


def run(file: Path, **options: Any) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run([*SHIM, str(file)], capture_output=True, text=True, timeout=60, **options)
    return done.returncode, json.loads((file.parent / "result.json").read_text()), done.stdout


WRITE = "import sys; [open(p, 'w').write(t) for p, t in zip(sys.argv[1::2], sys.argv[2::2])]"


def out(name: str) -> dict[str, Any]:
    return {"ref": ["outputs", "parameters", name]}


def test_outputs_are_read_from_their_files_by_type(tmp_path: Path) -> None:
    kinds = {
        "s": "STRING",
        "n": "NUMBER_INTEGER",
        "f": "NUMBER_DOUBLE",
        "b": "BOOLEAN",
        "l": "LIST",
        "d": "STRUCT",
    }
    texts = {"s": " 1\n", "n": "3.0", "f": "2", "b": "TRUE", "l": "[1, 2.5]", "d": '{"a": 1}'}
    command = python(WRITE, *(word for name in kinds for word in (out(name), texts[name])))
    code, result, _ = run(task(tmp_path, command, kinds=kinds))
    assert code == 0, result
    assert result["parameters"] == {
        "s": " 1\n",
        "n": 3,
        "f": 2.0,
        "b": True,
        "l": [1, 2.5],
        "d": {"a": 1},
    }
    assert [type(v).__name__ for v in result["parameters"].values()] == [
        "str",
        "int",
        "float",
        "bool",
        "list",
        "dict",
    ]


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("NUMBER_INTEGER", " 007\n", 7),
        ("NUMBER_INTEGER", "-3", -3),
        ("NUMBER_INTEGER", "9007199254740993", 9007199254740992),
        ("NUMBER_DOUBLE", ".5", 0.5),
        ("BOOLEAN", "1", True),
        ("BOOLEAN", "F\n", False),
    ],
)
def test_files_are_read_as_kfps_launcher_reads_them(
    kind: str, text: str, value: Any, tmp_path: Path
) -> None:
    file = task(tmp_path, python(WRITE, out("s"), text), kinds={"s": kind})
    assert run(file)[1]["parameters"] == {"s": value}


def test_values_in_a_command_are_written_as_kfp_writes_them(tmp_path: Path) -> None:
    """As Go's %d and %g, but with all digits beside an output (driver/util.go, launcher_v2.go)."""
    share = {"ref": ["inputs", "parameters", "share"]}
    beside = {"concat": [out("s"), "=", share]}
    code = "import sys; print(sys.argv[2], sys.argv[3].partition('=')[2]); open(sys.argv[1], 'w')"
    given = {"inputs": {"parameterValues": {"share": 1e-05}, "artifacts": {}}}
    file = task(tmp_path, python(code, out("s"), share, beside), kinds={"s": "STRING"})
    content = json.loads(file.read_text())
    content["executor_input"] |= given
    file.write_text(json.dumps(content))
    assert run(file)[2] == "1e-05 0.00001\n"


def test_executor_output_wins_and_carries_artifacts(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    custom = tmp_path / "custom"
    report = {
        "parameterValues": {"s": "said", "n": 4.0},
        "artifacts": {
            "data": {
                "artifacts": [{"name": "data", "metadata": {"rows": 2}, "custom_path": str(custom)}]
            }
        },
    }
    target = str(tmp_path / "out" / "executor_output.json")
    command = python(WRITE, target, json.dumps(report), str(custom), "content", out("s"), "file")
    _, result, _ = run(task(tmp_path, command))
    assert result["parameters"] == {"s": "said", "n": 4}
    uri = str(tmp_path / "deep" / "data")
    assert result["artifacts"]["data"] == {
        "schema_title": "system.Dataset",
        "schema_version": "0.0.1",
        "uri": uri,
        "metadata": {"rows": 2},
        "custom_path": str(custom),
    }
    assert Path(uri).read_text() == "content"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x", "`n` is not a NUMBER_INTEGER"),
        ("2.5", "`n` is not a NUMBER_INTEGER"),
        ("true", "`n` is not a NUMBER_INTEGER"),
    ],
)
def test_an_output_of_the_wrong_type_fails_the_step(text: str, says: str, tmp_path: Path) -> None:
    code, result, _ = run(task(tmp_path, python(WRITE, out("s"), "x", out("n"), text)))
    assert code == 1
    assert says in result["error"]


def test_a_missing_output_fails_the_step(tmp_path: Path) -> None:
    code, result, _ = run(task(tmp_path, python("")))
    assert (code, result["exit_code"]) == (1, 1)
    assert "did not write its output `s`" in result["error"]


@pytest.mark.parametrize("code", [1, 2, 75, 130])
def test_exit_codes_pass_through(code: int, tmp_path: Path) -> None:
    returned, result, _ = run(task(tmp_path, python(f"raise SystemExit({code})")))
    assert returned == result["exit_code"] == code
    assert result["error"] == ""


def test_death_by_a_signal_is_128_and_its_number(tmp_path: Path) -> None:
    code, _, _ = run(task(tmp_path, python("import os; os.kill(os.getpid(), 9)")))
    assert code == 137


@pytest.mark.parametrize(
    ("command", "says"),
    [(["no-such-command"], "cannot start `no-such-command`"), ([], "no command")],
)
def test_what_cannot_start_says_why(command: list[str], says: str, tmp_path: Path) -> None:
    code, result, _ = run(task(tmp_path, command))
    assert code == 1
    assert says in result["error"]


def test_python3_is_this_interpreter_and_the_environment_is_handed_on(tmp_path: Path) -> None:
    show = (
        "import json, os, sys; e = os.environ; "
        "print(json.dumps([sys.executable, e['GIVEN'], e['OWN']]))"
    )
    env = {"PATH": "/usr/bin:/bin", "GIVEN": "from outside"}
    own = {"OWN": {"concat": ["<", {"ref": ["inputs", "parameters", "word"]}, ">"]}}
    _, _, printed = run(task(tmp_path, python(show), env=own, kinds={}), env=env)
    executable, given, added = json.loads(printed)
    assert Path(executable).parent == Path(sys.executable).parent
    assert (given, added) == ("from outside", "<a b>")


def test_an_interpreter_without_a_python3_beside_it_is_still_used(tmp_path: Path) -> None:
    lone = tmp_path / "lone" / "python-own"
    lone.parent.mkdir()
    lone.symlink_to(sys.executable)
    file = task(tmp_path, python("import sys; print(sys.executable)"), kinds={})
    done = subprocess.run([str(lone), *SHIM[1:], str(file)], capture_output=True, text=True)
    assert done.stdout.strip() == str(lone), done


def start(file: Path) -> subprocess.Popen[str]:
    """The shim, once what it runs has said that it is ready."""
    process = subprocess.Popen([*SHIM, str(file)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


TRAP = """
import signal, sys, time
def on(number, frame):
    print("got", number, flush=True); time.sleep(0.2); sys.exit(75)
signal.signal(signal.SIGTERM, on); signal.signal(signal.SIGINT, on)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_go_on_to_the_process(number: int, tmp_path: Path) -> None:
    process = start(task(tmp_path, python(TRAP)))
    process.send_signal(number)
    told, _ = process.communicate(timeout=20)
    assert told == f"got {int(number)}\n"
    assert process.returncode == 75


def test_a_shell_in_between_does_not_hide_that_its_child_saved(tmp_path: Path) -> None:
    (tmp_path / "trap.py").write_text(TRAP)
    process = start(task(tmp_path, ["sh", "-c", "python3 trap.py; echo after"]))
    process.send_signal(signal.SIGTERM)
    told, _ = process.communicate(timeout=20)
    assert "got 15" in told
    assert process.returncode == 75


DETACH = """
import subprocess, sys
subprocess.Popen(["sleep", "{seconds}"], start_new_session=True)
subprocess.Popen(["sh", "-c", "sleep {seconds} & sleep {seconds}"])
"""


def running(seconds: str) -> list[str]:
    """Sleeps of that length, a number that no other test uses."""
    lines = [p / "cmdline" for p in Path("/proc").glob("[0-9]*")]
    found = []
    for line in lines:
        try:
            words = line.read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0] == b"sleep" and seconds.encode() in words:
            found.append(line.parent.name)
    return found


@pytest.mark.parametrize(
    "command", [python(""), python("raise SystemExit(3)"), ["no-such-command"]]
)
def test_what_is_to_come_afterwards_comes_however_the_task_ends(
    command: list[Any], tmp_path: Path
) -> None:
    codes = {"": 0, "raise SystemExit(3)": 3, "no-such-command": 1}
    code, _, _ = run(task(tmp_path, command, kinds={}, afterwards=["touch", str(tmp_path / "end")]))
    assert code == codes[command[-1]]
    assert (tmp_path / "end").exists()


def test_what_outlives_the_process_is_killed_even_outside_its_group(tmp_path: Path) -> None:
    seconds = f"600.{os.getpid()}1"
    code, _, _ = run(task(tmp_path, python(DETACH.replace("{seconds}", seconds)), kinds={}))
    assert code == 0
    assert running(seconds) == []


def test_sigquit_kills_everything(tmp_path: Path) -> None:
    seconds = f"600.{os.getpid()}2"
    process = start(task(tmp_path, python(DEAF + DETACH.replace("{seconds}", seconds) + READY)))
    assert len(running(seconds)) >= 1
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGQUIT)
    assert process.wait(10) == 137
    assert running(seconds) == []


DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN)"
READY = "print('ready', flush=True); time.sleep(600)"


def none_left(seconds: str) -> bool:
    end = time.monotonic() + 10
    while running(seconds) and time.monotonic() < end:
        time.sleep(0.02)
    return not running(seconds)


def test_it_dies_with_its_parent_and_so_does_what_does_not_listen(tmp_path: Path) -> None:
    seconds = f"600.{os.getpid()}3"
    file = task(tmp_path, python(DEAF + DETACH.replace("{seconds}", seconds) + READY))
    parent = (
        "import json, os, subprocess, sys; p = sys.argv[1]; t = json.load(open(p)); "
        "json.dump({**t, 'parent': os.getpid()}, open(p, 'w')); subprocess.run(sys.argv[2:] + [p])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", parent, str(file), *SHIM], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.kill()
    process.wait()
    assert none_left(seconds)


def test_when_it_is_killed_its_process_dies_too(tmp_path: Path) -> None:
    seconds = f"600.{os.getpid()}4"
    process = start(task(tmp_path, ["sh", "-c", f"echo ready; exec sleep {seconds}"]))
    process.kill()
    process.wait()
    assert none_left(seconds)


def test_it_does_not_start_for_a_parent_that_is_gone(tmp_path: Path) -> None:
    file = task(tmp_path, ["touch", str(tmp_path / "started")], parent=1)
    done = subprocess.run([*SHIM, str(file)], capture_output=True)
    assert done.returncode == 137
    assert not (tmp_path / "started").exists()


def test_the_core_needs_the_standard_library_only(tmp_path: Path) -> None:
    for name in ("launch/shim.py", "protojson.py"):
        copy = tmp_path / "rekindle" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        (copy.parent / "__init__.py").touch()
        copy.write_bytes((ROOT / "rekindle" / name).read_bytes())
    file = task(tmp_path, python(WRITE, out("s"), "x", out("n"), "1"))
    command = [word.replace(str(ROOT), str(tmp_path)) for word in SHIM[1:]]
    done = subprocess.run([sys.executable, *command, str(file)], capture_output=True)
    assert done.returncode == 0, done


def test_events_survive_prefixes_and_nonsense(capsys: pytest.CaptureFixture[str]) -> None:
    events.emit("progress", step=1, steps=2, loss=0.5)
    line = capsys.readouterr().out
    assert line.endswith("}\n")
    found = events.parse(line)
    assert found == {"event": "progress", "at": found["at"], "step": 1, "steps": 2, "loss": 0.5}
    assert events.parse("[default0]:" + line) == found
    for nonsense in (
        "",
        "::rekindle ",
        "::rekindle {",
        "::rekindle [1]",
        '::rekindle {"a": 1}',
        "loss 0.5",
    ):
        assert events.parse(nonsense) is None


def test_the_reason_is_in_the_log_where_the_result_cannot_be_written(tmp_path: Path) -> None:
    file = task(tmp_path, ["true"], kinds={"s": "STRING"}, result=str(tmp_path / "none" / "r.json"))
    done = subprocess.run([*SHIM, str(file)], text=True, capture_output=True, check=False)
    assert done.returncode == 1
    assert "the step ended well but did not write its output `s`" in done.stderr


@pytest.mark.parametrize(
    ("word", "says"), [("a\udc80\ud800", "surrogates"), ("a\0b", "embedded null byte")]
)
def test_a_word_that_no_command_can_have_is_an_error_of_the_step(
    word: str, says: str, tmp_path: Path
) -> None:
    file = task(tmp_path, ["true", word])
    done = subprocess.run([*SHIM, str(file)], text=True, capture_output=True, check=False)
    result = json.loads((tmp_path / "result.json").read_text())
    assert (done.returncode, done.stderr) == (1, "")
    assert result["error"].startswith("cannot start `true`: ")
    assert says in result["error"]


def test_an_output_that_is_not_utf8_is_an_error_of_the_step(tmp_path: Path) -> None:
    code = f"open({str(tmp_path / 'out/s')!r}, 'wb').write(bytes([255]))"
    file = task(tmp_path, python(code), kinds={"s": "STRING"})
    subprocess.run([*SHIM, str(file)], check=False)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["error"].startswith("the output `s` is not UTF-8")
