"""What a monitoring system receives of runs, by OTLP; and that nothing waits for one that does not answer."""

import datetime
import gzip
import json
import logging
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rekindle import telemetry
from rekindle.telemetry import Telemetry
from tests.ports import free_port
from tests.servers.collector import collector
from tests.servers.tls_hosts import Answer, Hosts
from tests.support.cli import rekindle
from tests.support.moto import aws as aws

PIPELINE = """
from kfp import dsl

@dsl.component(base_image="python:3.11", install_kfp_package=False)
def say():
    raise ValueError("it is broken")

@dsl.pipeline(name="hello")
def hello():
    say()
"""
SEND = """
from rekindle.telemetry import Telemetry
sent = Telemetry(config="reviews", platform="local")
sent.set({"monitor.alarm": 1.0, "train.loss": 0.5}, run_key="0123")
sent.close()
"""
CONFIGS = Path(__file__).parents[1] / "configs"
PLATFORMS = Path(telemetry.__file__).parent / "platforms"


@pytest.fixture
def receiver(monkeypatch):
    with collector() as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "300")
        yield server


@pytest.mark.slow
def test_a_run_and_its_training_are_received(receiver, tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    home = ("--home", str(tmp_path))
    done = rekindle("run", str(CONFIGS / "digits.yaml"), *home, "--set", "train.epochs=2", "--json")
    found, last = json.loads(done.stdout), receiver.last
    assert last("rekindle.run.failed", config="digits", platform="local") == 0
    assert last("rekindle.run.promoted") == found["gate"]["promoted"]
    assert last("rekindle.model.version") == 1
    assert last("rekindle.metric.accuracy") == pytest.approx(found["metrics"]["accuracy"])
    assert last("rekindle.run.seconds") == pytest.approx(found["seconds"], abs=1)
    record = json.loads((tmp_path / "runs" / found["run_id"] / "run.json").read_text())
    (step,) = (step for step in record["steps"] if step["name"] == "finetune")
    history = Path(step["artifacts"]["training"]["uri"].removeprefix("file://"), "history.jsonl")
    row = json.loads(history.read_text().splitlines()[-1])
    assert last("rekindle.train.step", config="digits") == row["step"]
    assert last("rekindle.train.loss") == pytest.approx(row["loss"])
    assert last("rekindle.train.samples_per_second") > 0
    assert {p.resource["service.name"] for p in receiver.points} == {"rekindle"}
    assert {p.resource["deployment.environment"] for p in receiver.points} == {"test"}
    assert {headers["x-key"] for headers in receiver.headers} == {"secret"}


@pytest.mark.slow
def test_a_run_that_failed_is_received(receiver, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("p.py").write_text(PIPELINE)
    Path("c.yaml").write_text("name: hello\npipeline: p.py:hello\n")
    assert rekindle("run", "c.yaml", check=False).returncode == 1
    assert receiver.last("rekindle.run.failed", config="hello") == 1
    assert {p.name for p in receiver.points} == {"rekindle.run.failed", "rekindle.run.seconds"}


def test_figures_go_out_while_work_goes_on(receiver):
    figures = Telemetry(config="a")
    figures.set({"loss": 2.0, "mfu": None})
    give_up = time.monotonic() + 30
    while not receiver.points:
        assert time.monotonic() < give_up
        time.sleep(0.01)
    figures.set({"loss": 1.0}, rank="1")
    figures.close()
    assert receiver.points[0].value == 2
    assert receiver.last("rekindle.loss", config="a", rank="1") == 1
    assert {p.name for p in receiver.points} == {"rekindle.loss"}


def test_a_collector_that_hangs_is_not_waited_for(receiver, monkeypatch, caplog):
    monkeypatch.setattr(telemetry, "SECONDS", 0.5)
    receiver.open.clear()
    figures = Telemetry()
    figures.set({"loss": 2.0})
    began = time.monotonic()
    figures.close()
    assert time.monotonic() - began < 5
    assert "the last figures were not taken within 0.5 s" in caplog.text


@pytest.mark.slow
def test_a_run_without_its_collector_ends_as_any_other(tmp_path, monkeypatch):
    monkeypatch.setenv(
        "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", f"http://127.0.0.1:{free_port()}/v1/metrics"
    )
    done = rekindle(
        "run",
        str(CONFIGS / "digits.yaml"),
        "--home",
        str(tmp_path),
        "--set",
        "train.epochs=1",
        "--json",
    )
    assert json.loads(done.stdout)["status"] == "succeeded"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("none", ""),
        (" none ", ""),
        ("datadog", "no package brings the exporter datadog: pip install 'rekindle[otlp]'"),
        (
            "azure_monitor_opentelemetry_exporter",
            "the exporter azure_monitor_opentelemetry_exporter does not start: ",
        ),
    ],
)
def test_what_cannot_be_exported_is_said_and_nothing_else(
    asked, said, receiver, monkeypatch, caplog
):
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", asked)
    monkeypatch.delenv("APPLICATIONINSIGHTS_CONNECTION_STRING", raising=False)
    with caplog.at_level(logging.WARNING):
        figures = Telemetry()
    assert not figures.on
    assert said in caplog.text
    assert bool(said) == bool(caplog.text)
    figures.set({"loss": 1.0})
    figures.close()
    assert not receiver.points


