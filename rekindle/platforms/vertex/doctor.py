"""The least that the account of steps on Vertex AI may do, and whether the project on
Google Cloud has what a config names; each check reads and none changes anything
(`testIamPermissions` is a POST that reads, too).

What Google says plainly is a problem; a refusal to answer, an API that is off, and no
answer, are none. Google says 403 both for what is not there and for what one may not see.
Authority: the REST references of serviceusage v1, cloudresourcemanager v1, aiplatform v1,
storage v1 and secretmanager v1; Artifact Registry is read as any registry. No project has
been asked yet."""

import difflib
import threading
from collections.abc import Collection, Iterator
from typing import Any
from urllib.parse import urlencode

from rekindle.errors import Problem, RequestError, first_line
from rekindle.http import HttpError
from rekindle.platforms import reads
from rekindle.platforms.checks import Needs, NotChecked, PlatformCheck, about, may, rights
from rekindle.platforms.reads import Image, absent, manifest, read
from rekindle.platforms.submission import Definition
from rekindle.platforms.vertex.client import LOG_IN, SCOPES, images
from rekindle.platforms.vertex.limits import limits
from rekindle.platforms.vertex.section import VertexSpec
from rekindle.protojson import Json

_OBJECTS = ("storage.objects.create", "storage.objects.get", "storage.objects.list")


def permissions(place: VertexSpec, needs: Needs) -> str:
    """Permissions of the account, a line each:
    its name, what it is for, and a role that has it."""
    rules = limits()
    account = place.service_account or "platforms.vertex.service_account"
    of_steps = list(rules["permissions"])
    if place.secrets:
        of_steps.append(rules["secret_permission"])
    if needs.deploys_in_steps:
        of_steps += rules["deploy_permissions"]
    if needs.publishes:
        of_steps += rules["publish_permissions"]
    groups = {
        f"The account of the steps, {account}, needs:": of_steps,
        "Who deploys to an endpoint needs:": rules["deploy_permissions"],
    }
    if needs.publishes:
        groups["Who promotes needs:"] = rules["publish_permissions"]
    lines = []
    for head, rows in groups.items():
        lines.append(head)
        lines += [f"  {name:<48} {why} ({role})" for name, why, role in rows]
    return "\n".join(lines)


def checks(
    place: VertexSpec, definition: Definition | None, needs: Needs
) -> Iterator[PlatformCheck]:
    if not place.project or not place.region:  # which of them is missing is reported elsewhere
        return
    check_of = about("vertex", AskedProject(place))
    yield check_of("credentials", "project", AskedProject.login, early=True, login=True)
    yield check_of("you may", "project", permitted, early=True)
    if needs.deploys:
        yield check_of("you may deploy", "project", permitted_beyond, "deploy_permissions")
    if needs.publishes:
        yield check_of("you may publish", "project", permitted_beyond, "publish_permissions")
    yield check_of("API", "project", enabled)
    yield check_of("region", "region", region, early=True)
    if place.artifact_root:
        yield check_of("bucket", "artifact_root", bucket, early=True)
    references = set(images(definition)) if definition else set()
    references.add(place.image or "")
    for reference in reads.images(references):
        yield check_of("image", "image", image, reference, early=True)
    for variable, name in sorted(place.secrets.items()):
        yield check_of(f"secret {variable}", f"secrets.{variable}", secret, name)


class AskedProject:
    """The project that `place` names, and the user who is logged in here."""

    def __init__(self, place: VertexSpec) -> None:
        self.place = place
        self._credentials: Any = None
        self._lock = threading.Lock()

    def login(self) -> str:
        """Who is logged in, with a token that Google gave just now."""
        try:
            import google.auth
            from google.auth import exceptions
            from google.auth.transport.requests import Request
        except ImportError as error:
            raise RequestError(
                f"{error.name} is not installed here",
                fix="pip install google-cloud-aiplatform",
            ) from None
        try:
            credentials: Any = google.auth.default(scopes=SCOPES)[0]
            credentials.refresh(Request())
        except exceptions.GoogleAuthError as error:
            message = first_line(error, error.args[0] if error.args else "")
            if error.retryable or isinstance(error, exceptions.TransportError):
                raise NotChecked(message) from None
            raise RequestError(message, fix=LOG_IN) from None
        self._credentials = credentials
        return str(getattr(credentials, "service_account_email", "") or "a user of gcloud")

    def get(self, url: str, **query: object) -> Json:
        """What Google says of a resource."""
        address = f"{url}?{urlencode(query, doseq=True)}" if query else url
        return read(address, self.headers("GET", address))

    def headers(self, method: str, url: str) -> dict[str, str]:
        """A token, and the project that pays where the login names one."""
        from google.auth.transport.requests import Request

        headers: dict[str, str] = {}
        with self._lock:
            self._credentials.before_request(Request(), method, url, headers)
        return headers


