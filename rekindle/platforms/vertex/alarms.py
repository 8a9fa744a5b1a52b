"""Alert policies and a dashboard in Cloud Monitoring. A policy is found by its label, for its id is
the service's; a dashboard has the id that we give it.

Authority: monitoring.googleapis.com, REST v3 (alertPolicies) and v1 (dashboards);
cloud.google.com/monitoring/api/metrics_gcp. No project has been asked."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rekindle.platforms.submission import Definition, plain_name
from rekindle.platforms.vertex.client import connected
from rekindle.platforms.vertex.endpoint import VertexEndpoint
from rekindle.platforms.vertex.runs import asked, on_pages
from rekindle.spec.deploy import DeploySpec
from rekindle.spec.platforms import VertexSpec

_URL, _LABEL = "https://monitoring.googleapis.com", "rekindle"


class Alarms:
    """See `rekindle.platforms.alarms.Monitoring`."""

    template = Path(__file__).with_name("alarms.yaml.j2")

    def __init__(self, place: VertexSpec, definition: Definition, model: str, folder: Path) -> None:
        self.place, self.parent = place, f"projects/{place.project}"
        endpoint = VertexEndpoint(place, DeploySpec(), model).id
        self.values = {"endpoint": endpoint, "channels": place.alarm_actions}

    def find(self, kind: str, name: str) -> dict[str, Any] | None:
        from google.api_core.exceptions import NotFound

        with connected(self.place) as project:
            if kind == "policy":
                query = {"filter": f'user_labels.{_LABEL}="{_plain(name)}"'}
                url = f"{_URL}/v3/{self.parent}/alertPolicies"
                return next(iter(on_pages(project, "alertPolicies", "GET", url, query)), None)
            try:
                url = f"{_URL}/v1/{self.parent}/dashboards/{_plain(name)}"
                return dict(asked(project, "GET", url).json())
            except NotFound:
                return None

    def put(self, kind: str, name: str, body: Mapping[str, Any]) -> None:
        there = self.find(kind, name)
        with connected(self.place) as project:
            if kind == "policy":
                made = {**body, "userLabels": {_LABEL: _plain(name)}}
                path = there["name"] if there else f"{self.parent}/alertPolicies"
                url = f"{_URL}/v3/{path}"
                if there:  # what others added to it stays
                    asked(project, "PATCH", url, params={"updateMask": ",".join(made)}, json=made)
                else:
                    asked(project, "POST", url, json=made)
                return
            path = f"{self.parent}/dashboards"
            made = {**body, "name": f"{path}/{_plain(name)}"}
            if there:  # one that was changed meanwhile is refused
                made["etag"], path = there["etag"], made["name"]
            asked(project, "PATCH" if there else "POST", f"{_URL}/v1/{path}", json=made)

    def remove(self, kind: str, name: str) -> None:
        while there := self.find(kind, name):  # twice, where two have written it at once
            version = "v3" if kind == "policy" else "v1"
            with connected(self.place) as project:
                asked(project, "DELETE", f"{_URL}/{version}/{there['name']}")


def _plain(name: str) -> str:
    """As labels and ids are: lower-case letters, digits and `-`, at most 63."""
    return plain_name(name.lower(), r"[^a-z0-9-]", 63, distinct=True)
