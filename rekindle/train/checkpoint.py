"""Training state that survives being killed at any instant, and is never trusted when it
did not.

A checkpoint is a folder `step-<step>.<attempt>` below a root that belongs to one run key:
a folder or any fsspec URI. `save` copies the tensors and returns; a thread of low
priority then lets torch.distributed.checkpoint write them (dcp.py). Everything else is in
`manifest.json` (manifest.py), which is written last, in one instant and only if there is
none: it is the commit.

The newest complete checkpoint wins. One whose files do not match its manifest is skipped,
loudly; one of another run key or schema is refused. On a folder the lock of the run key
keeps other attempts away; on an object store each attempt has a prefix of its own."""

import dataclasses
import datetime as dt
import functools
import gzip
import hashlib
import json
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from rekindle.errors import CheckpointError
from rekindle.launch.events import emit
from rekindle.spec.model import CheckpointSpec
from rekindle.storage import Failure, Folder, Storage
from rekindle.storage.protocol import reason_of
from rekindle.train import dcp, manifest
from rekindle.train.checkpoint_storage import checkpoint_error, checkpoint_storage
from rekindle.train.dcp import File, Piece, pieces_of
from rekindle.train.manifest import HISTORY, MANIFEST, Checkpoint, State, broken, step_of
from rekindle.train.mesh import Ranks, of_all, of_first
from rekindle.train.snapshot import Snapshot

log = logging.getLogger(__name__)

__all__ = ["Checkpoint", "Checkpointer", "agreed", "broken", "load", "newest"]

# Ranks wait in the background for the slowest upload; a peer that dies ends the wait at once.
_PATIENCE = dt.timedelta(hours=12)
_MARGIN = 1.5  # a save in the grace period may take so much longer than those before


def newest(
    root: str | Path, run_key: str, rank: int = 0, world: int = 1, step: int | None = None
) -> Checkpoint | None:
    """The newest checkpoint under `root` whose files all match its manifest, or None.

    Broken ones are reported. Raises CheckpointError for one of another run key or schema.
    See also `agreed`."""
    storage = checkpoint_storage(root)
    offers = _offers(storage, run_key, step) if rank == 0 else iter(())
    skipped = 0
    while True:
        offer = _or_error(lambda: next(offers, None))
        if world > 1:
            offer = of_first(offer)
        if isinstance(offer, CheckpointError):
            raise offer
        if offer is None:
            if skipped and rank == 0:
                _say(f"no usable checkpoint is left in {root}; training starts over")
            return None
        checkpoint: Checkpoint = offer[0]
        problem: str | CheckpointError = offer[1]
        if not problem:
            problem = _problem_of_files(checkpoint, rank, world)
        if isinstance(problem, CheckpointError):
            raise problem
        if not problem:
            return checkpoint
        skipped += 1
        if rank == 0:
            _say(f"checkpoint {checkpoint.name} is broken ({problem}); the one before is taken")


def _offers(storage: Storage, run_key: str, step: int | None) -> Iterator[tuple[Checkpoint, str]]:
    """As `manifest.offers`; with `step`, of that step."""
    for checkpoint, problem in manifest.offers(storage, run_key):
        if step is None or checkpoint.step == step:
            yield checkpoint, problem


def _problem_of_files(checkpoint: Checkpoint, rank: int, world: int) -> str | CheckpointError:
    """What is wrong with the files, or ""; ranks share the reading, and all get the same."""
    share = sorted(checkpoint.files, key=lambda file: file.bytes)[rank::world]
    problem: str | CheckpointError = _or_error(functools.partial(broken, checkpoint, share))
    if world == 1:
        return problem
    for problem_of_rank in of_all(problem):
        if problem_of_rank:
            return problem_of_rank
    return ""


def agreed(root: str | Path, run_key: str, step: int | None = None) -> Checkpoint | None:
    """`newest` of all ranks, which share the reading and all call it; with `step`, of that step."""
    return newest(root, run_key, dist.get_rank(), dist.get_world_size(), step)