def permitted(project: AskedProject) -> str:
    """Whether there is such a project, in which who is logged in may run pipelines."""
    name = project.place.project
    needed = limits()["your_permissions"]
    try:
        missing = _missing(project, needed)
    except HttpError as error:
        if not _concerns_resource(error):
            raise
        raise RequestError(
            f"there is no project {name}, or you may not see it",
            fix="gcloud projects list; or log in as another",
        ) from None
    if missing:
        raise RequestError(
            f"you may not {', '.join(missing)} in {name}",
            fix="ask for roles/aiplatform.user in the project",
        )
    return ", ".join(needed)


def permitted_beyond(project: AskedProject, table: str) -> str:
    """Whether who is logged in has the permissions that a table of the catalog lists."""
    name = project.place.project
    fixes = {}
    for permission, role in rights(limits()[table]):
        fixes[permission] = f"ask for {role} in the project {name}"
    return may(fixes, _missing(project, fixes))


def _missing(project: AskedProject, permissions: Collection[str]) -> list[str]:
    """The permissions that who is logged in does not have."""
    name = project.place.project
    url = f"https://cloudresourcemanager.googleapis.com/v1/projects/{name}:testIamPermissions"
    response = read(url, project.headers("POST", url), body={"permissions": list(permissions)})
    granted = response.get("permissions", [])
    return [permission for permission in permissions if permission not in granted]


def enabled(project: AskedProject) -> str:
    """Whether the project uses Vertex AI at all."""
    name = project.place.project
    api = "aiplatform.googleapis.com"
    service = project.get(f"https://serviceusage.googleapis.com/v1/projects/{name}/services/{api}")
    if service.get("state") != "ENABLED":
        raise RequestError(
            f"{name} does not use {api}",
            fix=f"gcloud services enable {api} --project {name}",
        )
    return api


def region(project: AskedProject) -> str:
    """Whether Vertex AI is in the region."""
    place = project.place
    url = f"https://aiplatform.googleapis.com/v1/projects/{place.project}/locations"
    regions: list[str] = []
    token = ""
    while True:
        page = project.get(url, pageSize=100, pageToken=token)
        regions += [location["locationId"] for location in page.get("locations", [])]
        token = page.get("nextPageToken", "")
        if not token:
            break
    if not regions:
        raise NotChecked("no region is listed")
    if place.region in regions:
        return place.region
    near = difflib.get_close_matches(place.region, regions, n=2)
    fix = f"such as {' or '.join(near)}" if near else f"one of {', '.join(regions[:5])}"
    raise RequestError(f"Vertex AI is in no region `{place.region}`", fix=fix)


def bucket(project: AskedProject) -> str:
    """Whether the bucket is there, who is logged in may use it, and it lies near."""
    place = project.place
    name = place.artifact_root.removeprefix("gs://").partition("/")[0]
    url = f"https://storage.googleapis.com/storage/v1/b/{name}"
    granted = None
    try:
        granted = project.get(f"{url}/iam/testPermissions", permissions=_OBJECTS).get("permissions")
    except HttpError as error:
        if not _concerns_resource(error):
            raise
        if error.status == 404:
            raise RequestError(
                f"there is no bucket {name}",
                fix=f"gcloud storage buckets create gs://{name} --location {place.region}",
            ) from None
    if not granted:
        raise RequestError(
            f"the bucket {name} belongs to another project, or you may do nothing with it",
            fix="name a bucket of yours, or ask for roles/storage.objectUser on it",
        )
    described = project.get(url, fields="location,locationType,projectNumber")
    location = str(described.get("location", "")).lower()
    # a bucket of several regions is near enough
    if described.get("locationType") == "region" and location != place.region:
        raise RequestError(
            f"the bucket {name} is in {location}, the pipeline in {place.region}",
            fix=f"name a bucket in {place.region}, or set platforms.vertex.region: {location}",
        )
    return f"{name} in {location}, of the project {described.get('projectNumber', '?')}"


def image(project: AskedProject, reference: Image) -> str:
    """Whether Artifact Registry has the image;
    other registries are not asked with a token."""
    if not reference.host.endswith((".pkg.dev", "gcr.io")):
        raise NotChecked(f"{reference.host} is not one of Google's registries")
    folder = f"{reference.host}/{reference.name.rpartition('/')[0]}"
    fix = f"push it, then name its digest: gcloud artifacts docker images list {folder}"
    return manifest(reference, project.headers("HEAD", reference.url), fix)


def secret(project: AskedProject, name: str) -> str:
    """Whether the version of the secret is there and enabled; its value is not read."""
    project_name = name.split("/")[1]
    missing = Problem(
        f"there is no secret {name}", fix=f"gcloud secrets list --project {project_name}"
    )
    with absent(missing):
        version = project.get(f"https://secretmanager.googleapis.com/v1/{name}")
    if version.get("state") != "ENABLED":
        raise RequestError(
            f"the secret {name} is {version.get('state')}",
            fix=f"gcloud secrets versions enable {name}",
        )
    return name


def _concerns_resource(error: HttpError) -> bool:
    """Whether an error is about the resource: an API that is off and a perimeter are
    refused with 403, too."""
    refusals = ("", "403", "PERMISSION_DENIED", "IAM_PERMISSION_DENIED")
    return error.status == 404 or (error.status == 403 and error.code in refusals)
