"""A real Prometheus scrapes a real server; the alerts and the dashboard that `rekindle alarms` writes hold for it."""

import json
import shutil
import subprocess
import time
from pathlib import Path

import httpx
import pytest
import yaml

from tests.ports import free_port
from tests.serve import models
from tests.serve.servers import running

FILES = Path(__file__).parents[1] / "rekindle" / "platforms" / "kubeflow" / "manifests"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not shutil.which("prometheus"),
        reason="prometheus is not installed: apt-get install prometheus",
    ),
]

ALL = "0 1 2 3 4 5 6 7 8 9 10 11"
# of each alert: what it looks at, and the minute by which it has to be there, None for never
CASES = [
    ("RekindleRunFailed", {'rekindle_run_failed{config="a",platform="local"}': "0 1+0x11"}, 2),
    ("RekindleRunFailed", {'rekindle_run_failed{config="a",platform="local"}': "0+0x11"}, None),
    ("RekindleTrainingStalled", {'rekindle_train_step{config="a"}': "0+5x20 100+0x60"}, 60),
    ("RekindleTrainingStalled", {'rekindle_train_step{config="a"}': "0+5x90"}, None),
    ("RekindleTrainingStalled", {'rekindle_train_step{config="a"}': "0+5x20 stale"}, None),
    ("RekindleDrift", {'rekindle_monitor_alarm{config="a"}': "0 1"}, 1),
    (
        "RekindleServerErrors",
        {
            'rekindle_request_seconds_count{instance="s",status="200"}': "0+60x90",
            'rekindle_request_seconds_count{instance="s",status="500"}': "0+1x90",
        },
        30,
    ),
    (
        "RekindleServerErrors",
        {
            'rekindle_request_seconds_count{instance="s",status="200"}': "0+600x90",
            'rekindle_request_seconds_count{instance="s",status="422"}': "0+60x90",
        },
        None,
    ),
    (
        "RekindleServerSlow",
        {
            'rekindle_request_seconds_bucket{instance="s",le="1.0"}': "0+90x90",
            'rekindle_request_seconds_bucket{instance="s",le="+Inf"}': "0+100x90",
        },
        None,
    ),
    (
        "RekindleServerSlow",
        {
            'rekindle_request_seconds_bucket{instance="s",le="1.0"}': "0+90x90",
            'rekindle_request_seconds_bucket{instance="s",le="5.0"}': "0+100x90",
            'rekindle_request_seconds_bucket{instance="s",le="+Inf"}': "0+100x90",
        },
        30,
    ),
    (
        "RekindleQueueFull",
        {'rekindle_refused_total{instance="s",reason="queue_full"}': "0+1x90"},
        30,
    ),
    (
        "RekindleQueueFull",
        {'rekindle_refused_total{instance="s",reason="bad_request"}': "0+1x90"},
        None,
    ),
    ("RekindlePredictionsUnlogged", {'rekindle_unlogged{instance="s"}': "0+0x20 5+0x20"}, 30),
    ("RekindlePredictionsUnlogged", {'rekindle_unlogged{instance="s"}': "5+0x60"}, None),
]


@pytest.mark.parametrize(("alert", "series", "minute"), CASES)
def test_an_alert_is_raised_when_it_has_to_be(tmp_path, alert, series, minute):
    rules = tmp_path / "alerts.yaml"
    rules.write_text(FILES.joinpath("alerts.yaml").read_text())
    for at in (minute,) if minute is not None else (5, 30, 60, 80):
        # expected labels are not compared here: whether there is such an alert decides
        query = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)'
        test = {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "promql_expr_test": [
                {
                    "expr": query,
                    "eval_time": f"{at}m",
                    "exp_samples": [{"labels": "{}", "value": float(minute is not None)}],
                }
            ],
        }
        file = tmp_path / "test.yaml"
        file.write_text(
            yaml.safe_dump(
                {"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": [test]}
            )
        )
        done = subprocess.run(
            ["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_what_a_server_says_is_scraped_and_drawn(tmp_path):
    port = free_port()
    with running(models.made(tmp_path / "m", "text")) as server:
        place = server.url.removeprefix("http://")
        config = {
            "global": {
                "scrape_interval": "200ms",
                "evaluation_interval": "200ms",
                "scrape_timeout": "200ms",
            },
            "rule_files": [str(FILES / "alerts.yaml")],
            "scrape_configs": [{"job_name": "rekindle", "static_configs": [{"targets": [place]}]}],
        }
        (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(config))
        words = [
            "prometheus",
            f"--config.file={tmp_path}/prometheus.yaml",
            f"--storage.tsdb.path={tmp_path}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with (tmp_path / "log.txt").open("w") as log:
            process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
        try:
            for path, expression in shown():
                give_up = time.monotonic() + 60
                while not (found := asked(port, expression)) or found[0]["value"][1] == "NaN":
                    if not path:  # pushed, not scraped: it only has to be read without an error
                        break
                    assert time.monotonic() < give_up, (
                        expression,
                        (tmp_path / "log.txt").read_text()[-2000:],
                    )
                    assert server.predict("the parcel came open").status_code == 200
            (sum_,) = asked(
                port, 'sum(rekindle_request_seconds_count{status="200",route="/predict"})'
            )
            assert float(sum_["value"][1]) > 3
            (up,) = asked(port, "up")
            assert up["value"][1] == "1"
            rules = httpx.get(f"http://127.0.0.1:{port}/api/v1/rules").json()["data"]["groups"][0]
            assert [one["health"] for one in rules["rules"]] == ["ok"] * 7
        finally:
            process.terminate()
            process.wait(30)


def shown():
    """Of each curve of the dashboard whether a server answers it, and its expression."""
    of_servers = ("request_seconds", "batch_instances", "rekindle_unlogged")
    for panel in json.loads((FILES / "dashboard.json").read_text())["panels"]:
        for target in panel["targets"]:
            yield (
                any(name in target["expr"] for name in of_servers),
                target["expr"].replace("[$__rate_interval]", "[2s]"),
            )


def asked(port, expression):
    """What Prometheus answers; [] while it does not listen yet."""
    try:
        answer = httpx.get(f"http://127.0.0.1:{port}/api/v1/query", params={"query": expression})
    except httpx.TransportError:
        return []
    if answer.status_code == 503:  # it starts
        return []
    assert answer.json()["status"] == "success", answer.text
    return answer.json()["data"]["result"]
