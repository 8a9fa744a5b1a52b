"""From `path.py:function` (or an already compiled file) to IR text: the only place that
starts KFP's compiler.

The file is loaded in a process of its own (`python -m rekindle.ir.compile
PATH.py:FUNCTION`), so that nothing in it can collide with anything here, and our own
process needs no kfp. The folder of the file, the folder above it (where `components/`
lies beside `pipelines/`) and the working folder are importable. The same file gives the
same bytes: hash seed fixed, no times in the IR."""

import dataclasses
import importlib.util
import json
import os
import re
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

DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_COMPILED = (".yaml", ".yml", ".json")
_TIMEOUT_SECONDS = 300
# what only KFP 1 has: dsl.ContainerOp, dsl.VolumeOp, components.create_component_from_func, ...
_KFP_1 = re.compile(
    r"'kfp[^']*' has no attribute '(\w+Op|\w*create_component_from_func|get_pipeline_conf)'"
)
_NO_WORK = "do no work when it is imported"


def compile_pipeline(target: str, cwd: Path | None = None) -> str:
    """IR text of the pipeline at `target`: `path.py:function`, or a compiled `.yaml` or
    `.json`, returned as it is. RequestError or UnsupportedError with file:line where it
    does not compile."""
    folder = (cwd or Path.cwd()).absolute()
    if target.endswith(_COMPILED):
        try:
            with (folder / target).open(encoding="utf-8") as file:
                return file.read(MAX_BYTES + 1)  # the reader refuses more
        except (OSError, UnicodeDecodeError) as error:
            message = f"cannot read the pipeline: {error}"
            raise RequestError(message, where=str(folder / target)) from error
    name, _, function = target.rpartition(":")
    path = folder / (name or target)
    if path.suffix != ".py" or (name and not function.isidentifier()):
        fix = "write path.py:function, or the path of a .yaml"
        raise RequestError(f"`{target}` names no pipeline", fix=fix)
    if not path.is_file():
        raise RequestError(f"file not found: {path}", fix="write path.py:function")
    answer = _load_elsewhere(path, function if name else "", folder)
    if "ir" in answer:
        return str(answer["ir"])
    error_class = UnsupportedError if answer["unsupported"] else RequestError
    raise error_class(answer["what"], where=answer["where"], fix=answer["fix"])


def _load_elsewhere(path: Path, function: str, folder: Path) -> dict[str, Any]:
    """What a process of its own, started in `folder`, answers: see `_main`."""
    with tempfile.TemporaryDirectory(prefix="rekindle-") as scratch:
        answer_file = Path(scratch) / "answer.json"
        command = [sys.executable, "-P", "-m", "rekindle.ir.compile"]
        command += [str(path), function, str(answer_file)]
        process = _run(command, path, folder)
        try:
            answer: dict[str, Any] = json.loads(answer_file.read_bytes())
        except (OSError, ValueError):  # it ended before it had written it all
            raise _error_of_end(process, path) from None
    return answer


def _error_of_end(process: subprocess.CompletedProcess[str], path: Path) -> RekindleError:
    """The error for a pipeline whose file ended the process that loaded it."""
    if process.returncode < 0:
        # a signal comes from outside, and perhaps not the next time: not an error of the request
        number = -process.returncode
        message = f"the process that loaded the pipeline was killed by signal {number}"
        if number == signal.SIGKILL:
            message += "; was the memory full?"
        fix = "run the same command again; nothing was changed"
        return RekindleError(message, where=str(path), fix=fix)
    message = f"loading it ended the process with exit code {process.returncode}"
    printed_lines = (process.stderr or process.stdout).strip().splitlines()
    if printed_lines:
        message += f"; the last line that it printed: {printed_lines[-1]}"
    return RequestError(message, where=str(path), fix=_NO_WORK)


def _run(command: list[str], path: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    # rekindle is importable wherever it was imported from
    import_folders = [str(Path(__file__).parents[2])]
    if os.environ.get("PYTHONPATH"):
        import_folders.append(os.environ["PYTHONPATH"])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(import_folders),
        "PYTHONHASHSEED": "0",  # sets have no random order, so the same file gives the same bytes
    }
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
        message = f"loading the pipeline took over {_TIMEOUT_SECONDS} s"
        raise RequestError(message, where=str(path), fix=_NO_WORK) from error


def compile_function(pipeline: Any) -> str:
    """IR text of a `@dsl.pipeline` or component that is loaded, as in a notebook. Not
    written by KFP's compiler: its comments on top break the YAML where a default has a
    line break."""
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
    module = importlib.util.module_from_spec(spec)
    # before it runs: dataclasses and pickles in it look their module up by name
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    components: dict[str, BaseComponent] = {}
    pipeline_names = []
    for name, value in vars(module).items():
        if isinstance(value, BaseComponent):
            components[name] = value
            if type(value).__name__ == "GraphComponent":
                pipeline_names.append(name)
    if not function and len(pipeline_names) == 1:
        function = pipeline_names[0]
    if function not in components:
        message = "which pipeline?"
        if function:
            message = f"`{function}` is no @dsl.pipeline in this file"
        fix = f"there is: {', '.join(pipeline_names) or 'none'}"
        raise RequestError(message, where=str(path), fix=fix)
    return compile_function(components[function])


def _explain(error: BaseException, path: Path) -> dict[str, Any]:
    """What went wrong, at the deepest line of the user's own files that took part in it."""
    where = str(path)
    if isinstance(error, SyntaxError) and error.filename:
        where = f"{error.filename}:{error.lineno}"
    else:
        for frame in traceback.extract_tb(error.__traceback__):
            if not frame.filename.startswith(("<", sys.base_prefix, sys.prefix, __file__)):
                where = f"{frame.filename}:{frame.lineno}"
    return {
        "unsupported": isinstance(error, NotImplementedError),
        "what": f"the pipeline does not compile: {type(error).__name__}: {error}",
        "where": where,
        "fix": _fix_of(error),
    }


def _fix_of(error: BaseException) -> str:
    """What to do about errors that files of others make often; "" for all others."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0].replace("_", "-")
        return f"install it here: pip install {package}"
    if isinstance(error, AttributeError) and _KFP_1.search(str(error)):
        return "this is a pipeline of KFP 1: write its steps as @dsl.component of kfp 2.x"
    return ""


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
