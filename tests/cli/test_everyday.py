"""What a person at a terminal meets every day: the list of runs, a home of one's own, colour, completion."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from rekindle.app.runs import write_card
from rekindle.cli.main import VERBS, invoke
from rekindle.records import StepRecord
from rekindle.report.collect import collect
from tests.report.homes import Home
from tests.report.runs import promoted_digits, refused_reviews

REKINDLE = [sys.executable, "-m", "rekindle.cli.main"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Three runs: digits that were promoted, reviews that were refused, and one that failed."""
    made = Home(tmp_path / "home")
    promoted_digits(made)
    refused_reviews(made)
    made.run(
        run_id="20261122-080000-broken-e5f6",
        name="broken",
        status="failed",
        number=9,
        started_at="2026-11-22T08:00:00+00:00",
        seconds=7500.0,
    )
    return tmp_path / "home"


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ((), ["broken", "reviews", "digits"]),
        (("--name", "digits"), ["digits"]),
        (("--name", "nobody"), []),
        (("--status", "failed"), ["broken"]),
        (("--status", "failed", "--status", "succeeded", "--limit", "2"), ["broken", "reviews"]),
        (("--sort", "seconds", "--limit", "1"), ["broken"]),
        (("--sort", "metric"), ["digits", "reviews", "broken"]),
    ],
)
def test_runs_are_picked_and_sorted(home, capsys, words, names):
    assert invoke(["runs", "--json", f"--home={home}", *words]) == 0
    assert [run["name"] for run in json.loads(capsys.readouterr().out)["runs"]] == names


