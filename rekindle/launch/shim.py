"""Run one KFP executor anywhere that is not KFP: `python -m rekindle.launch.shim
TASK.json`.

TASK.json, written by a platform, holds
    source          code of a lightweight component, or ""; `args` are then for KFP's executor
    command, args   lists of arguments as `ir.placeholders.lower` writes them
    executor_input  KFP's ExecutorInput; the folders of its output paths are made here
    env             what the step adds to this process's environment, each value an argument too
    run             values of `{{$.pipeline_job_name}}` and its like
    outputs         {"parameters": {name: IR type}, "artifacts": {name: {schema_title, ...}}}
    work, cwd       a scratch folder, and where to run
    python          the folder of the step's `python3`, if it is not this interpreter
    result          where RESULT.json goes
    parent          a process id to die with, or null
    afterwards      for docker's client: the command that removes the container, which a client that
                    is killed leaves running

RESULT.json holds `exit_code`, typed `parameters`, `artifacts` (uri, schema_title,
schema_version, metadata, custom_path) and `error`: why the shim failed the step although
its process did not. The exit code is the process's own (75 stays 75), 128 + n where
signal n ended it. SIGTERM and SIGINT go on to the process's group; SIGQUIT kills
everything it started. Whatever outlives the process is killed, whatever its parent is by
then (Linux; elsewhere the process group only).

Standard library only, and of rekindle only protojson.py, which is so as well: a platform
may ship these two files."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rekindle.protojson import Json, argument_of, carried, text_of

PREEMPTED = 75
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
# of prctl(2)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
MOST_OUTPUT_BYTES = 64 << 20  # of a parameter, or of what KFP's executor reports
_LONGEST_ARGUMENT = 128 * 1024 - 1  # MAX_ARG_STRLEN of Linux
_EXECUTOR_MODULE = "kfp.dsl.executor_main"
# modules of the working directory are found but hide nothing: a `queue.py` there is not
# Python's
_FOLDER_LAST = "import sys; '' in sys.path and sys.path.remove(''); sys.path.append('')"
_RUN = f"runpy.run_module('{_EXECUTOR_MODULE}', run_name='__main__', alter_sys=True)"
_BOOLEANS = {"1": True, "t": True, "true": True, "0": False, "f": False, "false": False}
EXECUTOR = ["python3", "-c", f"{_FOLDER_LAST}; import runpy; {_RUN}"]
ADDED = {"PATH", "PYTHONUNBUFFERED", "_KFP_RUNTIME"}  # what `build_environment` adds to ours
_FROM_FILE = "sys.argv[1:] = json.load(open(sys.argv[1]))"
_WITH_ARGUMENTS_FROM_FILE = f"{_FOLDER_LAST}; import json, runpy; {_FROM_FILE}; {_RUN}"

# What a fork of this process has to do in place of a command with an environment in a
# folder, which gives its exit code; None: the command has to be executed.
Fork = Callable[[Sequence[str], Mapping[str, str], str], "Callable[[], int] | None"]


class TaskError(Exception):
    """The task cannot be started, or what it left behind is not what it promised."""


def end_when_told() -> None:
    """Let SIGTERM end this process until a step runs in it, which is told instead. The
    kernel keeps signals without a handler from process 1, which a container's first
    process is."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def main(argv: list[str], fork: Fork | None = None) -> int:
    """Run the task in the file `argv[1]`; the exit code says how it ended."""
    task = json.loads(Path(argv[1]).read_text(encoding="utf-8"))
    try:
        return run(task, fork)
    finally:
        afterwards = task.get("afterwards")
        if afterwards:
            for number in _SIGNALS:  # nothing shall interrupt it
                signal.signal(number, signal.SIG_IGN)
            null = subprocess.DEVNULL
            with contextlib.suppress(OSError):
                subprocess.run(afterwards, stdin=null, stdout=null, stderr=null)


