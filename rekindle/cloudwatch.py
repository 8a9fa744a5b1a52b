"""What telemetry.py sends, to CloudWatch: OTEL_METRICS_EXPORTER=cloudwatch.

Authority: botocore's model of PutMetricData (1,000 figures a call; NaN is refused)."""

import itertools
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any, TypedDict

from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData

from rekindle.errors import first_line

log = logging.getLogger(__name__)

NAMESPACE = "rekindle"
_MOST = 1_000
# each of its values would be a metric of its own, which is paid for by the month
_LEFT_OUT = {"run_key"}


class _Dimension(TypedDict):
    Name: str
    Value: str


class _Figure(TypedDict):
    """A MetricDatum of PutMetricData, by Amazon's names."""

    MetricName: str
    Dimensions: list[_Dimension]
    Value: float
    Timestamp: float


class CloudWatchExporter(MetricExporter):
    """Sends gauges under `NAMESPACE`, with their attributes as dimensions. Raises what
    botocore does where no region is set."""

    def __init__(self) -> None:
        super().__init__()
        import boto3
        from botocore.config import Config

        patient = Config(connect_timeout=5, read_timeout=10, retries={"max_attempts": 2})
        self.api: Any = boto3.client("cloudwatch", config=patient)

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: object
    ) -> MetricExportResult:
        """One call for each thousand figures."""
        figures = _figures(metrics_data)
        try:
            while batch := list(itertools.islice(figures, _MOST)):
                self.api.put_metric_data(Namespace=NAMESPACE, MetricData=batch)
        except Exception as error:  # noqa: BLE001 - whatever the network has: work goes on
            log.warning("telemetry: CloudWatch took nothing: %s", first_line(error))
            return MetricExportResult.FAILURE
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        """Nothing is kept back."""
        return True

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: object) -> None:
        self.api.close()


def _figures(data: MetricsData) -> Iterator[_Figure]:
    for resource in data.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                for point in metric.data.data_points:
                    value = getattr(point, "value", math.nan)
                    if math.isfinite(value):
                        yield {
                            "MetricName": metric.name,
                            "Dimensions": _dimensions(point.attributes or {}),
                            "Value": value,
                            "Timestamp": point.time_unix_nano / 1e9,
                        }


def _dimensions(attributes: Mapping[str, object]) -> list[_Dimension]:
    dimensions: list[_Dimension] = []
    for name, value in attributes.items():
        if name not in _LEFT_OUT:
            dimensions.append({"Name": name, "Value": str(value)})
    return dimensions
