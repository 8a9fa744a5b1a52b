"""A training that ran here corrects the next plan; its own plan is on its record."""

from __future__ import annotations

import json

import pytest

from rekindle.app.forecast import facts
from rekindle.app.history import past_measurements
from rekindle.app.plan import settled
from rekindle.app.runs import find_run
from rekindle.cli.main import invoke
from rekindle.outputs import Calibration, Planned
from rekindle.records import TrainingSummary
from rekindle.report.collect import HISTORY, collect
from rekindle.spec.load import load_target
from tests.support.cli_compile import ROOT

CHAT = str(ROOT / "configs" / "chat.yaml")
pytestmark = pytest.mark.slow  # a training, and plans of what it took

SHORT = ("--set", "train.epochs=2")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    assert invoke(["run", CHAT, *SHORT, "--home", str(folder)]) == 0
    return folder


def said(capsys, *words):
    capsys.readouterr()
    assert invoke([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_here_is_planned_and_all_ranks_have_work(home):
    run = find_run(home, "latest")
    chosen = run.plan["chosen"]
    assert (chosen["gpu"], chosen["layout"], chosen["machine"]) == ("CPU", "dp 2", "this machine")
    (memory,) = (text for head, text in facts(Planned.model_validate(run.plan)) if head == "memory")
    assert " a process, " in memory
    assert "GPU" not in memory
    assert chosen["micro_batch_size"] == run.spec["train"]["micro_batch_size"] == 2
    assert run.spec["train"]["layout"] == "auto", "as many ranks as there are"
    given = settled(load_target(CHAT, ["train.micro_batch_size=4"]), "local")
    assert given.train.micro_batch_size == 4


def test_its_card_says_what_came_of_the_plan(home):
    run = find_run(home, "latest")
    page = (home / "runs" / run.run_id / "card.html").read_text()
    section = page.partition('<section id="plan">')[2].partition("</section>")[0]
    for words in (
        "Planned for this machine with the layout dp 2.",
        "Time of a step",
        "Memory is not compared",
    ):
        assert words in section


def test_the_next_plan_is_what_was_measured(home, capsys):
    words = ["plan", CHAT, *SHORT, "--platform", "local", "--home", str(home)]
    before = said(capsys, *words)["chosen"]["step_seconds"]
    found = Calibration.model_validate(
        said(capsys, "plan", "--calibrate", "latest", "--home", str(home))
    )
    assert found == Calibration.read(home / "speeds" / f"{found.run_id}.json")
    assert (found.steps, found.left_out, found.gpu) == (21, 5, "CPU")
    assert found.ratio == pytest.approx(found.measured / found.predicted)
    again = said(capsys, *words)
    after = again["chosen"]["step_seconds"]
    assert after[1] == pytest.approx(found.measured)
    tokens = again["tokens_per_step"]  # as many as there were, not as many as there may be
    assert tokens % found.sequence == 0 < found.sequence
    assert again["chosen"]["tokens_per_second"] == pytest.approx(tokens / found.measured)
    assert after[2] / after[0] < before[2] / before[0]
    assert said(capsys, *words, "--calibrate", found.run_id[:20])["chosen"]["step_seconds"] == after
    assert len(list((home / "speeds").iterdir())) == 1, "measured again, it says the same"


def test_a_training_that_is_under_way_is_measured_by_its_first_steps(home, tmp_path, capsys):
    run = find_run(home, "latest")
    steps = tuple(
        step.model_copy(update={"status": "running", "artifacts": {}})
        if step.name.endswith("finetune")
        else step
        for step in run.steps
    )
    # a home that was not moved: its records name what lies elsewhere
    update = {"steps": steps, "status": "running", "home": str(tmp_path.resolve())}
    under_way = run.model_copy(update=update)
    under_way.write(tmp_path / "runs" / run.run_id / "run.json")
    (curve,) = (home / "checkpoints").glob(f"*/{HISTORY}")
    there = tmp_path / "checkpoints" / curve.parent.name / HISTORY
    there.parent.mkdir(parents=True)
    first = curve.read_text().splitlines(keepends=True)[:12]
    there.write_text("".join(first) + '{"step": 13, "lo')
    found = said(capsys, "plan", "--calibrate", run.run_id, "--home", str(tmp_path))
    assert (found["steps"], found["left_out"]) == (7, 5)


def test_what_the_last_run_knew_is_taken_from_it(home, capsys):
    run = find_run(home, "latest")
    steps = [step for step in run.steps if not step.name.endswith("finetune")]
    plan = said(capsys, "plan", CHAT, "--set", "train.epochs=4", "--home", str(home))
    assert plan["steps"] == 52, "twice as many as two epochs had"
    assert f"as many examples as in {run.run_id}: 52" in plan["notes"]
    seconds = sum(step.seconds or 0 for step in steps)
    assert plan["rest"] == {
        "hours": pytest.approx(seconds / 3600),
        "usd": None,
        "run_id": run.run_id,
        "divided": 0,
    }
    counted = said(capsys, "plan", CHAT, "--examples", "8", "--home", str(home))
    assert counted["steps"] == 2 * 20, "what one says oneself counts more"
    other = said(capsys, "plan", CHAT, "--set", "name=other", "--home", str(home))
    assert (other["steps"], other["rest"]) == (None, None)


def test_what_cannot_be_measured_is_refused(home, tmp_path, capsys):
    assert invoke(["plan", "--calibrate", "nobody", "--home", str(home)]) == 2
    assert "no run `nobody`" in capsys.readouterr().err
    assert invoke(["plan", "--home", str(home)]) == 2
    assert "a CONFIG to plan is missing" in capsys.readouterr().err
    run = find_run(home, "latest")
    update = {"plan": {}, "run_id": "unplanned", "home": str(tmp_path.resolve())}
    unplanned = run.model_copy(update=update)
    unplanned.write(tmp_path / "runs" / "unplanned" / "run.json")
    assert invoke(["plan", "--calibrate", "unplanned", "--home", str(tmp_path)]) == 2
    assert "has no plan to compare with" in capsys.readouterr().err
    summary = collect(run).files["training"]
    wrong = TrainingSummary.read(summary)
    try:
        wrong.model_copy(update={"device": "NVIDIA H200"}).write(summary)
        assert invoke(["plan", "--calibrate", run.run_id, "--home", str(home)]) == 2
        assert "planned CPU, trained NVIDIA H200" in capsys.readouterr().err
    finally:
        wrong.write(summary)
    older = unplanned.model_copy(update={"plan": {"name": "old"}, "run_id": "older"})
    older.write(tmp_path / "runs" / "older" / "run.json")
    assert invoke(["plan", "--calibrate", "older", "--home", str(tmp_path)]) == 2
    assert "older has no plan to compare with" in capsys.readouterr().err
    history = summary.with_name(HISTORY)
    lines = history.read_text().splitlines(keepends=True)
    try:
        history.write_text("".join(lines[:4]))
        assert invoke(["plan", "--calibrate", run.run_id, "--home", str(home)]) == 2
        assert "has 4 steps that were measured, and 5 are needed" in capsys.readouterr().err
    finally:
        history.write_text("".join(lines))


def test_a_record_of_a_measurement_that_is_broken_is_left_out(home, caplog):
    (home / "speeds").mkdir(exist_ok=True)
    (home / "speeds" / "a.json").write_text("{")
    assert "a.json" not in [one.run_id for one in past_measurements(home, "chat").speeds.measured]
    assert "cannot be read and is left out" in caplog.text
