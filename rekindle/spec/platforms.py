"""Where a pipeline may run, and as whom: one section a platform, and the base of all
sections.

Secrets are named here, each in the way of its platform; never their values."""

import dataclasses
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from rekindle.errors import Problem, SpecError
from rekindle.masking import name_secret


def _secret(name: str) -> str:
    """From when a config names it, no error and no log shows its value."""
    name_secret(name.removeprefix("env:"))
    return name


SecretReference = Annotated[
    str, StringConstraints(pattern=r"^env:[A-Za-z_][A-Za-z0-9_]*$"), AfterValidator(_secret)
]
SecretArn = Annotated[
    str, StringConstraints(pattern=r"^arn:aws[a-z-]*:secretsmanager:[a-z0-9-]+:\d{12}:secret:\S+$")
]
VariableName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$"), AfterValidator(_secret)
]
ClusterName = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)
]
ClusterSecret = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[-._A-Za-z0-9]+$")
]
GoogleSecret = Annotated[
    str,
    StringConstraints(
        pattern=r"^projects/[a-z0-9:.-]+/secrets/[A-Za-z0-9_-]{1,255}/versions/([0-9]+|latest)$"
    ),
]

VaultSecret = Annotated[
    str,
    StringConstraints(
        pattern=r"^https://[A-Za-z][A-Za-z0-9-]{1,22}[A-Za-z0-9]\.vault\.azure\.net/secrets/"
        r"[A-Za-z0-9-]{1,127}(/[0-9a-f]{32})?$"
    ),
]


