"""Every layout trains as one process does: the same gradients, the same weights after five steps, the same validation. All of
them by `make layouts`; otherwise so many that each pair of features is there which goes together in any of them.

One process forks the ranks of all cases (see differential.py). Cells of fp32 compute in fp64, so that what differs is an
error and not rounding.
"""

import dataclasses
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rekindle.errors import UnsupportedError
from rekindle.spec import layout_support
from rekindle.spec.layout import Layout
from rekindle.spec.layout_support import Cell
from rekindle.train import compat
from tests.support.train_layouts import MODELS, NO_DROPOUT, TASKS

HERE = Path(__file__).parent
BLOCKS = {"distilbert": "n_layers", "llama": "num_hidden_layers"}
USUAL = {"image": "cnn", "text": "distilbert", "tags": "bert", "tokens": "llama"}
# relative L2 of gradients and weights by precision; gradients of 8 mantissa bits differ by their rounding
TOLERANCE = {"fp32": 1e-9, "bf16": 4e-2, "fp16": 1e-2, "fp8": 1e-1}


@dataclasses.dataclass(frozen=True)
class Case:
    """A cell on a model; `export` is a folder for the trained weights; `check`: what a training in it would begin with;
    `backend`: of torch.compile."""

    cell: Cell
    model: str = ""
    packing: bool = True
    fault: str = ""
    export: str = ""
    check: bool = False
    backend: str = "inductor"
    task: str = ""

    @property
    def name(self):
        # DistilBERT has a ReLU before its classifier: one unit that rounding puts on the other side of
        # zero changes the norm of all gradients by 2 %
        rounded = self.cell.kind == "text" and self.cell.precision == "fp16"
        return self.model or ("bert" if rounded else USUAL[self.cell.kind])

    @property
    def network(self):
        name = self.name
        # a pipeline pads all micro-batches of a step to one length, which changes the shape of dropout masks; a compiled
        # block draws them with a generator of the compiler's own
        quiet = NO_DROPOUT.get(name, {}) if "pp" in self.cell.axes or self.cell.compile else {}
        # how many blocks there are matters to a pipeline only, which is to get stages of unequal length: two of them, or
        # four where each rank has two
        fewer = {"": 2, "1f1b": 3}.get(self.cell.schedule)
        depth = {BLOCKS[name]: fewer} if fewer and name in BLOCKS else {}
        return {**MODELS[name], **quiet, **depth}

    @property
    def exact(self):
        return self.cell.precision == "fp32" and not self.cell.compile

    @property
    def world(self):
        return 2 ** len(self.cell.axes)

    @property
    def micro(self):
        """Rows of a micro-batch; dropout is keyed by micro-batch, so one process takes the same. There are at least two a
        rank where ranks do not share the batch, and as many as have to be on their way in a pipeline."""
        axes = self.cell.axes
        return 1 if len(axes) > 2 else 2 if {"dp", "shard", "pp"} & set(axes) else 4

    def as_json(self, one_rank=False):
        cell = dataclasses.asdict(self.cell)
        if one_rank:
            cell |= {"axes": (), "schedule": "", "checkpointing": "none", "compile": False}
        made = {
            "task": self.task or TASKS[self.cell.kind],
            "model": self.network,
            "cell": cell,
            "exact": self.exact,
            "packing": self.packing and self.cell.kind == "tokens",
            "fault": "" if one_rank else self.fault,
            "world": 1 if one_rank else self.world,
            "micro": self.micro,
            "check": self.check,
            "backend": self.backend,
            "export": f"{self.export}-{'one' if one_rank else 'many'}" if self.export else "",
        }
        made["name"] = hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()[:16]
        return made

    def __str__(self):
        return f"{self.task or self.name} {self.cell}{'' if self.packing else ' unpacked'}{self.fault and ', ' + self.fault}"


