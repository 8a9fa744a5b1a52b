"""What is sent has the layout of its plan, and whoever sends it sees the plan's figures."""

from __future__ import annotations

import dataclasses
import datetime
import json
from pathlib import Path

import pytest

from rekindle.app.forecast import outlook
from rekindle.app.history import rest_of
from rekindle.app.plan import on_machines, planned, settled
from rekindle.app.runs import all_runs
from rekindle.catalog.prices import Price, PriceBook, shipped
from rekindle.cli.main import invoke
from rekindle.errors import RequestError
from rekindle.plan.plan import make
from rekindle.spec.load import load_target
from rekindle.spec.model import Spec
from tests.platforms.azureml.conftest import service as service
from tests.support.cli_compile import PLATFORMS, ROOT, TRACKED, sagemaker
from tests.support.cli_submit import WORKSPACE

SEVEN = ROOT / "configs" / "plan" / "7b-spot.yaml"
ON = "resources.machine=ml.p4de.24xlarge"


def spec(*overrides, config=SEVEN):
    return load_target(config, [ON, *overrides])


def test_what_is_compiled_has_the_layout_of_the_plan(tmp_path, capsys):
    words = sagemaker(resources__machine="ml.p4de.24xlarge")
    for name in ("one", "two"):
        assert invoke(["compile", str(SEVEN), *words, "-o", str(tmp_path / name)]) == 0
    tasks = (tmp_path / "one").rglob("task.json")
    given = [text for path in tasks if "micro_batch_size" in (text := path.read_text())]
    assert len(given) == 3, "the key of the work, the training, and the scores"
    for text in given:
        said = text.replace("\\", "").replace(" ", "")
        for words in ('"shard":8', '"micro_batch_size":4', '"activation_checkpointing":"none"'):
            assert words in said
    files = [sorted(p.read_bytes() for p in (tmp_path / n).rglob("*.json")) for n in ("one", "two")]
    assert files[0] == files[1], "the same config gives the same bytes"


def test_what_the_config_says_stays_and_what_it_leaves_open_is_filled():
    found = settled(spec("train.layout={tp: 2, shard: 4}"), "sagemaker").train
    assert (found.layout.tp, found.layout.shard, found.layout.dp) == (2, 4, None)
    assert isinstance(found.micro_batch_size, int)
    fixed = spec(
        "train.layout={shard: 8}", "train.micro_batch_size=2", "train.activation_checkpointing=full"
    )
    assert settled(fixed, "sagemaker") == fixed


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.source=nobody/knows-it",),
        ("resources.gpus_per_node=0",),
        ("resources.machine=ml.g4dn.xlarge", "resources.gpus_per_node=4"),
        ("resources.machine=ml.g4dn.xlarge", "resources.gpus_per_node=1"),
    ],
)
def test_what_the_planner_does_not_know_stays_as_it_is(overrides):
    unknown = spec(*overrides)
    assert settled(unknown, "sagemaker") == unknown
    assert planned(unknown, "sagemaker", Path("/nowhere")) is None
    digits = load_target(ROOT / "configs" / "digits.yaml", ["resources.gpus_per_node=1"])
    assert settled(digits, "sagemaker") == digits


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("train.layout={tp: 3}",), "the layout dp 2 x tp 3 needs 6 ranks and there are 8"),
        (
            ("train.layout={tp: 8}", "model.source={model_type: llama, num_attention_heads: 4}"),
            "tp 8 does not divide 4 heads",
        ),
    ],
)
def test_a_layout_that_the_planner_does_not_know_is_checked_all_the_same(overrides, says):
    with pytest.raises(RequestError, match=says):
        settled(spec("train.engine=deepspeed", *overrides), "sagemaker")