def test_the_list_says_when_and_how_long_and_never_cuts_a_word(home, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert invoke(["runs", f"--home={home}", "--name", "broken"]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "started", "status", "time", "metric", "gate", "model"]
    assert line.startswith("20261122-080000-broken-e5f6  2026-11-2")
    assert line.endswith("failed  2 h 5 min")


def test_the_list_says_which_window_and_which_version_is_champion(home, capsys):
    assert invoke(["runs", f"--home={home}", "--json"]) == 0
    runs = {run["name"]: run for run in json.loads(capsys.readouterr().out)["runs"]}
    assert [name for name, run in runs.items() if run["champion"]] == ["digits"]
    assert invoke(["runs", f"--home={home}"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    said = {line.split()[0]: line for line in lines}
    assert said[runs["digits"]["run_id"]].endswith("v1, champion")
    assert "champion" not in said[runs["reviews"]["run_id"]]
    assert "window" in head
    assert "  2026-04-01/2026-10-01  " in said[runs["reviews"]["run_id"]]


def test_a_training_of_a_grid_is_listed_with_its_values_and_its_loss(home, capsys):
    made, settings = Home(home), ("train.lr=1e-3", "train.seed=2")
    whole = promoted_digits(made, "20261123-080000-digits-0001")
    run = whole.model_copy(update={"settings": settings, "steps": whole.steps[:5], "number": 10})
    run.write(home / "runs" / run.run_id / "run.json")
    assert invoke(["runs", f"--home={home}", "--limit", "2"]) == 0
    head, trial, other = capsys.readouterr().out.splitlines()
    assert head.split()[2] == "settings"
    assert "  train.lr=1e-3 train.seed=2  succeeded  " in trial
    loss = collect(whole).training.validation["loss"]
    assert trial.endswith(f"validation loss {loss:.4f}")
    assert "validation loss" not in other
    write_card(home, run.run_id)
    assert "train.lr=1e-3 train.seed=2</small>" in (home / "index.html").read_text()
    card = (home / "runs" / run.run_id / "card.html").read_text()
    assert f"with train.lr=1e-3 train.seed=2: validation loss {loss:.4f}. Only the best" in card


@pytest.mark.parametrize("words", [("--limit", "0"), ("--status", "fine"), ("--sort", "colour")])
def test_what_cannot_be_asked_of_runs_is_refused(home, capsys, words):
    assert invoke(["runs", f"--home={home}", *words]) == 2


def test_a_home_may_be_named_once_for_all_commands(home, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REKINDLE_HOME", str(home))
    assert invoke(["runs", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 3
    assert invoke(["runs", "--json", "--home", "elsewhere"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == []


def on_a_terminal(words: list[str], **more: str) -> str:
    """What a command prints on a terminal."""
    master, slave = pty.openpty()
    with subprocess.Popen(
        [*REKINDLE, *words],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**{k: v for k, v in os.environ.items() if k != "NO_COLOR"}, "TERM": "xterm", **more},
    ) as process:
        os.close(slave)
        said = b""
        while True:
            try:
                piece = os.read(master, 4096)
            except OSError:  # the other end is closed
                break
            said += piece
        assert process.wait(30) == 2
    os.close(master)
    return said.decode()


@pytest.mark.slow
def test_errors_have_colour_on_a_terminal_unless_no_color_is_set(tmp_path):
    words = ["status", f"--home={tmp_path}"]
    assert "\x1b[" in on_a_terminal(words)
    plain = on_a_terminal(words, NO_COLOR="1")
    assert "error: " in plain
    assert "\x1b[" not in plain


def test_a_command_that_changes_nothing_says_so(home, tmp_path, capsys):
    assert invoke(["cancel", "20261122-080000-broken-e5f6", f"--home={home}"]) == 0
    assert capsys.readouterr().out.endswith("  failed: already over, nothing changed\n")
    assert invoke(["gc", f"--home={tmp_path / 'empty'}"]) == 0
    assert capsys.readouterr() == ("", "nothing to remove\n")
    assert invoke(["runs", f"--home={tmp_path / 'empty'}"]) == 0
    assert capsys.readouterr().out.startswith("no runs match; run `rekindle run CONFIG`")


def test_the_log_of_a_cached_step_is_in_the_run_that_made_it(tmp_path, capsys):
    step = StepRecord(
        name="fit",
        status="succeeded",
        cached=True,
        log="nowhere/log.txt",
        reason="same inputs and code as in run digits-20261122-080000-aaaa",
    )
    Home(tmp_path / "home").run(
        run_id="digits-2",
        name="digits",
        number=2,
        status="succeeded",
        steps=(step,),
        started_at="2026-11-22T08:00:00+00:00",
    )
    for words in (("--step", "fit"), ()):
        assert invoke(["logs", "latest", *words, f"--home={tmp_path / 'home'}"]) == 2
        fix = "fix:   rekindle logs digits-20261122-080000-aaaa --step fit"
        assert fix in capsys.readouterr().err


def test_a_prefix_of_many_runs_lists_the_newest(tmp_path, capsys):
    made = Home(tmp_path / "home")
    for number in range(1, 8):
        made.run(
            run_id=f"digits-{number}",
            name="digits",
            number=number,
            status="succeeded",
            started_at="2026-11-22T08:00:00+00:00",
        )
    assert invoke(["status", "digits", f"--home={tmp_path / 'home'}"]) == 2
    said = capsys.readouterr().err
    shown = ", ".join(f"digits-{number}" for number in (7, 6, 5, 4, 3))
    assert f"`digits` matches 7 runs, the newest first: {shown}, ...\n" in said


@pytest.mark.parametrize("more", [(), ("--full",)])
def test_init_prints_commands_that_work_as_they_stand(more, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert invoke(["init", "my work", *more]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "  cd 'my work'"
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert invoke(["init", *more]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == lines[2:]
    (command,) = [line.split("  ")[1] for line in lines[2:3]]
    config = command.removeprefix("rekindle run ")
    assert invoke(["doctor", config]) == 0
    assert invoke(["init", *more]) == 2, "never over what is there"


@pytest.mark.slow
def test_what_init_lays_out_trains_a_model_that_is_promoted(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert invoke(["init"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "README.md",
        "tickets.csv",
        "tickets.yaml",
    ]
    capsys.readouterr()
    assert invoke(["run", "tickets.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gate"]["decision"] == "promoted"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_its_completion(shell):
    command = [sys.executable, "-c", "from rekindle.cli.main import main; main([])"]
    env = {**os.environ, "_REKINDLE_COMPLETE": f"{shell}_source"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert "_REKINDLE_COMPLETE" in done.stdout


@pytest.mark.slow
def test_the_tab_key_knows_verbs():
    words = {"COMP_WORDS": "rekindle re", "COMP_CWORD": "1", "_REKINDLE_COMPLETE": "bash_complete"}
    done = subprocess.run(
        REKINDLE, env={**os.environ, **words}, capture_output=True, text=True, check=False
    )
    found = {line.partition(",")[2] for line in done.stdout.splitlines()}
    assert found == {verb for verb in VERBS if verb.startswith("re")}


CONFIG = 'name: digits\ntask: image_classification\ndata: {source: "sklearn:digits"}\ntrain: {steps: 2}\n'


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ("train.lr_schedule=cosin", "did you mean `cosine`?"),
        ("evaluate.floor.acuracy=0.5", "did you mean `accuracy`?"),
        ("evaluate.gate.metric=f1", "write one of accuracy, macro_f1, log_loss"),
        ("platforms.local.ranks=x", "write a whole number: Training processes"),
        ("train.lr=abc", "write a number: Peak learning rate of AdamW\n"),
        ("data=file.csv", "write a section, {field: value}: Where the examples come from"),
        (
            "train.layout=fsdp",
            "write auto, or a section, {field: value}: How the ranks divide the work",
        ),
        ("train.layout={tp: x}", "write a whole number: Ranks that divide every matrix"),
        ("train.learning_rate=1e-3", "did you mean `lr`?"),
        ("train.batch_size=8", "did you mean `global_batch_size`?"),
        ("train.layout=aut", "did you mean `auto`?"),
        ("evaluate.floor.accuracy=90%", "write a number: What every promoted model must reach"),
    ],
)
def test_the_fix_of_a_wrong_value_is_what_to_write(tmp_path, capsys, given, fix):
    (tmp_path / "c.yaml").write_text(CONFIG)
    assert invoke(["plan", str(tmp_path / "c.yaml"), "--set", given]) == 2
    said = capsys.readouterr().err
    assert f"fix:   {fix}" in said
    assert said.count("error: ") == 1  # also where a field may be one of two things


@pytest.mark.parametrize(
    ("option", "fix"),
    [
        ("--epochs", "--set train.epochs=VALUE"),
        ("--max-length", "--set data.max_length=VALUE"),
        ("--xyz", "see `rekindle run --help`"),
    ],
)
def test_a_field_that_is_given_as_an_option_is_named(capsys, option, fix):
    assert invoke(["run", "c.yaml", option, "3"]) == 2
    assert f"fix:   {fix}\n" in capsys.readouterr().err


def test_a_text_model_that_is_not_named_is_asked_for(tmp_path, capsys):
    (tmp_path / "t.csv").write_text("text,label\na,b\n")
    text = "name: x\ntask: text_classification\ndata: {source: t.csv}\n"
    (tmp_path / "c.yaml").write_text(text)
    assert invoke(["doctor", str(tmp_path / "c.yaml")]) == 2
    said = capsys.readouterr().err
    assert "no model is named" in said
    assert (
        "one of the Hugging Face hub, or describe one to train from scratch: {model_type:" in said
    )


@pytest.mark.parametrize(("verb", "hint"), [("rnu", "did you mean `run`?"), ("xyzzy", "")])
def test_a_mistyped_command_is_guessed(capsys, verb, hint):
    assert invoke([verb]) == 2
    said = capsys.readouterr().err
    assert f"error: there is no command `{verb}`" in said
    assert hint in said
    assert said.count("`rekindle --help`") == 1
