"""Metric alerts and a dashboard of Azure Monitor, of which each request replaces the
whole one.

Authority: Microsoft.Insights/metricAlerts 2018-03-01, Microsoft.Portal/dashboards
2020-09-01-preview; azure-monitor/reference/supported-metrics. No subscription has been
asked."""

from collections.abc import Mapping
from pathlib import Path

import yaml

from rekindle.platforms.azureml.client import ARM, workspace_path
from rekindle.platforms.azureml.endpoint import AzureMLEndpoint
from rekindle.platforms.azureml.section import AzureMLSpec
from rekindle.platforms.submission import Definition, plain_name
from rekindle.protojson import Json
from rekindle.spec.deploy import DeploySpec

# type and API version of each kind of the template
_KINDS = {
    "alert": ("Microsoft.Insights/metricAlerts", "2018-03-01"),
    "dashboard": ("Microsoft.Portal/dashboards", "2020-09-01-preview"),
}


class AzureMLAlarms:
    """See `rekindle.platforms.alarms.Monitoring`."""

    template = Path(__file__).with_name("alarms.yaml.j2")

    def __init__(
        self, place: AzureMLSpec, definition: Definition, model: str, folder: Path
    ) -> None:
        self.endpoint = AzureMLEndpoint(place, DeploySpec(), model)
        self.workspace = workspace_path(place)
        workspace = self.endpoint.call("GET", "").json()
        self.values = {
            "workspace": self.workspace,
            "endpoint": f"{self.workspace}{self.endpoint.path}",
            "insights": workspace.get("properties", {}).get("applicationInsights") or "",
            "location": workspace["location"],
            "actions": place.alarm_actions,
            "experiment": yaml.safe_load(definition.text)["experiment_name"],
            "deployed": self.endpoint.call("GET", self.endpoint.path).status_code != 404,
        }

    def find(self, kind: str, name: str) -> Json | None:
        response = self.endpoint.call("GET", self._url(kind, name))
        return None if response.status_code == 404 else dict(response.json())

    def put(self, kind: str, name: str, body: Mapping[str, object]) -> None:
        self.endpoint.call("PUT", self._url(kind, name), body)

    def remove(self, kind: str, name: str) -> None:
        self.endpoint.call("DELETE", self._url(kind, name))

    def _url(self, kind: str, name: str) -> str:
        group = self.workspace.rpartition("/providers/")[0]
        resource_type, api_version = _KINDS[kind]
        plain = plain_name(name, r"[^a-zA-Z0-9-]", 64, distinct=True)
        return f"{ARM}{group}/providers/{resource_type}/{plain}?api-version={api_version}"
