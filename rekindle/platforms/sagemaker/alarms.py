"""Alarms and a dashboard in CloudWatch. Each variant of an endpoint has metrics of its own, so an
alarm asks for all by a query of Metrics Insights, which knows no percentiles.

Authority: botocore's model of cloudwatch; docs.aws.amazon.com/sagemaker/latest/dg/
monitoring-cloudwatch.html. No account has been asked."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rekindle.platforms.sagemaker.client import code_of, pipeline_name
from rekindle.platforms.sagemaker.endpoint import SageMakerEndpoint
from rekindle.platforms.submission import Definition, plain_name
from rekindle.spec.deploy import DeploySpec
from rekindle.spec.platforms import SageMakerSpec

_ADDED = ("OKActions", "InsufficientDataActions", "DatapointsToAlarm")  # by hand, which stays


class Alarms:
    """See `rekindle.platforms.alarms.Monitoring`."""

    template = Path(__file__).with_name("alarms.yaml.j2")

    def __init__(
        self, place: SageMakerSpec, definition: Definition, model: str, folder: Path
    ) -> None:
        endpoint = SageMakerEndpoint(place, DeploySpec(), model)
        self.account = endpoint.account
        self.values = {
            "endpoint": endpoint.name,
            "pipeline": pipeline_name(definition),
            "region": place.region,
            "actions": place.alarm_actions,
        }

    def find(self, kind: str, name: str) -> dict[str, Any] | None:
        with self.account.client("cloudwatch") as api:
            if kind == "alarm":
                found = api.describe_alarms(AlarmNames=[name], AlarmTypes=["MetricAlarm"])
                return next(iter(found["MetricAlarms"]), None)
            try:
                found = api.get_dashboard(DashboardName=_board(name))
                return dict(json.loads(found["DashboardBody"]))
            except api.exceptions.ClientError as error:
                if code_of(error) == "ResourceNotFound":
                    return None
                raise

    def put(self, kind: str, name: str, body: Mapping[str, Any]) -> None:
        with self.account.client("cloudwatch") as api:
            if kind == "alarm":
                there = self.find(kind, name) or {}
                kept = {field: there[field] for field in _ADDED if there.get(field)}
                api.put_metric_alarm(AlarmName=name, **kept, **body)
            else:
                api.put_dashboard(DashboardName=_board(name), DashboardBody=json.dumps(body))

    def remove(self, kind: str, name: str) -> None:
        with self.account.client("cloudwatch") as api:
            if kind == "alarm":
                api.delete_alarms(AlarmNames=[name])
            elif self.find(kind, name):
                api.delete_dashboards(DashboardNames=[_board(name)])


def _board(name: str) -> str:
    return plain_name(name, r"[^A-Za-z0-9_-]", 255, distinct=True)
