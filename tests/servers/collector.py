"""An OpenTelemetry collector that receives OTLP over HTTP, for tests of telemetry."""

import contextlib
import dataclasses
import http.server
import threading
from collections.abc import Iterator
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest


@dataclasses.dataclass(frozen=True)
class Point:
    """A figure as it was received, with the attributes of its resource and of itself."""

    name: str
    value: float
    attributes: dict[str, str]
    resource: dict[str, str]


class Collector(http.server.ThreadingHTTPServer):
    """Keeps each point; `open` holds answers back while it is not set."""

    daemon_threads = True

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.headers: list[dict[str, str]] = []
        self.open = threading.Event()
        self.open.set()
        super().__init__(("127.0.0.1", 0), _Answer)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def last(self, name: str, **attributes: str) -> float:
        """The latest value of a figure whose attributes have these among them."""
        found = [
            p.value
            for p in self.points
            if p.name == name and attributes.items() <= p.attributes.items()
        ]
        assert found, (name, sorted({p.name for p in self.points}))
        return found[-1]


class _Answer(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        assert self.path == "/v1/metrics"
        assert self.headers["Content-Type"] == "application/x-protobuf"
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.open.wait(60)
        self.server.headers.append(dict(self.headers))
        for of_resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            resource = _attributes(of_resource.resource.attributes)
            for scope in of_resource.scope_metrics:
                for metric in scope.metrics:
                    assert metric.WhichOneof("data") == "gauge"
                    for point in metric.gauge.data_points:
                        found = _attributes(point.attributes)
                        self.server.points.append(
                            Point(metric.name, point.as_double, found, resource)
                        )
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def _attributes(pairs: Any) -> dict[str, str]:
    return {pair.key: pair.value.string_value for pair in pairs}


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    """One that listens."""
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.open.set()
            server.shutdown()
            thread.join()
