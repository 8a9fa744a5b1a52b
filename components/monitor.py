"""Compare what the champion is asked and answers with the rows that judged it."""

from typing import NamedTuple

from kfp import dsl

from components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def monitor(config: str, artifact_root: str, checked: dsl.Output[dsl.Artifact]) -> NamedTuple(
    "Monitored", [("verdict", str), ("reason", str)]
):
    """Judge the log of predictions of the last `monitor.window`.

    Args:
        config: The spec's name, task, data, register and monitor, and the section of the platform,
            if it is one, as JSON; `monitor.log` and `monitor.labels` where the step reaches them.
        artifact_root: Folder or URI under which rekindle keeps state.
        checked: What `rekindle monitor --json` prints: each signal, and what it is compared with.

    Returns:
        verdict: `alarm`, `quiet`, or `too_few` rows to tell.
        reason: The same in words.
    """
    import tempfile
    from collections import namedtuple
    from pathlib import Path

    from rekindle.app.monitor import check
    from rekindle.spec.model import Spec

    spec = Spec.model_validate_json(config)
    home = tempfile.mkdtemp() if "://" in artifact_root else artifact_root
    found = check(spec, Path(home), next(iter(spec.platforms.model_fields_set), "local"))
    found.write(checked.path)
    return namedtuple("Monitored", ["verdict", "reason"])(found.verdict, found.reason)
