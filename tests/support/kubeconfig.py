"""Files by which kubectl and rekindle find a cluster that tests play."""

import json
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
