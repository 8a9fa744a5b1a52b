"""What tests share with platforms/azureml/test_client.py."""

from __future__ import annotations

from rekindle.platforms.azureml.section import AzureMLSpec
from rekindle.platforms.submission import Definition
from tests.servers.azure.rest import SUBSCRIPTION
from tests.support.azureml_compile import IMAGE, compiled
from tests.support.two_steps import pipeline as two_steps

PLACE = AzureMLSpec(
    subscription=SUBSCRIPTION,
    resource_group="rg",
    workspace="forge",
    image=IMAGE,
    identity="managed",
    secrets={"HF_TOKEN": "https://my-vault.vault.azure.net/secrets/hub"},
)


def definition(n: int = 3) -> Definition:
    return compiled(two_steps, {"n": n}, **PLACE.model_dump())
