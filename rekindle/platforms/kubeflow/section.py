"""The section `platforms.kubeflow` of the config: which cluster, and as whom."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from rekindle.spec.section import Needed, PlatformSection, TokenReference, VariableName

ClusterName = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)
]
ClusterSecret = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[-._A-Za-z0-9]+$")
]


class KubeflowSpec(PlatformSection):
    """Kubeflow Pipelines."""

    TITLE, PATH = "Kubeflow Pipelines", "platforms.kubeflow"
    ARTIFACT_ROOT_EXAMPLE = (
        "s3://my-bucket/rekindle, or the mount point of a volume that all pods share"
    )

    host: Annotated[
        str,
        Needed(
            "https://kubeflow.example.com/pipeline, or http://localhost:8080 behind kubectl "
            "port-forward"
        ),
    ] = Field("", pattern=r"^(https?://\S+)?$")
    """API of Kubeflow Pipelines: `https://kubeflow.example.com/pipeline`, or
    `http://localhost:8080` behind `kubectl port-forward`."""
    token: TokenReference | None = None
    """Token for `host`, by reference: `env:KFP_TOKEN`, or a file that is read for each
    request, such as `file:/var/run/secrets/kubeflow/pipelines/token` in a notebook of a
    Kubeflow for several users."""
    version: str = Field("2.17.0", pattern=r"^2\.[0-9]+(\.[0-9]+)?$")
    """Version of Kubeflow Pipelines on the cluster: what it does not have yet is refused.
    2.17.0 is what rekindle was run on; `rekindle doctor` compares it with what answers."""
    timezone: str = "UTC"
    """Clock of scheduled runs: what CRON_SCHEDULE_TIMEZONE says to the cluster's controller."""
    namespace: ClusterName = "kubeflow"
    """Namespace that runs live in: of the service account, the secrets and the queue."""
    service_account: ClusterName = "pipeline-runner"
    """Service account that steps run as; `rekindle doctor` prints what it needs."""
    node_account: ClusterName = "rekindle-node"
    """Service account that the nodes of a step on several nodes run as: they need less
    than its launcher."""
    artifact_root: str = ""
    """Folder for checkpoints: a URI (`minio://mlpipeline/rekindle` for KFP's own store), or
    the mount point of a volume that all pods share."""
    # what KFP 2.17 can open: backend/src/v2/objectstore/config.go, ParseBucketPathToConfig
    pipeline_root: str = Field("", pattern=r"^((s3|gs|minio)://.+)?$")
    """Where KFP keeps artifacts: `s3://my-bucket/kfp`. `status` and `report` read there
    what steps found out; default: the cluster's own choice, mostly `minio://`, which
    cannot be read from outside. On Azure KFP needs a gateway that speaks S3."""
    store_endpoint: str = Field("http://seaweedfs.kubeflow:9000", pattern=r"^https?://\S+$")
    """Where pods reach KFP's own store, `minio://`; the default is that of KFP 2.17."""
    store_secret: ClusterName = "mlpipeline-minio-artifact"  # noqa: S105 - its name
    """Secret with the keys of that store, `accesskey` and `secretkey`, as KFP makes it in
    each namespace of runs."""
    s3_endpoint: str = Field("", pattern=r"^(https?://\S+)?$")
    """Where pods reach `s3://`, if that is not AWS: `http://minio.team-a:9000`. For what
    opens the store itself: steps on several nodes, and checkpoints in `artifact_root`."""
    s3_region: str = Field("", pattern=r"^[-a-z0-9]*$")
    """Region of that store, where it has one."""
    image: str | None = None
    """Container image of rekindle's steps, best by digest; a step on several nodes is
    launched from it."""
    runtime: ClusterName = "rekindle"
    """ClusterTrainingRuntime that steps on several nodes run on."""
    queue: str = Field("", pattern=r"^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?$")
    """LocalQueue of Kueue for steps on several nodes; empty: none."""
    spot_nodes: dict[str, str] = Field(default_factory=dict)
    """Labels of the nodes that may be taken away, such as `{cloud.google.com/gke-spot:
    "true"}`; taints of the same keys and values are tolerated."""
    accelerator_nodes: dict[str, dict[str, str]] = Field(default_factory=dict)
    """Labels of the nodes with a GPU, by the name that `distribute()` calls it: `{H100:
    {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}}`."""
    claim: ClusterName | None = None
    """PersistentVolumeClaim that is mounted at `artifact_root`, if that is a folder, in
    the pods of `rekindle deploy`."""
    serving: Literal["deployment", "kserve"] = "deployment"
    """What `rekindle deploy` makes of a version: a Deployment, or an InferenceService of
    KServe, in its mode RawDeployment."""
    gateway: str = Field("", pattern=r"^([a-z0-9][-a-z0-9.]*/[a-z0-9][-a-z0-9.]*)?$")
    """Gateway of the Gateway API, `NAMESPACE/NAME`, that shares requests among the
    versions of `rekindle deploy`; without one, `deploy.canary` has to be `[]`."""
    secrets: dict[VariableName, ClusterSecret] = Field(default_factory=dict)
    """Environment variables of all steps from secrets of the cluster: `{HF_TOKEN:
    name-of-secret/key}`."""

    def uris(self) -> tuple[tuple[str, str], ...]:
        return (("host", self.host),)
