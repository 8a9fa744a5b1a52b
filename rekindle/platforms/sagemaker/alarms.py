"""Alarms and a dashboard in CloudWatch. Each variant of an endpoint has metrics of its
own, so an alarm asks for all by a query of Metrics Insights, which knows no percentiles.

Authority: botocore's model of cloudwatch; docs.aws.amazon.com/sagemaker/latest/dg/
monitoring-cloudwatch.html. No account has been asked."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rekindle.platforms.sagemaker.client import code_of, pipeline_name
from rekindle.platforms.sagemaker.endpoint import SageMakerEndpoint
from rekindle.platforms.sagemaker.section import SageMakerSpec
from rekindle.platforms.submission import Definition, plain_name
from rekindle.spec.deploy import DeploySpec

# what people add to an alarm by hand; an update that leaves it out would remove it
_ADDED_BY_HAND = ("OKActions", "InsufficientDataActions", "DatapointsToAlarm")


class SageMakerAlarms:
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
        with self.account.client("cloudwatch") as cloudwatch:
            if kind == "alarm":
                described = cloudwatch.describe_alarms(
                    AlarmNames=[name], AlarmTypes=["MetricAlarm"]
                )
                return next(iter(described["MetricAlarms"]), None)
            try:
                dashboard = cloudwatch.get_dashboard(DashboardName=_dashboard_name(name))
                return dict(json.loads(dashboard["DashboardBody"]))
            except cloudwatch.exceptions.ClientError as error:
                if code_of(error) == "ResourceNotFound":
                    return None
                raise

    def put(self, kind: str, name: str, body: Mapping[str, Any]) -> None:
        with self.account.client("cloudwatch") as cloudwatch:
            if kind == "alarm":
                existing = self.find(kind, name) or {}
                added = {f: existing[f] for f in _ADDED_BY_HAND if existing.get(f)}
                cloudwatch.put_metric_alarm(AlarmName=name, **added, **body)
            else:
                cloudwatch.put_dashboard(
                    DashboardName=_dashboard_name(name), DashboardBody=json.dumps(body)
                )

    def remove(self, kind: str, name: str) -> None:
        with self.account.client("cloudwatch") as cloudwatch:
            if kind == "alarm":
                cloudwatch.delete_alarms(AlarmNames=[name])
            elif self.find(kind, name):
                cloudwatch.delete_dashboards(DashboardNames=[_dashboard_name(name)])


def _dashboard_name(name: str) -> str:
    return plain_name(name, r"[^A-Za-z0-9_-]", 255, distinct=True)
