"""What a project on Google Cloud says of itself, as doctor asks: what one may do (cloudresourcemanager),
which APIs and regions there are, buckets, images, secrets.

It answers questions only; pipeline jobs and schedules are rest.py's. A question it does not know is a
404 and stands in `refused`. Authority: Google's REST references, named in the code that asks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tests.servers.google.rest import PROJECT, REGION, TOKEN, Project
from tests.servers.tls_hosts import Answer, Asked, Dropped

HOSTS = ("*.googleapis.com", "*.pkg.dev")
DIGEST = "sha256:" + "0" * 64
Route = tuple[str, str, str, Callable[..., Any]]


class Refused(Exception):
    def __init__(self, status: int, message: str, reason: str = "") -> None:
        self.status, self.message, self.reason = status, message, reason


class Facts:
    """The project `forge`; tests change what it has. `errors` are answered in place of calls that
    begin so: HTTP's status, 0 for none; `login` is what the token's endpoint says."""

    def __init__(self, jobs: Project | None = None) -> None:
        self.jobs = jobs
        self.login: tuple[int, dict[str, Any]] | None = None
        self.projects = {PROJECT}
        self.denied: set[str] = set()
        self.apis = {"aiplatform.googleapis.com"}
        self.regions = ["europe-west1", REGION, "us-central1"]
        self.buckets: dict[str, dict[str, Any]] = {
            "lake": {"location": REGION.upper(), "locationType": "region"}
        }
        self.images = {f"{PROJECT}/r/train": [DIGEST]}
        self.secrets: dict[str, str] = {}
        self.errors: dict[str, int] = {}
        self.calls: list[str] = []
        self.refused: list[str] = []
        name, api = r"([\w.@-]+)", r"([\w.]+)"
        self.routes: list[Route] = [
            (
                "POST",
                "cloudresourcemanager",
                rf"/v1/projects/{name}:testIamPermissions",
                self.permitted,
            ),
            ("GET", "serviceusage", rf"/v1/projects/{name}/services/{api}", self.service),
            ("GET", "aiplatform", rf"/v1/projects/{name}/locations", self.locations),
            ("GET", "storage", rf"/storage/v1/b/{name}", self.bucket),
            ("GET", "storage", rf"/storage/v1/b/{name}/iam/testPermissions", self.bucket_permitted),
            ("GET", "secretmanager", r"/v1/(projects/\S+/versions/\w+)", self.secret),
        ]

    def answer(self, asked: Asked) -> Answer:
        if asked.host == "oauth2.googleapis.com":
            if self.login:
                return Answer(*self.login)
            return Answer(200, {"access_token": TOKEN, "expires_in": 3600, "token_type": "Bearer"})
        if self.jobs and asked.host.endswith("-aiplatform.googleapis.com"):
            return self.jobs.answer(asked)
        if asked.host == "iamcredentials.googleapis.com":  # google-auth asks for bounds by itself
            return _error(404, "none")
        service = asked.host.removesuffix(".googleapis.com")
        call = f"{asked.method} {service}{asked.path}"
        self.calls.append(call)
        for begin, status in self.errors.items():
            if call.startswith(begin):
                if status == 0:
                    raise Dropped
                reason = "" if service == "storage" else "SERVICE_DISABLED"
                return _error(status, "as the test wants it", reason)
        try:
            if asked.headers.get("authorization") != f"Bearer {TOKEN}":
                raise Refused(401, "no token, or another one")
            return Answer(200, self.found(service, asked))
        except Refused as error:
            self.refused.append(f"{call}: {error.message}")
            return _error(error.status, error.message, error.reason)

    def found(self, service: str, asked: Asked) -> Any:
        if asked.host.endswith(".pkg.dev"):
            return self.manifest(asked)
        for method, host, path, call in self.routes:
            match = re.fullmatch(path, asked.path)
            if (method, host) == (asked.method, service) and match:
                return call(asked, *match.groups())
        raise Refused(404, f"nobody answers {asked}")

    def permitted(self, asked: Asked, name: str) -> Any:
        if name not in self.projects:
            raise Refused(403, "The caller does not have permission")
        return {
            "permissions": [one for one in asked.json()["permissions"] if one not in self.denied]
        }

    def service(self, asked: Asked, name: str, api: str) -> Any:
        return {
            "name": f"projects/1/services/{api}",
            "state": "ENABLED" if api in self.apis else "DISABLED",
        }

    def locations(self, asked: Asked, name: str) -> Any:
        begin = int(asked.query.get("pageToken") or 0)
        page = [{"locationId": one} for one in self.regions[begin : begin + 2]]
        return {
            "locations": page,
            **({"nextPageToken": str(begin + 2)} if begin + 2 < len(self.regions) else {}),
        }

    def bucket(self, asked: Asked, name: str) -> Any:
        self.bucket_permitted(asked, name)
        return {"projectNumber": "1", **self.buckets[name]}

    def bucket_permitted(self, asked: Asked, name: str) -> Any:
        if name not in self.buckets:
            raise Refused(404, "The specified bucket does not exist.")
        if self.buckets[name].get("of") == "somebody else":
            return {"kind": "storage#testIamPermissionsResponse"}
        return {"permissions": ["storage.objects.create", "storage.objects.get"]}

    def secret(self, asked: Asked, name: str) -> Any:
        if name not in self.secrets:
            raise Refused(404, f"Secret [{name}] not found")
        return {"name": name, "state": self.secrets[name]}

    def manifest(self, asked: Asked) -> Any:
        match = re.fullmatch(r"/v2/(\S+)/manifests/(\S+)", asked.path)
        if asked.method != "HEAD" or not match or match[2] not in self.images.get(match[1], ()):
            raise Refused(404, f"no {asked}")
        return None


def _error(status: int, message: str, reason: str = "") -> Answer:
    details = (
        [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": reason}] if reason else []
    )
    return Answer(status, {"error": {"code": status, "message": message, "details": details}})