def load(checkpoint: Checkpoint, tensors: Mapping[str, Any], replicas: Ranks = None) -> None:
    """Fill the tensors and DTensors of this rank in place, whatever layout the checkpoint
    has.

    `tensors` is a nested dict; `replicas`, ranks that hold the same, all call this and
    share the reading, unless it is from this machine into its own memory. Raises
    CheckpointError when something is not in the checkpoint with the same shape and dtype:
    nothing was filled then."""
    storage = checkpoint_storage(checkpoint.root)
    try:
        content = manifest.metadata_of(storage, checkpoint)
        metadata = dcp.read_metadata(content, [file.path for file in checkpoint.files])
        pieces = pieces_of(tensors)
        # from this machine's page cache each reads faster than gloo brings it from another process
        is_near = isinstance(storage, Folder) and all(p.local.is_cpu for p in pieces.values())
        dcp.fill(pieces, metadata, storage, checkpoint.name, None if is_near else replicas)
    except CheckpointError as error:
        problem = error.problems[0]
        layout = checkpoint.state.get("layout", "another layout")
        message = f"the checkpoint {checkpoint.name}, of {layout}, cannot be loaded: {problem.what}"
        where = problem.where or f"{checkpoint.root}/{checkpoint.name}"
        fix = problem.fix or f"train in its layout, or remove {checkpoint.root} to begin at step 0"
        raise CheckpointError(message, where=where, fix=fix) from error


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """How a save ended."""

    problem: CheckpointError | None = None
    seconds: float = 0.0
    """Of rank 0, so that all ranks expect the same of the next one."""


