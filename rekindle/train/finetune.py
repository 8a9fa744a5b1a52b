"""The fine-tune step on one node: own the run key's folder, run the ranks, hand over the
model.

With `train.entrypoint` the worker group runs the user's torchrun script instead of
rekindle's worker. The words of the entrypoint may hold {data} (the shards), {model}
(where to leave the model), {checkpoints} (a folder that outlives attempts), {seed} and
{init} (a model folder to start from, or nothing); the same is in the JSON file that
REKINDLE_JOB names."""

import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from rekindle.data.manifest import Shards, open_shards, read_manifest
from rekindle.engines import engine_of
from rekindle.errors import RequestError, StepError
from rekindle.launch.events import emit
from rekindle.launch.process import die_with_parent, owned
from rekindle.launch.rendezvous import Rendezvous
from rekindle.launch.staging import shared_secret
from rekindle.launch.torchrun import torchrun
from rekindle.records import HistoryRow, TrainingSummary
from rekindle.spec.checks import unknown_classes
from rekindle.spec.model import ENTRYPOINT_WORDS
from rekindle.train import modelfolder
from rekindle.train.history import read_history
from rekindle.train.job import Job, root_of

OnRows = Callable[[Sequence[HistoryRow]], None]


def finetune(job: Job, on_rows: OnRows = lambda rows: None) -> TrainingSummary | None:
    """Train until the model lies in `job.output` and its curve in `job.history`; resumes
    by itself.

    Only the first of several nodes gets a summary. `on_rows` receives each optimizer step
    once, in order, some seconds later. PreemptedError after a request to stop, StepError
    if it failed."""
    die_with_parent()
    rendezvous = Rendezvous.current()
    labels = read_manifest(Path(job.shards)).labels
    if labels:
        for path, message, fix in unknown_classes(job.train, labels):  # before ranks start
            raise RequestError(message, where=".".join(map(str, path)), fix=fix)
    if rendezvous.node_rank:
        _run(job, rendezvous, lambda: None)
        return None
    waiting = "another run trains the same work; waiting for it"
    with owned(job.working, lambda: emit("notice", text=waiting)):
        is_own_script = job.train.entrypoint is not None
        trained_on: list[np.ndarray] = []
        if is_own_script:
            trained_on = modelfolder.inherited(job.init, job.model)
        follower = _CurveFollower(job.curve, on_rows)
        _run(job, rendezvous, follower.poll)
        follower.poll(final=True)
        shutil.rmtree(job.cache, ignore_errors=True)
        if is_own_script:
            _adopt(job, rendezvous.world_size, trained_on)
    return TrainingSummary.read(Path(job.history) / "training.json")


def _run(job: Job, rendezvous: Rendezvous, on_poll: Callable[[], None]) -> None:
    """The ranks' part on this node, until all have ended."""
    path = Path(job.status) / "job.json"
    job.write(path)
    if job.train.entrypoint:
        Path(job.output).mkdir(parents=True, exist_ok=True)
        command = _own_command(job, job.train.entrypoint)
    else:
        engine = engine_of(job.train.engine)
        program = engine.program if engine is not None else ""
        command = ["-m", program or "rekindle.train.worker", str(path)]
    with shared_secret(rendezvous, root_of(job.checkpoints)) as place:
        torchrun(
            command,
            job.train,
            status=Path(job.status),
            rendezvous=place,
            environment={"REKINDLE_JOB": str(path)},
            on_poll=on_poll,
        )


def _own_command(job: Job, entrypoint: str) -> list[str]:
    """The words of the user's own script with its folders filled in."""
    folders = (job.shards, job.output, job.checkpoints, str(job.train.seed), job.init)
    values = dict(zip(ENTRYPOINT_WORDS, folders, strict=True))
    return [word.format(**values) for word in shlex.split(entrypoint)]


def _adopt(job: Job, world_size: int, trained_on: Sequence[np.ndarray]) -> None:
    """Make a model folder of ours out of what the user's script left.

    `trained_on`: what models that it began from were, as in `describe`."""
    output = Path(job.output)
    shards = open_shards(Path(job.shards))
    _check_weights(output, shards)
    precision = "" if job.train.precision == "auto" else job.train.precision
    modelfolder.describe(
        job.task, shards, output, job.run_key, precision=precision, known=trained_on
    )
    rows = list(read_history(job.curve))
    job.summarise(
        engine="entrypoint",
        world_size=world_size,
        steps=rows[-1].step if rows else 0,
        epochs=rows[-1].epoch if rows else 0.0,
        precision=precision,
        parameters=0,
        train_rows=shards.rows("train"),
    )


def _check_weights(output: Path, shards: Shards) -> None:
    """StepError where the user's script left no weights that can be loaded."""
    if list(output.glob("*.safetensors")):
        return
    shape = shards.manifest.settings.get("image_shape")
    keras = output / modelfolder.KERAS
    if shape and keras.is_file():
        from rekindle.train.keras_model import load_keras  # imports torch

        load_keras(keras, shape, len(shards.manifest.labels))
        return
    message = f"the script of train.entrypoint left no .safetensors file in {output}"
    fix = "save the weights as safetensors into {model}, so that evaluate can load them"
    if shape:
        fix += f", or {modelfolder.KERAS}"
    raise StepError(message, where="train.entrypoint", fix=fix)


class _CurveFollower:
    """Hands on each step of the growing history once, also what is done again after a restart."""

    def __init__(self, path: Path, on_rows: OnRows) -> None:
        self.path = path
        self.on_rows = on_rows
        self.step = 0
        self.size = -1

    def poll(self, final: bool = False) -> None:
        """Hand on what is new; `final`: look even where the file has the size of before."""
        size = self.path.stat().st_size if self.path.exists() else 0
        if size == self.size and not final:
            return
        self.size = size
        rows = [row for row in read_history(self.path) if row.step > self.step]
        if rows:
            self.step = rows[-1].step
            self.on_rows(rows)