def launch(folder, cases):
    """Run all cases and their references; results lie in `folder` under the cases' names. What is
    there already is not run again."""
    wanted = {}
    for case in cases:
        for made in (case.as_json(), *(() if case.check else (case.as_json(one_rank=True),))):
            if not (folder / f"{made['name']}.pt").exists():
                wanted[made["name"]] = made
    path = folder / "cases.json"
    path.write_text(json.dumps(sorted(wanted.values(), key=lambda made: made["world"])))
    with (folder / "log.txt").open("w") as log:
        subprocess.run(
            [sys.executable, str(HERE / "differential.py"), str(path), str(folder)],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "JE_ARROW_MALLOC_CONF": "background_thread:false",
                "TORCHINDUCTOR_COMPILE_THREADS": "1",  # a pool of processes costs each rank more than its few kernels
            },
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=3400,
        )
    return folder


def results(folder, case):
    found = []
    for one_rank in (True, False):
        name = case.as_json(one_rank)["name"]
        path = folder / f"{name}.pt"
        assert path.exists(), (folder / "log.txt").read_text()[-4000:]
        found.append(torch.load(path))
    return found


def distance(a, b, floor):
    """Largest relative L2 over parameters; those next to nothing, such as biases before a norm, whose gradients are pure
    rounding, are measured against the share `floor` of the whole."""
    assert a.keys() == b.keys()
    total = torch.stack([x.double().norm() for x in a.values()]).norm()
    gaps = {
        n: float((a[n].double() - b[n].double()).norm() / (a[n].double().norm() + floor * total))
        for n in a
    }
    return max(gaps.values())


def same(folder, case):
    one, many = results(folder, case)
    tolerance = (
        1e-4
        if case.cell.compile and case.cell.precision == "fp32"
        else TOLERANCE[case.cell.precision]
    )
    packs = case.cell.kind == "tokens" and case.packing
    assert [ranks["proof"]["packs"] for ranks in (one, many)] == [packs, packs], many["proof"]
    floor = 1e-4 if case.exact else 1e-2
    assert distance(one["gradients"], many["gradients"], floor) <= tolerance
    assert distance(one["weights"], many["weights"], floor) <= tolerance
    for name in ("losses", "norms", "adamw"):
        assert many[name] == pytest.approx(one[name], rel=tolerance), name
    assert many["validation"]["validation_loss"] == pytest.approx(
        one["validation"]["validation_loss"], rel=tolerance
    )
    if case.exact:
        right = [one["validation"].get("validation_accuracy") for one in (one, many)]
        assert right[0] == right[1]
        assert (right[0] is None) == (case.task == "text_regression")


# torchao is an extra of its own
FLOAT8 = importlib.util.find_spec("torchao") is not None
ALL = [Case(cell) for cell in layout_support.tested() if FLOAT8 or cell.precision != "fp8"]
AXES = ((), ("dp",), ("shard",), ("tp",), ("pp",), ("cp",))
FAMILIES = [
    Case(Cell(kind, axes, "1f1b" if "pp" in axes else ""), model)
    for model, kind in {
        "bert": "text",
        "mistral": "tokens",
        "qwen2": "tokens",
        "qwen3": "tokens",
        "gpt2": "tokens",
        "starcoder2": "tokens",
    }.items()
    for axes in (("shard",), ("tp",), ("pp",))
]
FAMILIES.append(Case(Cell("tokens", ("pp",), "zero_bubble"), "gpt2"))
UNPACKED = [
    Case(Cell("tokens", axes, "1f1b" if "pp" in axes else ""), packing=False) for axes in AXES[1:]
]


def runs_here(case):
    """Whether this torch has the schedule: the oldest one lacks one, and says so."""
    try:
        compat.check_schedule(Layout(pp=2, schedule=case.cell.schedule or "1f1b"))
    except UnsupportedError:
        return False
    return True


QUICK = [
    Case(Cell("image", ("dp",))),
    Case(Cell("text", ("tp",))),
    *(Case(Cell("tokens", (axis,))) for axis in ("shard", "cp")),
    Case(Cell("tokens", ("pp",), "1f1b")),
    Case(Cell("tokens", ("shard", "tp"))),
    Case(Cell("tokens", ("shard",), checkpointing="full", precision="bf16", lora=True)),
]
QUICK = [case for case in QUICK if runs_here(case)]
FAULTS = [
    Case(Cell("tokens", ("dp",)), fault="local mean"),
    Case(Cell("tokens", ("dp",)), fault="average instead of sum"),
    Case(Cell("tokens", ("pp",), "1f1b"), fault="untied head"),
    Case(Cell("tokens", ("tp",)), fault="unshared norm gradients"),
    Case(Cell("image", ("dp",)), fault="one dropout seed"),
]


