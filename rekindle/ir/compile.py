"""From `path.py:function` (or an already compiled file) to IR text: the only place that starts
KFP's compiler.

The file is loaded in a process of its own (`python -m rekindle.ir.compile PATH.py:FUNCTION`), so
that nothing in it can collide with anything here, and our own process needs no kfp. The folder of
the file, the folder above it (where `components/` lies beside `pipelines/`) and the working folder
are importable. The same file gives the same bytes: hash seed fixed, no times in the IR."""

import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import yaml

from rekindle.errors import RekindleError, RequestError, UnsupportedError
from rekindle.ir.read.raw import MAX_BYTES
from rekindle.tables import problems_in

DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_COMPILED = (".yaml", ".yml", ".json")
_TIMEOUT_SECONDS = 300
_problem = problems_in(__file__)


def compile_pipeline(target: str, cwd: Path | None = None) -> str:
    """IR text of the pipeline at `target`: `path.py:function`, or a compiled `.yaml` or `.json`,
    returned as it is. RequestError or UnsupportedError with file:line where it does not compile."""
    folder = (cwd or Path.cwd()).absolute()
    if target.endswith(_COMPILED):
        try:
            with (folder / target).open(encoding="utf-8") as file:
                return file.read(MAX_BYTES + 1)  # the reader refuses more
        except (OSError, UnicodeDecodeError) as error:
            wrong = _problem("unreadable", where=str(folder / target), error=error)
            raise RequestError([wrong]) from error
    name, _, function = target.rpartition(":")
    path = folder / (name or target)
    if path.suffix != ".py" or (name and not function.isidentifier()):
        raise RequestError([_problem("no_pipeline", target=target)])
    if not path.is_file():
        raise RequestError([_problem("no_file", path=path)])
    with tempfile.TemporaryDirectory(prefix="rekindle-") as scratch:
        answer_file = Path(scratch) / "answer.json"
        command = [sys.executable, "-P", "-m", "rekindle.ir.compile"]
        process = _run([*command, str(path), function if name else "", str(answer_file)], folder)
        try:
            answer = json.loads(answer_file.read_bytes())
        except (OSError, ValueError):  # it ended before it had written it all
            raise _ended(process, path) from None
    if "ir" in answer:
        return str(answer["ir"])
    kind = UnsupportedError if answer["unsupported"] else RequestError
    raise kind(answer["what"], where=answer["where"], fix=answer["fix"])


def _ended(process: subprocess.CompletedProcess[str], path: Path) -> RekindleError:
    """The error for a pipeline whose file ended the process that loaded it."""
    if process.returncode < 0:  # from outside, and perhaps not the next time
        number = -process.returncode
        why = "; was the memory full?" if number == signal.SIGKILL else ""
        return RekindleError([_problem("killed", where=str(path), number=number, why=why)])
    printed = (process.stderr or process.stdout).strip().splitlines()[-1:]
    last = f"; the last line that it printed: {printed[0]}" if printed else ""
    return RequestError([_problem("ended", where=str(path), code=process.returncode, last=last)])


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    # rekindle is importable wherever it was imported from; sets have no random order
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}
    try:
        return subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        slow = _problem("slow", where=command[-3], seconds=_TIMEOUT_SECONDS)
        raise RequestError([slow]) from error


def compile_function(pipeline: Any) -> str:
    """IR text of a `@dsl.pipeline` or component that is loaded, as in a notebook. Not written by
    KFP's compiler: its comments on top break the YAML where a default has a line break."""
    from google.protobuf.json_format import MessageToDict

    documents = [MessageToDict(pipeline.pipeline_spec)]
    if pipeline.platform_spec.platforms:
        documents.append(MessageToDict(pipeline.platform_spec))
    return yaml.dump_all(documents, Dumper=DUMPER, sort_keys=True, allow_unicode=True)


def _main(path: Path, function: str, answer_file: Path) -> None:
    """What the child process does."""
    try:
        answer: dict[str, Any] = {"ir": _compile_file(path, function)}
    except RekindleError as error:
        answer = {"unsupported": False, **dataclasses.asdict(error.problems[0])}
    except BaseException as error:  # noqa: BLE001 - the user's file may raise anything, even exit
        answer = _explain(error, path)
    answer_file.write_text(json.dumps(answer), encoding="utf-8")


def _compile_file(path: Path, function: str) -> str:
    from kfp.dsl.base_component import BaseComponent

    sys.path[:0] = [str(path.parent), str(path.parent.parent), str(Path.cwd())]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pipelines = {n: v for n, v in vars(module).items() if isinstance(v, BaseComponent)}
    own = [n for n, v in pipelines.items() if type(v).__name__ == "GraphComponent"]
    if not function and len(own) == 1:
        function = own[0]
    if function not in pipelines:
        what = f"`{function}` is no @dsl.pipeline in this file" if function else "which pipeline?"
        raise RequestError(what, where=str(path), fix=f"there is: {', '.join(own) or 'none'}")
    return compile_function(pipelines[function])


def _explain(error: BaseException, path: Path) -> dict[str, Any]:
    """What went wrong, at the deepest line of the user's own files that took part in it."""
    where = str(path)
    if isinstance(error, SyntaxError) and error.filename:
        where = f"{error.filename}:{error.lineno}"
    else:
        for frame in traceback.extract_tb(error.__traceback__):
            if not frame.filename.startswith(("<", sys.base_prefix, sys.prefix, __file__)):
                where = f"{frame.filename}:{frame.lineno}"
    what = f"the pipeline does not compile: {type(error).__name__}: {error}"
    unsupported = isinstance(error, NotImplementedError)
    return {"unsupported": unsupported, "what": what, "where": where, "fix": ""}


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
