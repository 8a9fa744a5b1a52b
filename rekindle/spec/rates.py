"""Which learning rates a config has to name, and which are too small for how weights are
stored.

Weights that were trained before have no default rate: the one that suits a model from
scratch destroys them. `findings` proposes one instead, by the kind of model and by what
is trained (rates.yaml, with sources).

bf16 has eight significant bits: what is added to a weight w is lost below 2^-9 |w|, and
mostly lost below 2^-8 |w|. AdamW moves a weight by about `lr` a step, and most weights of
a transformer are about 0.02 (`initializer_range` of transformers): below 2^-8 x 0.02 =
7.8e-5 most updates vanish. The moments, which are stored in bf16 too, lose in the same
way, so that no rate makes it exact."""

from collections.abc import Iterator
from pathlib import Path

from rekindle.errors import Problem, RequestError
from rekindle.spec.model import ModelSpec, TrainSpec
from rekindle.spec.tasks import BUILT_IN_TASKS
from rekindle.tables import rows

LEAST_LR_OF_BF16 = 2**-8 * 0.02

Finding = tuple[str, str, str]


def findings(task: str, model: ModelSpec, train: TrainSpec) -> Iterator[Finding]:
    """What is wrong with `train.lr`: (field of `train`, what, fix). Not for scripts."""
    if train.entrypoint:
        return
    has_adapters = model.lora is not None
    start = _pretrained(task, model)
    if train.lr is None and start:
        rate, usual = _usual_rate(task, model)
        message = f"is missing, and {start}: the default of 1e-3 is for weights from scratch"
        yield "lr", message, f"set `lr: {rate}` ({usual})"
    elif train.weights == "bf16" and not has_adapters and train.lr and train.lr < LEAST_LR_OF_BF16:
        message = f"bf16 cannot hold most updates of `lr: {train.lr:g}`: they are below 2^-8 of a "
        message += "weight"
        fix = "set `weights: fp32` (`layout: {shard: N}` divides them), or train `model.lora`"
        fix += f", or take an `lr` of at least {LEAST_LR_OF_BF16:.1e}"
        yield "weights", message, fix


def _usual_rate(task: str, model: ModelSpec) -> tuple[str, str]:
    """The rate to propose, and how it is usual; a network of your own says nothing of its kind."""
    table = rows(Path(__file__).with_suffix(".yaml"))
    kind = "own"
    if isinstance(model.source, str) and task in BUILT_IN_TASKS:
        kind = BUILT_IN_TASKS[task].rates
    rate, usual = table[kind]["lora" if model.lora is not None else "all"]
    return rate, usual


def require(task: str, model: ModelSpec, train: TrainSpec) -> None:
    """Raise RequestError with all findings: for trainings that no config was checked for."""
    problems = []
    for field, message, fix in findings(task, model, train):
        problems.append(Problem(message, f"train.{field}", fix))
    if problems:
        raise RequestError(problems)


def _pretrained(task: str, model: ModelSpec) -> str:
    """Where weights that were trained before come from, in words; "" from scratch."""
    if model.init_from == "champion":
        return "`model.init_from: champion` goes on with trained weights"
    if model.init_from != "base":
        return f"`model.init_from: {model.init_from}` names trained weights"
    if isinstance(model.source, str) and task != "image_classification":
        return f"`model.source: {model.source}` names pretrained weights"
    return ""
