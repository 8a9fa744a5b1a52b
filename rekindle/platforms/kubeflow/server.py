"""Questions about a config for Kubeflow that are not the cluster's own: KFP's API, a bucket, a
registry that answers anybody. Each reads and none changes anything.

The bucket is asked with what this machine is logged in with, which pods need not be: only that it
is not there is a problem. Authority: KFP's v2beta1 healthz and experiments; the Docker registry's
token specification for anonymous pulls."""

from __future__ import annotations

import re
from urllib.parse import quote, urlencode

from rekindle.errors import RequestError
from rekindle.platforms.asking import Unasked
from rekindle.platforms.kubeflow.client import token_of
from rekindle.platforms.reads import Image, Said, manifest, read
from rekindle.spec.places import KubeflowSpec

_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


def api(place: KubeflowSpec) -> str:
    """Whether `host` is KFP's API, and the token is enough to look at its namespace."""
    host, token = place.host.rstrip("/"), token_of(place)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    query = {"page_size": "1"}
    if place.namespace != "kubeflow":
        query["namespace"] = place.namespace
    try:
        health = read(f"{host}/apis/v2beta1/healthz", headers)
        read(f"{host}/apis/v2beta1/experiments?{urlencode(query)}", headers)
    except Said as error:
        if error.status in (301, 302, 303, 307, 308, 401, 403):
            at = "platforms.kubeflow.token"
            fix = f"export a token that is good, and set {at}: env:KFP_TOKEN"
            said = "has no right there" if error.status == 403 else "is not known there"
            whose = "the token" if token else "a user without a token"
            raise RequestError(f"{whose} {said}: {error}", where=at, fix=fix) from None
        if error.status in (200, 404, 405):
            fix = "name the address that ends before /apis, such as https://example.com/pipeline"
            raise RequestError(f"{host} is not the API of Kubeflow Pipelines", fix=fix) from None
        raise Unasked(str(error)) from error
    if not isinstance(health, dict) or "multi_user" not in health:
        return host
    return f"{host}, for {'several users' if health['multi_user'] else 'one user'}"


def bucket(root: str) -> str:
    """Whether the bucket is there, by what this machine is logged in with."""
    scheme, _, path = root.partition("://")
    name = path.partition("/")[0]
    try:
        import fsspec

        store = fsspec.filesystem({"gs": "gcs"}.get(scheme, scheme))
        store.ls(f"{name}/", detail=False)
    except FileNotFoundError:
        fix = f"make it, or name another: {scheme}://..."
        raise RequestError(f"there is no bucket {name}", fix=fix) from None
    except Exception as error:  # noqa: BLE001 - a driver's own, or that there is none
        raise Unasked(f"{type(error).__name__}: {str(error).splitlines()[0]}"[:200]) from None
    return name


def anonymously(wanted: Image) -> str:
    """Whether the registry has the image, where it answers anybody."""
    try:
        try:
            return manifest(wanted)
        except Said as error:
            challenge = error.headers.get("Www-Authenticate", "") or error.headers.get(
                "WWW-Authenticate", ""
            )
            if error.status != 401 or not challenge.startswith("Bearer "):
                raise
            return manifest(wanted, {"Authorization": f"Bearer {_token(challenge)}"})
    except Said as error:
        if error.status != 404:
            raise Unasked(f"{wanted.host} does not allow anonymous pulls: {error}") from error
        what = f"{wanted.host} has no image {wanted.name} {wanted.version}"
        raise RequestError(what, fix="push it, then name its digest") from None


def _token(challenge: str) -> str:
    """What the registry's own words lead to, without a login."""
    asked = dict(_CHALLENGE.findall(challenge))
    realm = asked.pop("realm", "")
    if not realm.startswith("https://"):
        raise Unasked("the registry wants a login")
    query = "&".join(f"{name}={quote(value)}" for name, value in asked.items())
    found = read(f"{realm}?{query}")
    return str(found.get("token") or found.get("access_token") or "")
