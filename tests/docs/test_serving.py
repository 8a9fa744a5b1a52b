"""The commands of docs/serving.md and of the README's "Use the model", in order, on a champion that was trained a moment ago."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest

from rekindle.app.runs import load_target_spec
from rekindle.errors import RequestError
from tests.docs.blocks import ROOT, blocks, commands
from tests.docs.conftest import environment
from tests.ports import free_port

PAGES = (ROOT / "docs" / "serving.md", ROOT / "README.md")
DEPLOY = ROOT / "docs" / "deploy.md"


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_model_is_trained_served_asked_and_predicts(page, tmp_path, sh):
    found = [line for b in blocks("bash") if b.readme == page for line in commands(b)]
    lines = [
        line for line in found if line.startswith(("rekindle serve", "rekindle predict", "curl"))
    ]
    assert len(lines) > 2
    shutil.copytree(ROOT / "configs" / "starter", tmp_path, dirs_exist_ok=True)
    if page.name == "README.md":  # its config names the column so
        for name, before, now in (
            ("tickets.yaml", "text: text", "text: body"),
            ("tickets.csv", ",text,", ",body,"),
        ):
            file = tmp_path / name
            file.write_text(file.read_text().replace(before, now, 1))
    assert "promoted: first model" in sh(tmp_path, "rekindle run tickets.yaml")
    _check_names(tmp_path / ".rekindle")
    port = free_port()
    serve, *rest = lines
    with (tmp_path / "server.txt").open("w") as log:
        words = [
            sys.executable,
            "-m",
            "rekindle.cli.main",
            *shlex.split(serve)[1:],
            "--port",
            str(port),
        ]
        server = subprocess.Popen(
            words, cwd=tmp_path, env=environment(), stdout=log, stderr=subprocess.STDOUT
        )
    try:
        give_up = time.monotonic() + 120
        while "curl" not in (text := (tmp_path / "server.txt").read_text()):
            assert server.poll() is None, text
            assert time.monotonic() < give_up, text
            time.sleep(0.05)
        assert "proven by 8 rows of its test split" in text
        printed = next(line for line in text.splitlines() if line.startswith("curl"))
        for line in [printed, *rest]:
            said = sh(tmp_path, line.replace("localhost:8080", f"localhost:{port}"))
            if "/predict" in line:
                assert json.loads(said)["predictions"][0]["label"]
        assert pq.read_table(tmp_path / "predictions.parquet").num_rows > 100
    finally:
        os.kill(server.pid, signal.SIGTERM)
        assert server.wait(60) == 0


@pytest.mark.slow
@pytest.mark.parametrize("page", [DEPLOY, ROOT / "README.md"], ids=lambda page: page.name)
def test_a_model_is_deployed_by_the_commands(page, tmp_path, sh):
    found = [line for b in blocks("bash") if b.readme == page for line in commands(b)]
    verbs = ("rekindle deploy", "rekindle champion", "rekindle rollback")
    deploy, *rest = [line for line in found if line.startswith(verbs)]
    shutil.copytree(ROOT / "configs" / "starter", tmp_path, dirs_exist_ok=True)
    sh(tmp_path, "rekindle run tickets.yaml")
    port = free_port()
    try:
        assert "version 1  ready, 100 % of requests" in sh(tmp_path, f"{deploy} --port {port}")
        for line in rest:
            if "rollback" in line:  # there is no version before; tests/e2e/test_deploy.py has one
                found = sh(tmp_path, f"! {line.removesuffix(' --yes')} --yes")
                assert "version 1 of tickets is the first champion" in found
            else:
                assert "tickets" in sh(tmp_path, line)
    finally:
        sh(tmp_path, "rekindle deploy delete tickets --yes")


def _check_names(home):
    """What may be named is found: a model, a run, a config, nothing."""
    (run,) = (path.name for path in (home / "runs").iterdir() if path.is_dir())
    found = {
        name: load_target_spec(name, home) for name in (None, "tickets", run, run[:12], "latest")
    }
    assert {spec.model_name for spec, _ in found.values()} == {"tickets"}
    assert [version for _, version in found.values()] == ["", "", "1", "1", "1"]
    with pytest.raises(RequestError, match="no config, model or run is called `nothing`"):
        load_target_spec("nothing", home)
