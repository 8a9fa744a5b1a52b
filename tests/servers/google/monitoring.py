"""Alert policies and dashboards of Cloud Monitoring, as REST v3 and v1 have them: a policy's id is the service's, a
dashboard's is given; what is zero is not given back; a change to a dashboard says which one it knew.

Checked against the messages of google-cloud-monitoring 2.33 and google-cloud-monitoring-dashboards 2.22: what the
templates make is parsed by both without a field left."""

from __future__ import annotations

import copy
import itertools
import re
from typing import Any

from tests.servers.google.endpoints import Endpoints
from tests.servers.google.rest import PROJECT, Refused
from tests.servers.tls_hosts import Asked

_POLICY = {
    "displayName",
    "documentation",
    "combiner",
    "enabled",
    "notificationChannels",
    "conditions",
    "userLabels",
    "severity",
    "alertStrategy",
}
_CONDITIONS = {
    "conditionThreshold": {
        "filter",
        "aggregations",
        "denominatorFilter",
        "denominatorAggregations",
        "comparison",
        "thresholdValue",
        "duration",
        "trigger",
    },
    "conditionPrometheusQueryLanguage": {"query", "duration", "evaluationInterval"},
}
_PATH = re.compile(rf"/v(1|3)/projects/{PROJECT}/(alertPolicies|dashboards)(?:/([\w-]+))?")


class Monitored(Endpoints):
    """A project whose alarms are kept, by what a request calls them: `policies` and `dashboards`."""

    def __init__(self, bucket: Any) -> None:
        super().__init__(bucket)
        self.etags = itertools.count()
        self.alarms: dict[str, dict[str, dict[str, Any]]] = {"alertPolicies": {}, "dashboards": {}}

    def found(self, asked: Asked) -> Any:
        if asked.host != "monitoring.googleapis.com" or not (match := _PATH.fullmatch(asked.path)):
            return super().found(asked)
        version, kind, id = match.groups()
        if (version == "3") != (kind == "alertPolicies"):
            raise Refused(404, f"there is no {asked}")
        there = self.alarms[kind]
        if asked.method == "POST" and id is None:
            return self.create(kind, asked.json())
        if asked.method == "GET" and id is None:
            label = re.fullmatch(
                r'user_labels\.rekindle="([a-z0-9_-]{1,63})"', asked.query["filter"]
            )
            if label is None:
                raise Refused(400, f"the filter {asked.query['filter']}")
            found = [one for one in there.values() if one["userLabels"]["rekindle"] == label[1]]
            return {kind: [_given(one) for one in found]}
        if id not in there:
            raise Refused(404, f"there is no {id}")
        if asked.method == "DELETE":
            return there.pop(id) and {}
        if asked.method == "PATCH":
            there[id] = self.checked(kind, id, self.patched(kind, there[id], asked))
        return _given(there[id])

    def patched(self, kind: str, one: dict[str, Any], asked: Any) -> dict[str, Any]:
        body: dict[str, Any] = asked.json()
        if kind == "dashboards" and body.pop("etag", "") != one["etag"]:
            raise Refused(409, "the dashboard was changed meanwhile")
        if not (mask := asked.query.get("updateMask")):
            return body
        fields = {*mask.split(",")}  # of which one without a value is emptied; the others stay
        if not fields <= _POLICY or not {*body} <= fields:
            raise Refused(400, f"updateMask {mask}")
        return {key: value for key, value in one.items() if key in _POLICY - fields} | body

    def create(self, kind: str, body: dict[str, Any]) -> Any:
        id = (
            body["name"].rpartition("/")[2]
            if kind == "dashboards"
            else str(1000 + len(self.alarms[kind]))
        )
        if id in self.alarms[kind]:
            raise Refused(409, f"there is a {id} already")
        self.alarms[kind][id] = self.checked(kind, id, body)
        return _given(self.alarms[kind][id])

    def checked(self, kind: str, id: str, body: dict[str, Any]) -> dict[str, Any]:
        name = f"projects/{PROJECT}/{kind}/{id}"
        if kind == "dashboards":
            if (
                not {"displayName", "mosaicLayout"}
                <= {*body}
                <= {"displayName", "mosaicLayout", "name"}
            ):
                raise Refused(400, f"a dashboard has no {sorted(body)}")
            return {**body, "name": name, "etag": str(next(self.etags))}
        if unknown := {*body} - _POLICY:
            raise Refused(400, f"a policy has no {unknown}")
        for condition in body["conditions"]:
            (of,) = {*condition} - {"displayName"}
            if of not in _CONDITIONS or (unknown := {*condition[of]} - _CONDITIONS[of]):
                raise Refused(400, f"a condition has no {of} with {unknown}")
            if "filter" in condition[of] and not (
                "metric.type" in condition[of]["filter"]
                and "resource.type" in condition[of]["filter"]
            ):
                raise Refused(400, "a filter names a metric and a resource")
            condition["name"] = f"{name}/conditions/1"
        return {**body, "name": name, "creationRecord": {"mutatedBy": "who-submits"}}


def _given(one: dict[str, Any]) -> Any:
    """What is zero, false or empty is not there."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: plain(each)
                for key, each in value.items()
                if each not in (0, "", False, [], {})
            }
        return [plain(each) for each in value] if isinstance(value, list) else value

    return plain(copy.deepcopy(one))