# what a training begins with in a layout that no test has trained as a whole; the first of each are quick
COMPOSED = [
    Case(Cell("tokens", ("dp", "cp"), precision="bf16", lora=True), check=True, packing=False),
    Case(Cell("text", ("dp", "tp"), checkpointing="selective"), check=True),
    Case(Cell("image", ("dp", "tp"), checkpointing="selective"), check=True),
    Case(
        Cell("tokens", ("shard", "pp"), "interleaved", checkpointing="full", precision="bf16"),
        "gpt2",
        check=True,
    ),
    Case(Cell("tokens", ("dp", "shard", "tp"), checkpointing="full"), check=True),
    Case(Cell("tokens", ("dp",), compile=True, lora=True), "qwen3", check=True),
]
WRONG = [
    Case(Cell("tokens", ("dp", "shard"), precision="fp16"), fault="half a gradient", check=True),
    # what rounding of fp16 would hide
    Case(Cell("tokens", ("dp", "shard"), precision="fp16"), fault="99% of a gradient", check=True),
    Case(Cell("tokens", ("dp", "cp"), precision="bf16", lora=True), fault="local mean", check=True),
    Case(
        Cell("tokens", ("dp", "tp"), checkpointing="full", lora=True),
        fault="unshared norm gradients",
        check=True,
    ),
]


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("quick"), [*QUICK, *COMPOSED[:2], *WRONG[:1]])


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_a_layout_trains_as_one_process_does(quick, case):
    same(quick, case)


def takes_the_same_steps(folder, case):
    assert layout_support.level(case.cell) == "composed"
    path = folder / f"{case.as_json()['name']}.pt"
    assert path.exists(), (folder / "log.txt").read_text()[-4000:]
    found = torch.load(path)
    assert list(found) == list(dict.fromkeys([case.cell.precision, "fp32"]))
    for precision, (((before, _), (after, _)), largest) in found.items():
        assert largest < (2e-2 if precision != "fp32" else 1e-4 if case.cell.compile else 1e-5)
        assert 0.5 * before < after < 0.995 * before, "steps are too short to show what is wrong"


def is_refused(folder, case):
    text = (folder / f"{case.as_json()['name']}.txt").read_text()
    assert "does not compute what one rank does" in text
    assert "docs/layouts.md" in text


@pytest.mark.parametrize("case", COMPOSED[:2], ids=str)
def test_a_composed_layout_takes_the_steps_of_one_rank_before_it_trains(quick, case):
    takes_the_same_steps(quick, case)


@pytest.mark.parametrize("case", WRONG[:1], ids=str)
def test_a_composed_layout_that_takes_other_steps_is_refused_before_it_trains(quick, case):
    is_refused(quick, case)


def generated_once(cases):
    """Of the compiled cells, the first of each kind of division gets its kernels from g++, 12 s a variant; the others are
    captured, differentiated and checked by guards as it is, and call torch's own kernels."""
    seen = set()
    for case in cases:
        if case.cell.compile and case.cell.axes in seen:
            case = dataclasses.replace(case, backend="aot_eager")
        elif case.cell.compile:
            seen.add(case.cell.axes)
        yield case


def pairs(case):
    """What may get in each other's way in a case, two by two: it is what a composed layout may rely on."""
    features = layout_support._features(case.cell) + ("unpacked",) * (not case.packing)
    kind = (case.cell.kind, case.model)
    return {(kind, one, other) for one in features for other in features}


def covering(cases):
    """As few of them as have each pair of features that any of them has, cheap ones first."""
    left, chosen = set().union(*map(pairs, cases)), []
    while left:
        best = max(
            cases, key=lambda c: len(pairs(c) & left) / (c.world * (3 if c.cell.compile else 1))
        )
        chosen.append(best)
        left -= pairs(best)
    return chosen


