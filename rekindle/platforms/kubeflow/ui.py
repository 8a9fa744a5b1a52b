"""What KFP's UI hands out of the cluster's own store, `minio://`, which is not reached from
outside.

`platforms.kubeflow.host` is the UI where it is what people open in a browser; it passes API
calls on, and answers for artifacts itself. Asked for a preview it sends the beginning of a
file, says of a folder that it is one, and never packs a folder up. Authority:
kubeflow/pipelines 2.17.0, frontend/server/handlers/artifacts.ts (getArtifactsHandler,
previewDirectorySummary). No such UI has been asked yet."""

from urllib.parse import urlsplit

from rekindle.errors import PlatformError, UnreachableError
from rekindle.platforms.kubeflow.client import KfpServer, where
from rekindle.platforms.kubeflow.section import KubeflowSpec
from rekindle.platforms.kubeflow.store import SCHEME

MOST_BYTES = 4 << 20  # what is larger is no record of ours
_FOLDER = b'Directory artifact "'
_MISSING = "No objects found at"
_FIX = (
    "set platforms.kubeflow.host to KFP's UI (kubectl port-forward svc/ml-pipeline-ui 8080:80), or "
    "platforms.kubeflow.pipeline_root to a bucket that this machine can read"
)


class IsFolderError(Exception):
    """An artifact that is a folder: its files are read by their own names."""


def read_file(server: KfpServer, place: KubeflowSpec, uri: str) -> bytes:
    """At most MOST_BYTES of a file.

    Raises FileNotFoundError where there is nothing, IsFolderError, and PlatformError where
    `host` is no UI, or does not hand it out."""
    parts = urlsplit(uri)
    query = [
        ("source", SCHEME.removesuffix("://")),
        ("bucket", parts.netloc),
        ("key", parts.path.strip("/")),
        ("namespace", place.namespace),
        ("peek", str(MOST_BYTES)),
    ]
    from kfp_server_api import ApiException

    try:
        content = server.get("/artifacts/get", query=query)
    except ApiException as error:
        body = str(error.body or "")
        if error.status == 404 and _MISSING in body:
            raise FileNotFoundError(uri) from None
        if error.status in (401, 403):
            message = f"the UI does not hand out {uri}: {body.strip() or error.reason}"
            fix = "set platforms.kubeflow.token to one that may see the namespace"
            raise PlatformError(message, where=where(place), fix=fix) from None
        if error.status == 404:
            message = f"{uri} is in the cluster's own store, and nothing there hands it out"
            raise PlatformError(message, where=where(place), fix=_FIX) from None
        message = f"the UI cannot read {uri}: {body.strip() or error.reason}"
        raise UnreachableError(message, where=where(place), fix=_FIX) from None
    if content.startswith(_FOLDER):
        raise IsFolderError(uri)
    return content
