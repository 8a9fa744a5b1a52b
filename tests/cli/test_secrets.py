"""No secret in any output, log, record or card: recognisable ones are planted in the environment, verbs
run and fail in every way, servers send back what they were sent, and a scanner looks at everything
that was printed or written."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from rekindle.cli.main import invoke
from tests.quick import first
from tests.servers.azure import facts as azure_facts
from tests.servers.azure.rest import SUBSCRIPTION, TENANT, token_for
from tests.servers.google import project as google_project
from tests.servers.google.rest import TOKEN, key_file
from tests.servers.tls_hosts import Answer, Asked, Hosts, identity
from tests.support.cli_compile import PLATFORMS, ROOT, TRACKED
from tests.support.cli_following import Here
from tests.support.cli_following import here as here

PLANTED = {
    "HF_TOKEN": "hub/planted+1=very-secret",
    "PLAIN_NAME": "named by the config, planted 2",
    "KFP_TOKEN": "kfp-planted-3-very-secret",
    "AWS_SECRET_ACCESS_KEY": "aws/planted+4/very/secret",
    "AWS_SESSION_TOKEN": "aws-session-planted-5//very==",
    "AZURE_CLIENT_SECRET": "azure~planted~6~very.secret",
    "AZURE_STORAGE_SAS_TOKEN": "sv=2024&sig=planted7%2Fvery%3D",
    "AWS_ACCESS_KEY_ID": "AKIAX",
}
MORE = {"google": TOKEN, "azure": token_for("https://management.azure.com")}  # got on the way
PIPELINE = """
from kfp import dsl

@dsl.component(base_image="python:3.11", install_kfp_package=False)
def tell(fail: bool):
    import base64, os, sys, time
    for name in ("HF_TOKEN", "MINE", "AWS_SECRET_ACCESS_KEY"):
        value = os.environ[name]
        print("printed:", value, flush=True)
        sys.stderr.write(base64.b64encode(value.encode()).decode() + chr(10))
        for letter in value:  # in pieces
            sys.stdout.write(letter)
            sys.stdout.flush()
        print()
    if fail:
        raise ValueError("the server said: 401 for " + os.environ["MINE"])

@dsl.pipeline(name="tell")
def pipeline(fail: bool = False):
    tell(fail=fail)
