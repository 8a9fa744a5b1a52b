"""Alert policies and a dashboard in Cloud Monitoring. A policy is found by its label, for
its id is the service's; a dashboard has the id that we give it.

Authority: monitoring.googleapis.com, REST v3 (alertPolicies) and v1 (dashboards);
cloud.google.com/monitoring/api/metrics_gcp. No project has been asked."""

from collections.abc import Mapping
from pathlib import Path

from rekindle.platforms.submission import Definition, plain_name
from rekindle.platforms.vertex.endpoint import VertexEndpoint
from rekindle.platforms.vertex.section import VertexSpec
from rekindle.protojson import Json
from rekindle.spec.deploy import DeploySpec

_URL = "https://monitoring.googleapis.com"
_LABEL = "rekindle"


class VertexAlarms:
    """See `rekindle.platforms.alarms.Monitoring`."""

    template = Path(__file__).with_name("alarms.yaml.j2")

    def __init__(self, place: VertexSpec, definition: Definition, model: str, folder: Path) -> None:
        self.endpoint = VertexEndpoint(place, DeploySpec(), model)
        self.parent = f"projects/{place.project}"
        self.values = {"endpoint": self.endpoint.id, "channels": place.alarm_actions}

    def find(self, kind: str, name: str) -> Json | None:
        if kind == "policy":
            query = {"filter": f'user_labels.{_LABEL}="{_plain(name)}"'}
            url = f"{_URL}/v3/{self.parent}/alertPolicies"
            return next(iter(self.endpoint.pages("alertPolicies", url, query)), None)
        url = f"{_URL}/v1/{self.parent}/dashboards/{_plain(name)}"
        return self.endpoint.call("GET", url, 404) or None

    def put(self, kind: str, name: str, body: Mapping[str, object]) -> None:
        if kind == "policy":
            self._put_policy(name, body)
        else:
            self._put_dashboard(name, body)

    def _put_policy(self, name: str, body: Mapping[str, object]) -> None:
        policy = {**body, "userLabels": {_LABEL: _plain(name)}}
        existing = self.find("policy", name)
        if existing:
            # what others added to it stays
            parameters = {"updateMask": ",".join(policy)}
            url = f"{_URL}/v3/{existing['name']}"
            self.endpoint.call("PATCH", url, json=policy, params=parameters)
        else:
            self.endpoint.call("POST", f"{_URL}/v3/{self.parent}/alertPolicies", json=policy)

    def _put_dashboard(self, name: str, body: Mapping[str, object]) -> None:
        parent = f"{self.parent}/dashboards"
        dashboard = {**body, "name": f"{parent}/{_plain(name)}"}
        existing = self.find("dashboard", name)
        if existing:
            # one that was changed meanwhile is refused
            dashboard["etag"] = existing["etag"]
            self.endpoint.call("PATCH", f"{_URL}/v1/{dashboard['name']}", json=dashboard)
        else:
            self.endpoint.call("POST", f"{_URL}/v1/{parent}", json=dashboard)

    def remove(self, kind: str, name: str) -> None:
        version = "v3" if kind == "policy" else "v1"
        existing = self.find(kind, name)
        while existing:  # twice, where two have written it at once
            self.endpoint.call("DELETE", f"{_URL}/{version}/{existing['name']}")
            existing = self.find(kind, name)


def _plain(name: str) -> str:
    """The name as labels and ids are: lower-case letters, digits and `-`, at most 63."""
    return plain_name(name.lower(), r"[^a-z0-9-]", 63, distinct=True)
