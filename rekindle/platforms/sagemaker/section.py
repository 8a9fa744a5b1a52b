"""The section `platforms.sagemaker` of the config: which region, and as whom."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from rekindle.spec.section import Needed, PlatformSection

SecretArn = Annotated[
    str, StringConstraints(pattern=r"^arn:aws[a-z-]*:secretsmanager:[a-z0-9-]+:\d{12}:secret:\S+$")
]


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
