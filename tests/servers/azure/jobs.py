"""Azure ML's pipeline jobs, as far as ours need it: runs the YAML of a job with real processes.

Each command gets a copy of its code as working folder, its inputs and outputs as folders, values put
into its text as the service does, an empty scratch folder, and Azure's environment; a command of
several instances is as many processes. What it does not know it refuses."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.ports import free_port

_JOB = {
    "type",
    "component",
    "inputs",
    "outputs",
    "resources",
    "limits",
    "queue_settings",
    "compute",
    "identity",
    "environment_variables",
}
_COMPONENT = {
    "type",
    "is_deterministic",
    "code",
    "environment",
    "command",
    "inputs",
    "outputs",
    "distribution",
}
_MOUNT = 'mkdir -p /tmp/rekindle && mount -t tmpfs tmpfs /tmp/rekindle && exec bash -c "$0"'
_BOUND = re.compile(r"\$\{\{parent\.(?:inputs\.(\w+)|jobs\.(\w+)\.outputs\.(\w+))\}\}")


class Failed(Exception):
    """A command failed; the text is its name and its log."""


class Workspace:
    """Runs jobs; `environment` is what images bring to every container."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder, self.environment = folder, dict(environment)

    def run(self, file: Path, **inputs: Any) -> dict[str, Path]:
        """Run the job in `file`; the folder of every command, with its `outputs`."""
        job = yaml.safe_load(file.read_text())
        assert job["type"] == "pipeline"
        given = {**job.get("inputs", {}), **inputs}
        done: dict[str, Path] = {}
        waiting = dict(job["jobs"])
        while waiting:
            name = next(n for n, c in waiting.items() if self.reads(c) <= done.keys())
            done[name] = self.command(name, waiting.pop(name), given, done, file.parent)
        return done

    def reads(self, command: dict[str, Any]) -> set[str]:
        found = (_BOUND.fullmatch(str(text)) for text in command["inputs"].values())
        return {match[2] for match in found if match and match[2]}

    def command(
        self,
        name: str,
        command: dict[str, Any],
        given: dict[str, Any],
        done: dict[str, Path],
        base: Path,
    ) -> Path:
        component = command["component"]
        assert command.keys() <= _JOB, command
        assert component.keys() <= _COMPONENT, component
        home = self.folder / f"{len(list(self.folder.iterdir()))}-{name}"
        values: dict[str, str] = {}
        for where, text in command["inputs"].items():
            match = _BOUND.fullmatch(text)
            assert match, text
            bound = given[match[1]] if match[1] else done[match[2]] / "outputs" / match[3]
            kind = component["inputs"][where]["type"]
            assert (kind == "uri_folder") == isinstance(bound, Path), (where, kind)
            values[f"inputs.{where}"] = bound if isinstance(bound, str) else _text(bound)
        for where in component["outputs"]:
            (home / "outputs" / where).mkdir(parents=True)
            values[f"outputs.{where}"] = str(home / "outputs" / where)
        text = re.sub(r"\$\{\{([\w.]+)\}\}", lambda match: values[match[1]], component["command"])
        nodes = command["resources"]["instance_count"]
        assert (nodes > 1) <= ("distribution" in component)
        port = free_port()
        running = []
        for rank in range(nodes):
            shutil.copytree(base / component["code"], home / f"code-{rank}")
            (home / f"scratch-{rank}").mkdir()
            environment = {
                "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
                "AZUREML_RUN_ID": name,
                "TMPDIR": str(home / f"scratch-{rank}"),
                "AZUREML_ROOT_RUN_ID": "root",
                "AZUREML_NODE_COUNT": str(nodes),
                **self.environment,
                **command.get("environment_variables", {}),
            }
            if "distribution" in component:
                environment |= {
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "NODE_RANK": str(rank),
                    "RANK": str(rank),
                    "WORLD_SIZE": str(nodes),
                }
            with (home / f"log-{rank}").open("w") as log:
                running.append(
                    subprocess.Popen(
                        ["unshare", "--mount", "sh", "-c", _MOUNT, text],
                        env=environment,
                        cwd=home / f"code-{rank}",
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        codes = [process.wait(120) for process in running]
        if any(codes):
            logs = "\n".join((home / f"log-{rank}").read_text()[-2000:] for rank in range(nodes))
            raise Failed(f"{name}: {codes}\n{logs}")
        return home


def _text(value: Any) -> str:
    return str(value) if isinstance(value, Path) else json.dumps(value)
