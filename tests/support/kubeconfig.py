"""Files by which kubectl and rekindle find a cluster that tests play."""

import json
import os
import subprocess
import sys
from pathlib import Path


def write_kubeconfig(folder: Path, server: str, token: str) -> Path:
    """A file that leads to the cluster at the URL `server`, as who has the token."""
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [{"name": "here", "cluster": {"server": server}}],
        "users": [{"name": "user", "user": {"token": token}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "user"}}],
    }
    folder.mkdir(exist_ok=True)
    file = folder / "kubeconfig"
    file.write_text(json.dumps(document))
    return file


def doctor(
    url: str, folder: Path, *words: str, token: str = "admin"
) -> subprocess.CompletedProcess[str]:
    """`rekindle doctor` in a process of its own, with a kubeconfig that leads to the cluster."""
    file = write_kubeconfig(folder, url, token)
    return subprocess.run(
        [sys.executable, "-m", "rekindle.cli.main", "doctor", "--platform", "kubeflow", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "KUBECONFIG": str(file)},
    )