def run(task: Json, fork: Fork | None) -> int:
    """Run the task and leave its result; the exit code says how it ended."""
    result: Json = {"exit_code": 1, "parameters": {}, "artifacts": {}, "error": ""}
    supervisor = Supervisor(task.get("parent"), fork)
    try:
        command = build_command(task)
        env = build_environment(task)
        create_output_parents(task["executor_input"]["outputs"])
        result["exit_code"] = supervisor.run(command, env, task["cwd"])
        result["told_to_end"] = supervisor.signalled is not None
        if result["exit_code"] == 0:
            result["parameters"], result["artifacts"] = collect_outputs(task)
    except TaskError as error:
        result["exit_code"] = result["exit_code"] or 1
        result["error"] = str(error)
    except OSError as error:
        result["exit_code"] = 1
        result["error"] = f"{error.strerror}: {error.filename or task['work']}"
    try:
        path = Path(task["result"])
        draft = path.with_name(path.name + ".draft")  # so that it is there whole or not at all
        draft.write_text(json.dumps(result), encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        message = f"cannot write {task['result']}: {error.strerror}"
        if result["error"] or not result["exit_code"]:  # else the command has said why it failed
            sys.stderr.write(f"{result['error'] or message}\n")
        return int(result["exit_code"]) or 1
    return int(result["exit_code"])


def render(argument: Any, task: Json, text_for: Callable[[Any], str] = text_of) -> list[str]:
    """The texts that one lowered argument stands for: one, or for an `if` none or
    several. `text_for` writes the values of parameters."""
    if isinstance(argument, str):
        return [argument]
    if "ref" in argument:
        value = _look_up(argument["ref"], task)
        if argument["ref"] == ["executor_input"]:
            return [json.dumps(value)]
        return [text_for(value)]
    if "concat" in argument:
        return ["".join(_rendered(argument["concat"], task, text_for))]
    inputs = task["executor_input"]["inputs"]
    name = argument["if"]
    is_given = name in inputs["parameterValues"] or name in inputs["artifacts"]
    return _rendered(argument["then" if is_given else "else"], task, text_for)


def _rendered(arguments: Sequence[Any], task: Json, text_for: Callable[[Any], str]) -> list[str]:
    """The texts of several arguments."""
    texts = []
    for argument in arguments:
        texts += render(argument, task, text_for)
    return texts


def _render_word(argument: Any, task: Json) -> list[str]:
    """The words of a command that one lowered argument stands for. KFP's driver writes
    the values in them, but where an output stands beside the value: there its launcher
    does."""
    text_for = text_of if _names_an_output(argument) else argument_of
    return render(argument, task, text_for)


def _names_an_output(argument: Any) -> bool:
    if isinstance(argument, str):
        return False
    if "ref" in argument:
        return bool(argument["ref"][0] == "outputs")
    for key in ("concat", "then", "else"):
        if any(map(_names_an_output, argument.get(key, ()))):
            return True
    return False


def _look_up(path: list[str], task: Json) -> Any:
    """The value that a placeholder refers to."""
    executor_input = task["executor_input"]
    match path:
        case ["executor_input"]:
            return executor_input
        case ["run", fact]:
            return _needed(task["run"], fact, f"`{fact}`, which does not exist here")
        case ["outputs", "output_file"]:
            return executor_input["outputs"]["outputFile"]
        case ["outputs", "parameters", name]:
            return executor_input["outputs"]["parameters"][name]["outputFile"]
        case ["inputs", "parameters", name]:
            values = executor_input["inputs"]["parameterValues"]
            return _needed(values, name, f"the input `{name}`, which has no value")
        case [side, "artifacts", name, *fields]:
            artifacts = executor_input[side]["artifacts"]
            missing = f"the artifact `{name}`, which was not given"
            group = _needed(artifacts, name, missing)
            return _artifact_field(group["artifacts"], name, fields)
    raise TaskError(f"unknown reference {path}")


def _needed(values: Json, name: str, what: str) -> Any:
    if name not in values:
        raise TaskError(f"the command needs {what}")
    return values[name]


def _artifact_field(artifacts: list[Json], name: str, fields: list[str]) -> Any:
    """A field of an artifact, of the first one if it is a list; all of them without
    `fields`."""
    if not fields:
        return artifacts
    if not artifacts:
        raise TaskError(f"the command needs the artifact `{name}`, which is an empty list")
    if fields == ["path"]:
        return artifacts[0].get("customPath") or artifacts[0]["uri"]
    value: Any = artifacts[0]
    for field in fields:
        value = value.get(field, "")
    return value


def build_command(task: Json) -> list[str]:
    """The words to execute, every placeholder filled in."""
    words = []
    for argument in (*task["command"], *task["args"]):
        words += _render_word(argument, task)
    if not task["source"]:
        return words
    module = Path(task["work"]) / "ephemeral_component.py"
    module.parent.mkdir(parents=True, exist_ok=True)
    module.write_text(task["source"], encoding="utf-8")
    words = ["--component_module_path", str(module), *words]
    if max(len(word.encode(errors="surrogatepass")) for word in words) <= _LONGEST_ARGUMENT:
        return [*EXECUTOR, *words]
    arguments = module.with_name("arguments.json")
    arguments.write_text(json.dumps(words), encoding="utf-8")
    return ["python3", "-c", _WITH_ARGUMENTS_FROM_FILE, str(arguments)]


def build_environment(task: Json) -> dict[str, str]:
    """Our environment and the step's, unbuffered; `python3` is ours or the task's."""
    env = {"PYTHONUNBUFFERED": "1", **os.environ, "_KFP_RUNTIME": "true"}
    for name, value in task["env"].items():
        env[name] = "".join(_render_word(value, task))
    folder = Path(task.get("python") or Path(sys.executable).parent)
    if not (folder / "python3").exists():
        # whose `python3` starts this interpreter; a link would hide its virtual
        # environment from it
        folder = Path(task["work"]) / "bin"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "python3").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        (folder / "python3").chmod(0o755)
    env["PATH"] = os.pathsep.join([str(folder), env.get("PATH", os.defpath)])
    return env


