"""KFP's own store (`minio://`), as steps of rekindle's reach it.

KFP's launcher gives an ordinary step its artifacts as files. The nodes of a step on
several nodes, its launcher, and checkpoints below an `artifact_root` there open the store
themselves. Endpoint and Secret are those of KFP's own launcher: DefaultEndpointInMultiUser
Mode in backend/src/v2/objectstore/config.go and minioArtifactSecretName in
backend/src/v2/config/env.go of kubeflow/pipelines 2.17.0, and fields of the config where a
cluster has others. storage/minio.py says what reads the variables."""

from rekindle.platforms.kubeflow.section import KubeflowSpec

SCHEME = "minio://"
ENDPOINT = "FSSPEC_MINIO_ENDPOINT_URL"
# the keys of the Secret that KFP's manifests, and its controller of profiles, create
_KEYS = {"FSSPEC_MINIO_KEY": "accesskey", "FSSPEC_MINIO_SECRET": "secretkey"}


def variables(place: KubeflowSpec) -> dict[str, str]:
    """Variables with their values for what opens the store itself; none where nothing
    does."""
    if not _is_used(place) or ENDPOINT in place.secrets:
        return {}
    return {ENDPOINT: place.store_endpoint}


def secrets(place: KubeflowSpec) -> dict[str, tuple[str, str]]:
    """By the name of a variable, the Secret of the namespace and the key in it. It may be
    missing, where the cluster's own choice is another store."""
    if not _is_used(place):
        return {}
    references = {env: (place.store_secret, key) for env, key in _KEYS.items()}
    return {env: value for env, value in references.items() if env not in place.secrets}


def keeps_checkpoints(place: KubeflowSpec) -> bool:
    """Whether ordinary steps of rekindle's open it, too."""
    return place.artifact_root.startswith(SCHEME)


def _is_used(place: KubeflowSpec) -> bool:
    # without a root of the config's the cluster decides, and mostly for its own store
    is_root = not place.pipeline_root or place.pipeline_root.startswith(SCHEME)
    return is_root or keeps_checkpoints(place)
