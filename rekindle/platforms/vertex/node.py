"""What every replica of a CustomJob runs: one node of a distributed step.

    python3 FOLDER/node.pyz

FOLDER is the attempt's own, on the mount of Cloud Storage, written by launcher.py before
it creates the job. It holds this file and what it imports as a zip (standard library
only, so any image with Python 3.10 will do), and `task.json`. The node finds its place in
CLUSTER_SPEC, fetches secrets, runs the step under the shim, and leaves in FOLDER

    ended-R.json   how node R ended; a machine that was taken away leaves none
    result.json    parameters and artifacts, by node rank 0 alone, and only if the step succeeded

Only node rank 0 has the step's places for artifacts, on the mount; what the others write goes into
scratch. What KFP reads the launcher writes, from result.json, once the job as a whole succeeded.
Node rank 0 also ends the job when the run is over: the launcher that should have is gone."""

import contextlib
import dataclasses
import io
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rekindle.errors import RekindleError, RequestError
from rekindle.http import HttpError
from rekindle.launch import node, shim
from rekindle.launch.rendezvous import Rendezvous
from rekindle.platforms.vertex.rest import Google, VertexSecretError, places, secrets
from rekindle.protojson import Json

_POOL = re.compile(r"workerpool(\d+)")
STORE = "gs://"
MOUNT = "/gcs/"
TASK = "task.json"
RESULT = "result.json"
ENDED_RUN = (
    "PIPELINE_STATE_SUCCEEDED",
    "PIPELINE_STATE_FAILED",
    "PIPELINE_STATE_CANCELLED",
)
_MISSING_FOR_GOOD = 3  # times in a row that the run is not found, until it counts as deleted
ENTRY = "node.pyz"
PACKAGE = Path(__file__).parents[2]
MODULES = (
    "__init__",
    "errors",
    "http",
    "launch.__init__",
    "launch.node",
    "launch.rendezvous",
    "launch.shim",
    "masking",
    "platforms.__init__",
    "platforms.vertex.__init__",
    "protojson",
    "platforms.vertex.node",
    "platforms.vertex.rest",
)
_MAIN = """import pathlib, sys
from rekindle.platforms.vertex.node import main
sys.exit(main(pathlib.Path(__file__).absolute().parent.parent))
"""


def rendezvous(environment: Mapping[str, str], gpus: int) -> Rendezvous:
    """The node's place; a job of one replica may lack CLUSTER_SPEC. Its `cluster` has the
    addresses of each worker pool, pool 0 with one replica, node rank 0, and `task` says
    which one this is; nodes are counted through the pools. RANK and its like are left
    alone: their meaning changed over time."""
    text = environment.get("CLUSTER_SPEC", "")
    if not text:
        return Rendezvous(ranks_per_node=max(1, gpus))
    try:
        spec = json.loads(text)
        pools = {name: list(hosts) for name, hosts in spec["cluster"].items()}
        kind = str(spec["task"]["type"])
        index = int(spec["task"]["index"])
        address, _, port = str(pools["workerpool0"][0]).rpartition(":")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise RequestError(f"CLUSTER_SPEC cannot be read: {error!r}", where=text[:200]) from error
    names = [name for name in pools if _POOL.fullmatch(name)]
    names.sort(key=lambda name: int(name.removeprefix("workerpool")))
    if kind not in names or not 0 <= index < len(pools[kind]):
        message = f"CLUSTER_SPEC says this is {kind} {index}, which is not in its cluster"
        raise RequestError(message, where=text[:200])
    pools_before = names[: names.index(kind)]
    nodes = sum(len(pools[name]) for name in names)
    rank = index + sum(len(pools[name]) for name in pools_before)
    master_port = int(port) if port.isdigit() else 0  # which the check refuses
    meeting = Rendezvous(nodes, rank, max(1, gpus), address, master_port)
    return meeting.checked("CLUSTER_SPEC")


def write(folder: Path, task: Json) -> list[str]:
    """Fill the folder of an attempt, and return the command that runs a node from it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TASK).write_text(json.dumps(task), encoding="utf-8")
    content = io.BytesIO()  # the mount is written in one go
    with zipfile.ZipFile(content, "w") as bundle:
        for module in MODULES:
            path = Path(*module.split(".")).with_suffix(".py")
            bundle.write(PACKAGE / path, Path("rekindle", path))
        bundle.writestr("__main__.py", _MAIN)
    (folder / ENTRY).write_bytes(content.getvalue())
    return ["python3", str(folder / ENTRY)]


def folder_of(command: tuple[str, ...]) -> Path | None:
    """The folder behind a command of `write`; None for another one."""
    if command and command[-1].endswith(f"/{ENTRY}"):
        return Path(command[-1]).parent
    return None


def mounted(uri: str) -> str:
    """Where a URI of Cloud Storage lies in a container of Vertex AI;
    any other one as it is."""
    return MOUNT + uri[len(STORE) :] if uri.startswith(STORE) else uri


def ended_file(rank: int) -> str:
    """Where node `rank` says how it ended."""
    return f"ended-{rank}.json"


def main(folder: Path) -> int:
    """Run the node; its exit code is the step's (75 stays 75)."""
    shim.end_when_told()
    task = json.loads((folder / TASK).read_text(encoding="utf-8"))
    try:
        meeting = rendezvous(os.environ, task["gpus"])
    except RekindleError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    rank = meeting.node_rank
    google = Google(places(task["region"]))
    try:
        os.environ.update(secrets(google, task["secrets"]))
    except VertexSecretError as error:
        return _ended(folder, rank, 1, f"cannot read the secret {error}")
    if rank == 0:
        _end_with_run(task["run"], google, task["watch_seconds"])
    os.environ.update(dataclasses.replace(meeting, secret=task["secret"]).environment())
    code = node.installed(task["pip"])
    if code:
        return _ended(folder, rank, code, f"pip ended with {code}; see the log")
    with tempfile.TemporaryDirectory(prefix="rekindle-") as scratch:
        code, result = _run(task, rank, Path(scratch))
    if code == 0 and rank == 0:
        (folder / RESULT).write_text(json.dumps(result), encoding="utf-8")
    return _ended(folder, rank, code, result["error"])


