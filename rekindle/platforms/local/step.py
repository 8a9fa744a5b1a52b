"""One step from its inputs to its outputs: take it from the cache, or run it, again if it may be
retried, and store it. It runs in a thread of its own and touches no shared state: what is worth
telling on the way goes through `say` and `event`."""

import contextlib
import dataclasses
import datetime
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from rekindle.errors import RekindleError, StepError, fix_of
from rekindle.ir.graph import AnyNode, Importer, Step
from rekindle.ir.placeholders import filled, references
from rekindle.launch.events import error_in_log
from rekindle.launch.fork_server import ForkServer
from rekindle.launch.shim import PREEMPTED
from rekindle.masking import masked
from rekindle.platforms.bundle import lowered_container
from rekindle.platforms.docker import HOME_LABEL, RUN_LABEL
from rekindle.platforms.local import cache, process
from rekindle.platforms.local.cache import NOTHING, Identity, OwnCode, Stored, Values
from rekindle.platforms.local.containers import Containers
from rekindle.platforms.local.content import describe, digest, local_path
from rekindle.platforms.local.environments import Packages, packages_of
from rekindle.platforms.local.process import Control, Ended, Log, run_shim
from rekindle.platforms.local.store import Store, slug
from rekindle.platforms.local.walk import Leaf, rendered
from rekindle.platforms.mounted import artifact_of
from rekindle.protojson import carried


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What all steps of a run have in common."""

    store: Store
    run_id: str
    name: str
    pipeline: str
    started_at: str
    env: Mapping[str, str]
    source_hash: str
    own_code: OwnCode
    grace_seconds: float
    control: Control
    fork_server: ForkServer | None
    containers: Containers
    pythons: Mapping[Packages, str]

    @property
    def workspace(self) -> Path:
        """The folder that the steps share, if the pipeline asks for one."""
        return self.store.run(self.run_id) / "workspace"

    def facts(self, node: AnyNode) -> dict[str, str]:
        """The values of `{{$.pipeline_job_name}}` and its like."""
        return {
            "pipeline_job_name": self.run_id,
            "pipeline_job_uuid": str(uuid.uuid5(uuid.NAMESPACE_OID, self.run_id)),
            "pipeline_job_resource_name": f"{self.pipeline}-{self.run_id}",
            "pipeline_job_create_time_utc": self.started_at,
            "pipeline_job_schedule_time_utc": self.started_at,
            "pipeline_task_name": node.name,
            "pipeline_task_uuid": str(uuid.uuid5(uuid.NAMESPACE_OID, f"{self.run_id}/{node.path}")),
            "pipeline_root": str(self.store.home / "artifacts"),
            "workspace_path": str(self.workspace),
        }


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a step ended. `reason` says why it ran or did not have to, `error` why it failed, and
    `failed_log` is the log of the node that decided so, where it is not the first."""

    step: Leaf
    status: Literal["succeeded", "failed", "cancelled", "preempted"]
    outputs: Values = NOTHING
    cached: bool = False
    reason: str = ""
    key: str = ""
    error: str = ""
    failed_log: str = ""
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Job:
    """One step to be done. `forced` says why the cache is not asked ("" = it is)."""

    step: Leaf
    inputs: Values
    around: Surroundings
    forced: str
    say: Callable[[dict[str, Any]], None]
    event: Callable[[dict[str, Any]], None]

    @property
    def slug(self) -> str:
        return slug(self.around.pipeline, self.step.path)

    @property
    def last(self) -> str:
        """Under which what a step is compared with is kept: of one config."""
        return slug(self.around.name, self.around.pipeline, self.step.path)

    @property
    def folder(self) -> Path:
        return self.around.store.step(self.around.run_id, self.step.path)


def perform(job: Job) -> Outcome:
    """Do the job; never raises."""
    began = time.monotonic()
    try:
        step = job.step
        outcome = _import(job, step) if isinstance(step, Importer) else _perform(job, step)
    except RekindleError as error:
        outcome = Outcome(job.step, "failed", error=str(error))
    except OSError as error:
        what = f"cannot write {error.filename or job.folder}: {error.strerror}; {fix_of(error)}"
        outcome = Outcome(job.step, "failed", error=what)
    except Exception as error:  # noqa: BLE001 - a bug of ours must end the run, not hang it
        outcome = Outcome(job.step, "failed", error=f"{type(error).__name__}: {error}")
    return dataclasses.replace(outcome, seconds=time.monotonic() - began)


