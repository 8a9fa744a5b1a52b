"""`rekindle monitor` over a log that a server's own thread wrote, with a champion in a real registry."""

import dataclasses
import datetime as dt
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from rekindle.app.monitor import check
from rekindle.app.triggers import due, moved
from rekindle.cli.main import invoke
from rekindle.modalities import load_modality
from rekindle.records import Monitored, Signal
from rekindle.serve.log import PredictionLog
from rekindle.serve.messages import LogTo
from rekindle.spec.load import load_target
from rekindle.spec.schedule import TriggersSpec
from tests.cli.turns import NOW, held, past
from tests.data.corpora import write_jsonl
from tests.monitor.watched import texts, watched
from tests.serve import models
from tests.support.cli import rekindle


@pytest.fixture(scope="module")
def registered(tmp_path_factory):
    """A home with a champion that keeps a reference."""
    folder = tmp_path_factory.mktemp("registered")
    model = watched(folder / "made", "nowhere")
    models.champion(folder / "home", model)
    return folder, model


@pytest.fixture
def job(registered, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, model = registered
    columns = {"text": "body", "label": "label", "key": "id"}
    config = {
        "name": "tickets",
        "task": "text_classification",
        "data": {"source": "r.jsonl", "columns": columns},
        "model": {"source": {"model_type": "distilbert", "dim": 32, "n_layers": 1, "n_heads": 2}},
        "monitor": {"log": str(tmp_path / "log"), "labels": "labels.jsonl"},
        "triggers": {"drift": True, "live_drop": 0.05},
    }
    Path("c.yaml").write_text(yaml.safe_dump(config))
    Path("home").symlink_to(folder / "home")
    write_jsonl(Path("labels.jsonl"), [{"id": "unknown", "label": "other"}])
    return model


def logged(model, count, unknown=0.1, seed=5, version=""):
    """Have so many predictions logged, a third of each class."""
    if version:
        model = dataclasses.replace(model, version=version, digest=version)
    to = LogTo(str(Path("log").absolute()), "id")
    log = PredictionLog(to, model, load_modality("text"))
    draw, asked = np.random.default_rng(seed), texts(count, seed, unknown)
    found = [
        {"label": models.LABELS[i % 3], "probability": float(draw.uniform(0.5, 1))}
        for i in range(count)
    ]
    log.put([f"r{i}" for i in range(count)], asked, found, 0.01)
    log.close()
    return [one["label"] for one in found]


def look(*words, check=True):
    done = rekindle("monitor", "c.yaml", "--home", "home", "--json", *words, check=check)
    return done.returncode, json.loads(done.stdout)


def requests_of(model, seconds, ago):
    """So many requests, each of one text, logged at a time."""
    to = LogTo(str(Path("log").absolute()), "id")
    log = PredictionLog(to, model, load_modality("text"))
    for i, (text, took) in enumerate(zip(texts(len(seconds), 5), seconds, strict=True)):
        answer = {"label": models.LABELS[i % 3], "probability": 0.5 + i % 50 / 100}
        log.put([f"r{i}"], [text], [answer], float(took))
    times = (dt.datetime.now(dt.UTC) - ago - dt.timedelta(seconds=i) for i in range(len(seconds)))
    log._rows = type(log._rows)(
        row._replace(time=time) for time, row in zip(times, log._rows, strict=True)
    )
    log.close()


@pytest.mark.slow
def test_a_step_of_a_pipeline_checks_and_decides_what_follows(job):
    """The component, by `rekindle run` of a pipeline that the user wrote."""
    Path("nightly.py").write_text("""
from kfp import dsl
from components.monitor import monitor


@dsl.component(base_image="python:3.11")
def told(reason: str):
    print(f"told: {reason}")


@dsl.pipeline(name="nightly")
def nightly(watched: str, root: str):
    done = monitor(config=watched, artifact_root=root)
    done.set_caching_options(False)
    with dsl.If(done.outputs["verdict"] == "alarm"):
        told(reason=done.outputs["reason"])
""")
    watched = load_target(Path("c.yaml")).model_dump_json(
        include={"name", "task", "data", "registration", "monitor"}, by_alias=True
    )
    arguments = {"watched": watched, "root": str(Path("home").resolve())}
    config = {"name": "nightly", "pipeline": "nightly.py:nightly", "arguments": arguments}
    Path("nightly.yaml").write_text(json.dumps(config))
    logged(job, 200)
    statuses = []
    for turn in range(2):
        done = json.loads(rekindle("run", "nightly.yaml", "--home", "runs", "--json").stdout)
        steps = {step["name"].rpartition("/")[2]: step for step in done["steps"]}
        record = json.loads(Path("runs", "runs", done["run_id"], "run.json").read_text())
        (checked,) = (
            step["artifacts"]["checked"] for step in record["steps"] if step["name"] == "monitor"
        )
        found = json.loads(Path(checked["uri"].removeprefix("file://")).read_text())
        statuses.append((found["verdict"], steps["told"]["status"]))
        if not turn:
            logged(job, 400, unknown=0.4, seed=6)
    assert statuses == [("quiet", "skipped"), ("alarm", "succeeded")]


@pytest.mark.slow
def test_a_stream_as_before_is_quiet_and_new_words_are_an_alarm(job):
    logged(job, 200)
    Path("home/index.html").unlink(missing_ok=True)
    code, found = look()
    assert Path("home/index.html").exists()  # which draws what checks found
    assert (code, found["verdict"], found["rows"]) == (0, "quiet", 200)
    assert {one["name"] for one in found["signals"]} == {
        "length",
        "unknown",
        "confidence",
        "prediction",
    }
    assert found["expected_accuracy"] == pytest.approx(0.8)
    logged(job, 400, unknown=0.5)
    logged(job, 50, version="4")
    code, found = look(check=False)
    assert (code, found["verdict"], found["left_out"]) == (3, "alarm", {"of another version": 50})
    assert [one["name"] for one in found["signals"] if one["alarm"]] == ["unknown"]
    assert "unknown words went from 9.5% to 37.6% (600 rows" in found["reason"]
    kept = Path("home/monitored/tickets.jsonl").read_text().splitlines()
    assert [json.loads(line)["verdict"] for line in kept][-2:] == ["quiet", "alarm"]
    text = rekindle("monitor", "c.yaml", "--home", "home", check=False).stdout
    assert "ALARM" in text
    assert text.splitlines()[0].endswith("600 rows (50 of another version left out)")


def test_too_few_rows_and_none_are_no_alarm_and_say_so(job):
    code, found = look()
    assert (code, found["verdict"], found["rows"]) == (0, "too_few", 0)
    logged(job, 99)
    code, found = look()
    assert (code, found["verdict"], found["signals"]) == (0, "too_few", [])
    assert "99 rows in" in found["reason"]
    tomorrow = dt.datetime.now(dt.UTC) - dt.timedelta(hours=2)  # all rows are from the future then
    _, found = look("--now", f"{tomorrow:%Y-%m-%dT%H:%M}")
    assert found["rows"] == 0


def test_labels_that_arrive_tell_live_accuracy(job):
    answered = logged(job, 360)[:300]
    wrong = {one: models.LABELS[(i + 1) % 3] for i, one in enumerate(models.LABELS)}
    truth = [
        {"id": f"r{i}", "label": one if i % 2 else wrong[one]} for i, one in enumerate(answered)
    ]
    waiting = [{"id": f"r{i}", "label": None} for i in range(300, 360)]
    # twice, the later one counts; of unknown ids; never, or not yet: all that is quiet
    first = {"id": "r1", "label": wrong[answered[1]]}
    write_jsonl(Path("labels.jsonl"), [first, *truth, {"id": "x", "label": "other"}, *waiting])
    code, found = look(check=False)
    (accuracy,) = [one for one in found["signals"] if one["name"] == "accuracy"]
    assert (code, accuracy["alarm"], accuracy["before"], accuracy["now"], accuracy["rows"]) == (
        3,
        True,
        0.8,
        0.5,
        300,
    )
    _, found = look("--set", "monitor.label_delay=1 day")  # nothing is so old yet
    assert "accuracy" not in {one["name"] for one in found["signals"]}
    spec = load_target("c.yaml")
    seen = check(spec, Path("home"))
    fires, because = moved(spec.triggers, seen)
    assert (fires, because) == (True, "accuracy went from 0.8 to 0.5")
    assert not moved(TriggersSpec(live_drop=0.4), seen)[0]
    assert not moved(TriggersSpec(drift=True), seen)[0]


def test_a_slice_that_falls_is_an_alarm_that_starts_no_training(job):
    answered = logged(job, 300)
    wrong = {one: models.LABELS[(i + 1) % 3] for i, one in enumerate(models.LABELS)}
    truth = [
        {
            "id": f"r{i}",
            "label": one if (i % 10 > 3 if i % 2 else i % 20) else wrong[one],
            "lang": ("de", "fr")[i % 2],
        }
        for i, one in enumerate(answered)
    ]
    write_jsonl(Path("labels.jsonl"), truth)
    slices = ("--set", "data.slices=[lang]")
    code, found = look(*slices, check=False)
    shown = {
        one["name"]: (one["now"], one["alarm"]) for one in found["signals"] if "acc" in one["name"]
    }
    assert shown == {
        "accuracy": (0.75, False),
        "accuracy:lang=de": (0.9, False),
        "accuracy:lang=fr": (0.6, True),
    }
    assert code == 3
    assert found["reason"].startswith("accuracy:lang=fr went from 80.0% to 60.0% (150 rows, p = ")
    text = rekindle("monitor", "c.yaml", "--home", "home", *slices, check=False).stdout
    (line,) = (line for line in text.splitlines() if line.startswith("accuracy:lang=fr"))
    assert line.endswith("  ALARM")
    spec = load_target("c.yaml", overrides=["data.slices=[lang]"])
    fires, because = moved(spec.triggers, check(spec, Path("home")))
    assert (fires, because.startswith("nothing moved: accuracy:lang=fr")) == (False, True)
    _, found = look()  # the config names no slices
    assert {one["name"] for one in found["signals"]}.isdisjoint(shown.keys() - {"accuracy"})


def test_a_server_that_became_slower_is_an_alarm_that_starts_no_training(job):
    """Against the window before, of the same log and version."""
    draw = np.random.default_rng(11)
    requests_of(job, draw.uniform(0.01, 0.03, 150), dt.timedelta(days=9))
    requests_of(job, draw.uniform(0.1, 0.14, 150), dt.timedelta(days=1))
    week = ("--set", "monitor.window=1 week")
    code, found = look(*week, check=False)
    (one,) = [one for one in found["signals"] if one["alarm"]]
    assert (code, one["name"], one["rows"], found["rows"]) == (3, "latency", 150, 150)
    median = r"the median latency went from [\d.]+ ms to 1\d\d ms \(150 requests, p = "
    assert re.match(median, found["reason"])
    text = rekindle("monitor", "c.yaml", "--home", "home", *week, check=False).stdout
    (line,) = (line for line in text.splitlines() if line.startswith("latency"))
    assert line.count(" ms") == 3
    spec = load_target("c.yaml", overrides=["monitor.window=1 week"])
    fires, because = moved(spec.triggers, check(spec, Path("home")))
    assert (fires, because.startswith("nothing moved: the median latency")) == (False, True)
    _, found = look()  # a month, and nothing before it
    assert "latency" not in {one["name"] for one in found["signals"]}


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        (["triggers.live_drop=null", "monitor=null"], "nothing is monitored"),
        (["monitor.labels="], "no labels arrive"),
        (["data.columns.key=null"], "labels are joined by a key, and the data have none"),
        (["monitor.window=often"], "use a number and a unit"),
        (["monitor.text=maybe"], "hash"),
        (["monitor.log=s3://key:secret@bucket/log"], "password"),
    ],
)
def test_what_cannot_be_monitored_is_refused(job, changed, what):
    words = [word for one in changed for word in ("--set", one)]
    done = rekindle("monitor", "c.yaml", "--home", "home", *words, check=False)
    assert (done.returncode, what in done.stderr) == (2, True), done.stderr


