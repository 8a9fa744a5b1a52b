"""Cloud Monitoring's MetricService over gRPC, as exporters write to it: descriptors first, series of one point whose labels
were described, no series twice within five seconds."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
from google.cloud import monitoring_v3
from google.protobuf import empty_pb2

_TYPE = re.compile(r"workload\.googleapis\.com/[A-Za-z][A-Za-z0-9_./]*")
_LABEL = re.compile(r"[a-z][a-z0-9_]*")
_SECONDS = 5.0  # between points of a series


class Metrics:
    """`points`: what was taken, as (type, labels, value)."""

    def __init__(self, project: str) -> None:
        self.project = project
        self.described, self.last = dict[str, set[str]](), dict[Any, float]()
        self.points = list[tuple[str, dict[str, str], float]]()

    def describe(self, asked: Any, context: grpc.ServicerContext) -> Any:
        made = asked.metric_descriptor
        labels = {label.key for label in made.labels}
        good = _TYPE.fullmatch(made.type) and all(map(_LABEL.fullmatch, labels))
        if asked.name != f"projects/{self.project}" or not good or len(labels) > 30:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{asked.name}: {made}")
        self.described[made.type] = labels
        return made

    def write(self, asked: Any, context: grpc.ServicerContext) -> Any:
        for series in asked.time_series:
            labels, (point,) = dict(series.metric.labels), series.points
            key = series.metric.type, *sorted({**labels, **series.resource.labels}.items())
            if {*labels} > self.described.get(series.metric.type, set()):
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"labels {labels}")
            if time.monotonic() - self.last.get(key, -_SECONDS) < _SECONDS:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "written too often")
            self.last[key] = time.monotonic()
            self.points.append((series.metric.type, labels, point.value.double_value))
        return empty_pb2.Empty()


@contextlib.contextmanager
def serving(project: str) -> Iterator[tuple[Metrics, str]]:
    """The service, and the address at which it listens."""
    made = Metrics(project)
    requests = {
        "CreateMetricDescriptor": (made.describe, monitoring_v3.CreateMetricDescriptorRequest),
        "CreateTimeSeries": (made.write, monitoring_v3.CreateTimeSeriesRequest),
    }
    methods = {
        name: grpc.unary_unary_rpc_method_handler(
            answer,
            request_deserializer=kind.deserialize,
            response_serializer=lambda message: message.SerializeToString(),
        )
        for name, (answer, kind) in requests.items()
    }
    server = grpc.server(futures.ThreadPoolExecutor(2))
    service = "google.monitoring.v3.MetricService"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield made, f"127.0.0.1:{port}"
    server.stop(None)
