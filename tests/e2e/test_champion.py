"""The main job over time: a weak first model, a better one, equal, poisoned and untrained ones, changed and unchanged bytes.

One home, one registry, in the order of the tests.
"""

import json
import random
import subprocess
import sys

import pytest
from sklearn.datasets import load_digits

from tests.e2e.digits import CONFIG, WEAK, write_digits


@pytest.fixture(scope="module")
def home(cli):
    (cli.folder / "digits.yaml").write_text(CONFIG)
    write_digits(cli.folder)
    return cli.folder


def executed(result):
    return {
        step["name"]
        for step in result["steps"]
        if step["status"] == "succeeded" and not step["cached"]
    }


def test_01_a_first_model_is_promoted_when_it_reaches_the_floor(cli, home, registry):
    result = cli.json("run", "digits.yaml", *WEAK)
    assert result["gate"]["promoted"] is True
    assert result["model"] == {
        "name": "digits",
        "version": "1",
        "aliases": ["champion"],
        "created": True,
    }
    assert registry("digits")["aliases"] == {"champion": "1"}


@pytest.mark.slow
def test_02_a_clearly_better_model_takes_its_place(cli, home, registry):
    result = cli.json("run", "digits.yaml")
    assert result["gate"]["promoted"] is True
    assert result["gate"]["champion_version"] == "1"
    assert result["gate"]["comparison"]["lower"] > 0
    assert result["metrics"]["accuracy"] >= 0.95
    assert registry("digits")["aliases"] == {"champion": "2"}


@pytest.mark.slow
def test_03_an_exact_rerun_comes_from_the_cache_and_makes_no_version(cli, home, registry):
    result = cli.json("run", "digits.yaml", "--require-promotion")
    assert executed(result) <= {"fingerprint", "register", "condition-1/promote"}
    assert all("same inputs and code" in s["reason"] for s in result["steps"] if s["cached"])
    assert {s["name"] for s in result["steps"] if s["cached"]} == {
        "ingest",
        "shard",
        "finetune",
        "score",
        "evaluate",
    }
    assert result["model"] == {
        "name": "digits",
        "version": "2",
        "aliases": ["champion"],
        "created": False,
    }
    assert registry("digits")["versions"] == ["1", "2"]


@pytest.mark.slow
def test_04_an_equal_model_is_not_promoted(cli, home, registry):
    """`auto` chooses 32 for this batch, so naming it is another setting with the same weights."""
    result = cli.json("run", "digits.yaml", "--set", "train.micro_batch_size=32")
    assert result["gate"]["promoted"] is False
    assert "does not lie above 0" in result["gate"]["reason"]
    assert registry("digits")["aliases"] == {"champion": "2", "challenger": "3"}


@pytest.mark.slow
def test_05_an_untrained_model_is_refused_and_says_why(cli, home, registry):
    result = cli.json("run", "digits.yaml", "--set", "train.lr=1e-6", "--require-promotion", code=1)
    assert result["gate"]["promoted"] is False
    assert "accuracy" in result["gate"]["reason"]
    now = registry("digits")
    assert now["aliases"] == {"champion": "2", "challenger": "4"}
    assert now["tags"]["4"]["rekindle.decision"] == "refused"


@pytest.mark.slow
def test_06_changed_bytes_behind_the_same_uri_retrain_and_poisoned_labels_are_refused(
    cli, home, registry
):
    poisoned = [str(label) for label in load_digits().target]
    random.Random(0).shuffle(poisoned)
    write_digits(cli.folder, poisoned)
    result = cli.json("run", "digits.yaml")
    assert {"ingest", "shard", "finetune", "score", "evaluate"} <= executed(result)
    assert result["gate"]["promoted"] is False
    assert registry("digits")["aliases"]["champion"] == "2"


@pytest.mark.slow
def test_07_unchanged_bytes_train_nothing(cli, home, registry):
    before = registry("digits")
    (cli.folder / "digits.parquet").touch()
    result = cli.json("run", "digits.yaml")
    assert "finetune" not in executed(result)
    assert registry("digits")["versions"] == before["versions"]


@pytest.mark.slow
def test_08_a_lost_artifact_is_made_again(cli, home):
    record = json.loads(
        next(
            iter(
                sorted(
                    (home / ".rekindle" / "runs").glob("*/run.json"),
                    key=lambda p: p.stat().st_mtime,
                    reverse=True,
                )
            )
        ).read_text()
    )
    network = next(s for s in record["steps"] if s["name"] == "finetune")["artifacts"]["network"][
        "uri"
    ]
    subprocess.run(["rm", "-r", network], check=True)
    result = cli.json("run", "digits.yaml")
    reasons = {s["name"]: s["reason"] for s in result["steps"]}
    assert "network" in reasons["finetune"]
    assert "gone" in reasons["finetune"]
    assert result["model"]["created"] is False, (
        "the weights came out the same, so it is the same version"
    )


@pytest.mark.slow
def test_09_the_lineage_of_a_version_is_complete(registry):
    tags = registry("digits")["tags"]["2"]
    for name in (
        "run_key",
        "work_key",
        "data_fingerprint",
        "init_from",
        "versions",
        "seed",
        "world_size",
        "weights_sha256",
        "evidence_sha256",
        "decision",
    ):
        assert tags[f"rekindle.{name}"], name
    assert tags["rekindle.world_size"] == "1"
    assert json.loads(tags["rekindle.versions"])["torch"].startswith("2.")