def test_a_job_that_cannot_fit_is_refused_before_anything_is_written(tmp_path, capsys):
    words = sagemaker(resources__machine="ml.g5.xlarge", resources__gpus_per_node=1)
    assert invoke(["compile", str(SEVEN), *words, "-o", str(tmp_path / "no")]) == 2
    assert "no layout fits on ml.g5.xlarge (1 x A10G)" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_figures_are_shown_before_one_is_asked_and_limits_are_kept(tmp_path):
    said = "\n".join(outlook(planned(spec(), "sagemaker", tmp_path)))
    for words in (
        "ml.p4de.24xlarge (8 x A100-80GB each)",
        "shard 8",
        "on demand  $",
        "min (",
        "GiB",
    ):
        assert words in said
    with pytest.raises(RequestError, match=r"resources\.deadline_hours is 2"):
        planned(spec("resources.deadline_hours=2"), "sagemaker", tmp_path)


def test_a_budget_becomes_the_hours_that_it_pays_for(tmp_path):
    """At the price of all machines together, spot's where they are; a limit of hours that is shorter stays."""
    region = "platforms.sagemaker.region=us-east-1"
    price = shipped().find("ml.p4de.24xlarge", "us-east-1")
    for spot, usd in ((False, price.on_demand_usd_per_hour), (True, price.spot_usd_per_hour)):
        asked = spec(
            region, "resources.budget_usd=5000", f"resources.spot={spot}", "resources.nodes=1"
        )
        found = on_machines(asked, "sagemaker", tmp_path).train.budget_hours
        assert found == pytest.approx(5000 / usd, abs=1e-4)
    shorter = spec(region, "resources.budget_usd=5000", "train.budget_hours=2")
    assert on_machines(shorter, "sagemaker", tmp_path).train.budget_hours == 2
    for usd, hours in (
        (1e-6, 1e-4),
        (1e9, 10_000),
    ):  # of no step, and of more than a training may have
        asked = spec(region, f"resources.budget_usd={usd}")
        assert on_machines(asked, "sagemaker", tmp_path).train.budget_hours == hours
    own = asked.model_copy(update={"pipeline": "p.py:own"})
    own.model_fields_set.discard("train")
    assert on_machines(own, "sagemaker", tmp_path) == own, (
        "a pipeline that is given nothing to train with"
    )
    for override, platform in (
        ("train.entrypoint=train.py", "sagemaker"),
        ("train.seed=1", "kubeflow"),
        ("resources.machine=p9", "sagemaker"),
    ):
        asked = spec(region, "resources.budget_usd=5000", override)
        assert on_machines(asked, platform, tmp_path) == asked, (
            "no price, or no end that could be a step's"
        )


@pytest.mark.slow
def test_machines_that_the_config_leaves_open_are_those_of_its_plan(tmp_path, caplog):
    auto = spec("resources={machine: auto}")
    chosen = on_machines(auto, "sagemaker", tmp_path).resources
    plan = make(auto, shipped(), "sagemaker").chosen.fleet
    assert (chosen.machine, chosen.nodes, chosen.gpus_per_node) == (
        plan.name,
        plan.nodes,
        plan.gpus_per_node,
    )
    words = sagemaker(
        resources__machine="auto",
        resources__gpus_per_node=0,
        platforms__sagemaker__region="us-east-1",
    )
    assert invoke(["compile", str(SEVEN), *words, "-o", str(tmp_path / "out")]) == 0
    assert "until the config names another" in caplog.text
    (path,) = (tmp_path / "out").glob("*.sagemaker.json")
    assert f'"InstanceType":"{chosen.machine}"' in path.read_text().replace(" ", "")