"""


def forms(value: str) -> set[bytes]:
    found = {value, quote(value, safe=""), json.dumps(value)[1:-1]}
    found.add(base64.b64encode(value.encode()).decode())
    return {form.encode() for form in found}


pytest.importorskip("azure.ai.ml", reason="azure-ai-ml is a developer's dependency")

SECRETS = {
    name: forms(value) for name, value in {**PLANTED, **MORE}.items() if name != "AWS_ACCESS_KEY_ID"
}


def leaks(content: bytes, where: str) -> list[str]:
    return [
        f"{name} in {where}"
        for name, all_ in SECRETS.items()
        if any(one in content for one in all_)
    ]


def of_files(folder: Path) -> list[str]:
    return [
        leak
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
        for leak in leaks(path.read_bytes(), str(path.relative_to(folder)))
    ]


def test_the_scanner_finds_what_it_shall(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" + base64.b64encode(PLANTED["HF_TOKEN"].encode()))
    (tmp_path / "b").write_text(f"?token={quote(PLANTED['KFP_TOKEN'])}&")
    assert of_files(tmp_path) == ["HF_TOKEN in a", "KFP_TOKEN in b"]


@pytest.mark.slow
def test_steps_that_print_their_secrets_leave_none_on_this_machine(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text(PIPELINE)
    secrets = "{HF_TOKEN: env:HF_TOKEN, MINE: env:PLAIN_NAME}"
    (tmp_path / "c.yaml").write_text(
        f"name: tell\npipeline: p.py:pipeline\nplatforms: {{local: {{secrets: {secrets}}}}}\n"
    )
    found, outputs = list[str](), list[str]()
    for words in (
        ["run", "c.yaml", "-v"],
        ["run", "c.yaml", "--set", "arguments.fail=true", "-v", "--json"],
        ["logs"],
        ["status", "--json"],
        ["report"],
        [
            "compile",
            "c.yaml",
            "--platform",
            "kubeflow,vertex",
            *PLATFORMS["vertex"][0],
            "-o",
            "out",
        ],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "rekindle.cli.main", *words],
            cwd=tmp_path,
            capture_output=True,
            env={**os.environ, **PLANTED},
        )
        outputs.append((done.stdout + done.stderr).decode())
        found += leaks(done.stdout + done.stderr, " ".join(words))
    assert found + of_files(tmp_path) == []
    assert "printed: ***\n" in outputs[2], "what was masked can be seen"
    assert "the server said: 401 for ***" in outputs[1]
    assert (tmp_path / "out" / "tell.parity.md").exists()


def test_what_is_logged_is_masked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With -v, and where nobody asked for logs but a library warns."""
    monkeypatch.setenv("KFP_TOKEN", PLANTED["KFP_TOKEN"])
    monkeypatch.setattr(logging.root, "handlers", [])
    with contextlib.suppress(SystemExit):
        invoke(["runs", "--home", "/nowhere"])
    logging.getLogger("a.library").warning("sent with %s", PLANTED["KFP_TOKEN"])
    with contextlib.suppress(SystemExit):
        invoke(["runs", "--home", "/nowhere", "-v"])
    logging.getLogger("a.library").warning("sent again with %s", PLANTED["KFP_TOKEN"])
    said = capsys.readouterr().err
    assert "sent with ***" in said
    assert "a.library: sent again with ***" in said
    assert leaks(said.encode(), "logs") == []


def echo(asked: Asked) -> Answer:
    """What a careless service says: everything that it was sent."""
    if asked.host == "oauth2.googleapis.com":
        return Answer(200, {"access_token": TOKEN, "expires_in": 3600, "token_type": "Bearer"})
    said = f"no: {asked.headers} {asked.body.decode(errors='replace')} {asked.query}"
    return Answer(
        403, {"error": {"code": "Echo", "message": said}, "message": said, "__type": "Echo"}
    )


