"""The command line as a user has it: real processes in folders of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


class Cli:
    """`rekindle` in a folder; `cli("run", "c.yaml")` returns the finished process."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, *words, code=0, env=None):
        done = subprocess.run(
            [sys.executable, "-m", "rekindle.cli.main", *map(str, words)],
            cwd=self.folder,
            text=True,
            capture_output=True,
            timeout=240,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        )
        assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def json(self, *words, code=0):
        """The one object on stdout."""
        return json.loads(self(*words, "--json", code=code).stdout)

    def start(self, *words):
        """The running process, a session of its own, its output in `out.txt`."""
        return subprocess.Popen(
            [sys.executable, "-m", "rekindle.cli.main", *map(str, words)],
            cwd=self.folder,
            stdout=(self.folder / "out.txt").open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


@pytest.fixture(scope="module")
def cli(tmp_path_factory):
    return Cli(tmp_path_factory.mktemp("work"))


@pytest.fixture(scope="module")
def registry(cli):
    """Asks the embedded registry in a process of its own, as another program would."""

    def ask(name, home=".rekindle"):
        code = (
            "import json, sys, logging; logging.disable(50)\n"
            "from mlflow import MlflowClient\n"
            "client = MlflowClient(sys.argv[1], registry_uri=sys.argv[1])\n"
            "versions = sorted(client.search_model_versions(f\"name = '{sys.argv[2]}'\"), key=lambda v: int(v.version))\n"
            "model = client.get_registered_model(sys.argv[2])\n"
            "print(json.dumps({'versions': [str(v.version) for v in versions], 'aliases': {k: str(v) for k, v in model.aliases.items()}, 'tags': {str(v.version): dict(v.tags) for v in versions}}))"
        )
        uri = f"sqlite:///{cli.folder / home / 'mlflow.db'}"
        done = subprocess.run(
            [sys.executable, "-c", code, uri, name], capture_output=True, text=True, check=True
        )
        return json.loads(done.stdout.splitlines()[-1])

    return ask
