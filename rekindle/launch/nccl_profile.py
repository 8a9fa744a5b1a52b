"""What a vendor's own script says to NCCL, on the nodes that have it.

Google's plugins (GPUDirect-TCPXO, gIB) come with a script that sets NCCL's variables for the
version installed on the node. REKINDLE_NCCL_PROFILE, which catalog/network.yaml gives by the
machine's name, is that script, and after colons whatever else has to exist for it to be right.
Nothing of this has run on such a machine yet."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from rekindle.errors import StepError

PROFILE = "REKINDLE_NCCL_PROFILE"
_ITS_OWN = ("NCCL_", "CUDA_", "LD_LIBRARY_PATH")
_PATIENCE_SECONDS = 60.0


def profiled(environment: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """The variables that the script sets, but for those that are set already, and a line about it;
    nothing and "" if no script is named. StepError if it fails."""
    script, *others = environment.get(PROFILE, "").split(":")
    if not script:
        return {}, ""
    if missing := [path for path in (script, *others) if not Path(path).exists()]:
        return {}, f"no GPUDirect between nodes: {', '.join(missing)} is not in this container"
    given = {"LD_LIBRARY_PATH": "", **environment}
    words = ["bash", "-c", 'set -a; . "$0" >&2 && exec env -0', script]
    try:
        done = subprocess.run(words, env=given, capture_output=True, timeout=_PATIENCE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _failed(script, str(error)) from error
    if done.returncode:
        raise _failed(script, done.stderr.decode(errors="replace").strip()[-500:])
    pairs = (line.partition("=") for line in done.stdout.decode(errors="replace").split("\0"))
    told = {n: value for n, _, value in pairs if n.startswith(_ITS_OWN) and given.get(n) != value}
    own = {n for n in environment if n != "LD_LIBRARY_PATH"}
    return {n: v for n, v in told.items() if n not in own}, f"NCCL as {script} says"


def _failed(script: str, why: str) -> StepError:
    return StepError(
        f"the script that tells NCCL of this machine's network failed: {why}", where=script,
        fix=f"correct what is mounted there, or set {PROFILE} to nothing in the step's environment",
    )  # fmt: skip