@pytest.mark.slow
def test_10_the_registered_champion_predicts_in_a_fresh_process(cli, home):
    code = (
        "import logging; logging.disable(50)\n"
        "import mlflow, numpy as np\n"
        "from sklearn.datasets import load_digits\n"
        f"mlflow.set_tracking_uri('sqlite:///{home}/.rekindle/mlflow.db')\n"
        "model = mlflow.pyfunc.load_model('models:/digits@champion')\n"
        "digits = load_digits()\n"
        "pixels = (digits.images * 255 / 16).round().astype(np.uint8)[..., None]\n"
        "answers = model.predict(pixels[:200])\n"
        "print((answers['label'].astype(int).to_numpy() == digits.target[:200]).mean())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.splitlines()[-1]) >= 0.95


@pytest.mark.slow
def test_11_init_from_champion_or_a_run_is_idempotent(cli, home):
    write_digits(cli.folder)
    if not (home / ".rekindle").exists():  # run alone, without the tests before it
        cli.json("run", "digits.yaml")
    first = cli.json(
        "run", "digits.yaml", "--set", "model.init_from=champion", "--set", "train.epochs=1"
    )
    again = cli.json(
        "run", "digits.yaml", "--set", "model.init_from=champion", "--set", "train.epochs=1"
    )
    assert first["run_key"] == again["run_key"]
    assert "finetune" not in executed(again)
    from_run = cli.json(
        "run", "digits.yaml", "--set", "model.init_from=run:latest", "--set", "train.epochs=1"
    )
    assert from_run["run_key"] != first["run_key"]
    assert from_run["metrics"]["accuracy"] > 0.9, "one epoch from trained weights, not from scratch"


@pytest.mark.slow
def test_12_every_run_is_in_the_ledger_and_has_a_card(cli, home):
    rows = cli.json("runs")["runs"]
    assert len(rows) >= 8
    assert all(
        (home / ".rekindle" / "runs" / row["run_id"] / "card.html").is_file() for row in rows
    )
    status = cli("status", "latest").stdout
    assert "finetune" in status
    assert "KFP Executor" in cli("logs", "latest", "--step", "fingerprint", "--raw").stdout
    assert "KFP Executor" not in cli("logs", "latest", "--step", "fingerprint").stdout


@pytest.mark.slow
def test_13_scores_of_a_champion_do_not_count_for_another_one_with_its_number(cli, home, registry):
    """A registry that is set up again numbers from 1 again; what the cache knows of the old version 1 must not decide."""
    write_digits(cli.folder)

    def run(*words):
        return cli.json("run", "digits.yaml", "--home", "again", *words)

    run(*WEAK)
    beaten = run()
    assert (beaten["gate"]["champion_version"], beaten["gate"]["promoted"]) == ("1", True)
    (home / "again" / "mlflow.db").unlink()
    run("--set", "train.epochs=7")
    result = run()
    assert result["gate"]["champion_version"] == "1"
    assert "finetune" not in executed(result)
    assert {"score", "evaluate"} <= executed(result)
    assert result["gate"]["promoted"] is False
    assert registry("digits", "again")["aliases"]["champion"] == "1"


@pytest.mark.slow
def test_14_a_roll_back_and_a_person_s_word_show_everywhere(cli, home, registry):
    """Alias, history, `runs`, cards and index agree after each, and the rolled-back model stays back."""
    write_digits(cli.folder)

    def run(*words):
        return cli.json("run", "digits.yaml", "--home", "back", *words)

    weak, better = run(*WEAK)["run_id"], run()["run_id"]

    def shown():
        rows = cli.json("runs", "--home", "back")["runs"]
        index = (home / "back" / "index.html").read_text()
        champion = cli.json("champion", "digits", "--home", "back")
        assert registry("digits", "back")["aliases"]["champion"] == champion["version"]
        assert f"champion is version {champion['version']}" in index
        decisions = {row["run_id"]: row["gate"]["decision"] for row in rows}
        return champion, [row["run_id"] for row in rows if row["champion"]], decisions

    assert shown()[1] == [better]
    asked = cli("rollback", "digits", "--home", "back", "--reason", "bad labels", code=2)
    assert "pass --yes" in asked.stderr
    cli("rollback", "digits", "--home", "back", "--reason", "bad labels", "--yes")
    champion, marked, decisions = shown()
    assert (champion["version"], champion["change"]["reason"]) == ("1", "bad labels")
    assert marked == [weak]
    assert decisions == {weak: "promoted", better: "rolled_back"}
    card = (home / "back" / "runs" / better / "card.html").read_text()
    assert "Rolled back: version 2 of digits was champion" in card
    assert "bad labels" in card
    again = run()
    assert (again["gate"]["decision"], again["gate"]["promoted"]) == ("rolled_back", False)
    assert registry("digits", "back")["tags"]["2"]["rekindle.decision"] == "rolled_back"
    cli("promote", better, "--home", "back", code=1)
    cli("promote", better, "--home", "back", "--reason", "the labels were fine")
    champion, marked, decisions = shown()
    assert (champion["version"], champion["change"]["how"]) == ("2", "reason")
    assert set(decisions.values()) == {"promoted"}