def test_a_source_of_labels_that_is_not_there_is_named_by_its_field(job):
    logged(job, 3)
    Path("labels.jsonl").unlink()
    done = rekindle("monitor", "c.yaml", "--home", "home", check=False)
    assert done.returncode == 1
    assert "labels.jsonl names no file\n  where: monitor.labels\n" in done.stderr


def test_a_config_without_the_section_is_told_to_add_it(job):
    done = rekindle(
        "monitor",
        "c.yaml",
        "--home",
        "home",
        "--set",
        "monitor=null",
        "--set",
        "triggers=null",
        check=False,
    )
    assert done.returncode == 2
    assert "add `monitor: {}`, deploy, and send requests" in done.stderr


def test_a_platform_that_is_not_configured_is_refused(job):
    done = rekindle("monitor", "c.yaml", "--home", "home", "--platform", "vertex", check=False)
    assert done.returncode == 2
    assert "platforms.vertex" in done.stderr


def test_an_alarm_makes_a_run_due_where_the_data_have_changed():
    fields = {"before": 0.1, "now": 0.3, "effect": 0.2, "rows": 200, "p_value": 1e-9}
    signal = Signal(name="unknown", alarm=True, **fields)
    times = dict.fromkeys(("at", "start", "end"), "2026-07-15T12:00:00+00:00")
    seen = Monitored(
        name="n", version="1", verdict="alarm", reason="r", rows=200, signals=(signal,), **times
    )
    triggers = TriggersSpec(drift=True, new_rows=50)
    words = moved(triggers, seen)
    assert due(triggers, NOW, held("b", 3), past(), words) == (True, "unknown went from 0.1 to 0.3")
    is_due, because = due(triggers, NOW, held("a", 0), past(), words)
    assert (is_due, because) == (False, "the data have not changed since r1")
    quiet = moved(triggers, seen.model_copy(update={"signals": ()}))
    assert due(triggers, NOW, held("b", 3), past(), quiet) == (
        False,
        "3 new rows (due from 50); nothing moved: r",
    )
    cooled = TriggersSpec(drift=True, cooldown="2 weeks")
    assert due(cooled, NOW, held("b", 3), past(), words)[0] is False


@pytest.mark.parametrize("missing", ["scipy", "mlflow"])
def test_a_package_that_is_missing_is_named_with_its_extra(missing, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, missing, None)
    assert invoke(["monitor", "c.yaml"]) == 2
    said = capsys.readouterr().err
    assert f"{missing} is not installed" in said
    assert "rekindle[registry]" in said
