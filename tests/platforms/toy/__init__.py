"""A whole platform in about 100 lines: a folder whose files are runs, which end at once.

What a platform needs: this folder, a row in rekindle/platforms/platform.py, a section of the config
in rekindle/spec/platforms.py, and its column in the feature table for what its compiler lets pass."""

from __future__ import annotations

from typing import Annotated

from rekindle.spec.platforms import Needed, PlatformSection


class ToySpec(PlatformSection):
    """A folder that plays a platform."""

    TITLE, PATH = "Toy", "platforms.toy"

    folder: Annotated[str, Needed("/srv/toy", to="compile")] = ""
    """Where runs and schedules lie."""
    image: str | None = None
    artifact_root: str = "/srv/artifacts"
