"""The run that a launcher belongs to: an Argo Workflow, what the launcher's own pod says
of it, and the process beside node rank 0 that ends a TrainJob whose run is over.

    python3 -m rekindle.platforms.kubeflow.workflow JSON

KFP terminates a run by setting `activeDeadlineSeconds` of its Workflow to 0
(GetTerminatePatch in kubeflow/pipelines), Argo by `shutdown`; a node drain only takes the
pod, and the Workflow goes on. Argo names the node of a pod in an annotation: the path of
templates from the run down, the turn of a loop as `(0:item)`, the number of a retry as
`(0)`.

The launcher deletes the job when its run is terminated, if it gets to: KFP's own
launcher, its parent, dies of the same signal, and Argo then takes the container away. One
that the kernel kills for its memory leaves its job as well: its pod is Failed, which KFP
2.17 does not retry, so the run fails (rekindle-launcher-killed as recorded). So nodes look
themselves whether their Workflow has ended, all of them: node rank 0 may not have started,
or be gone. After seeing that twice this process leaves a mark and has its node end, whose
exit code then ends the job: nodes, which run the user's code, need no right to delete
anything. Each node also looks before it starts
ranks, and when it ends with an error: ranks of other nodes lose those of node 0 before
that has ended, and the Job controller judges the pod that failed first, so an exit code of
theirs would restart all nodes of a run that is over (seen with Trainer 2.3 and JobSet
0.12). An API server that does not answer changes nothing."""

import dataclasses
import datetime
import json
import logging
import os
import re
import signal
import sys
import time
from pathlib import Path

from rekindle.errors import RekindleError, StepError
from rekindle.launch.process import die_with_parent
from rekindle.platforms.kubeflow.cluster import ApiServer
from rekindle.protojson import Json

log = logging.getLogger(__name__)

# for a last save: with two looks, 20 s apart, no job outlives its run by two minutes
GRACE_SECONDS = 60
NODE_NAME = "workflows.argoproj.io/node-name"
RUN_ID = "pipeline/runid"
_RETRY = re.compile(r"\((\d+)\)")
# phases that a Workflow does not leave
_OVER = ("Succeeded", "Failed", "Error")


@dataclasses.dataclass(frozen=True)
class WorkflowRun:
    """Where this pod stands: the Workflow that owns it, `identity`, the step of the run
    that it is for, the same in every pod for that step, and `retry`, which counts these
    pods from 0."""

    namespace: str
    workflow: Json
    identity: str
    retry: int
    run_id: str

    @property
    def path(self) -> str:
        """The Workflow in the API."""
        namespace = f"/apis/argoproj.io/v1alpha1/namespaces/{self.namespace}"
        return f"{namespace}/workflows/{self.workflow['name']}"


def own_run(cluster: ApiServer, namespace: str, pod_name: str) -> WorkflowRun:
    """What the launcher's pod says; StepError if no Workflow has it."""
    pod = cluster.get(f"/api/v1/namespaces/{namespace}/pods/{pod_name}")
    metadata = (pod or {}).get("metadata", {})
    owners = metadata.get("ownerReferences", [])
    workflows = [owner for owner in owners if owner["kind"] == "Workflow"]
    node = metadata.get("annotations", {}).get(NODE_NAME, "")
    if not workflows or not node:
        message = "this pod does not belong to an Argo Workflow"
        fix = "run the pipeline on Kubeflow Pipelines with Argo"
        raise StepError(message, where=f"pod {namespace}/{pod_name}", fix=fix)
    workflow = workflows[0]
    retries = _RETRY.findall(node)
    retry = int(retries[-1]) if retries else 0
    identity = f"{workflow['uid']}/{_RETRY.sub('', node)}"
    run_id = metadata.get("labels", {}).get(RUN_ID, workflow["name"])
    return WorkflowRun(namespace, workflow, identity, retry, run_id)


def ending(workflow: Json | None, uid: str, now: datetime.datetime | None = None) -> str:
    """Why the run is at its end, or ""; a Workflow of its name with another uid is
    another run."""
    if workflow is None or workflow["metadata"].get("uid") != uid:
        return "its Workflow is gone"
    spec = workflow.get("spec", {})
    status = workflow.get("status", {})
    if workflow["metadata"].get("deletionTimestamp"):
        return "its Workflow is being deleted"
    shutdown = spec.get("shutdown") or status.get("shutdown")
    if shutdown:
        return f"it was shut down ({shutdown})"
    deadline_seconds = spec.get("activeDeadlineSeconds")
    if deadline_seconds is not None and deadline_seconds <= 0:  # how KFP terminates a run
        return "it was terminated"
    started_at = status.get("startedAt")
    if deadline_seconds is not None and started_at:
        now = now or datetime.datetime.now(datetime.UTC)
        ran = now - datetime.datetime.fromisoformat(started_at)
        if ran.total_seconds() >= deadline_seconds:
            return f"its {deadline_seconds} s are over"
    phase = status.get("phase", "")
    return f"it is over ({phase})" if phase in _OVER else ""


def look(leash: Json, patience_seconds: float) -> str:
    """Why the run that the leash names is at its end; "" where it goes on, or where the
    API server does not answer within the patience."""
    account = Path(leash["account"])
    cluster = ApiServer.in_cluster(account, leash["server"], patience_seconds=patience_seconds)
    try:
        return ending(cluster.get(leash["workflow"]), leash["workflow_uid"])
    except RekindleError as error:
        log.warning("%s", error)
        return ""


def main(words: list[str]) -> int:
    """Watch until the run is over."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    die_with_parent()
    leash: Json = json.loads(words[0])
    ended_looks = 0
    while ended_looks < 2:
        time.sleep(leash["every_seconds"])
        reason = look(leash, patience_seconds=60.0)
        ended_looks = ended_looks + 1 if reason else 0
    log.info("the run ends, %s: this TrainJob ends with it", reason)
    Path(leash["mark"]).touch()
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.kill(os.getppid(), signal.SIGQUIT)  # the shim kills what has not ended by now
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