def test_other_exporters_are_found_by_their_names(receiver):
    program = "from rekindle.telemetry import Telemetry as T; t = T(config='a'); t.set({'loss': 2}); t.close()"
    environment = {**os.environ, "OTEL_METRICS_EXPORTER": "otlp, console"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert receiver.last("rekindle.loss") == 2
    assert '"name": "rekindle.loss"' in done.stdout


def test_an_empty_variable_is_as_one_that_is_not_set(receiver, monkeypatch):
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "")
    figures = Telemetry()
    figures.set({"loss": 2.0})
    figures.close()
    assert receiver.last("rekindle.loss") == 2


def test_an_interval_that_is_none_is_said_and_nothing_else(receiver, monkeypatch, caplog):
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "-1")
    assert not Telemetry().on
    assert "the exporter otlp does not start: " in caplog.text


@pytest.mark.slow
def test_cloudwatch_gets_a_metric_a_config_and_none_a_run_key(aws, monkeypatch, caplog):
    boto3 = pytest.importorskip("boto3", reason="boto3 is a developer's dependency")
    for name, value in {
        "AWS_ENDPOINT_URL": aws,
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "eu-central-1",
        "OTEL_METRICS_EXPORTER": "cloudwatch",
    }.items():
        monkeypatch.setenv(name, value)
    sent = Telemetry(config="reviews", run_key="0123")
    sent.set(
        {f"figure.{number}": number for number in range(1_100)}
        | {"train.loss": 0.5, "nan": math.nan}
    )
    sent.close()
    api = boto3.client("cloudwatch")
    pages = api.get_paginator("list_metrics").paginate(Namespace="rekindle")
    found = {one["MetricName"]: one["Dimensions"] for page in pages for one in page["Metrics"]}
    assert len(found) == 1_101, "in two calls of at most a thousand, without NaN"
    assert found["rekindle.train.loss"] == [{"Name": "config", "Value": "reviews"}]
    now = datetime.datetime.now(datetime.UTC)
    (point,) = api.get_metric_statistics(
        Namespace="rekindle",
        MetricName="rekindle.train.loss",
        Statistics=["Maximum"],
        Period=3600,
        Dimensions=found["rekindle.train.loss"],
        StartTime=now - datetime.timedelta(hours=2),
        EndTime=now + datetime.timedelta(hours=1),
    )["Datapoints"]
    assert point["Maximum"] == 0.5
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    lost = Telemetry(config="reviews")
    lost.set({"train.loss": 0.4})
    lost.close()
    assert "telemetry: CloudWatch took nothing: Could not connect" in caplog.text


