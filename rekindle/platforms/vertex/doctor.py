"""The least that the account of steps on Vertex AI may do, and whether the project on Google Cloud
has what a config names; each check reads and none changes anything (`testIamPermissions` is a POST
that reads, too).

What Google says plainly is a problem; a refusal to answer, an API that is off, and no answer, are
none. Google says 403 both for what is not there and for what one may not see. Authority: the REST
references of serviceusage v1, cloudresourcemanager v1, aiplatform v1, storage v1 and secretmanager
v1; Artifact Registry is read as any registry. No project has been asked yet."""

import difflib
import threading
from collections.abc import Collection, Iterator
from typing import Any
from urllib.parse import urlencode

from rekindle.catalog.tables import limits
from rekindle.errors import RequestError, first_line
from rekindle.http import HttpError
from rekindle.platforms import reads
from rekindle.platforms.checks import Check, Needs, NotChecked, about, may, rights
from rekindle.platforms.reads import Image, absent, manifest, read
from rekindle.platforms.submission import Definition, problems_in
from rekindle.platforms.vertex.client import SCOPES, images
from rekindle.spec.platforms import VertexSpec

_OBJECTS = ("storage.objects.create", "storage.objects.get", "storage.objects.list")
_problem = problems_in(__file__)


def permissions(place: VertexSpec, needs: Needs) -> str:
    """Permissions of the account, a line each: its name, what it is for, and a role that has it."""
    rules = limits("vertex")
    account = place.service_account or "platforms.vertex.service_account"
    needed = [*rules["permissions"], *([rules["secret_permission"]] if place.secrets else [])]
    needed += rules["deploy_permissions"] * needs.deploys_in_steps
    needed += rules["publish_permissions"] * needs.publishes
    groups = {
        f"The account of the steps, {account}, needs:": needed,
        "Who deploys to an endpoint needs:": rules["deploy_permissions"],
    }
    groups |= {"Who promotes needs:": rules["publish_permissions"]} if needs.publishes else {}
    lines = list[str]()
    for head, rows in groups.items():
        lines += [head, *(f"  {name:<48} {why} ({role})" for name, why, role in rows)]
    return "\n".join(lines)


def checks(place: VertexSpec, definition: Definition | None, needs: Needs) -> Iterator[Check]:
    if not place.project or not place.region:  # which of them is missing is reported elsewhere
        return
    ask = about("vertex", Project(place))
    yield ask("credentials", "project", Project.login, early=True, login=True)
    yield ask("you may", "project", permitted, early=True)
    for use, is_asked in (("deploy", needs.deploys), ("publish", needs.publishes)):
        if is_asked:
            yield ask(f"you may {use}", "project", permitted_beyond, f"{use}_permissions")
    yield ask("API", "project", enabled)
    yield ask("region", "region", region, early=True)
    if place.artifact_root:
        yield ask("bucket", "artifact_root", bucket, early=True)
    for wanted in reads.images({place.image or "", *(images(definition) if definition else ())}):
        yield ask("image", "image", image, wanted, early=True)
    for variable, name in sorted(place.secrets.items()):
        yield ask(f"secret {variable}", f"secrets.{variable}", secret, name)


class Project:
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
            raise RequestError([_problem("no_package", name=error.name)]) from None
        try:
            found: Any = google.auth.default(scopes=SCOPES)[0]
            found.refresh(Request())
        except exceptions.GoogleAuthError as error:
            said = first_line(error, error.args[0] if error.args else "")
            if error.retryable or isinstance(error, exceptions.TransportError):
                raise NotChecked(said) from None
            raise RequestError([_problem("login", what=said)]) from None
        self._credentials = found
        return str(getattr(found, "service_account_email", "") or "a user of gcloud")

    def get(self, url: str, **query: Any) -> dict[str, Any]:
        """What Google says of a resource."""
        where = f"{url}?{urlencode(query, doseq=True)}" if query else url
        return read(where, self.headers("GET", where))

    def headers(self, method: str, url: str) -> dict[str, str]:
        """A token, and the project that pays where the login names one."""
        from google.auth.transport.requests import Request

        found: dict[str, str] = {}
        with self._lock:
            self._credentials.before_request(Request(), method, url, found)
        return found


