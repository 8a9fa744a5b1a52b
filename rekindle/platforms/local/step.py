"""One step from its inputs to its outputs: take it from the cache, or run it, again if it
may be retried, and store it. It runs in a thread of its own and touches no shared state:
what is worth telling on the way goes through `say` and `event`."""

import contextlib
import dataclasses
import datetime
import logging
import signal
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from rekindle.errors import RekindleError, StepError, fix_of
from rekindle.ir.graph import AnyNode, Importer, Step
from rekindle.ir.placeholders import Template, filled, references
from rekindle.launch.events import error_in_log
from rekindle.launch.fork_server import ForkServer
from rekindle.launch.shim import PREEMPTED
from rekindle.masking import masked
from rekindle.platforms.bundle import lowered_container
from rekindle.platforms.docker import HOME_LABEL, RUN_LABEL
from rekindle.platforms.local import cache, portable, process
from rekindle.platforms.local.cache import (
    NO_VALUES,
    ArtifactValue,
    Identity,
    OwnCode,
    StoredArtifact,
    Values,
)
from rekindle.platforms.local.containers import NO_CONTAINERS, Containers
from rekindle.platforms.local.content import FileFact, describe, digest, local_path
from rekindle.platforms.local.environments import Packages, packages_of
from rekindle.platforms.local.process import Control, Ended, StepLogFile, run_shim
from rekindle.platforms.local.store import HomeStore, slug
from rekindle.platforms.local.walk import Leaf, rendered
from rekindle.platforms.mounted import artifact_of, executor_input
from rekindle.protojson import Json, carried

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """How the steps of a run are carried out on this machine: what is decided before it
    begins, and the same for all of them."""

    env: Mapping[str, str]
    """Their environment."""
    source_hash: str
    """Stands for our own code in cache keys."""
    own_code: OwnCode = lambda names: {}
    """Stands there for files of the user's, by name: a component, or the value of a
    parameter."""
    imports: Sequence[str] = ()
    """Modules that most steps import: a fork server imports them once."""
    containers: Containers = NO_CONTAINERS
    """Which steps docker runs."""
    max_parallel: int | None = None
    """How many run side by side; None: as many as there are cores, and at least two."""
    grace_seconds: float = 30.0
    """How long they have to end when they are asked to."""


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What all steps of a run have in common."""

    store: HomeStore
    run_id: str
    name: str
    pipeline: str
    started_at: str
    settings: StepSettings
    control: Control
    fork_server: ForkServer | None
    pythons: Mapping[Packages, str]

    @property
    def workspace(self) -> Path:
        """The folder that the steps share, if the pipeline asks for one."""
        return self.store.run(self.run_id) / "workspace"

    def facts(self, node: AnyNode) -> dict[str, str]:
        """The values of `{{$.pipeline_job_name}}` and its like."""
        # in the form that KFP writes: whole seconds, and Z
        started = datetime.datetime.fromisoformat(self.started_at).astimezone(datetime.UTC)
        time_of_start = started.strftime("%Y-%m-%dT%H:%M:%SZ")
        return {
            "pipeline_job_name": self.run_id,
            "pipeline_job_uuid": str(uuid.uuid5(uuid.NAMESPACE_OID, self.run_id)),
            "pipeline_job_resource_name": f"{self.pipeline}-{self.run_id}",
            "pipeline_job_create_time_utc": time_of_start,
            "pipeline_job_schedule_time_utc": time_of_start,
            "pipeline_task_name": node.name,
            "pipeline_task_uuid": str(uuid.uuid5(uuid.NAMESPACE_OID, f"{self.run_id}/{node.path}")),
            "pipeline_root": str(self.store.home / "artifacts"),
            "workspace_path": str(self.workspace),
        }


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a step ended. `reason` says why it ran or did not have to, `error` why it
    failed, and `failed_log` is the log of the node that decided so, where it is not the
    first."""

    step: Leaf
    status: Literal["succeeded", "failed", "cancelled", "preempted"]
    outputs: Values = NO_VALUES
    cached: bool = False
    reason: str = ""
    key: str = ""
    error: str = ""
    failed_log: str = ""
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class StepJob:
    """One step to be done. `forced` says why the cache is not asked ("" = it is)."""

    step: Leaf
    inputs: Values
    around: Surroundings
    forced: str
    say: Callable[[Json], None]
    event: Callable[[Json], None]

    @property
    def slug(self) -> str:
        return slug(self.around.pipeline, self.step.path)

    @property
    def last(self) -> str:
        """The name under which the step's last identity in runs of this config is
        kept."""
        return slug(self.around.name, self.around.pipeline, self.step.path)

    @property
    def folder(self) -> Path:
        return self.around.store.step(self.around.run_id, self.step.path)