class Checkpointer:
    """Saves in the background, commits, and forgets what the spec does not keep.

    There is one an attempt, on all ranks. On an object store a copy of `history`, the
    growing loss curve, travels along."""

    def __init__(
        self, root: str | Path, spec: CheckpointSpec, run_key: str, history: Path | None = None
    ) -> None:
        self.storage = checkpoint_storage(root)
        self.spec = spec
        self.run_key = run_key
        self.history = None if isinstance(self.storage, Folder) else history
        # of its own: collectives of a save in the background must not interleave with a step's
        self.group = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self.attempt = of_first(uuid.uuid4().hex[:8], self.group)
        self.snapshot = Snapshot()
        self.thread = ThreadPoolExecutor(1, "checkpoint", initializer=dcp.yield_to_training)
        self.pending: Future[_Outcome] | None = None
        self.started = -1
        self.seconds: deque[float] = deque(maxlen=3)
        self.known: dict[str, State] = {}  # of complete checkpoints

    def save(self, step: int, tensors: Mapping[str, Any], state: State) -> None:
        """Copy `tensors` and start saving them, once the save before is done; a step is
        saved once. `state` is JSON, of which retention reads `validation_loss` and
        `train_seconds`. Raises CheckpointError if the save before failed."""
        self.wait()
        if step == self.started:
            return
        json.dumps(state)  # what is not JSON has to fail here, on all ranks
        began = time.monotonic()
        copies = self.snapshot.take(pieces_of(tensors))
        curve_bytes = 0  # the curve grows while this is saved: later rows belong to later steps
        if self.history is not None and self.history.exists():
            curve_bytes = self.history.stat().st_size
        self.started = step
        self.pending = self.thread.submit(self._save, began, step, copies, dict(state), curve_bytes)

    def wait(self) -> None:
        """Finish and commit the save in flight. Raises CheckpointError on all if it failed."""
        if self.pending is not None:
            self.settle(self.pending)

    def written(self) -> bool:
        """Whether this rank has no save in flight, or its part of it is done; never waits."""
        return self.pending is None or self.pending.done()

    def settle(self, save: object) -> None:
        """Commit `save`, once it is `written` on all ranks. Raises CheckpointError if it failed."""
        pending = self.pending
        if pending is None or pending is not save:
            return
        self.pending = None
        outcome = pending.result()
        if outcome.problem is not None:
            self.started = -1
            raise outcome.problem
        self.seconds.append(outcome.seconds)

    def fits(self, seconds_left: float) -> bool:
        """Whether a save that begins now will be committed in that time, as far as
        earlier ones of this attempt tell; without any, yes. All ranks have to ask, and
        get the same answer."""
        expected = _MARGIN * max(self.seconds, default=0.0)
        if self.pending:  # which has to end first
            expected *= 2
        fits = torch.tensor(float(expected <= seconds_left))
        dist.all_reduce(fits, dist.ReduceOp.MIN)  # on the host, where no save has its collectives
        return bool(fits)

    def _save(
        self, began: float, step: int, copies: dict[str, Piece], state: State, curve_bytes: int
    ) -> _Outcome:
        """Write, commit, forget; runs in the thread. All ranks return the same."""
        folder = f"step-{step:09d}.{self.attempt}"
        # a store's throughput grows with parallel uploads; a disk's does not, and costs processors
        threads = 1 if isinstance(self.storage, Folder) else dcp.THREADS
        writer = dcp.CheckpointWriter(self.storage, folder, threads)
        try:
            dcp_save(copies, storage_writer=writer, planner=dcp.Planner(), process_group=self.group)
        except CheckpointException as error:  # the same on all ranks
            if dist.get_rank() == 0 and isinstance(self.storage, Folder):
                self._drop(folder)  # its room is needed; a store may not even answer
            rank, (cause, _) = min(error.failures.items())
            if isinstance(cause, CheckpointError):
                return _Outcome(cause)
            failure = f"failed on rank {rank}: {type(cause).__name__}: {cause}"
            return _Outcome(CheckpointError(f"the checkpoint of step {step} {failure}"))
        files: list[list[File]] | None = None
        if dist.get_rank() == 0:
            files = [[] for _ in range(dist.get_world_size())]
        dist.gather_object(writer.files, files, group=self.group)
        outcome = _Outcome()
        if files is not None:
            body = {
                "schema_version": manifest.SCHEMA_VERSION,
                "run_key": self.run_key,
                "step": step,
                "state": state,
            }
            all_files = [file for files_of_rank in files for file in files_of_rank]
            outcome = self._commit(folder, body, all_files, curve_bytes)
            outcome = dataclasses.replace(outcome, seconds=time.monotonic() - began)
            if outcome.problem is not None and isinstance(self.storage, Folder):
                self._drop(folder)
        return of_first(outcome, self.group)

    def _commit(
        self, folder: str, body: dict[str, Any], files: list[File], curve_bytes: int
    ) -> _Outcome:
        """Put the curve and then the manifest behind `files`; afterwards forget old ones."""
        total = sum(file.bytes for file in files)
        try:
            if isinstance(self.storage, Folder):
                self._check_folder_is_shared(folder, files)
            if self.history is not None and curve_bytes:
                with self.history.open("rb") as stream:
                    content = gzip.compress(stream.read(curve_bytes), compresslevel=3, mtime=0)
                path = f"{folder}/{HISTORY}"
                self.storage.write(path, lambda stream: stream.write(content), total)
                files.append(File(HISTORY, len(content), hashlib.sha256(content).hexdigest()))
                total += len(content)
            body["files"] = [dataclasses.asdict(file) for file in files]
            self.storage.put_new(f"{folder}/{MANIFEST}", manifest.signed(body), total)
        except CheckpointError as error:
            return _Outcome(error)
        except OSError as error:  # of the curve's file on this machine
            reason = reason_of(error)
            failure = Failure(self.storage.root, folder, "write", reason, error, total)
            return _Outcome(checkpoint_error(failure))
        self.known[folder] = body["state"]
        try:
            self._forget(folder)
        except (OSError, CheckpointError) as error:
            log.warning("old checkpoints in %s stay: %s", self.storage.root, error)
        return _Outcome()

    def _check_folder_is_shared(self, folder: str, files: list[File]) -> None:
        """Raise CheckpointError where rank 0 does not see what the others wrote."""
        root = self.storage.root
        for file in files:
            path = f"{folder}/{file.path}"
            if self.storage.size(path) != file.bytes:
                raise CheckpointError(
                    f"{root} is not the same folder on all nodes: rank 0 does not see {path}",
                    where=root,
                    fix="use a volume that all nodes mount, or an object store",
                )

    def _forget(self, newest_name: str) -> None:
        """Remove what retention does not keep, and what attempts before this one left behind."""
        complete: dict[str, State] = {}
        for name in manifest.names_in(self.storage):
            state = self.known.get(name) or manifest.state_of(self.storage, name)
            # a later step of an attempt before this one was there to resume from, and broken
            is_superseded = step_of(name) >= step_of(newest_name) and self.attempt not in name
            if state is not None and not (is_superseded and self.storage.abandoned(name)):
                self.known[name] = state
                complete[name] = state
            elif self.attempt in name or self.storage.abandoned(name):
                self._drop(name)
        retained = manifest.retained(complete, self.spec)
        for name in complete:
            if name not in retained:
                self._drop(name)

    def _drop(self, folder: str) -> None:
        self.known.pop(folder, None)
        self.storage.remove(folder, first=MANIFEST)


def _say(text: str) -> None:
    log.warning("%s", text)
    emit("notice", text=text)


def _or_error(call: Callable[[], Any]) -> Any:
    """What a call gives, or the error that came instead: values that can be sent to other ranks."""
    try:
        return call()
    except CheckpointError as error:
        return error
