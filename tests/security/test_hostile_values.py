"""Values that a service, a step, a platform or a data set made up: none is obeyed, and none ends in another error than it should."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading

import numpy as np
import pyarrow as pa
import pytest

from rekindle import masking
from rekindle.app.runs import find_run
from rekindle.cli.doctor import _print_checks
from rekindle.cli.main import invoke
from rekindle.data.hub import HubSource
from rekindle.data.normalise import label_order
from rekindle.errors import DataError, RequestError
from rekindle.masking import masked
from rekindle.outputs import ReadinessCheck
from rekindle.platforms.kubeflow.cluster import LONGEST_LINE_BYTES, ApiServer
from rekindle.platforms.launcher import Attempt
from rekindle.platforms.vertex.launcher import RUN, TASK, VertexLauncher
from rekindle.records import ArtifactRecord, Registration, RunRecord, StepRecord, Submission
from rekindle.report.ledger import ledger
from rekindle.rows.columns import RawBatch
from rekindle.spec.model import DataSpec

ERASE = "\x1b[2J\x1b[1;1H"


@pytest.mark.parametrize(
    "name", ["AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_KEY", "MYSQL_PWD", "DB_PASS", "PGPASSWORD"]
)
def test_variables_that_usually_hold_a_secret_are_known(name):
    assert masked("it is hunter2hunter2", {name: "hunter2hunter2"}) == "it is ***"


@pytest.mark.parametrize("name", ["PWD", "OLDPWD", "BYPASS_X", "COMPASS", "STORAGE_KEY_NAME"])
def test_variables_that_only_sound_so_are_not(name):
    assert masked("it is /work/somewhere", {name: "/work/somewhere"}) == "it is /work/somewhere"


def test_a_secret_that_looks_like_a_path_too_long_for_one_is_masked(monkeypatch):
    secret = "/" + "x" * 300
    assert masked(f"<{secret}>", {"MY_TOKEN": secret}) == "<***>"
    assert masked("<\0>", {"MY_TOKEN": "/a\0bcdefghij"}) == "<\0>"


def test_a_path_that_may_not_be_read_is_a_path(monkeypatch):
    def closed(*_):
        raise PermissionError

    monkeypatch.setattr(masking.os, "stat", closed)
    given = {"GOOGLE_APPLICATION_CREDENTIALS": "/closed/key.json"}
    assert masked("read /closed/key.json", given) == "read /closed/key.json"


@pytest.mark.parametrize("labels", [{"1", "--2"}, {"1", "9" * 5_000}, {"1", "-"}, {"1", "٣"}])
def test_labels_that_look_like_numbers_are_sorted_as_text(labels):
    assert label_order((), labels) == tuple(sorted(labels))


def test_whole_numbers_are_sorted_by_their_value():
    assert label_order((), {"10", "9", "-1"}) == ("-1", "9", "10")


def test_a_folder_is_not_read_in_place_of_a_data_set_of_the_hub(tmp_path, monkeypatch):
    (tmp_path / "acme" / "reviews").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match="has the name of the data set `acme/reviews`"):
        HubSource(DataSpec(source="hub:acme/reviews?split=train"), "text")
    HubSource(DataSpec(source="hub:acme/others"), "text")


@pytest.mark.parametrize(
    "column",
    [
        pa.array([0, 7]),
        pa.array([[0, 7]]),
        pa.array([[0, 7]], pa.list_(pa.int64(), 2)),
    ],
)
def test_a_class_number_without_a_name_is_an_error_of_the_data(column):
    source = HubSource(DataSpec(source="hub:acme/others"), "text")
    raw = RawBatch({"label": column}, np.arange(len(column)), "x")
    with pytest.raises(
        DataError, match="holds the class number 7, and the data set names 2 classes"
    ):
        source._with_class_names(raw, ["bad", "good"])


def test_lists_of_a_fixed_length_have_names_too():
    source = HubSource(DataSpec(source="hub:acme/others"), "text")
    raw = RawBatch({"label": pa.array([[1, 0]], pa.list_(pa.int64(), 2))}, np.arange(1), "x")
    assert source._with_class_names(raw, ["bad", "good"]).columns["label"].to_pylist() == [
        ["good", "bad"]
    ]


def test_a_log_without_an_end_of_line_comes_in_pieces():
    listening = socket.create_server(("127.0.0.1", 0))
    piece = b"\r 12% |####      | 1/9" * 200

    def serve():
        connection, _ = listening.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + piece * 300)

    threading.Thread(target=serve, daemon=True).start()
    lines = list(ApiServer(f"http://127.0.0.1:{listening.getsockname()[1]}").lines("/log"))
    assert "".join(lines).encode() == piece * 300
    assert max(map(len, lines)) <= 2 * LONGEST_LINE_BYTES
    assert len(lines) > 5


@pytest.mark.parametrize(
    ("words", "spot", "cause"),
    [
        ({0: {"exit_code": 75}, 1: {"exit_code": 1}}, False, "failed"),
        ({0: {"exit_code": 75}, 1: {"exit_code": 75}}, False, "preempted"),
        ({0: {"exit_code": 75}, 1: {"exit_code": 1}}, True, "preempted"),
        ({0: [], 1: {"exit_code": "75"}}, False, "failed"),
    ],
)
def test_a_node_that_failed_by_itself_is_not_taken_for_a_machine_that_was_taken_away(
    words, spot, cause, tmp_path
):
    for rank, word in words.items():
        (tmp_path / f"ended-{rank}.json").write_text(json.dumps(word))
    payload = {
        "failures": 0,
        "preemptions": 5,
        "limit_seconds": 3600,
        "region": "r",
        "project": "p",
        "jobs": "x",
        "nodes": 2,
        "spot": spot,
        "job": {},
        "task": {},
    }
    launcher = VertexLauncher(payload, {}, {RUN: "r", TASK: "t"}, {})
    job = Attempt("n/1", "FAILED", 1.0, 1.0, 2.0, command=("python3", f"{tmp_path}/node.pyz"))
    assert launcher.cause(job) == cause


def test_what_records_and_services_say_does_not_steer_the_terminal(tmp_path, capsys):
    kept = tmp_path / "runs/r1/records/x"
    Registration(
        name=f"m{ERASE}",
        version="1",
        aliases=(),
        created=True,
        decision="promoted",
        tracking_uri="",
    ).write(kept / "registration.json")
    there = ArtifactRecord(uri="s3://x", kept=str(kept), metadata={"record": "registration"})
    log = tmp_path / "log.txt"
    log.write_text(f"printed {ERASE}\n")
    sent = Submission(definition="d", token="t", id="x", settled=True, url=f"http://x/{ERASE}")
    steps = (
        StepRecord(
            name=f"s{ERASE}", status="failed", log=str(log), artifacts={"registration": there}
        ),
    )
    RunRecord(
        run_id="r1",
        name="n",
        platform="kubeflow",
        status="failed",
        started_at="2026-01-01T00:00:00Z",
        submission=sent,
        steps=steps,
    ).write(tmp_path / "runs/r1/run.json")
    for words in (["runs"], ["status", "r1"]):
        invoke([*words, f"--home={tmp_path}"])
    _print_checks(
        (ReadinessCheck(name="login", where="x", state="problem", said=f"denied {ERASE}"),)
    )
    shown = capsys.readouterr()
    assert "\x1b[2J" not in shown.out + shown.err
    assert "denied \\x1b[2J" in shown.err


def test_a_record_that_calls_itself_another_run_is_not_opened(tmp_path, caplog):
    record = RunRecord(
        run_id="../../place", name="n", platform="local", status="failed", started_at=""
    )
    record.write(tmp_path / "runs/r1/run.json")
    assert ledger(tmp_path).unreadable == ("r1",)
    assert "calls itself '../../place'" in caplog.text
    with pytest.raises(RequestError):
        find_run(tmp_path, "r1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]


LOOK = """
import pathlib, sys
from rekindle.platforms.local.store import is_alive

print("looking", flush=True)
while True:
    is_alive(pathlib.Path(sys.argv[1]), "r")
"""


def test_looking_at_a_run_does_not_refuse_its_start(tmp_path):
    from rekindle.platforms.local.store import HomeStore, is_alive

    store = HomeStore(tmp_path)
    with store.hold_run("r"):
        assert is_alive(tmp_path, "r")
    # a process of its own: threads here would hold the lock while they wait for the interpreter
    looking = subprocess.Popen([sys.executable, "-c", LOOK, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        looking.stdout.readline()
        for _ in range(20):
            with store.hold_run("r"):
                pass
    finally:
        looking.kill()
        looking.communicate()
    with (
        store.hold_run("r"),
        pytest.raises(RequestError, match="already going on"),
        store.hold_run("r"),
    ):
        pass