class Section(BaseModel):
    """Base of every section: frozen, unknown keys refused, field docstrings kept as
    descriptions."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, serialize_by_alias=True
    )


class ImageSpec(Section):
    """What `rekindle images build` makes: an image with your own code."""

    base: str = Field("rekindle-cpu", min_length=1)
    """Image with rekindle in it, to which your own code is added; `make images` builds
    `rekindle-cpu` and `rekindle-train`."""
    include: tuple[str, ...] = ()
    """Files, folders and patterns (`prompts/*.txt`) that the code needs beside what it
    imports: relative ones start at the config's folder. `task`, `train.entrypoint`, and
    the modules that they and the pipeline's components import are there without being
    named."""


class LocalSpec(Section):
    """This machine."""

    ranks: int = Field(2, ge=1, le=64)
    """Training processes."""
    containers: Literal["never", "auto", "always"] = "auto"
    """Which steps docker runs, each in its image. `auto`: containers with a command of
    their own, where docker answers and has or gets the image; others, and those, run as
    processes here. `always`: every step, or the run is refused. `never`: none."""
    secrets: dict[str, SecretReference] = Field(default_factory=dict)
    """Environment variables of the steps, by reference: `{HF_TOKEN: env:MY_TOKEN}`."""


@dataclasses.dataclass(frozen=True)
class Needed:
    """Metadata of a setting that nothing goes to the platform without, nor is compiled
    for it where that is what it is needed `to` do; with an `example` of its value."""

    example: str
    to: Literal["compile", "submit"] = "submit"


class PlatformSection(Section):
    """Base of the sections of platforms."""

    TITLE: ClassVar[str]
    PATH: ClassVar[str]

    def missing(self, to: Literal["compile", "submit"] = "submit") -> tuple[Problem, ...]:
        """The settings that are needed to do that, and to compile first, and that are empty."""
        problems = []
        for name, needed in self.needed().items():
            if to in (needed.to, "submit") and not getattr(self, name):
                where = f"{self.PATH}.{name}"
                message = f"{self.TITLE} needs `{name}`"
                fix = f"set {where}: {needed.example}"
                code = SpecError.code if needed.to == "compile" else ""
                problems.append(Problem(message, where, fix, code))
        return tuple(problems)

    def refuse_if_incomplete(self) -> None:
        """SpecError with all that is `missing`, if anything is."""
        if problems := self.missing():
            raise SpecError(problems)

    @classmethod
    def needed(cls) -> dict[str, Needed]:
        """The settings that are needed, by name."""
        fields = ((name, each) for name, f in cls.model_fields.items() for each in f.metadata)
        return {name: each for name, each in fields if isinstance(each, Needed)}


class KubeflowSpec(PlatformSection):
    """Kubeflow Pipelines."""

    TITLE, PATH = "Kubeflow Pipelines", "platforms.kubeflow"

    host: Annotated[
        str,
        Needed(
            "https://kubeflow.example.com/pipeline, or http://localhost:8080 behind kubectl "
            "port-forward"
        ),
    ] = Field("", pattern=r"^(https?://\S+)?$")
    """API of Kubeflow Pipelines: `https://kubeflow.example.com/pipeline`, or
    `http://localhost:8080` behind `kubectl port-forward`."""
    token: SecretReference | None = None
    """Token for `host`, by reference: `env:KFP_TOKEN`."""
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
    """Folder for checkpoints: a URI, or the mount point of a volume that all pods share."""
    pipeline_root: str = Field("", pattern=r"^((s3|gs|abfs|file)://.+)?$")
    """Where KFP keeps artifacts: `s3://my-bucket/kfp`. `status` and `report` read there
    what steps found out; default: the cluster's own choice, which mostly cannot be read
    from outside."""
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


class VertexSpec(PlatformSection):
    """Vertex AI Pipelines."""

    TITLE, PATH = "Vertex AI", "platforms.vertex"

    project: Annotated[str, Needed("my-project", to="compile")] = Field("", max_length=63)
    """Google Cloud project."""
    region: Annotated[str, Needed("europe-west4", to="compile")] = Field(
        "", pattern=r"^([a-z]+-[a-z]+[0-9]+)?$"
    )
    """Region of the pipeline, such as `europe-west4`."""
    artifact_root: Annotated[str, Needed("gs://my-bucket/rekindle", to="compile")] = ""
    """Folder of a bucket for artifacts and checkpoints: `gs://my-bucket/rekindle`."""
    service_account: str = Field("", pattern=r"^([^@\s]+@[^@\s]+)?$")
    """E-mail of the account that steps run as; default: the project's Compute Engine account."""
    network: str = Field("", pattern=r"^(projects/[^/]+/global/networks/[^/]+)?$")
    """Network that steps are peered with: `projects/NUMBER/global/networks/NAME`."""
    kms_key: str = Field("", pattern=r"^(projects/.+/locations/.+/keyRings/.+/cryptoKeys/.+)?$")
    """Key that encrypts what the pipeline keeps, in the same region."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the job, which flow into the bill."""
    image: str | None = None
    """Container image of rekindle's steps, and of the launcher of a distributed step, by digest."""
    provisioning: Literal["standard", "spot", "flex-start"] | None = None
    """How distributed steps get machines; default: `spot` for a step that says so, else
    `standard`. `flex-start` waits until all of them are there."""
    max_wait_hours: float = Field(24.0, ge=0.0, le=8760.0)
    """How long `flex-start` waits for machines; 0 waits for ever."""
    max_preemptions: int = Field(10, ge=0, le=100)
    """How often a distributed step may lose its machines and begin again, from its checkpoint."""
    alarm_actions: tuple[str, ...] = ()
    """Who hears the alarms of `rekindle alarms write`: notification channels,
    `projects/my-project/notificationChannels/NUMBER`."""
    secrets: dict[VariableName, GoogleSecret] = Field(default_factory=dict)
    """Environment variables of distributed steps and of rekindle's own, from Secret
    Manager: `{HF_TOKEN: projects/my-project/secrets/hf/versions/latest}`."""


