"""Roll the champion out where it serves."""

from typing import NamedTuple

from kfp import dsl

from components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def deploy(config: str, artifact_root: str) -> NamedTuple(
    "Deployed", [("address", str), ("version", str)]
):
    """Roll the champion out and watch its canary to the end; fails where it has to be rolled back.

    What is deployed already stays, and what an attempt before began is completed.

    Args:
        config: The spec's name, task, data, register and deploy, and the section of the platform,
            as JSON.
        artifact_root: Folder or URI under which rekindle keeps state.

    Returns:
        address: Where it answers.
        version: The version that does.
    """
    import sys
    import tempfile
    from collections import namedtuple
    from pathlib import Path

    from rekindle.app.deploy import DeployOptions
    from rekindle.app.deploy import deploy as roll_out
    from rekindle.serve.rollout import serving
    from rekindle.spec.model import Spec

    spec = Spec.model_validate_json(config)
    (platform,) = spec.platforms.model_fields_set
    home = tempfile.mkdtemp() if "://" in artifact_root else artifact_root
    done = roll_out(
        spec,
        Path(home),
        DeployOptions(
            platform=platform,
            wait=True,
            on_event=lambda event: sys.stdout.write(event.to_json() + "\n"),
        ),
    )
    return namedtuple("Deployed", ["address", "version"])(done.address, serving(done.events[-1]))
