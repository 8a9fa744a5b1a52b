"""Alert policies and a dashboard in Cloud Monitoring. A policy is found by its label, for its id is
the service's; a dashboard has the id that we give it.

Authority: monitoring.googleapis.com, REST v3 (alertPolicies) and v1 (dashboards);
cloud.google.com/monitoring/api/metrics_gcp. No project has been asked."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rekindle.platforms.submission import Definition, plain_name
from rekindle.platforms.vertex.endpoint import VertexEndpoint
from rekindle.spec.deploy import DeploySpec
from rekindle.spec.platforms import VertexSpec

_URL, _LABEL = "https://monitoring.googleapis.com", "rekindle"


class Alarms:
    """See `rekindle.platforms.alarms.Monitoring`."""

    template = Path(__file__).with_name("alarms.yaml.j2")

    def __init__(self, place: VertexSpec, definition: Definition, model: str, folder: Path) -> None:
        self.endpoint = VertexEndpoint(place, DeploySpec(), model)
        self.parent = f"projects/{place.project}"
        self.values = {"endpoint": self.endpoint.id, "channels": place.alarm_actions}

    def find(self, kind: str, name: str) -> dict[str, Any] | None:
        if kind == "policy":
            query = {"filter": f'user_labels.{_LABEL}="{_plain(name)}"'}
            url = f"{_URL}/v3/{self.parent}/alertPolicies"
            return next(iter(self.endpoint.pages("alertPolicies", url, query)), None)
        url = f"{_URL}/v1/{self.parent}/dashboards/{_plain(name)}"
        return self.endpoint.call("GET", url, 404) or None

    def put(self, kind: str, name: str, body: Mapping[str, Any]) -> None:
        there = self.find(kind, name)
        if kind == "policy":
            made, query = {**body, "userLabels": {_LABEL: _plain(name)}}, dict[str, Any]()
            path = f"{self.parent}/alertPolicies"
            if there:  # what others added to it stays
                path, query = there["name"], {"params": {"updateMask": ",".join(made)}}
            url = f"{_URL}/v3/{path}"
        else:
            path, query = f"{self.parent}/dashboards", {}
            made = {**body, "name": f"{path}/{_plain(name)}"}
            if there:  # one that was changed meanwhile is refused
                made["etag"], path = there["etag"], made["name"]
            url = f"{_URL}/v1/{path}"
        self.endpoint.call("PATCH" if there else "POST", url, json=made, **query)

    def remove(self, kind: str, name: str) -> None:
        version = "v3" if kind == "policy" else "v1"
        while there := self.find(kind, name):  # twice, where two have written it at once
            self.endpoint.call("DELETE", f"{_URL}/{version}/{there['name']}")


def _plain(name: str) -> str:
    """As labels and ids are: lower-case letters, digits and `-`, at most 63."""
    return plain_name(name.lower(), r"[^a-z0-9-]", 63, distinct=True)
