"""The cluster that the user's kubectl speaks to: its current context, or the cluster around us.

kubeconfigs hold certificates, tokens and commands that fetch one; the `kubernetes` package, which
KFP's SDK brings, reads them. Requests are ours (cluster.py)."""

from __future__ import annotations

from pathlib import Path

from rekindle.errors import RequestError
from rekindle.platforms.kubeflow.cluster import ACCOUNT, IN_CLUSTER, Cluster

_PATIENCE_SECONDS = 10.0


def connected() -> Cluster:
    """The API server and how to speak to it; RequestError if nothing says which."""
    if ACCOUNT.exists():
        return Cluster.around(ACCOUNT, IN_CLUSTER, patience_seconds=_PATIENCE_SECONDS)
    from kubernetes import client, config

    found = client.Configuration()
    try:
        config.load_kube_config(client_configuration=found)
    except config.ConfigException as error:
        fix = "name a context: kubectl config use-context NAME, or set KUBECONFIG"
        raise RequestError(f"no cluster is configured: {error}", fix=fix) from error
    token = found.get_api_key_with_prefix("authorization") or ""
    certificate = (Path(found.cert_file), Path(found.key_file)) if found.cert_file else None
    return Cluster(
        found.host,
        token.removeprefix("Bearer "),
        Path(found.ssl_ca_cert) if found.ssl_ca_cert else "",
        certificate,
        patience_seconds=_PATIENCE_SECONDS,
    )