def perform(job: StepJob) -> Outcome:
    """Do the job; never raises."""
    began = time.monotonic()
    try:
        if isinstance(job.step, Importer):
            outcome = _import(job, job.step)
        else:
            outcome = _perform(job, job.step)
    except RekindleError as error:
        outcome = Outcome(job.step, "failed", error=str(error))
    except OSError as error:
        message = f"cannot write {error.filename or job.folder}: {error.strerror}; {fix_of(error)}"
        outcome = Outcome(job.step, "failed", error=message)
    except Exception as error:  # noqa: BLE001 - a bug of ours must end the run, not hang it
        outcome = Outcome(job.step, "failed", error=f"{type(error).__name__}: {error}")
    return dataclasses.replace(outcome, seconds=time.monotonic() - began)


def _import(job: StepJob, node: Importer) -> Outcome:
    """The artifact where it is: here it has to exist, elsewhere the step that reads it
    will see."""

    def text_of(template: Template) -> str:
        return rendered(node, template, job.inputs.parameters, job.around.facts)

    uri = text_of(node.uri)
    path = local_path(uri)
    if not uri or (path is not None and not path.exists()):
        raise StepError(f"there is nothing to import at {uri!r}", where=node.where)
    home = job.around.store.home.resolve()
    # its files are listed and hashed, and those of the home change while a run goes on
    if path is not None and home.is_relative_to(path.resolve()):
        message = f"{uri} cannot be imported: rekindle's home {home} lies in it"
        fix = "import the folder that holds the data, and nothing around it"
        raise StepError(message, where=node.where, fix=fix)
    metadata = carried(filled(node.metadata, text_of))
    kind = next(iter(node.outputs.artifacts.values()))
    artifact_uri = uri
    files: Mapping[str, FileFact] = {}
    if path is not None:
        artifact_uri = str(path)
        files = describe(path, follow=True)
    artifact = StoredArtifact(artifact_uri, kind.schema_title, kind.schema_version, metadata, files)
    return Outcome(node, "succeeded", Values({}, {kind.name: artifact}), reason=f"imported {uri}")


def _perform(job: StepJob, step: Step) -> Outcome:
    store = job.around.store
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

    # one run at a time does a step that is cached; others wait for its result
    with store.claim(identity.key, waiting, job.around.control.stopped) as is_claimed:
        if not is_claimed:
            return Outcome(step, "cancelled", reason="the run was interrupted")
        # before the look: a removal that began meanwhile leaves what is noted
        store.note_use(job.around.run_id, identity.key)
        outputs, reason = cache.look_up(store, identity)
        if outputs:
            return Outcome(step, "succeeded", outputs, True, reason, identity.key)
        reason = reason or cache.explain_miss(store, job.last, identity)
        return _run(job, step, identity, reason, keep=True)


def _identity(job: StepJob, step: Step, inputs: Values) -> Identity:
    surroundings = job.around
    settings = surroundings.settings
    image_id = settings.containers.image_of(step)
    own_code = settings.own_code(cache.names_of_code(step, inputs))
    home = str(surroundings.store.home)
    return cache.identify(step, inputs, settings.source_hash, image_id, own_code, home)


