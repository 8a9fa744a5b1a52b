"""Who a step acts as, and secrets of Key Vault, read by real steps over TLS from a vault that is
played here, with a token from the endpoint that Azure ML's compute has."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle.cli.main import invoke
from rekindle.errors import RequestError
from rekindle.ir.compile import compile_function
from rekindle.platforms.azureml import secrets
from rekindle.platforms.azureml.doctor import permissions
from rekindle.platforms.azureml.section import AzureMLSpec
from rekindle.platforms.checks import Needs
from rekindle.platforms.submission import Definition
from tests.servers.azure.jobs import Failed, Workspace
from tests.servers.azure.key_vault import Vault
from tests.servers.tls_hosts import Hosts, identity, on_behalf
from tests.support.azureml_compile import (
    BEHAVIOUR,
    IMAGE,
    compiled,
    job_of,
    stored,
    validated,
    what_came_of_it,
)
from tests.support.azureml_compile import workspace as workspace

REFERENCE = "https://my-vault.vault.azure.net/secrets/hub"
TOKEN = "a-token-for-key-vault"
NAMED = {"REKINDLE_SECRET_HF_TOKEN": REFERENCE}
VALUE = "hf-of-the-hub-and-nobody-else"


@pytest.fixture
def vault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Vault]:
    """A vault that answers, and this process finds, and steps whose environment says so."""
    pytest.importorskip("azure.identity", reason="azure-identity is a developer's dependency")
    made = Vault("my-vault", TOKEN, {"hub": VALUE})
    (tmp_path / "tls").mkdir()
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(Hosts(tmp_path / "tls", ("*.vault.azure.net",), made.answer))
        msi = stack.enter_context(identity({"https://vault.azure.net": TOKEN}))
        for name, value in {**hosts.environment, **msi}.items():
            monkeypatch.setenv(name, value)
        made.environment = {**hosts.environment, **msi}
        yield made
        assert hosts.strangers == []


def with_a_secret(folder: Path, reference: str = REFERENCE) -> Definition:
    """Two nodes of our image hand on what they know of HF_TOKEN, and a foreign step reads that."""
    for rank in range(2):
        (folder / f"saved-{rank}").write_text("10")
    text = compile_function(BEHAVIOUR.taken_away).replace("python:3.11", IMAGE, 1)
    text = text.replace("spot: true", "spot: false")
    return compiled(text, {"save_to": str(folder)}, secrets={"HF_TOKEN": reference})


def test_a_step_in_our_image_reads_the_secret_and_nothing_else_knows_it(
    vault: Vault, workspace: Workspace, tmp_path: Path
) -> None:
    made = with_a_secret(tmp_path)
    counted, keep = job_of(made)["jobs"]["count_to"], job_of(made)["jobs"]["condition_1_keep"]
    assert counted["environment_variables"] == {"REKINDLE_SECRET_HF_TOKEN": REFERENCE}
    assert "environment_variables" not in keep
    assert VALUE not in str(made.files)
    file = stored(made, tmp_path)
    sent = validated(file)["properties"]["jobs"]["count_to"]
    assert sent["environment_variables"] == {"REKINDLE_SECRET_HF_TOKEN": REFERENCE}
    workspace.environment |= vault.environment
    vault.faults = [429, 503, 0]
    done = workspace.run(file)
    assert what_came_of_it(done)["condition_1_keep"][0] == {"Output": f"{VALUE}, 10"}
    for log in done["count_to"].glob("log-*"):
        assert VALUE not in log.read_text()
        assert TOKEN not in log.read_text()


def test_a_secret_of_kubernetes_is_one_of_the_vault_by_the_same_variable() -> None:
    foreign = compile_function(BEHAVIOUR.tells_a_secret)
    ours = foreign.replace("python:3.11", IMAGE)
    (job,) = job_of(compiled(ours, {}, secrets={"HF_TOKEN": REFERENCE}))["jobs"].values()
    assert job["environment_variables"] == {"REKINDLE_SECRET_HF_TOKEN": REFERENCE}
    for pipeline, named in ((foreign, "HF_TOKEN"), (ours, "OTHER")):
        with pytest.raises(RequestError, match=r"platforms\.azureml\.secrets"):
            compiled(pipeline, {}, secrets={named: REFERENCE})


def test_what_keeps_a_step_from_its_secret_fails_it_with_a_way_out(
    vault: Vault, workspace: Workspace, tmp_path: Path
) -> None:
    workspace.environment |= vault.environment
    for faults, reference, says in (
        ([403] * 9, REFERENCE, "`Key Vault Secrets User`"),
        ([], REFERENCE.replace("hub", "nope"), "HTTP 404 SecretNotFound"),
    ):
        vault.faults = list(faults)
        folder = tmp_path / says.strip("`")
        folder.mkdir()
        with pytest.raises(Failed, match=says) as caught:
            workspace.run(stored(with_a_secret(folder, reference), folder))
        assert VALUE not in str(caught.value)


def test_without_an_identity_the_step_says_what_to_do(
    vault: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MSI_SECRET", "of-another-container")
    with pytest.raises(secrets.KeyVaultSecretError, match=r"platforms\.azureml\.identity: managed"):
        secrets.read(["HF_TOKEN"], NAMED)
    monkeypatch.setitem(sys.modules, "azure.identity", None)
    with pytest.raises(secrets.KeyVaultSecretError, match="pip install azure-identity"):
        secrets.read(["HF_TOKEN"], NAMED)
    assert vault.asked == []


def test_a_step_that_acts_as_whoever_submitted_reads_as_them(
    vault: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MSI_ENDPOINT")
    with on_behalf({"https://vault.azure.net": TOKEN}) as obo:
        monkeypatch.setenv("OBO_ENDPOINT", obo["OBO_ENDPOINT"])
        assert secrets.read(["HF_TOKEN"], {**NAMED, **obo}) == {"HF_TOKEN": VALUE}


def test_an_address_that_got_lost_is_missed(vault: Vault) -> None:
    with pytest.raises(secrets.KeyVaultSecretError, match="REKINDLE_SECRET_OTHER"):
        secrets.read(["HF_TOKEN", "OTHER"], NAMED)
    assert vault.asked == []


def test_the_token_follows_no_redirection_and_patience_ends(
    vault: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    vault.faults = [302]
    with pytest.raises(secrets.KeyVaultSecretError, match="HTTP 302"):
        secrets.read(["HF_TOKEN"], NAMED)
    assert len(vault.asked) == 1
    monkeypatch.setattr(secrets, "PAUSES_SECONDS", (0.0, 0.0))
    vault.faults = [503] * 9
    with pytest.raises(secrets.KeyVaultSecretError, match="HTTP 503"):
        secrets.read(["HF_TOKEN"], NAMED)
    assert len(vault.faults) == 6


@pytest.mark.parametrize(("asked", "says"), [("managed", "Managed"), ("user", "UserIdentity")])
def test_the_job_says_whom_its_steps_act_as(asked: Any, says: str, tmp_path: Path) -> None:
    made = compiled(BEHAVIOUR.gathered, {"folder": "x"}, identity=asked)
    sent = validated(stored(made, tmp_path))["properties"]["jobs"]["gather"]
    assert sent["identity"] == {"identity_type": says}


def test_secrets_without_an_image_and_those_of_kubernetes_are_refused() -> None:
    with pytest.raises(RequestError, match=r"secrets reach the steps in rekindle's image"):
        compiled(BEHAVIOUR.gathered, {"folder": "x"}, image=None, secrets={"HF_TOKEN": REFERENCE})
    with pytest.raises(RequestError, match=r"platforms\.azureml\.secrets"):
        compiled(BEHAVIOUR.knows_a_secret, {"folder": "x"})


def test_the_permissions_name_the_vaults() -> None:
    place = AzureMLSpec(secrets={"HF_TOKEN": REFERENCE})
    (line,) = [line for line in permissions(place, Needs()).splitlines() if "Key Vault" in line]
    assert "Key Vault Secrets User" in line
    assert "https://my-vault.vault.azure.net" in line
    assert "Key Vault" not in permissions(AzureMLSpec(), Needs())


@pytest.mark.parametrize(
    "given",
    [
        "hf_abcdefghijklmnopqrstuvwxyz",
        "https://my-vault.vault.azure.net/secrets/hub?x=hf_abcdefgh",
        "http://my-vault.vault.azure.net/secrets/hub",
        "https://evil.example/secrets/hub",
    ],
)
def test_a_secret_in_clear_is_refused_and_not_repeated(
    given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(
        "name: digits\ntask: image_classification\ndata: {source: 'sklearn:digits'}\n"
        f"platforms: {{azureml: {{secrets: {{HF_TOKEN: '{given}'}}}}}}\n"
    )
    assert invoke(["compile", str(config), "--platform", "azureml", "-o", str(tmp_path / "o")]) == 2
    told = capsys.readouterr()
    assert "platforms.azureml.secrets.HF_TOKEN" in told.err
    assert given not in told.out + told.err
