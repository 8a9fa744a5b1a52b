"""Ends a TrainJob whose run is over: a process beside node rank 0.

    python3 -m rekindle.platforms.kubeflow.watchdog JSON

The launcher deletes the job when its run is terminated, if it gets to: KFP's own launcher, which is
its parent, dies of the same signal at once, and Argo then takes the container away. So the job
looks itself whether the Workflow that owns it has ended. After seeing that twice this process
leaves a mark and has node rank 0 end, whose exit code then ends the job: so that nodes, which run
the user's code, need no right to delete anything. A Workflow that goes on, and an API server that
does not answer, change nothing."""

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

from rekindle.errors import RekindleError
from rekindle.launch.process import die_with_parent
from rekindle.platforms.kubeflow.cluster import Cluster
from rekindle.platforms.kubeflow.workflow import ending

log = logging.getLogger(__name__)

GRACE_SECONDS = 120  # as in runtime.yaml


def main(words: list[str]) -> int:
    """Watch until the run is over."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    die_with_parent()
    told = json.loads(words[0])
    cluster = Cluster.around(Path(told["account"]), told["server"], patience_seconds=60.0)
    seen = 0
    while seen < 2:
        time.sleep(told["every_seconds"])
        try:
            reason = ending(cluster.get(told["workflow"]), told["workflow_uid"])
        except RekindleError as error:
            log.warning("%s", error)
            continue
        seen = seen + 1 if reason else 0
    log.info("the run ends, %s: this TrainJob ends with it", reason)
    Path(told["mark"]).touch()
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.kill(os.getppid(), signal.SIGQUIT)  # the shim kills what has not ended by now
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
