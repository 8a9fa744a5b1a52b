"""The section `platforms.azureml` of the config: which workspace, and as whom."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from rekindle.errors import Problem
from rekindle.spec.section import Needed, PlatformSection, VariableName

VaultSecret = Annotated[
    str,
    StringConstraints(
        pattern=r"^https://[A-Za-z][A-Za-z0-9-]{1,22}[A-Za-z0-9]\.vault\.azure\.net/secrets/"
        r"[A-Za-z0-9-]{1,127}(/[0-9a-f]{32})?$"
    ),
]


class AzureMLSpec(PlatformSection):
    """Azure Machine Learning pipelines."""

    TITLE, PATH = "Azure ML", "platforms.azureml"
    ARTIFACT_ROOT_EXAMPLE = "abfs://container@account.dfs.core.windows.net/rekindle"

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

    def problems_of_a_deploying_step(self) -> tuple[Problem, ...]:
        if self.identity != "user":
            return ()
        return (
            Problem(
                "a step that deploys has no token of the user for Azure's services",
                f"{self.PATH}.identity",
                "set it to managed, or leave it out",
            ),
        )