@contextlib.contextmanager
def echoing() -> Iterator[str]:
    """The same without TLS."""

    class Handler(BaseHTTPRequestHandler):
        def any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode(
                errors="replace"
            )
            said = f"no: {dict(self.headers)} {body}"
            content = json.dumps({"error": said, "message": said, "__type": "Echo"}).encode()
            self.send_response(403, "no")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = any

        def log_message(self, *_: Any) -> None:
            pass

    many = type("Many", (ThreadingHTTPServer,), {"request_queue_size": 64})
    with many(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("tls")
    key_file(folder)
    with Hosts(folder, (*azure_facts.HOSTS, *google_project.HOSTS), echo) as running:
        yield running


@pytest.fixture
def careless(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, list[str]]]:
    """Services of all platforms that send back what they were sent, and how each is named."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    tokens = {resource: token_for(resource) for resource in azure_facts.RESOURCES}
    with echoing() as url, identity(tokens) as msi:
        environment = {
            **PLANTED,
            **hosts.environment,
            **msi,
            "AWS_ENDPOINT_URL": url,
            "GOOGLE_APPLICATION_CREDENTIALS": str(hosts.folder / "account.json"),
        }
        del environment["AZURE_CLIENT_SECRET"]
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        places = {
            "kubeflow": [f"host={url}", "token=env:KFP_TOKEN"],
            "sagemaker": [
                "secrets={HF_TOKEN: 'arn:aws:secretsmanager:eu-central-1:123456789012:secret:hub'}"
            ],
            "vertex": [
                "secrets={HF_TOKEN: projects/p/secrets/hub/versions/1}",
                "service_account=a@b.c",
            ],
            "azureml": [
                f"subscription={SUBSCRIPTION}",
                "resource_group=rg",
                "workspace=forge",
                "secrets={HF_TOKEN: 'https://my-vault.vault.azure.net/secrets/hub'}",
            ],
        }
        yield {
            name: [
                str(ROOT / "configs" / "digits.yaml"),
                "--platform",
                name,
                *PLATFORMS[name][0],
                *TRACKED,
                *(word for one in settings for word in ("--set", f"platforms.{name}.{one}")),
            ]
            for name, settings in places.items()
        }


@pytest.mark.parametrize("platform", first(1, ("kubeflow", "sagemaker", "vertex", "azureml")))
def test_what_a_service_sends_back_is_not_passed_on(
    platform: str,
    careless: dict[str, list[str]],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    from rekindle.app.prepared import PreparedSubmission
    from rekindle.platforms import reads

    monkeypatch.setattr(reads, "_PAUSE_SECONDS", 0.0)
    words, found = careless[platform], list[str]()
    for verb, more in (
        ("doctor", ["--json"]),
        ("submit", ["--yes", "-v", "--json"]),
        ("schedule list", ["-v"]),
    ):
        invoke([*verb.split(), *words, *more])
        captured = capfd.readouterr()
        found += leaks((captured.out + captured.err).encode(), verb)
        assert captured.out + captured.err
    # past the questions, the platform's own client says what it was told, and a record keeps it
    monkeypatch.setattr(PreparedSubmission, "refuse_early", lambda _: None)
    for verb, more in (("submit", ["--yes", "--json"]), ("submit", ["--yes", "-v"])):
        assert invoke([verb, *words, *more]) == 1
        captured = capfd.readouterr()
        found += leaks((captured.out + captured.err).encode(), verb)
    for verb in ("runs", "status", "report"):
        invoke([verb])
        captured = capfd.readouterr()
        found += leaks((captured.out + captured.err).encode(), verb)
    assert found + of_files(tmp_path / "here") == []
    assert list((tmp_path / "here" / ".rekindle" / "runs").glob("*/run.json")), "there was a record"


def test_what_entra_says_of_a_secret_is_not_passed_on(
    careless: dict[str, list[str]],
    hosts: Hosts,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secret = PLANTED["AZURE_CLIENT_SECRET"]
    made = azure_facts.Facts(azure_facts.Workspace())
    made.login = {
        "error": "invalid_client",
        "error_description": f"AADSTS7000215: Invalid client secret {secret}",
    }
    monkeypatch.setattr(hosts, "answer", made.answer)
    for name, value in {"TENANT_ID": TENANT, "CLIENT_ID": "a", "CLIENT_SECRET": secret}.items():
        monkeypatch.setenv(f"AZURE_{name}", value)
    for words in (["doctor", "--json"], ["submit", "--yes", "-v"]):
        assert invoke([words[0], *careless["azureml"], *words[1:]]) == 2
        captured = capfd.readouterr()
        assert "AADSTS7000215: Invalid client secret ***" in captured.out + captured.err
        assert leaks((captured.out + captured.err).encode(), words[0]) == []


@pytest.mark.slow
def test_what_a_platform_keeps_of_a_step_is_masked_here(
    here: Here, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step fails with words that are a secret on this machine."""
    monkeypatch.setenv("SAID_TOKEN", "there is no flag")
    assert here.submit("--wait") == 1
    assert here.say("status") == 0
    assert here.say("logs") == 0
    captured = capsys.readouterr()
    shown = captured.out + captured.err
    assert "ValueError: ***" in shown
    assert "there is no flag" not in shown
    files = [path for path in here.home.rglob("*") if path.suffix in (".json", ".log", ".html")]
    kept = [path for path in files if "definition" not in path.parts]  # which holds the code
    assert {path.suffix for path in kept} == {".json", ".log", ".html"}
    assert [path for path in kept if "there is no flag" in path.read_text()] == []
