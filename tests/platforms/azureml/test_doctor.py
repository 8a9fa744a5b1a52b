"""What doctor asks a workspace of Azure ML and what lies around it: azure-identity's login and our
reads, over TLS, against ones that are played here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from rekindle.answers import ReadinessCheck
from rekindle.platforms.azureml import subscription
from rekindle.platforms.azureml.doctor import checks
from rekindle.platforms.definition import Definition
from rekindle.spec.places import AzureMLSpec
from tests.platforms.azureml.test_compile import BEHAVIOUR, IMAGE, compiled
from tests.platforms.sagemaker.test_compile import pipeline as two_steps
from tests.servers.azure_facts import Facts
from tests.servers.azure_rest import SUBSCRIPTION, TENANT

HF = "https://my-vault.vault.azure.net/secrets/hub"
KWARGS: dict[str, Any] = {
    "subscription": SUBSCRIPTION, "resource_group": "rg", "workspace": "forge", "image": IMAGE,
    "artifact_root": "abfs://lake@acc.dfs.core.windows.net/rekindle", "secrets": {"HF_TOKEN": HF},
}  # fmt: skip


@pytest.fixture
def around(facts: Facts) -> Facts:
    """A workspace that has everything."""
    facts.secrets["hub"] = ["0" * 32]
    return facts


@functools.cache
def definition(compute: str = "") -> Definition:
    place = {**KWARGS, "compute": compute}
    if compute:  # three nodes
        return compiled(BEHAVIOUR.gathered, {"folder": "x"}, **place)
    return compiled(two_steps, {"n": 3}, **place)


def asked(early: bool = False, **changes: Any) -> tuple[ReadinessCheck, ...]:
    place = AzureMLSpec(**{**KWARGS, **changes})
    return checks(place, definition(place.compute), early)


def wrong(found: tuple[ReadinessCheck, ...]) -> list[str]:
    return [f"{check.said} | {check.fix}" for check in found if check.state == "problem"]


def test_a_workspace_that_has_everything_has_no_problem_and_is_only_asked(around: Facts) -> None:
    found = asked()
    assert [check for check in found if check.state != "ok"] == []
    assert [check.name for check in found if check.name != "you may"] == [
        "credentials", "workspace", "datastore", "container", "image", "machine", "secret HF_TOKEN",
    ]  # fmt: skip
    posts = {call for call in around.calls if call.startswith("POST")}
    assert posts == {f"POST lake.azurecr.io/oauth2/{name}" for name in ("exchange", "token")}
    assert {call.partition(" ")[0] for call in around.calls} == {"GET", "HEAD", "POST"}
    assert around.refused == around.workspace.refused == []
    assert around.workspace.calls == {}


def test_before_a_submission_little_is_asked(around: Facts) -> None:
    found = asked(early=True, compute="cpus")
    assert [check.name for check in found] == [
        "credentials",
        "workspace",
        "container",
        "image",
        "compute",
    ]
    assert {check.state for check in found} == {"ok"}


Change = Callable[[Facts], Any]
WRONG: dict[str, tuple[Change, dict[str, Any], str]] = {
    "a workspace that is not there": (
        lambda f: setattr(f, "there", False), {}, "there is no workspace forge in rg | az ml workspace list",
    ),
    "a workspace that one may not see": (
        lambda f: f.errors.update({f"GET management.azure.com{f.root}": 403}), {},
        "there is no workspace forge in rg, or you may not see it | az ml workspace list",
    ),
    "a container that is not there": (
        lambda f: f.containers.clear(), {}, "acc.dfs.core.windows.net has no container lake | az storage container create",
    ),
    "a container of another tenant": (
        lambda f: f.containers.update({"acc/lake": 401}), {}, "the container lake of acc.dfs.core.windows.net belongs to another tenant",
    ),
    "a container that whoever submits may not read, where steps act as them": (
        lambda f: f.containers.update({"acc/lake": 403}), {"identity": "user"}, "or you may not read it | name one of yours",
    ),
    "an image that is not there": (
        lambda f: f.images.clear(), {}, f"lake.azurecr.io has no image train {IMAGE.partition('@')[2]} | push it",
    ),
    "a secret that is not there": (lambda f: f.secrets.clear(), {}, f"there is no secret {HF} | az keyvault secret list"),
    "a version that is not there": (
        lambda f: None, {"secrets": {"HF_TOKEN": f"{HF}/{'1' * 32}"}}, f"there is no secret {HF}/{'1' * 32} | az",
    ),
    "somebody who may not submit": (
        lambda f: f.actions.update(notActions=["*/jobs/write"]), {},
        "you may not Microsoft.MachineLearningServices/workspaces/jobs/write | ask for the role",
    ),
    "no datastore": (lambda f: f.stores.clear(), {}, "the workspace has no default datastore | az ml datastore create"),
    "a size that is not there": (
        lambda f: f.sizes.clear(), {}, "westeurope has no machines of the size Standard_D4s_v5 | az ml compute list-sizes",
    ),
    "too small a quota": (
        lambda f: f.usages.update(standardDSv5Family=(98, 100)), {},
        "wants 4 vCPUs (1 x Standard_D4s_v5); standardDSv5Family has 2 of 100 left in westeurope | ask for more",
    ),
    "a cluster that is not there": (
        lambda f: setattr(f.workspace, "compute", ()), {"compute": "cpus"}, "the workspace has no compute cpus | az ml compute list",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_a_workspace_lacks_is_said_with_its_fix(case: str, around: Facts) -> None:
    change, settings, says = WRONG[case]
    change(around)
    assert [line for line in wrong(asked(**settings)) if says in line]


def test_everything_that_is_wrong_is_said_at_once(around: Facts) -> None:
    around.containers.clear(), around.images.clear(), around.secrets.clear(), around.stores.clear()
    assert len(wrong(asked())) == 4


def test_more_nodes_than_a_cluster_has_and_spot_where_there_is_none_are_said(around: Facts) -> None:
    from rekindle.errors import RequestError

    there = subscription.Subscription(AzureMLSpec(**KWARGS))
    there.login()
    assert "up to 4 x Standard_D4s_v5" in subscription.cluster(there, "cpus", 4, "train")
    with pytest.raises(RequestError, match="wants 5 nodes, the cluster cpus has 4 at most"):
        subscription.cluster(there, "cpus", 5, "train")
    with pytest.raises(RequestError, match="is not there as a spot machine"):
        subscription.machine(there, "Standard_ND96isr_H100_v5", 1, True, "train")
    with pytest.raises(RequestError, match="TotalLowPriorityCores has 100 of 100 left"):
        subscription.machine(there, "Standard_D4s_v5", 26, True, "train")


def test_a_secret_that_has_expired_is_said_and_nothing_more_is_asked(
    around: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    around.login = {
        "error": "invalid_client", "error_codes": [7000222],
        "error_description": "AADSTS7000222: The provided client secret keys for app 'a' are expired.",
    }  # fmt: skip
    for name, value in {"TENANT_ID": TENANT, "CLIENT_ID": "a", "CLIENT_SECRET": "s"}.items():
        monkeypatch.setenv(f"AZURE_{name}", value)
    found = asked()
    (said,) = wrong(found)
    assert "AADSTS7000222" in said
    assert "are expired" in said
    assert "| az login" in said
    assert {check.said for check in found[1:]} == {"the login failed"}
    assert around.calls == []


def test_no_login_is_said_to_be_none(around: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSI_SECRET", "of-another-machine")
    (said,) = wrong(asked())
    assert "| az login" in said


def test_what_one_may_not_ask_is_no_problem(around: Facts) -> None:
    hosts = ("HEAD acc.dfs", "POST lake.azurecr.io", "GET my-vault", f"GET management.azure.com{around.root}/", "GET management.azure.com/subscriptions/0")  # fmt: skip
    around.errors = dict.fromkeys(hosts, 403)
    del around.errors[hosts[-1]]
    around.errors[f"GET management.azure.com/subscriptions/{SUBSCRIPTION}/providers"] = 403
    found = asked()
    assert wrong(found) == []
    assert {check.name for check in found if check.state == "ok"} == {"credentials", "workspace"}
