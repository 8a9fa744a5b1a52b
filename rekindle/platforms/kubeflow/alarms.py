"""Alarms and a dashboard as files: a PrometheusRule for its operator, and a dashboard
that Grafana imports."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rekindle.platforms.kubeflow.section import KubeflowSpec
from rekindle.platforms.submission import Definition
from rekindle.protojson import Json
from rekindle.records import write_atomically

_FILES = Path(__file__).with_name("manifests")


class KubeflowAlarms:
    """See `rekindle.platforms.alarms.Monitoring`; its files lie in `folder`."""

    template = Path(__file__).with_name("alarms.yaml.j2")

    def __init__(
        self, place: KubeflowSpec, definition: Definition, model: str, folder: Path
    ) -> None:
        self.folder = folder
        self.values = {
            "namespace": place.namespace,
            "rules": yaml.safe_load((_FILES / "alerts.yaml").read_text(encoding="utf-8")),
            "dashboard": json.loads((_FILES / "dashboard.json").read_text(encoding="utf-8")),
        }

    def find(self, kind: str, name: str) -> Json | None:
        path = self.folder / name
        if not path.exists():
            return None
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (ValueError, yaml.YAMLError):
            return {}  # which is an edited one
        return content if isinstance(content, dict) else {}

    def put(self, kind: str, name: str, body: Mapping[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        existing = self.find(kind, name) or {}
        metadata = existing.get("metadata")
        if metadata:  # such as an operator's labels
            body = {**body, "metadata": {**metadata, **body["metadata"]}}
        text = json.dumps(body, indent=2)
        if name.endswith(".yaml"):
            text = yaml.safe_dump(body, sort_keys=False, width=100)
        write_atomically(self.folder / name, f"{text.rstrip()}\n")

    def remove(self, kind: str, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)