def _is_what_it_was(job: StepJob, step: Step, identity: Identity) -> bool:
    """Whether the user's code and imported files are those that the step was known by."""
    home = job.around.store.home
    with contextlib.suppress(RekindleError, OSError):  # what cannot be read now has changed
        artifacts: dict[str, ArtifactValue] = {}
        for name, given in job.inputs.artifacts.items():
            if isinstance(given, tuple):
                artifacts[name] = tuple(_described_again(artifact, home) for artifact in given)
            else:
                artifacts[name] = _described_again(given, home)
        inputs = Values(job.inputs.parameters, artifacts)
        if _identity(job, step, inputs).key == identity.key:
            return True
    text = "its code or its files changed meanwhile: the result counts for this run only"
    job.event({"event": "notice", "text": text})
    return False


def _described_again(artifact: StoredArtifact, home: Path) -> StoredArtifact:
    """The artifact with its files as they are now; those under rekindle's home do not
    change."""
    path = local_path(artifact.uri)
    if path is None or path.is_relative_to(home):
        return artifact
    for follow in (True, False):  # as an importer does, or of what a step left elsewhere
        files = describe(path, artifact.files, follow=follow)
        if digest(files) == artifact.digest:
            return artifact
    return dataclasses.replace(artifact, files=files)


def _in_workspace(job: StepJob, step: Step) -> bool:
    """Whether the step is given the workspace, of which nothing is kept."""
    container = step.container
    for text in (*container.command, *container.args, *container.env.values()):
        if ("run", "workspace_path") in references(text):
            return True
    workspace = str(job.around.workspace)
    return any(workspace in str(value) for value in job.inputs.parameters.values())


def _run(job: StepJob, step: Step, identity: Identity, reason: str, keep: bool) -> Outcome:
    """The outcome of attempts until one succeeds or none is left; `keep` puts the result
    into the cache."""
    retry = step.retry
    control = job.around.control
    job.folder.mkdir(parents=True, exist_ok=True)
    outcome = Outcome(step, "cancelled", reason="the run was interrupted", key=identity.key)
    with StepLogFile(job.folder / "log.txt") as log:
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


def _attempt(job: StepJob, step: Step, identity: Identity, log: StepLogFile, keep: bool) -> Outcome:
    surroundings = job.around
    log.begin()
    try:
        with surroundings.store.attempt(job.slug, identity.key) as folder:
            surroundings.store.note_use(surroundings.run_id, identity.key, folder.name)
            node, ended, log_end = _execute(job, step, folder, log)
            failed = _failure(step, ended, log_end)
            if failed:
                who = "" if node is None else f"node {node}: "
                node_log = str(_node_folder(job, node) / "log.txt") if node else ""
                error = who + failed.error
                failed = dataclasses.replace(failed, error=error, failed_log=node_log)
                raise _AttemptFailed
            artifacts = cache.stored(ended.result["artifacts"])
            outputs = Values(ended.result["parameters"], artifacts)
            _say_what_is_not_portable(job, outputs, log)
            if keep and _is_what_it_was(job, step, identity):
                cache.save(surroundings.store, job.last, identity, surroundings.run_id, outputs)
    except _AttemptFailed:
        assert failed is not None
        return failed
    return Outcome(step, "succeeded", outputs)


def _say_what_is_not_portable(job: StepJob, outputs: Values, log: StepLogFile) -> None:
    uris = {}
    for name, value in outputs.artifacts.items():
        if isinstance(value, StoredArtifact):  # a list of them is not an output of a step
            uris[name] = value.uri
    for sentence in portable.sentences(outputs.parameters, uris):
        log.write(f"--- {sentence}\n".encode())
        _logger.warning("%s: %s", job.step.path, sentence)


def _node_folder(job: StepJob, node: int) -> Path:
    """Where a node but the first has its log, and what it writes; the first has the
    step's."""
    return job.folder / f"node-{node}"


