"""Figures for a monitoring system, by OpenTelemetry's SDK and its variables.

They go by OTLP where OTEL_EXPORTER_OTLP_ENDPOINT names a collector, and to other exporters
by OTEL_METRICS_EXPORTER.

Nothing waits for it: a thread of the SDK sends the latest figures, and logs what it could
not send. Authority: OpenTelemetry's "Environment Variable Specification".

Runs and checks end before anything could scrape them, so figures are pushed; servers
answer Prometheus at `/metrics`. OpenTelemetry's own variables say where to, not fields of
the config, because collectors already speak every monitoring system's protocol;
CloudWatch's exporter is ours (cloudwatch.py). The cost: on a platform the variables have
to be among its secrets."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Protocol

from rekindle.errors import first_line

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider

log = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
SECONDS = 5.0  # for which the end waits; the SDK itself would wait for 30
_GROUP = "opentelemetry_metrics_exporter"
_NAMES = {"otlp": "otlp_proto_http"}
_OURS = (EntryPoint("cloudwatch", "rekindle.cloudwatch:CloudWatchExporter", _GROUP),)


class _Gauge(Protocol):
    def set(self, amount: float, attributes: Mapping[str, str]) -> None: ...


class Telemetry:
    """Gauges with the attributes `about`; nothing is done where no variable asks for it,
    as `on` tells."""

    def __init__(self, **about: str) -> None:
        self.about = about
        self._gauges: dict[str, _Gauge] = {}
        self._provider = _provider()
        self.on = self._provider is not None

    def set(self, figures: Mapping[str, float | None], **more: str) -> None:
        """The latest of each figure, by its name behind `rekindle.`, with more attributes."""
        for name, value in figures.items():
            if self._provider is None or value is None:
                continue
            if name not in self._gauges:
                meter = self._provider.get_meter("rekindle")
                self._gauges[name] = meter.create_gauge(f"rekindle.{name}")
            self._gauges[name].set(float(value), {**self.about, **more})

    def close(self) -> None:
        """Send what was set last; waits a bounded time."""
        if self._provider is None:
            return
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(SECONDS)
        if ending.is_alive():
            log.warning("telemetry: the last figures were not taken within %g s", SECONDS)


def _exporter_names() -> list[str]:
    """The exporters that the environment asks for, in the words of OpenTelemetry."""
    listed = os.environ.get("OTEL_METRICS_EXPORTER")
    if not listed:
        has_endpoint = any(map(os.environ.get, ENDPOINTS))
        return ["otlp"] if has_endpoint else []
    names = [name.strip() for name in listed.split(",")]
    return [name for name in names if name not in ("", "none")]


def _provider() -> MeterProvider | None:
    """The SDK's provider of meters, with a reader for each exporter that is asked for, or None."""
    readers = []
    for name in _exporter_names():
        entries = [entry for entry in _OURS if entry.name == name]
        entries += entry_points(group=_GROUP, name=_NAMES.get(name, name))
        if not entries:
            fix = "pip install 'rekindle[otlp]'"
            log.warning("telemetry: no package brings the exporter %s: %s", name, fix)
            continue
        try:
            from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

            exporter = entries[0].load()()
            readers.append(PeriodicExportingMetricReader(exporter))
        except Exception as error:  # noqa: BLE001 - whatever an exporter lacks: work goes on
            log.warning("telemetry: the exporter %s does not start: %s", name, first_line(error))
    if not readers:
        return None
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource

    resource = Resource.create({SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", "rekindle")})
    return MeterProvider(readers, resource, shutdown_on_exit=False)
