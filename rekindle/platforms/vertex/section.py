"""The section `platforms.vertex` of the config: which project and region, and as whom."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from rekindle.spec.section import Needed, PlatformSection, VariableName

GoogleSecret = Annotated[
    str,
    StringConstraints(
        pattern=r"^projects/[a-z0-9:.-]+/secrets/[A-Za-z0-9_-]{1,255}/versions/([0-9]+|latest)$"
    ),
]


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