def create_output_parents(outputs: Json) -> None:
    """Make the folders that outputs go into, as KFP's launcher does."""
    places = [outputs["outputFile"]]
    for parameter in outputs["parameters"].values():
        places.append(parameter["outputFile"])
    for group in outputs["artifacts"].values():
        for artifact in group["artifacts"]:
            places.append(artifact["uri"])
    for folder in {Path(path).parent for path in places if "://" not in path}:
        folder.mkdir(parents=True, exist_ok=True)


class Supervisor:
    """Starts one process in its own group, hands signals on, and leaves nothing
    behind."""

    def __init__(self, parent: int | None, fork: Fork | None = None) -> None:
        self.parent = parent
        self.fork = fork
        self.child = 0
        self.signalled: int | None = None
        self.libc = ctypes.CDLL(None) if sys.platform == "linux" else None
        for number in _SIGNALS:
            signal.signal(number, self.on_signal)
        if self.libc:
            self.libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            if parent is not None:
                self.libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if self.orphaned():  # the parent may have died before the kernel was asked
            raise SystemExit(128 + signal.SIGKILL)

    def orphaned(self) -> bool:
        return self.parent is not None and os.getppid() != self.parent

    def on_signal(self, number: int, _frame: object) -> None:
        self.signalled = number
        if number == signal.SIGQUIT or self.orphaned():
            self.signalled = signal.SIGKILL
        self.hand_on()

    def hand_on(self) -> None:
        if self.child and self.signalled:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.child, self.signalled)
            if self.signalled == signal.SIGKILL:
                self.signal_children(signal.SIGKILL)

    def run(self, command: list[str], env: dict[str, str], cwd: str) -> int:
        """The exit code of `command` once it and all that it started are gone."""
        if not command:
            raise TaskError("the step has no command; its image's own entry point is not used here")
        run_in_fork = self.fork(command, env, cwd) if self.fork else None
        if run_in_fork is not None:
            self.child = self.start_fork(run_in_fork)
            self.hand_on()  # a signal that came before there was a child
            code = self.wait_for(self.child)
        else:
            process = self.start(command, env, cwd)
            self.child = process.pid
            self.hand_on()
            code = self.wait_for(self.child)
            process.returncode = code  # or Popen would wait for it once more
        other_codes = self.sweep()
        if self.signalled and PREEMPTED in other_codes:
            return PREEMPTED  # a shell in between died at once, what it had started saved first
        return code if code >= 0 else 128 - code

    def start(self, command: list[str], env: dict[str, str], cwd: str) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                command, env=env, cwd=cwd, stdin=subprocess.DEVNULL, preexec_fn=self.prepare_child
            )
        except (OSError, ValueError) as error:  # a null byte, a lone surrogate
            why = getattr(error, "strerror", "") or error
            raise TaskError(f"cannot start `{command[0]}`: {why}") from error

    def start_fork(self, run_in_fork: Callable[[], int]) -> int:
        """The child's process id; in the child it does not return."""
        me = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        pid = os.fork()
        if pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.setpgid(pid, pid)  # both do, because either may be first
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            return pid
        self.prepare_child()
        for number in _SIGNALS:  # as Python begins with
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        if os.getppid() != me:
            os._exit(128 + signal.SIGKILL)
        sys.exit(run_in_fork())

    def prepare_child(self) -> None:
        os.setpgid(0, 0)
        if self.libc:
            self.libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def wait_for(self, child: int) -> int:
        while True:
            pid, status = os.waitpid(-1, 0)
            if pid == child:
                return os.waitstatus_to_exitcode(status)

    def sweep(self) -> list[int]:
        """End what is left, at once unless signalled to end by itself; their exit
        codes."""
        codes: list[int] = []
        signalled_pids: set[int] = set()
        with contextlib.suppress(ChildProcessError):
            while True:
                if self.signalled is None or self.signalled == signal.SIGKILL:
                    self.signal_children(signal.SIGKILL)
                else:  # some may be outside the group and not know yet
                    signalled_pids |= self.signal_children(self.signalled, signalled_pids)
                _, status = os.waitpid(-1, 0)
                codes.append(os.waitstatus_to_exitcode(status))
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.child, signal.SIGKILL)
        return codes

    def signal_children(self, number: int, spared: Collection[int] = ()) -> set[int]:
        """Send a signal to all children but those `spared`; the others' process ids."""
        # adopted ones included: a subreaper adopts what its descendants leave behind
        pids: set[int] = set()
        with contextlib.suppress(OSError):
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
            pids = set(map(int, children.split())).difference(spared)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return pids


