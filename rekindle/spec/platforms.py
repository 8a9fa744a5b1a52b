"""The sections of a config about where a pipeline may run: this machine's, and that of each
platform that is installed (installed.py), which has it in its folder."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, create_model

from rekindle.spec.installed import installed_platforms
from rekindle.spec.section import PlatformSection, SecretReference, Section


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


class SectionsOfPlatforms(Section):
    """One section a platform."""

    local: LocalSpec = LocalSpec()
    """This machine."""

    def section(self, platform: str) -> PlatformSection:
        """That of an installed platform other than this machine."""
        section: PlatformSection = getattr(self, platform)
        return section


if TYPE_CHECKING:
    PlatformsSpec = SectionsOfPlatforms
else:
    PlatformsSpec = create_model(
        "PlatformsSpec",
        __base__=SectionsOfPlatforms,
        __module__=__name__,
        __doc__="One section a platform.",
        **{
            name: (
                platform_class.section,
                Field(platform_class.section(), description=f"{platform_class.section.__doc__}"),
            )
            for name, platform_class in installed_platforms().classes.items()
        },
    )


def recorded_sections(values: Mapping[str, Any]) -> PlatformsSpec:
    """The sections that a run recorded, of the platforms that are still installed."""
    names = PlatformsSpec.model_fields
    sections = {name: section for name, section in values.items() if name in names}
    return PlatformsSpec.model_validate(sections)