def test_azure_monitor_receives_the_metric_that_its_alarm_asks_for(tmp_path):
    """By Microsoft's own exporter; the alarm splits by `config` in the default namespace."""
    pytest.importorskip("azure.monitor.opentelemetry.exporter")
    host, envelopes = "westeurope-5.in.applicationinsights.azure.com", []

    def answer(asked):
        assert str(asked) == f"POST https://{host}/v2.1/track"
        packed = asked.headers.get("content-encoding") == "gzip"
        envelopes.extend(json.loads(gzip.decompress(asked.body) if packed else asked.body))
        taken = len(envelopes)
        return Answer(200, {"itemsReceived": taken, "itemsAccepted": taken, "errors": []})

    key = "00000000-0000-0000-0000-000000000001"
    with Hosts(tmp_path, (host,), answer) as hosts:
        own = {
            "APPLICATIONINSIGHTS_CONNECTION_STRING": f"InstrumentationKey={key};IngestionEndpoint=https://{host}/",
            "APPLICATIONINSIGHTS_STATSBEAT_DISABLED_ALL": "true",
            "OTEL_METRICS_EXPORTER": "azure_monitor_opentelemetry_exporter",
        }
        # a process of its own: the exporter leaves threads behind
        words = [sys.executable, "-c", SEND]
        subprocess.run(words, env=os.environ | hosts.environment | own, check=True, timeout=60)
        assert hosts.strangers == []
    assert {one["iKey"] for one in envelopes} == {key}
    assert {one["data"]["baseType"] for one in envelopes} == {"MetricData"}
    told = [one["data"]["baseData"] for one in envelopes]
    told = [one for one in told if "config" in one["properties"]]  # not what it counts of itself
    found = {metric["name"]: metric for one in told for metric in one["metrics"]}
    assert {name: metric["value"] for name, metric in found.items()} == {
        "rekindle.monitor.alarm": 1.0,
        "rekindle.train.loss": 0.5,
    }
    assert all("ns" not in metric for metric in found.values())
    properties = {"config": "reviews", "platform": "local", "run_key": "0123"}
    assert [one["properties"] for one in told] == [properties] * 2
    alarm = (PLATFORMS / "azureml" / "alarms.yaml.j2").read_text()
    assert '"azure.applicationinsights", "rekindle.monitor.alarm"' in alarm


@pytest.mark.filterwarnings("ignore:CloudMonitoringMetricsExporter is deprecated")
def test_cloud_monitoring_receives_the_metric_that_its_alarm_asks_for(monkeypatch, caplog):
    """By Google's own exporter and client; only the channel and the credentials are of this machine."""
    pytest.importorskip("opentelemetry.exporter.cloud_monitoring")
    import google.auth
    import grpc
    from google.auth.credentials import AnonymousCredentials
    from google.cloud.monitoring_v3.services.metric_service import transports

    from tests.servers.google.metrics import serving

    known = AnonymousCredentials(), "forge"
    monkeypatch.setattr(google.auth, "default", lambda *args, **words: known)
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "gcp_monitoring")
    with serving("forge") as (service, address):

        def channel(cls, *args, **words):
            return grpc.insecure_channel(address)

        transport = transports.MetricServiceGrpcTransport
        monkeypatch.setattr(transport, "create_channel", classmethod(channel))
        sent = Telemetry(config="reviews", platform="local")
        sent.set({"monitor.alarm": 1.0, "train.loss": 0.5}, run_key="0123")
        sent.close()
    labels = {"config": "reviews", "platform": "local", "run_key": "0123"}
    assert sorted(service.points) == [
        ("workload.googleapis.com/rekindle.monitor.alarm", labels, 1.0),
        ("workload.googleapis.com/rekindle.train.loss", labels, 0.5),
    ]
    assert caplog.text == ""
    alarm = (PLATFORMS / "vertex" / "alarms.yaml.j2").read_text()
    assert "workload_googleapis_com:rekindle_monitor_alarm{config=" in alarm
