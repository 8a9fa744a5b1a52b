"""The stores of artifacts and checkpoints, as steps of rekindle's reach them: KFP's own,
`minio://`, and a store that speaks S3 at an endpoint of its own.

KFP's launcher gives an ordinary step its artifacts as files. The nodes of a step on
several nodes, its launcher, and checkpoints below an `artifact_root` there open the store
themselves. Endpoint and Secret of `minio://` are those of KFP's own launcher
(DefaultEndpointInMultiUserMode in backend/src/v2/objectstore/config.go and
minioArtifactSecretName in backend/src/v2/config/env.go of kubeflow/pipelines 2.17.0), and
fields of the config where a cluster has others. storage/minio.py says what reads its
variables; those of S3 are AWS's own, which botocore reads."""

from rekindle.platforms.kubeflow.section import KubeflowSpec

# what KFP opens (backend/src/v2/objectstore/config.go, ParseBucketPathToConfig)
ROOTS = ("s3://", "gs://", "minio://")
SCHEME = "minio://"
S3_SCHEME = "s3://"
ENDPOINT = "FSSPEC_MINIO_ENDPOINT_URL"
KEY = "FSSPEC_MINIO_KEY"
SECRET = "FSSPEC_MINIO_SECRET"  # noqa: S105 - the name of a variable
# the keys of the Secret that KFP's manifests, and its controller of profiles, create
KEYS = {KEY: "accesskey", SECRET: "secretkey"}
_S3_ENDPOINT = "AWS_ENDPOINT_URL_S3"
_S3_REGION = "AWS_DEFAULT_REGION"


def variables(place: KubeflowSpec) -> dict[str, str]:
    """Variables with their values for what opens the store itself; none where nothing
    does."""
    values = {}
    if _uses(place, SCHEME):
        values[ENDPOINT] = place.store_endpoint
    if _uses(place, S3_SCHEME):
        values[_S3_ENDPOINT] = place.s3_endpoint
        values[_S3_REGION] = place.s3_region
    return {env: value for env, value in values.items() if value and env not in place.secrets}


def secrets(place: KubeflowSpec) -> dict[str, tuple[str, str]]:
    """By the name of a variable, the Secret of the namespace and the key in it. It may be
    missing, where the cluster's own choice is another store."""
    if not _uses(place, SCHEME):
        return {}
    references = {env: (place.store_secret, key) for env, key in KEYS.items()}
    return {env: value for env, value in references.items() if env not in place.secrets}


def keeps_checkpoints(place: KubeflowSpec) -> bool:
    """Whether ordinary steps of rekindle's open such a store, too."""
    root = place.artifact_root
    return root.startswith(SCHEME) or (root.startswith(S3_SCHEME) and bool(place.s3_endpoint))


def _uses(place: KubeflowSpec, scheme: str) -> bool:
    """Whether artifacts or checkpoints lie in a store of this scheme. Without a root of the
    config's the cluster decides, and mostly for `minio://`."""
    root = place.pipeline_root
    if not root:
        # an endpoint in the config says that the cluster's choice is such a store
        return scheme == SCHEME or bool(place.s3_endpoint)
    return root.startswith(scheme) or place.artifact_root.startswith(scheme)
