"""Each architecture that transformers builds at tiny size, written by `save_pretrained`, as the engine takes it.

Its weights are those of `from_pretrained`, what is written has the names and bits of `save_pretrained`, and its loss is proven
to be its own; or it is refused, for a reason that is true. The table of docs/architectures.md is made from this:
`python -m pytest tests/train/test_every_architecture.py --regenerate -m slow`."""

import contextlib
import dataclasses
import io
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file

from rekindle.errors import RekindleError
from rekindle.objectives.loss import Goal
from rekindle.spec.layout import Layout
from rekindle.spec.model import ModelSpec, TrainSpec
from rekindle.tasks import load_task
from rekindle.train import modules, parallel, weights
from rekindle.train.evaluation import Evaluation
from rekindle.train.mesh import Mesh
from rekindle.train.proof import prove_forward, prove_packing
from rekindle.train.stored import Saving
from tests.support.architectures import ARCHITECTURES, NOT_BUILT, tiny_model
from tests.support.proof import LABELS, SETTINGS, made_shards
from tools.generate import paragraph

PAGE = Path("docs/architectures.md")
TASKS = {
    "causal_lm": "AutoModelForCausalLM",
    "text_classification": "AutoModelForSequenceClassification",
    "token_classification": "AutoModelForTokenClassification",
}
TRAIN = TrainSpec(steps=1, global_batch_size=4, precision="fp32")


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    meet = tmp_path_factory.mktemp("ranks") / "meet"
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Of one architecture: `trains`, and whether its documents share sequences; or why not."""

    model_type: str
    trains: bool
    packs: bool = False
    reason: str = ""


def outcome(task_name: str, model_type: str, folder: Path) -> Outcome:
    """Written, loaded, proven and written again. Raises AssertionError where something is wrong in silence."""
    if model_type in NOT_BUILT:
        return Outcome(model_type, False, reason=NOT_BUILT[model_type].reason)
    auto = TASKS[task_name]
    tiny_model(auto, model_type).save_pretrained(folder)
    task = load_task(task_name)
    labels = LABELS if task.makes_head else ()
    torch.manual_seed(0)
    try:
        with weights.deferred() as recorder:
            network = task.build(ModelSpec(source=str(folder)), labels, SETTINGS, folder)
        source = weights.WeightSource(network, recorder, 0, folder, makes_head=task.makes_head)
        origins = modules.unfused(network)
        mesh = Mesh.of(Layout(), torch.device("cpu"))
        parts = parallel.build(task, network, origins, TRAIN, Goal(), mesh)
        weights.fill([parts.network], source, parts.origins)
        check_weights(auto, parts.network, source, folder)
        shards = made_shards(task_name)
        given = task, shards, parts, TRAIN, Evaluation(parts, "fp32")
        prove_forward(*given, small=lambda: None)
        return Outcome(model_type, True, prove_packing(*given).packs)
    except RekindleError as refusal:
        return Outcome(model_type, False, reason=refusal.problems[0].what)


def check_weights(
    auto: str, network: torch.nn.Module, source: weights.WeightSource, folder: Path
) -> None:
    """Against `from_pretrained` and `save_pretrained`."""
    more = {} if auto == TASKS["causal_lm"] else {"num_labels": len(LABELS)}
    own = getattr(transformers, auto).from_pretrained(
        folder, dtype=torch.float32, ignore_mismatched_sizes=True, **more
    )
    fresh = set(source.fresh)
    mine = {name: value for name, value in network.state_dict().items() if name not in fresh}
    theirs = {name: value for name, value in own.state_dict().items() if name not in fresh}
    if not any(
        origin in name for name in mine for origin in ("c_attn.q", "c_attn.k")
    ):  # GPT-2's are apart
        assert mine.keys() == theirs.keys()
        differ = [
            name
            for name in mine
            if not torch.equal(_untransposed(mine[name], theirs[name]), theirs[name])
        ]
        assert differ == []
        state = own.state_dict()
        saving = Saving(network, state)
        written = dict(pair for name, value in state.items() for pair in saving.add(name, value))
        stored = load_file(folder / "model.safetensors")
        lost = stored.keys() - written.keys()
        assert not lost, f"{sorted(lost)[:3]} of save_pretrained are not written"
        kept = [name for name in stored if name not in fresh]
        assert [name for name in kept if not torch.equal(written[name], stored[name])] == []


def _untransposed(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """A Conv1D of GPT-2's kin is a linear layer while it trains."""
    return mine.T if mine.shape != theirs.shape and mine.T.shape == theirs.shape else mine


QUICK = {
    ("causal_lm", "gpt_neox"): "",
    ("causal_lm", "deepseek_v3"): "",
    ("causal_lm", "falcon_h1"): "computes another loss",
    ("causal_lm", "cpmant"): "sees the tokens",
    ("text_classification", "nomic_bert"): "",
    ("text_classification", "distilbert"): "",
    ("token_classification", "llama"): "",
}


@pytest.mark.parametrize(("given", "reason"), QUICK.items(), ids=lambda value: str(value))
def test_an_architecture_is_taken_whole_or_refused(given, reason, tmp_path):
    found = outcome(*given, tmp_path)
    assert found.trains == (reason == ""), found.reason
    assert reason in found.reason


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("task", TASKS)
def test_every_architecture_is_taken_whole_or_refused(task, tmp_path, request):
    silent, outcomes = {}, []
    for model_type in ARCHITECTURES[TASKS[task]]:
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                outcomes.append(outcome(task, model_type, tmp_path / model_type))
            except Exception as error:  # noqa: BLE001 - each is what the test looks for
                silent[model_type] = f"{type(error).__name__}: {error}"[:300]
    refused = [f"{each.model_type}: {each.reason}" for each in outcomes if not each.trains]
    assert silent == {}, f"{Counter(each.trains for each in outcomes)} {refused}"
    section = rendered(task, outcomes)
    if request.config.getoption("--regenerate"):
        replace_section(task, section)
    assert section in PAGE.read_text()


def rendered(task: str, outcomes: list[Outcome]) -> str:
    trained = [each for each in outcomes if each.trains]
    packed = [each.model_type for each in trained if each.packs]
    apart = [each.model_type for each in trained if not each.packs]
    lines = [f"## {task}", "", f"{len(trained)} of {len(outcomes)} train.", ""]
    if task == "causal_lm":
        together = f"**Documents share sequences** ({len(packed)}): {', '.join(packed)}."
        alone = f"**Each document has a sequence of its own** ({len(apart)}): {', '.join(apart)}."
        lines += [paragraph(together), "", paragraph(alone), ""]
    else:
        lines += [paragraph(f"{', '.join(each.model_type for each in trained)}."), ""]
    lines += ["| refused | because |", "| --- | --- |"]
    lines += [f"| {each.model_type} | {each.reason} |" for each in outcomes if not each.trains]
    return "\n".join(lines) + "\n"


def replace_section(task: str, section: str) -> None:
    text = PAGE.read_text()
    start = text.find(f"## {task}\n")
    head = text if start < 0 else text[:start]
    rest = "" if start < 0 else text[start:]
    end = rest.find("\n## ", 1)
    tail = rest[end + 1 :] if end >= 0 else ""
    PAGE.write_text(head.rstrip() + "\n\n" + section + ("\n" + tail if tail else ""))