def collect_outputs(task: Json) -> tuple[Json, Json]:
    """Parameters by their IR types, and artifacts, from the files that the step wrote."""
    outputs = task["executor_input"]["outputs"]
    within = task.get("within")
    report = _executor_output(outputs["outputFile"], within)
    values = report.get("parameterValues", {})
    reported = report.get("artifacts", {})
    if not (isinstance(values, dict) and isinstance(reported, dict)):
        raise TaskError("executor_output.json is not KFP's form")
    parameters = {}
    for name, kind in task["outputs"]["parameters"].items():
        if name in values:
            parameters[name] = _typed(name, values[name], kind)
        else:
            file = outputs["parameters"][name]["outputFile"]
            parameters[name] = _from_file(name, file, kind, within)
    artifacts = {}
    for name, schema in task["outputs"]["artifacts"].items():
        planned = outputs["artifacts"][name]
        artifacts[name] = _artifact(name, schema, planned, reported.get(name, {}), within)
    return parameters, artifacts


def _executor_output(path: str, within: list[str] | None) -> Json:
    """What KFP's executor reported; empty where it reported nothing."""
    try:
        text = _content("executor_output.json", path, within)
    except FileNotFoundError:
        return {}
    try:
        report = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"executor_output.json is not valid JSON: {error}") from error
    if not isinstance(report, dict):
        raise TaskError("executor_output.json is not a JSON object")
    return report


def _check_place(name: str, uri: str, within: list[str] | None) -> None:
    """TaskError for a place that a container may not name. What it says of its outputs is
    read here, with our rights: only what it was given to see may be named, by a link
    neither."""
    resolved = Path(uri.removeprefix("file://")).resolve()
    is_inside = within is None or any(resolved.is_relative_to(folder) for folder in within)
    is_remote = "://" in uri and not uri.startswith("file://")
    # `projects/1/endpoints/2`, which a component may give an artifact, is a name of
    # something else
    is_name = not ("://" in uri or Path(uri).is_absolute() or os.path.lexists(uri))
    if not is_remote and not is_name and not is_inside:
        raise TaskError(f"the output `{name}` is said to be at {uri}, which the step cannot see")


