"""Secrets of Key Vault, read in the container when a step begins: one request for a token of
the step's identity, then one GET a secret.

A value is never part of an error or a log, and no token follows a redirection. The image
needs azure-identity (azure-ai-ml for the submitting user's identity). All else here is
standard library, since the bundle of a step brings this module into images without
rekindle. Authority: azure-identity 1.x (AzureMLCredential),
learn.microsoft.com/rest/api/keyvault/secrets."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from rekindle.http import HttpError, request, retried

PREFIX = "REKINDLE_SECRET_"
SCOPE = "https://vault.azure.net/.default"
API_VERSION = "7.4"
PAUSES_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)
_FIXES = {
    401: "the vault refuses the token: is it in the same tenant as the workspace?",
    403: "give the identity of the step `Key Vault Secrets User` on the vault, and let it through "
    "the vault's firewall",
    404: "there is no such secret, or no such version of it",
}


class KeyVaultSecretError(Exception):
    """A secret cannot be read; the text names its variable and what to do."""


def read(names: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The values of secrets, by the variables that a step is to have them in.

    The URL of each in its vault comes in `environment`. Raises KeyVaultSecretError for the first
    that cannot be read."""
    urls = {name: environment.get(PREFIX + name, "") for name in names}
    for name, url in urls.items():
        if not url:
            raise KeyVaultSecretError(
                f"the address of {name} did not reach the step as {PREFIX}{name}"
            )
    token = _token(environment)
    return {name: _value(name, url, token) for name, url in urls.items()}


def _token(environment: Mapping[str, str]) -> str:
    """A token for Key Vault, of the identity that Azure ML gave the step."""
    try:
        credential = _credential(environment)
    except ImportError as error:
        raise KeyVaultSecretError(
            f"secrets of Key Vault need {error.name or 'azure-identity'} in the image: "
            "pip install azure-identity (azure-ai-ml with platforms.azureml.identity: user)"
        ) from None
    logging.getLogger("azure").setLevel(logging.CRITICAL)  # it logs answers that it cannot read
    try:
        return str(credential.get_token(SCOPE).token)
    except Exception as error:  # noqa: BLE001 - azure.core's and requests'; texts may hold a token
        raise KeyVaultSecretError(
            f"the step gets no token for Key Vault ({type(error).__name__}): give its compute a "
            "managed identity and set platforms.azureml.identity: managed"
        ) from None


def _credential(environment: Mapping[str, str]) -> Any:
    """azure-identity's credential of the step: the submitting user's, or its compute's."""
    # Azure ML sets it in steps that act for the user ("on behalf of")
    if environment.get("OBO_ENDPOINT"):
        from azure.ai.ml.identity import AzureMLOnBehalfOfCredential

        return AzureMLOnBehalfOfCredential()
    from azure.identity import ManagedIdentityCredential

    # Azure ML names a user-assigned identity of the compute here. None: the system-assigned one.
    return ManagedIdentityCredential(client_id=environment.get("DEFAULT_IDENTITY_CLIENT_ID"))


def _value(variable: str, url: str, token: str) -> str:
    """The value of a secret. An error holds the vault's code and neither its message nor its
    response, in which the value may be."""
    address = f"{url}?api-version={API_VERSION}"
    headers = {"Authorization": f"Bearer {token}"}
    try:
        response = retried(lambda: request(address, headers), PAUSES_SECONDS)
    except HttpError as error:
        reason = str(error)
        if error.status:
            reason = f"HTTP {error.status} {error.code[:80]}".strip()
        fix = _FIXES.get(error.status, "see whether the vault can be reached from the compute")
        raise KeyVaultSecretError(f"cannot read {variable} from {url}: {reason}: {fix}") from None
    value = response.get("value")
    if not isinstance(value, str):
        raise KeyVaultSecretError(
            f"cannot read {variable} from {url}: it has no value that is text"
        )
    return value