class SageMakerSpec(PlatformSection):
    """SageMaker Pipelines."""

    TITLE, PATH = "SageMaker", "platforms.sagemaker"

    region: Annotated[str, Needed("eu-central-1", to="compile")] = Field(
        "", pattern=r"^([a-z]{2}(-[a-z]+)+-[0-9])?$"
    )
    """Region of the pipeline, such as `eu-central-1`."""
    role_arn: Annotated[str, Needed("arn:aws:iam::123456789012:role/NAME", to="compile")] = Field(
        "", pattern=r"^(arn:aws[a-z-]*:iam::\d{12}:role/.+)?$"
    )
    """Role that jobs run as: `arn:aws:iam::123456789012:role/NAME`."""
    schedule_role_arn: str = Field("", pattern=r"^(arn:aws[a-z-]*:iam::\d{12}:role/.+)?$")
    """Role that EventBridge Scheduler starts scheduled runs as; default: `role_arn`."""
    artifact_root: Annotated[str, Needed("s3://my-bucket/rekindle", to="compile")] = ""
    """Folder of a bucket for bundles, artifacts and checkpoints:
    `s3://my-bucket/rekindle`."""
    image: str | None = None
    """Container image of rekindle's steps and of Python components, in ECR, by digest."""
    machine: str = "ml.m5.xlarge"
    """Instance type of steps that ask for nothing else."""
    volume_gb: int = Field(30, ge=1, le=16_384)
    """Disk of a job."""
    subnets: tuple[str, ...] = ()
    """Subnets of the VPC that jobs run in."""
    security_groups: tuple[str, ...] = ()
    """Security groups of jobs; needed with `subnets`."""
    kms_key: str = ""
    """Key that encrypts disks and outputs."""
    tags: dict[str, str] = Field(default_factory=dict)
    """Tags of every job, which flow into the bill."""
    alarm_actions: tuple[str, ...] = Field((), max_length=5)
    """Who hears the alarms of `rekindle alarms write`: ARNs of SNS topics."""
    secrets: dict[str, SecretArn] = Field(default_factory=dict)
    """Environment variables of the steps in `image`, by reference to Secrets Manager:
    `{HF_TOKEN: "arn:aws:secretsmanager:..."}`. The image needs boto3; the value is read
    when the step begins."""
    unproven: tuple[Literal["exit_handlers"], ...] = ()
    """Features to use although they are untested: the service's SDK has them, its
    documentation does not. `exit_handlers` become steps that wait with `Trigger: Any`."""
    spot_wait_hours: float = Field(24.0, ge=0, le=672)
    """How long a job on spot machines waits for them, in all."""


class AzureMLSpec(PlatformSection):
    """Azure Machine Learning pipelines."""

    TITLE, PATH = "Azure ML", "platforms.azureml"

    subscription: Annotated[str, Needed("00000000-0000-0000-0000-000000000000")] = Field(
        "", pattern=r"^([0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12})?$"
    )
    """Subscription of the workspace, by its id; `rekindle submit` needs it."""
    resource_group: Annotated[str, Needed("my-group")] = Field(
        "", pattern=r"^([-\w.()]{0,89}[-\w()])?$"
    )
    """Resource group of the workspace."""
    workspace: Annotated[str, Needed("my-workspace")] = Field(
        "", pattern=r"^([A-Za-z0-9][A-Za-z0-9_-]{2,32})?$"
    )
    """Workspace that runs the pipeline."""
    identity: Literal["managed", "user"] | None = None
    """Whom steps act as: `managed`, the identity of their compute; `user`, the user who
    submits; null: as the workspace decides."""
    compute: str = Field("", pattern=r"^([A-Za-z][A-Za-z0-9-]{0,31})?$")
    """Cluster that steps run on; default: serverless, on a machine that Azure finds."""
    gpu_compute: str = Field("", pattern=r"^([A-Za-z][A-Za-z0-9-]{0,31})?$")
    """Cluster of steps that want GPUs; default: as `compute`."""
    machine: str = "Standard_D4s_v5"
    """Size of a serverless machine for steps that ask for nothing else."""
    artifact_root: str = ""
    """Folder for checkpoints:
    `abfs://container@account.dfs.core.windows.net/rekindle`."""
    image: str | None = None
    """Container image of rekindle's steps, by digest."""
    tags: dict[str, str] = Field(default_factory=dict)
    """Tags of the job."""
    alarm_actions: tuple[str, ...] = Field((), max_length=5)
    """Who hears the alarms of `rekindle alarms write`: ids of action groups,
    `/subscriptions/.../actionGroups/NAME`."""
    secrets: dict[VariableName, VaultSecret] = Field(default_factory=dict)
    """Environment variables of the steps in `image`, by reference to Key Vault:
    `{HF_TOKEN: https://my-vault.vault.azure.net/secrets/hf}`, of a version if `/VERSION`
    follows. The image needs azure-identity; the value is read when the step begins."""


class PlatformsSpec(Section):
    """One section a platform."""

    local: LocalSpec = LocalSpec()
    """This machine."""
    kubeflow: KubeflowSpec = KubeflowSpec()
    """Kubeflow Pipelines."""
    vertex: VertexSpec = VertexSpec()
    """Vertex AI Pipelines."""
    sagemaker: SageMakerSpec = SageMakerSpec()
    """SageMaker Pipelines."""
    azureml: AzureMLSpec = AzureMLSpec()
    """Azure Machine Learning pipelines."""