def _content(name: str, path: str, within: list[str] | None) -> str:
    """The text of a file that a step wrote. Of one that ran without our rights only a
    regular file in its own folders is read: a link would be followed with our rights, and
    a pipe never ends."""
    _check_place(name, path, within)
    flags = os.O_RDONLY
    if within is not None:
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        with open(os.open(path, flags), "rb") as file:  # noqa: PTH123 - a descriptor
            if within is not None and not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise TaskError(f"the output `{name}` is not a regular file")
            content = file.read(MOST_OUTPUT_BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise TaskError(f"the output `{name}` cannot be read: {error.strerror}") from error
    if len(content) > MOST_OUTPUT_BYTES:
        raise TaskError(f"the output `{name}` has more than {MOST_OUTPUT_BYTES:,} bytes")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TaskError(f"the output `{name}` is not UTF-8: {error}") from error


def _from_file(name: str, path: str, kind: str, within: list[str] | None) -> Any:
    try:
        text = _content(name, path, within)
    except FileNotFoundError:
        raise TaskError(f"the step ended well but did not write its output `{name}`") from None
    if kind == "STRING":
        return text
    try:
        return _typed(name, _value_of(text, kind), kind)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"the output `{name}` is not a {kind}: {text[:60]!r}") from error


def _value_of(text: str, kind: str) -> Any:
    """What a file says, as KFP's launcher reads it (metadata/converter.go,
    TextToPbValue)."""
    word = text.strip()
    if kind == "BOOLEAN" and word.lower() in _BOOLEANS:
        return _BOOLEANS[word.lower()]
    if kind == "NUMBER_INTEGER" and word.lstrip("+-").isdecimal():
        return int(word)
    if kind == "NUMBER_DOUBLE":
        return float(word)
    return json.loads(text)


def _typed(name: str, value: Any, kind: str) -> Any:
    """The value of an output as its type has it; TaskError for one of another type."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind == "NUMBER_INTEGER" and is_number:
        with contextlib.suppress(ValueError, OverflowError):
            if int(value) == value:
                return carried(value)
    if kind == "NUMBER_DOUBLE" and is_number:
        with contextlib.suppress(OverflowError):
            return float(value)
    python_type = {"STRING": str, "BOOLEAN": bool, "LIST": list, "STRUCT": dict}.get(kind)
    if python_type is None or not isinstance(value, python_type):
        raise TaskError(f"the output `{name}` is not a {kind}: {str(value)[:60]!r}")
    return value


def _artifact(
    name: str,
    schema: dict[str, str],
    group: Json,
    reported: Any,
    within: list[str] | None,
) -> Json:
    """One artifact as the executor reports it; content that it put elsewhere
    (`custom_path`) is copied to its URI. Every place is checked before anything is
    written."""
    planned = group["artifacts"][0]
    try:
        actual = (reported.get("artifacts") or [{}])[0]
        uri = actual.get("uri") or planned["uri"]
        custom = actual.get("custom_path", "")
        metadata = {**planned.get("metadata", {}), **(actual.get("metadata") or {})}
        _check_place(name, uri, within)
        if custom:
            _check_place(name, custom, within)
    except (AttributeError, TypeError, LookupError, ValueError) as error:
        raise TaskError(f"what was reported of the output `{name}` is not KFP's form") from error
    if custom and Path(uri).is_absolute() and Path(custom).exists() and not os.path.lexists(uri):
        if Path(custom).is_dir():
            shutil.copytree(custom, uri, symlinks=within is not None)
        else:
            shutil.copy2(custom, uri, follow_symlinks=within is None)
    return {**schema, "uri": uri, "metadata": metadata, "custom_path": custom}


if __name__ == "__main__":
    sys.exit(main(sys.argv))