def _import(job: Job, node: Importer) -> Outcome:
    """The artifact where it is: here it has to exist, elsewhere the step that reads it will see."""
    parameters, facts = job.inputs.parameters, job.around.facts
    uri = rendered(node, node.uri, parameters, facts)
    path = local_path(uri)
    if not uri or (path is not None and not path.exists()):
        raise StepError(f"there is nothing to import at {uri!r}", where=node.where)
    home = job.around.store.home.resolve()
    if path is not None and home.is_relative_to(path.resolve()):
        what = f"{uri} cannot be imported: rekindle's home {home} lies in it"
        fix = "import the folder that holds the data, and nothing around it"
        raise StepError(what, where=node.where, fix=fix)
    found = filled(node.metadata, lambda text: rendered(node, text, parameters, facts))
    kind = next(iter(node.outputs.artifacts.values()))
    metadata = carried(found)
    files = describe(path, follow=True) if path is not None else {}
    there = str(path) if path is not None else uri
    artifact = Stored(there, kind.schema_title, kind.schema_version, metadata, files)
    return Outcome(node, "succeeded", Values({}, {kind.name: artifact}), reason=f"imported {uri}")


def _perform(job: Job, step: Step) -> Outcome:
    store, around = job.around.store, job.around
    identity = _identity(job, step, job.inputs)
    if not step.cache:
        return _run(job, step, identity, "caching is off for this step", keep=False)
    if _in_workspace(job, step):
        return _run(job, step, identity, "it works in the workspace of the run", keep=False)
    if job.forced:
        return _run(job, step, identity, job.forced, keep=True)

    def waiting() -> None:
        reason = "another run is doing the same step; waiting for its result"
        job.say({"reason": reason})
        job.event({"event": "notice", "text": reason})

    with store.claim(identity.key, waiting, job.around.control.stopped) as claimed:
        if not claimed:
            return Outcome(step, "cancelled", reason="the run was interrupted")
        store.note_use(around.run_id, identity.key)
        outputs, reason = cache.look_up(store, identity)
        if outputs:
            return Outcome(step, "succeeded", outputs, True, reason, identity.key)
        reason = reason or cache.explain_miss(store, job.last, identity)
        return _run(job, step, identity, reason, keep=True)


def _identity(job: Job, step: Step, inputs: Values) -> Identity:
    around = job.around
    image_id = around.containers.image_of(step)
    own_code = around.own_code(cache.names_of_code(step, inputs))
    home = str(around.store.home)
    return cache.identify(step, inputs, around.source_hash, image_id, own_code, home)


def _is_what_it_was(job: Job, step: Step, identity: Identity) -> bool:
    """Whether the user's code and imported files are those that the step was known by."""

    def again(artifact: Stored) -> Stored:
        if (path := local_path(artifact.uri)) is None or path.is_relative_to(job.around.store.home):
            return artifact
        for follow in (True, False):  # as an importer does, or of what a step left elsewhere
            files = describe(path, artifact.files, follow=follow)
            if digest(files) == artifact.digest:
                return artifact
        return dataclasses.replace(artifact, files=files)

    with contextlib.suppress(RekindleError, OSError):  # what cannot be read now has changed
        artifacts = {
            name: tuple(again(a) for a in given) if isinstance(given, tuple) else again(given)
            for name, given in job.inputs.artifacts.items()
        }
        now = Values(job.inputs.parameters, artifacts)
        if _identity(job, step, now).key == identity.key:
            return True
    text = "its code or its files changed meanwhile: the result counts for this run only"
    job.event({"event": "notice", "text": text})
    return False


def _in_workspace(job: Job, step: Step) -> bool:
    """Whether the step is given the workspace, of which nothing is kept."""
    container, given = step.container, job.inputs.parameters.values()
    words = (*container.command, *container.args, *container.env.values())
    asked = any(("run", "workspace_path") in references(word) for word in words)
    return asked or any(str(job.around.workspace) in str(value) for value in given)


def _run(job: Job, step: Step, identity: Identity, reason: str, keep: bool) -> Outcome:
    """Attempts until one succeeds or none is left; `keep` puts the result into the cache."""
    retry, control = step.retry, job.around.control
    job.folder.mkdir(parents=True, exist_ok=True)
    outcome = Outcome(step, "cancelled", reason="the run was interrupted", key=identity.key)
    with Log(job.folder / "log.txt") as log:
        for attempt in range(1, retry.count + 2):
            job.say({"attempts": attempt, "reason": reason, "cache_key": identity.key})
            outcome = _attempt(job, step, identity, log, keep)
            if outcome.status != "failed" or attempt > retry.count:
                break
            pause = retry.pause_before(attempt + 1)
            text = f"--- attempt {attempt} failed; the next one begins in {pause:g} s\n"
            log.write(text.encode())
            control.sleep(pause)
            if control.stopped():
                break
    return dataclasses.replace(outcome, reason=outcome.reason or reason, key=identity.key)


class _AttemptFailed(Exception):
    """Leaves the folder of an attempt, which is then removed."""


