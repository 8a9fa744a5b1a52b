"""`minio://BUCKET/KEY`: the store that Kubeflow Pipelines brings, as a file system of fsspec.

It is an S3 store of the cluster (SeaweedFS since KFP 2.15, MinIO before), at another
endpoint and with other keys than the S3 that a run may use as well. fsspec reads both from
variables of this scheme: FSSPEC_MINIO_ENDPOINT_URL, FSSPEC_MINIO_KEY, FSSPEC_MINIO_SECRET.
Without them it is the S3 that AWS_ENDPOINT_URL and the other variables of AWS say. The
entry point `fsspec.specs` in pyproject.toml names this class to fsspec."""

from s3fs import S3FileSystem


class MinioFileSystem(S3FileSystem):  # type: ignore[misc]  # s3fs has no types
    """S3 under the scheme `minio`, by which fsspec looks for its settings."""

    protocol = ("minio",)