@pytest.mark.parametrize(
    ("overrides", "platform", "says"),
    [
        (("resources={machine: auto}",), "kubeflow", "it is not known which machines kubeflow has"),
        (
            ("resources={machine: auto, budget_usd: 5}", "train.steps=null", "train.epochs=1"),
            "sagemaker",
            "data that has not been counted",
        ),
        (
            ("resources={machine: auto}", "platforms.sagemaker.region=mx-central-1"),
            "sagemaker",
            "no price of a machine in mx-central-1 is known",
        ),
        pytest.param(
            ("resources={machine: auto, budget_usd: 5}",),
            "vertex",
            "resources.budget_usd is \\$5",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_machines_that_nobody_can_choose_are_not_chosen(overrides, platform, says, tmp_path):
    with pytest.raises(RequestError, match=says):
        on_machines(load_target(SEVEN, overrides), platform, tmp_path)


def test_a_submission_shows_the_plan_and_leaves_it_on_record(
    service, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    settings = [
        *WORKSPACE,
        "resources={machine: Standard_ND96isr_H100_v5, gpus_per_node: 8}",
        "train.epochs=null",
        "train.steps=100",
    ]
    words = [
        str(ROOT / "configs" / "plan" / "distilbert.yaml"),
        "--platform",
        "azureml",
        "--yes",
        *PLATFORMS["azureml"][0],
        *TRACKED,
        *(w for s in settings for w in ("--set", s)),
    ]
    assert invoke(["submit", *words]) == 0, capsys.readouterr()
    assert "  layout     dp 8" in capsys.readouterr().err
    (path,) = Path(".rekindle/runs").glob("*/run.json")
    plan = json.loads(path.read_text())["plan"]
    assert (plan["chosen"]["degrees"]["dp"], plan["steps"]) == (8, 100)
    assert invoke(["submit", *words, "--set", "resources.deadline_hours=0.000001"]) == 2
    assert "training takes" in capsys.readouterr().err
    assert len(service.jobs) == 1


@pytest.mark.slow
def test_other_steps_are_counted_as_they_were(service, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    home = tmp_path / ".rekindle"
    words = [
        str(ROOT / "configs" / "plan" / "distilbert.yaml"),
        "--platform",
        "azureml",
        "--yes",
        *PLATFORMS["azureml"][0],
        *TRACKED,
        *(w for s in WORKSPACE for w in ("--set", s)),
        "--set",
        "resources={machine: Standard_ND96isr_H100_v5, gpus_per_node: 8}",
    ]
    assert invoke(["submit", *words]) == 0, capsys.readouterr()
    (run,) = all_runs(home)
    machines = run.submission.machines
    assert machines["finetune"] == ("Standard_ND96isr_H100_v5", 1)
    ended = [
        step.model_copy(update={"status": "succeeded", "seconds": 360.0}) for step in run.steps
    ]
    run.model_copy(update={"steps": tuple(ended), "status": "succeeded"}).write(
        home / "runs" / run.run_id / "run.json"
    )
    book = PriceBook(
        [
            Price(kind, "eastus", 2.0, None, "a test", datetime.date(2026, 11, 23))
            for kind in {kind for kind, _ in machines.values()}
        ]
    )
    spec = Spec.model_validate(dict(run.spec))
    plan = make(spec, book, "azureml")
    rest = rest_of(plan, spec, "azureml", home, book)
    others = len(run.steps) - 1
    assert rest.hours == pytest.approx(0.1 * others)
    assert rest.usd == pytest.approx(0.2 * others)
    assert rest_of(plan, spec, "azureml", home, PriceBook(())).usd is None, "nobody knows a price"
    assert rest_of(plan, spec, "vertex", home, book).usd is None, "other machines"
    more = spec.model_copy(update={"data": spec.data.model_copy(update={"nodes": 4})})
    divided = rest_of(plan, more, "azureml", home, book)
    assert divided.hours == pytest.approx(0.1 * (others - 2 + 2 / 4)), (
        "ingest and shard in a quarter"
    )
    assert divided.usd == pytest.approx(rest.usd), "of four machines"
    assert (divided.divided, rest.divided) == (4, 0)
    another = dataclasses.replace(plan, name="new")
    assert rest_of(another, spec, "azureml", home, book) is None
    assert f"as in {run.run_id}" in "\n".join(outlook(planned(spec, "azureml", home)))
