"""How records are found, and what a damaged one becomes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rekindle.errors import RequestError
from rekindle.records import ArtifactRecord, Evidence, OperatorShare, Profile, RunRecord, StepRecord
from rekindle.report.card import render_card
from rekindle.report.collect import collect, summarised
from rekindle.report.index import render_index
from tests.report.homes import Home, curve
from tests.report.mishaps import build, failed
from tests.report.runs import promoted_digits, refused_reviews


def artifact(run: RunRecord, step: str) -> Path:
    return Path(run.step(step).artifacts["output"].uri)


def test_all_records_of_a_run_are_found(tmp_path: Path) -> None:
    run = promoted_digits(Home(tmp_path))
    found = collect(run)
    assert found.notes == ()
    assert found.fingerprint
    assert found.shards
    assert found.training
    assert found.evidence
    assert found.registration
    assert [row.step for row in found.history] == list(range(1, 277))
    assert collect(run, history=False).history == ()


def test_the_source_of_the_data_is_named_as_the_config_names_it(tmp_path: Path) -> None:
    run, home = promoted_digits(Home(tmp_path)), tmp_path
    files = {"data": {"source": "tickets.csv"}}  # of which shards know a hash
    page = render_card(home, run.model_copy(update={"spec": {**run.spec, **files}})).read_text()
    section = page.partition('<section id="data">')[2].partition("</section>")[0]
    assert "<dt>Source</dt><dd>tickets.csv</dd>" in section


def test_an_artifact_may_be_the_file_itself_or_a_file_uri(tmp_path: Path) -> None:
    run = promoted_digits(Home(tmp_path / "a b"))
    file = artifact(run, "evaluate") / "evidence.json"
    for uri in (str(file), file.as_uri(), file.parent.as_uri()):
        step = StepRecord(
            name="x", artifacts={"e": ArtifactRecord(uri=uri, metadata={"record": "evidence"})}
        )
        assert collect(run.model_copy(update={"steps": (step,)})).evidence


def test_the_later_step_counts_and_unknown_kinds_are_passed_over(tmp_path: Path) -> None:
    first, second = promoted_digits(Home(tmp_path)), refused_reviews(Home(tmp_path))
    strange = StepRecord(
        name="x", artifacts={"e": ArtifactRecord(uri="/x", metadata={"record": ["evidence"]})}
    )
    run = first.model_copy(update={"steps": (*first.steps, strange, *second.steps)})
    evidence = collect(run).evidence
    assert evidence
    assert evidence.champion_version == "3"


DAMAGE = {
    "cut in the middle": lambda file: file.write_bytes(file.read_bytes()[:100]),
    "not text": lambda file: file.write_bytes(b"\xff\xfe\x00"),
    "of another version": lambda file: file.write_text('{"schema_version": 99, "new": 1}'),
    "gone": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_record_is_a_note_and_the_card_stands(tmp_path: Path, damage: str) -> None:
    run = promoted_digits(Home(tmp_path))
    DAMAGE[damage](artifact(run, "evaluate") / "evidence.json")
    found = collect(run)
    assert found.evidence is None
    assert len(found.notes) == 1
    assert found.notes[0].startswith("The evidence record cannot be shown: ")
    assert found.notes[0].count("evidence.json") == 1
    assert found.training
    html = render_card(tmp_path, run).read_text()
    assert "The evidence record cannot be shown" in html
    assert 'id="training"' in html


def test_history_after_a_resume_counts_the_later_row_and_skips_damaged_lines(
    tmp_path: Path,
) -> None:
    run = promoted_digits(Home(tmp_path))
    again = curve(3, 9.0, 8.0, 1.0, 1.0)
    path = artifact(run, "finetune") / "history.jsonl"
    with path.open("a") as file:
        file.writelines(row.model_dump_json() + "\n" for row in again)
        file.write('{"step": 7, "lo')
    found = collect(run)
    assert [row.step for row in found.history] == list(range(1, 277))
    assert found.history[:3] == tuple(again)
    assert found.notes == (f"1 line(s) of the training history are damaged and left out: {path}.",)


def test_not_a_number_survives_the_way_through_the_records(tmp_path: Path) -> None:
    rows = collect(failed(Home(tmp_path))).history
    assert len(rows) == 40
    assert math.isnan(rows[-1].loss)
    assert math.isinf(rows[-1].grad_norm)


def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    runs = build(tmp_path)
    once = [render_card(tmp_path, run).read_bytes() for run in runs.values()]
    index = render_index(tmp_path).read_bytes()
    assert [render_card(tmp_path, run).read_bytes() for run in runs.values()] == once
    assert render_index(tmp_path).read_bytes() == index
    assert max(len(page) for page in once) < 400_000


@pytest.mark.parametrize("run_id", ["../x", "a/b", "", ".", ".."])
def test_a_run_id_cannot_leave_the_home(tmp_path: Path, run_id: str) -> None:
    run = RunRecord(run_id=run_id, name="x", platform="local", status="failed", started_at="")
    with pytest.raises(RequestError, match="not a run id"):
        render_card(tmp_path, run)


def test_an_empty_home_gives_an_index_that_says_so(tmp_path: Path) -> None:
    assert "No run yet." in render_index(tmp_path / "new").read_text()


def test_collecting_imports_no_template_engine_and_reporting_nothing_heavy() -> None:
    code = (
        "import sys, json, rekindle.report.collect; light = sorted(sys.modules);"
        "import rekindle.report.card, rekindle.report.index;"
        "print(json.dumps([light, sorted(sys.modules)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    light, full = (set(names) for names in json.loads(done.stdout))
    assert "jinja2" not in light
    heavy = {"torch", "kfp", "mlflow", "pandas", "numpy", "matplotlib", "sklearn"}
    assert not heavy & full


def test_a_class_that_is_never_predicted_is_warned_of_on_the_card_and_in_the_summary(
    tmp_path: Path,
):
    home = Home(tmp_path)
    run = refused_reviews(home)
    file = artifact(run, "evaluate") / "evidence.json"
    evidence = Evidence.read(file)
    assert summarised(run).warnings == ()
    silent = evidence.classes[0].model_copy(
        update={"predicted": 0, "precision": None, "recall": 0.0, "f1": 0.0}
    )
    evidence.model_copy(update={"classes": (*evidence.classes[1:], silent)}).write(file)
    said = f"the model never predicts `{silent.label}` ({silent.rows} held out)"
    assert summarised(run).warnings == (said,)
    html = render_card(tmp_path, run).read_text(encoding="utf-8")
    assert f"{said}." in html
    rows = html[html.index("By class") :]
    assert rows.index(f">{silent.label}<") < rows.index(f">{evidence.classes[1].label}<"), (
        "the worst first"
    )


def test_a_profile_says_what_the_training_was_bound_by(tmp_path: Path) -> None:
    run = promoted_digits(Home(tmp_path))
    shares = {"compute": 0.25, "data": 0.75}
    matmul = OperatorShare(name="aten::mm", calls=1234, share=0.2)
    Profile(
        steps=3,
        seconds=0.6,
        bound="data",
        shares=shares,
        advice="Add workers.",
        operators=(matmul,),
    ).write(artifact(run, "finetune") / "profile.json")
    page = render_card(tmp_path, run).read_text()
    section = page.partition("What it was bound by")[2].partition("</section>")[0]
    assert (
        "3 recorded steps of 200 ms were bound by waiting for data: 75.0% of the time." in section
    )
    assert "<td>aten::mm</td><td>1,234</td><td>20.0%</td>" in section


@pytest.mark.parametrize(
    ("losses", "checked", "said"),
    [
        (
            np.linspace(1.1, 1.05, 100),
            [1.09, 1.08],
            "hardly fell, from 1.0990 to 1.0510: more epochs or another train.lr",
        ),
        (
            np.linspace(1.1, 0.1, 100),
            [0.9, 1.2],
            "is 0.1202 on training rows and 1.2000 on the validation split: more rows",
        ),
        (
            np.linspace(1.1, 0.6, 100),
            [0.9, 0.7],
            "on the validation split still fell at the end: more epochs",
        ),
        (np.linspace(1.1, 0.6, 100), [0.7, 0.72], ""),
        (np.linspace(1.1, 1.05, 10), [1.09, 1.08], ""),
    ],
    ids=["little", "by heart", "too short", "fair", "few steps"],
)
def test_below_a_floor_the_losses_say_what_may_help(tmp_path, losses, checked, said):
    """And only there: a gain over the champion that is not certain is no matter of epochs."""
    home = Home(tmp_path)
    run = refused_reviews(home)
    history = artifact(run, "finetune") / "history.jsonl"
    row = collect(run).history[0].model_dump(mode="json")
    rows = [
        {**row, "step": n, "loss": float(loss), "validation_loss": None}
        for n, loss in enumerate(losses)
    ]
    for n, loss in zip((len(rows) // 2, len(rows) - 1), checked, strict=True):
        rows[n]["validation_loss"] = loss
    history.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert summarised(run).warnings == ()
    file = artifact(run, "evaluate") / "evidence.json"
    evidence = Evidence.read(file)
    below = evidence.checks[0].model_copy(update={"passed": False})
    evidence.model_copy(update={"checks": (below, *evidence.checks[1:])}).write(file)
    assert [said in one for one in summarised(run).warnings] == ([True] if said else [])
    html = render_card(tmp_path, run).read_text(encoding="utf-8")
    assert ("Warning:" in html) == bool(said)