EVERY = [case for case in [*ALL, *FAMILIES, *UNPACKED] if case not in QUICK]
# all of them by `make layouts`, before a release
REST = list(generated_once(EVERY if os.environ.get("LAYOUTS") == "all" else covering(EVERY)))


AT_ONCE = 60  # cases of one launch: all of them take more than its hour on a busy machine


@pytest.fixture(scope="module")
def rest(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rest")
    cases = [*REST, *COMPOSED[2:], *WRONG[1:]]
    for begin in range(0, len(cases), AT_ONCE):
        launch(folder, cases[begin : begin + AT_ONCE])
    return folder


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("case", REST, ids=str)
def test_every_other_cell_trains_as_one_process_does(rest, case):
    same(rest, case)


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("case", COMPOSED[2:], ids=str)
def test_every_other_composed_layout_takes_the_steps_of_one_rank_before_it_trains(rest, case):
    takes_the_same_steps(rest, case)


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("case", WRONG[1:], ids=str)
def test_every_other_wrong_step_is_refused_before_training(rest, case):
    is_refused(rest, case)


NUMBERS = [
    Case(Cell("text", axes, "1f1b" if "pp" in axes else ""), task="text_regression")
    for axes in (("dp",), ("shard",), ("tp",), ("pp",), ("dp", "shard"))
]


@pytest.mark.slow
def test_numbers_train_as_one_process_does_in_layouts_of_texts(tmp_path):
    launch(tmp_path, NUMBERS)
    for case in NUMBERS:
        same(tmp_path, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", FAULTS, ids=str)
def test_a_fault_in_the_arithmetic_is_noticed(tmp_path, case):
    launch(tmp_path, [case])
    with pytest.raises(AssertionError):
        same(tmp_path, case)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "cell"),
    [
        ("gpt2", Cell("tokens", ("shard", "tp"))),
        ("llama", Cell("tokens", ("pp",), "interleaved")),
        ("llama", Cell("tokens", ("shard",), lora=True)),
        ("distilbert", Cell("text", ("tp",))),
    ],
    ids=lambda value: str(value),
)
def test_weights_leave_in_files_that_transformers_reads(tmp_path, model, cell):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    case = Case(cell, model, export=str(tmp_path / "model"))
    launch(tmp_path, [case])
    same(tmp_path, case)
    kind = AutoModelForCausalLM if cell.kind == "tokens" else AutoModelForSequenceClassification
    ids = torch.arange(1, 13)[None]
    said = [
        kind.from_pretrained(f"{case.export}-{who}").eval()(input_ids=ids).logits
        for who in ("one", "many")
    ]
    torch.testing.assert_close(*said)
    one, _ = results(tmp_path, case)
    fresh = kind.from_config(kind.from_pretrained(f"{case.export}-one").config).eval()
    assert not torch.allclose(fresh(input_ids=ids).logits, said[0], atol=1e-3), (
        "the trained weights were not read"
    )
    stored = json.loads((Path(f"{case.export}-many") / "model.safetensors.index.json").read_text())[
        "weight_map"
    ]
    assert len(set(stored.values())) > 1
    assert not [
        name for name in stored if "lora" in name or "base_layer" in name or "c_attn.q" in name
    ]
    if not cell.lora and model != "gpt2":
        read = kind.from_pretrained(f"{case.export}-many").state_dict()
        for name, value in one["weights"].items():
            # AdamW has moved the weights on since they were kept
            assert read[name].shape == value.shape


@pytest.mark.slow
def test_documents_that_see_each_other_are_noticed_before_the_first_step(tmp_path):
    right, wrong = (Case(Cell("tokens", ("dp",)), fault=fault) for fault in ("", "one document"))
    launch(tmp_path, [right, wrong])
    assert results(tmp_path, right)[1]["proof"]["packs"]
    refused = results(tmp_path, wrong)[1]["proof"]
    assert not refused["packs"]
    assert "in one sequence they change each other's states" in refused["packing"]