def _execute(
    job: StepJob, step: Step, folder: Path, log: StepLogFile
) -> tuple[int | None, Ended, bytes]:
    """The node that decided how the attempt ended (None for a single one), how it ended,
    and the end of its log."""
    surroundings = job.around
    settings = surroundings.settings
    log_ends: dict[int, bytes] = {}
    environments: list[dict[str, str]] = [{}]
    if step.distribution:
        environments = process.environments(step.distribution.nodes)

    def run_node(node: int, control: Control) -> Ended:
        is_first = node == 0  # it alone has outputs, and shows what happens
        work = job.folder if is_first else _node_folder(job, node)
        outputs = folder if is_first else work / "outputs"
        task: Json = {  # TASK.json for the shim; see there
            **lowered_container(step),
            "executor_input": _step_input(step, job.inputs, outputs),
            "run": surroundings.facts(step),
            "work": str(work),
            "cwd": str(Path.cwd()),
        }
        if not is_first:
            task["outputs"] = {"parameters": {}, "artifacts": {}}
            work.mkdir(parents=True, exist_ok=True)
        fork_server = surroundings.fork_server
        packages = packages_of(step)
        if settings.containers.image_of(step):
            labels = {HOME_LABEL: str(surroundings.store.home), RUN_LABEL: surroundings.run_id}
            task = settings.containers.contained(task, step, outputs, labels)
            fork_server = None  # which forks this environment's Python
        elif packages:
            task["python"] = surroundings.pythons[packages]
            fork_server = None
        own_log = contextlib.nullcontext(log) if is_first else StepLogFile(work / "log.txt")
        with own_log as opened_log:
            ended = run_shim(
                task,
                work,
                opened_log,
                {**settings.env, **environments[node]},
                control,
                job.event if is_first else _ignore,
                step.time_limit_seconds,
                settings.grace_seconds,
                fork_server,
            )
            log_ends[node] = opened_log.end
        return ended

    if step.distribution is None:
        return None, run_node(0, surroundings.control), log_ends[0]
    deciding_node, ended = process.on_nodes(step.distribution.nodes, surroundings.control, run_node)
    return deciding_node, ended, log_ends[deciding_node]


def _ignore(event: Json) -> None:
    """The events of nodes but the first, which would be told once a node."""


def _step_input(step: Step, inputs: Values, folder: Path) -> Json:
    """The ExecutorInput of `step`, its outputs placed in `folder`."""
    artifacts: dict[str, list[Json]] = {}
    for name, several in inputs.artifacts.items():
        artifacts[name] = []
        for artifact in cache.as_artifacts(several):
            metadata = carried(artifact.metadata)
            artifacts[name].append(artifact_of(name, vars(artifact), artifact.uri, metadata))
    promised = {}
    for name, kind in step.outputs.artifacts.items():
        promised[name] = artifact_of(name, vars(kind), folder / name, {})
    # an artifact may be called as a parameter is: they lie in one folder
    files = {name: folder / f".parameter-{name}" for name in step.outputs.parameters}
    return executor_input(inputs.parameters, artifacts, promised, files, folder)


def _failure(step: Step, ended: Ended, log_end: bytes) -> Outcome | None:
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
    return Outcome(step, "failed", error=_error_text(ended, log_end))


def _error_text(ended: Ended, log_end: bytes) -> str:
    error = ended.result.get("error")
    if error:
        return masked(str(error))
    if ended.exit_code > 128:  # as shells write a signal
        number = ended.exit_code - 128
        note = " (out of memory?)" if number == signal.SIGKILL else ""
        return f"killed by signal {number}{note}"
    kind, message = error_in_log(log_end.decode(errors="replace"))
    if message and f"{RekindleError.__module__}.{kind}:".encode() in log_end:
        return message  # an error of ours, which says all there is to know
    what = kind or f"exit code {ended.exit_code}"
    return f"{what}: {message}" if message else what


def utc_now() -> str:
    """Now, in ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