def permitted(project: Project) -> str:
    """Whether there is such a project, in which who is logged in may run pipelines."""
    name, wanted = project.place.project, limits("vertex")["your_permissions"]
    try:
        missing = _missing(project, wanted)
    except HttpError as error:
        if not _plain(error):
            raise
        raise RequestError([_problem("no_project", name=name)]) from None
    if missing:
        raise RequestError([_problem("not_permitted", missing=", ".join(missing), name=name)])
    return ", ".join(wanted)


def permitted_beyond(project: Project, rows: str) -> str:
    """Whether who is logged in has the permissions of these rows of the catalog."""
    name = project.place.project
    asked = rights(limits("vertex")[rows])
    fixes = {right: f"ask for {role} in the project {name}" for right, role in asked}
    return may(fixes, _missing(project, fixes))


def _missing(project: Project, wanted: Collection[str]) -> list[str]:
    name = project.place.project
    url = f"https://cloudresourcemanager.googleapis.com/v1/projects/{name}:testIamPermissions"
    answer = read(url, project.headers("POST", url), body={"permissions": [*wanted]})
    return [one for one in wanted if one not in answer.get("permissions", [])]


def enabled(project: Project) -> str:
    """Whether the project uses Vertex AI at all."""
    name, api = project.place.project, "aiplatform.googleapis.com"
    found = project.get(f"https://serviceusage.googleapis.com/v1/projects/{name}/services/{api}")
    if found.get("state") != "ENABLED":
        raise RequestError([_problem("not_enabled", name=name, api=api)])
    return api


def region(project: Project) -> str:
    """Whether Vertex AI is in the region."""
    place, known, token = project.place, list[str](), ""
    url = f"https://aiplatform.googleapis.com/v1/projects/{place.project}/locations"
    while True:
        listed = project.get(url, pageSize=100, pageToken=token)
        known += [one["locationId"] for one in listed.get("locations", [])]
        if not (token := listed.get("nextPageToken", "")):
            break
    if not known:
        raise NotChecked("no region is listed")
    if place.region in known:
        return place.region
    near = difflib.get_close_matches(place.region, known, n=2)
    fix = f"such as {' or '.join(near)}" if near else f"one of {', '.join(known[:5])}"
    raise RequestError(f"Vertex AI is in no region `{place.region}`", fix=fix)


def bucket(project: Project) -> str:
    """Whether the bucket is there, who is logged in may use it, and it lies near."""
    place = project.place
    name = place.artifact_root.removeprefix("gs://").partition("/")[0]
    url = f"https://storage.googleapis.com/storage/v1/b/{name}"
    try:
        mine = project.get(f"{url}/iam/testPermissions", permissions=_OBJECTS).get("permissions")
    except HttpError as error:
        if not _plain(error):
            raise
        mine = []
        if error.status == 404:
            raise RequestError([_problem("no_bucket", name=name, region=place.region)]) from None
    if not mine:
        raise RequestError([_problem("foreign_bucket", name=name)])
    found = project.get(url, fields="location,locationType,projectNumber")
    lies = str(found.get("location", "")).lower()
    if found.get("locationType") == "region" and lies != place.region:
        raise RequestError([_problem("far_bucket", name=name, lies=lies, region=place.region)])
    return f"{name} in {lies}, of the project {found.get('projectNumber', '?')}"


def image(project: Project, wanted: Image) -> str:
    """Whether Artifact Registry has the image; other registries are not asked with a token."""
    if not wanted.host.endswith((".pkg.dev", "gcr.io")):
        raise NotChecked(f"{wanted.host} is not one of Google's registries")
    folder = f"{wanted.host}/{wanted.name.rpartition('/')[0]}"
    fix = f"push it, then name its digest: gcloud artifacts docker images list {folder}"
    return manifest(wanted, project.headers("HEAD", wanted.url), fix)


def secret(project: Project, name: str) -> str:
    """Whether the version of the secret is there and enabled; its value is not read."""
    with absent(_problem("no_secret", name=name, project=name.split("/")[1])):
        found = project.get(f"https://secretmanager.googleapis.com/v1/{name}")
    if found.get("state") != "ENABLED":
        raise RequestError([_problem("disabled_secret", name=name, state=found.get("state"))])
    return name


def _plain(error: HttpError) -> bool:
    """Whether it is about the resource: an API that is off and a perimeter are refusals, too."""
    refusals = ("", "403", "PERMISSION_DENIED", "IAM_PERMISSION_DENIED")
    return error.status == 404 or (error.status == 403 and error.code in refusals)