def _run(task: Json, rank: int, scratch: Path) -> tuple[int, Json]:
    """Run the step on this node: its exit code, and its result, which has an `error` in
    any case."""
    executor_input = on_node(task["executor_input"], rank, scratch)
    placed_task = dict(task)
    placed_task["env"] = {
        name: placed(value, executor_input) for name, value in task["env"].items()
    }
    for key in ("command", "args"):
        placed_task[key] = [placed(word, executor_input) for word in task[key]]
    words = node.prepared(
        placed_task,
        executor_input,
        task["facts"],
        scratch,
        leads=rank == 0,
        cwd=Path.cwd(),
    )
    for group in executor_input["outputs"]["artifacts"].values():
        Path(mounted(group["artifacts"][0]["uri"])).parent.mkdir(parents=True, exist_ok=True)
    code = shim.main(words)
    try:
        result = node.left(scratch)
        for artifact in result["artifacts"].values():
            _keep_custom_path(artifact)
    except (OSError, ValueError, KeyError) as error:
        return code or 1, {"error": f"the step's results cannot be kept: {error}"}
    return code, result


def _keep_custom_path(artifact: Mapping[str, Any]) -> None:
    """Copy an artifact that the step put elsewhere to where its URI lies."""
    custom_path = artifact["custom_path"]
    target = Path(mounted(artifact["uri"]))
    if not custom_path or not Path(custom_path).exists() or target.exists():
        return
    if Path(custom_path).is_dir():
        shutil.copytree(custom_path, target)
    else:
        shutil.copy2(custom_path, target)


def placed(argument: Any, executor_input: Json) -> Any:
    """A lowered argument with paths of artifacts on the mount;
    all else is for the shim."""
    if isinstance(argument, str):
        return argument
    match argument.get("ref"):
        case [side, "artifacts", name, "path"]:
            artifacts = executor_input[side]["artifacts"].get(name, {}).get("artifacts", [])
            return mounted(artifacts[0]["uri"]) if artifacts else argument
    argument = dict(argument)
    for key in ("concat", "then", "else"):
        if key in argument:
            argument[key] = [placed(item, executor_input) for item in argument[key]]
    return argument


def on_node(executor_input: Json, rank: int, scratch: Path) -> Json:
    """The ExecutorInput for this node, its outputs in scratch but for node rank 0's
    artifacts."""
    outputs = executor_input["outputs"]
    artifacts = outputs["artifacts"]
    if rank:
        artifacts = {}
        for name, group in outputs["artifacts"].items():
            uri = str(scratch / "out" / name)
            artifacts[name] = {"artifacts": [{**a, "uri": uri} for a in group["artifacts"]]}
    parameters = {}
    for name in outputs["parameters"]:
        parameters[name] = {"outputFile": str(scratch / "parameters" / name)}
    node_outputs = {
        "parameters": parameters,
        "artifacts": artifacts,
        "outputFile": str(scratch / "executor_output.json"),
    }
    return {**executor_input, "outputs": node_outputs}


def _end_with_run(run: str, google: Google, every_seconds: float) -> None:
    """Have SIGTERM sent to this process once the run is over, and again until it ends.
    What cannot be asked now is asked later: a healthy job does not end because an API is
    down."""

    def watch() -> None:
        missing = 0
        while True:
            try:
                state = str(google.get("aiplatform", f"/v1/{run}", patience=0).get("state", ""))
            except HttpError as error:
                state = "deleted" if error.status == 404 else "unknown"
            missing = missing + 1 if state == "deleted" else 0
            if state in ENDED_RUN or missing >= _MISSING_FOR_GOOD:
                sys.stderr.write(f"the run is over ({state}), and so is this job\n")
                os.kill(os.getpid(), signal.SIGTERM)
            google.stop.wait(every_seconds)

    threading.Thread(target=watch, daemon=True).start()


def _ended(folder: Path, rank: int, code: int, error: str) -> int:
    """Leave word of how the node ended, and return its exit code."""
    if error:
        sys.stderr.write(f"{error}\n")
    word = {"exit_code": code, "error": error}
    with contextlib.suppress(OSError):  # the exit code says it, too
        (folder / ended_file(rank)).write_text(json.dumps(word), encoding="utf-8")
    return code