def _attempt(job: Job, step: Step, identity: Identity, log: Log, keep: bool) -> Outcome:
    around = job.around
    log.begin()
    try:
        with around.store.attempt(job.slug, identity.key) as folder:
            around.store.note_use(around.run_id, identity.key, folder.name)
            node, ended, last_words = _execute(job, step, folder, log)
            if failed := _failure(step, ended, last_words):
                who = "" if node is None else f"node {node}: "
                where = str(_node_folder(job, node) / "log.txt") if node else ""
                failed = dataclasses.replace(failed, error=who + failed.error, failed_log=where)
                raise _AttemptFailed
            artifacts = cache.stored(ended.result["artifacts"])
            outputs = Values(ended.result["parameters"], artifacts)
            if keep and _is_what_it_was(job, step, identity):
                cache.save(around.store, job.last, identity, around.run_id, outputs)
    except _AttemptFailed:
        assert failed is not None
        return failed
    return Outcome(step, "succeeded", outputs)


def _node_folder(job: Job, node: int) -> Path:
    """Where a node but the first has its log, and what it writes; the first has the step's."""
    return job.folder / f"node-{node}"


def _execute(job: Job, step: Step, folder: Path, log: Log) -> tuple[int | None, Ended, bytes]:
    """Which node decided how the attempt ended (None for a single one), how, and its log's end."""
    around, wanted = job.around, step.distribution
    places: list[dict[str, str]] = process.environments(wanted.nodes) if wanted else [{}]
    words = dict[int, bytes]()

    def run_node(node: int, control: Control) -> Ended:
        work = _node_folder(job, node) if node else job.folder
        outputs = work / "outputs" if node else folder
        task: dict[str, Any] = {  # TASK.json for the shim; see there
            **lowered_container(step),
            "executor_input": executor_input(step, job.inputs, outputs),
            "run": around.facts(step),
            "work": str(work),
            "cwd": str(Path.cwd()),
        }
        if node:  # only node rank 0 has any
            task["outputs"] = {"parameters": {}, "artifacts": {}}
            work.mkdir(parents=True, exist_ok=True)
        contained = around.containers.image_of(step)
        elsewhere = bool(contained)
        if not contained and (packages := packages_of(step)):
            task["python"], elsewhere = around.pythons[packages], True
        if contained:
            labels = {HOME_LABEL: str(around.store.home), RUN_LABEL: around.run_id}
            task = around.containers.contained(task, step, outputs, labels)
        with Log(work / "log.txt") if node else contextlib.nullcontext(log) as own:
            ended = run_shim(
                task,
                work,
                own,
                {**around.env, **places[node]},
                control,
                (lambda event: None) if node else job.event,
                step.time_limit_seconds,
                around.grace_seconds,
                None if elsewhere else around.fork_server,
            )
            words[node] = own.end
        return ended

    if wanted is None:
        return None, run_node(0, around.control), words[0]
    decides, ended = process.on_nodes(wanted.nodes, around.control, run_node)
    return decides, ended, words[decides]


def executor_input(step: Step, inputs: Values, folder: Path) -> dict[str, Any]:
    """KFP's ExecutorInput for `step`, its outputs placed in `folder`."""
    given = {
        n: {
            "artifacts": [
                artifact_of(n, vars(a), a.uri, carried(a.metadata)) for a in cache.each(several)
            ]
        }
        for n, several in inputs.artifacts.items()
    }
    made = {
        name: {"artifacts": [artifact_of(name, vars(a), folder / name, {})]}
        for name, a in step.outputs.artifacts.items()
    }
    files = {n: {"outputFile": str(folder / f".parameter-{n}")} for n in step.outputs.parameters}
    outputs = {"parameters": files, "artifacts": made}
    return {
        "inputs": {"parameterValues": dict(inputs.parameters), "artifacts": given},
        "outputs": {**outputs, "outputFile": str(folder / "executor_output.json")},
    }


def _failure(step: Step, ended: Ended, last_words: bytes) -> Outcome | None:
    """The outcome of an attempt that did not succeed; None if it did."""
    if ended.timed_out:
        return Outcome(step, "failed", error=f"timed out after {step.time_limit_seconds:g} s")
    if ended.stopped and ended.exit_code == PREEMPTED:
        reason = "the run was interrupted; what the step saved last is kept"
        return Outcome(step, "preempted", reason=reason)
    if ended.stopped:  # even with exit code 0: who knows what it did not get to do
        return Outcome(step, "cancelled", reason="the run was interrupted")
    if ended.exit_code == PREEMPTED:
        reason = "stopped from outside after a save (exit code 75)"
        return Outcome(step, "preempted", reason=reason)
    if ended.exit_code == 0 and ended.result:
        return None
    return Outcome(step, "failed", error=_error_text(ended, last_words))


def _error_text(ended: Ended, last_words: bytes) -> str:
    if error := ended.result.get("error"):
        return masked(str(error))
    if ended.exit_code > 128:
        number = ended.exit_code - 128
        note = " (out of memory?)" if number == 9 else ""
        return f"killed by signal {number}{note}"
    kind, message = error_in_log(last_words.decode(errors="replace"))
    if message and f"{RekindleError.__module__}.{kind}:".encode() in last_words:
        return message  # an error of ours, which says all there is to know
    if kind:
        return f"{kind}: {message}" if message else kind
    return f"exit code {ended.exit_code}" + (f": {message}" if message else "")


def utc_now() -> str:
    """Now, in ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
