"""`rekindle watch`: when a run is due, what a turn leaves on record, and who comes second. Runs of before are records as
real runs leave them, over a source whose fingerprint is real."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import yaml

from rekindle.app import follow
from rekindle.app.triggers import Past, due
from rekindle.app.watch import _have_gone, turn
from rekindle.cli.main import invoke
from rekindle.data.arrivals import Arrivals
from rekindle.data.fingerprint import fingerprint
from rekindle.errors import PlatformError, PreemptedError, RequestError, StepError
from rekindle.platforms.local.store import locked
from rekindle.platforms.snapshot import RunSnapshot
from rekindle.records import Submission
from rekindle.report.ledger import path_of, turns
from rekindle.spec.load import load_target
from rekindle.spec.model import NotifySpec
from rekindle.spec.schedule import TriggersSpec
from tests.cli.turns import NOW, ago, past
from tests.cli.world import World
from tests.cli.world import compiled as compiled
from tests.cli.world import served as served
from tests.cli.world import world as world
from tests.data.corpora import rows, write_jsonl
from tests.report import homes, runs
from tests.servers.webhook import webhook as listening
from tests.support.cli import rekindle


@pytest.mark.parametrize(
    ("triggers", "held", "before", "is_due", "because"),
    [
        ({}, ("a", 0), Past(), True, "no run was judged before"),
        ({}, ("a", 0), past(), False, "the data have not changed since r1"),
        (
            {},
            ("a", 0),
            past(refused=True),
            False,
            "the data have not changed since r1, whose candidate was refused",
        ),
        ({}, ("b", 1), past(), True, "the data have changed since r1"),
        ({"new_rows": 50}, ("b", 49), past(), False, "49 new rows (due from 50)"),
        ({"new_rows": 50}, ("b", 50), past(), True, "50 new rows (due from 50)"),
        ({"new_rows": 0.1}, ("b", 99), past(), False, "99 new rows (due from 100)"),
        ({"new_rows": 0.1}, ("b", 1200), past(), True, "1,200 new rows (due from 100)"),
        ({"every": "2 weeks"}, ("b", 1), past(), False, "due at 2026-07-19 12:00 UTC"),
        (
            {"every": "1 week"},
            ("b", 1),
            past(),
            True,
            "the last judged run began at least 1 week ago",
        ),
        ({"every": "1 week"}, ("a", 0), past(), False, "the data have not changed since r1"),
        (
            {"every": "1 month", "new_rows": 5},
            ("b", 3),
            past(),
            False,
            "3 new rows (due from 5); due at 2026-08-05 12:00 UTC",
        ),
        ({"every": "1 month", "new_rows": 5}, ("b", 7), past(), True, "7 new rows (due from 5)"),
        (
            {"cooldown": "2 weeks"},
            ("b", 1),
            past(),
            False,
            "the data have changed since r1, but the cooldown of 2 weeks ends at 2026-07-19 12:00 UTC",
        ),
        (
            {"cooldown": "6 days"},
            ("b", 1),
            past(lost=1),
            False,
            "the data have changed since r1, but the cooldown of 6 days (x 2: 1 in a row refused or failed) ends at "
            "2026-07-17 12:00 UTC",
        ),
        ({"cooldown": "6 days"}, ("b", 1), past(), True, "the data have changed since r1"),
        (
            {"cooldown": "1 day"},
            ("b", 1),
            past(ago(days=31), lost=99),
            False,
            "the data have changed since r1, but the cooldown of 1 day (x 32: 99 in a row refused or failed) ends at "
            "2026-07-16 12:00 UTC",
        ),
        (
            {"max_per_week": 2},
            ("b", 1),
            past(ago(days=1), ago(days=6), ago(days=8)),
            False,
            "the data have changed since r1, but 2 runs began within seven days, and 2 may",
        ),
        (
            {"max_per_week": 2},
            ("b", 1),
            past(ago(days=1), ago(days=8)),
            True,
            "the data have changed since r1",
        ),
        # a failed turn is tried again, though the data are as they were; the cooldown holds for it too
        (
            {},
            ("a", 0),
            past(failed="failed: no deployment"),
            True,
            "the last turn failed: no deployment",
        ),
        (
            {"cooldown": "2 weeks"},
            ("a", 0),
            past(failed="failed: x"),
            False,
            "the last turn failed: x, but the cooldown of 2 weeks ends at 2026-07-19 12:00 UTC",
        ),
        # a clock that was wrong dated a run into the future: it holds nothing up
        (
            {"cooldown": "1 day"},
            ("b", 1),
            past(ago(days=-900), ago(days=10)),
            True,
            "the data have changed since r1",
        ),
        (
            {"every": "1 week"},
            ("b", 1),
            past(ago(days=-900)),
            True,
            "the last judged run began at least 1 week ago",
        ),
        # runs that failed put nothing off
        (
            {"every": "1 week"},
            ("b", 1),
            past(ago(days=1), judged_at=ago(days=9)),
            True,
            "the last judged run began at least 1 week ago",
        ),
    ],
)
def test_when_a_run_is_due(triggers, held, before, is_due, because):
    data, new = held
    found = due(
        TriggersSpec.model_validate(triggers), NOW, Arrivals(data, "", 1000, 1000, new), before
    )
    assert found == (is_due, because)


@pytest.mark.parametrize(
    ("triggers", "what"),
    [
        ("{new_rows: 0}", "new_rows"),
        ("{new_rows: 1.5}", "new_rows"),
        ("{every: monthly}", "use a number and a unit, such as `6 months`"),
        ("{drift: true}", "drift"),
        ("{act: perhaps}", "act"),
    ],
)
def test_triggers_that_mean_nothing_are_refused(job, triggers, what):
    done = look("--set", f"triggers={triggers}", check=False)
    assert done.returncode == 2
    assert what in done.stderr
    assert not Path(".rekindle").exists()


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A folder with a config over 300 rows and what a run over them left, whose candidate was refused."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "r.jsonl", rows(300))
    config = {
        "name": "reviews",
        "task": "text_classification",
        "data": {"source": "r.jsonl"},
        "model": {"source": {"model_type": "distilbert", "dim": 32, "n_layers": 1, "n_heads": 2}},
        "triggers": {"new_rows": 20, "act": "suggest"},
    }
    Path("c.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


@pytest.fixture
def judged(job):
    home, spec = homes.Home(job / ".rekindle"), load_target("c.yaml")
    run = runs.refused_reviews(home)
    known = fingerprint(spec.task, spec.data, spec.model, spec.train, champion=None)
    home.artifact(run.run_id, "fingerprint", "fingerprint", known)
    shards = homes.manifest("text_classification", "r.jsonl", ("bad",), {"train": 250, "test": 50})
    home.artifact(run.run_id, "shard", "shards", shards)
    return run


def look(*words, check=True):
    return rekindle("watch", "c.yaml", "--once", *words, check=check)


def test_a_turn_says_why_and_suggests_what_is_due(job):
    done = look(check=False)
    assert done.returncode == 3
    assert done.stdout.endswith("reviews: a run is suggested because no run was judged before\n")
    assert not Path(".rekindle/runs").exists()


def test_new_rows_are_counted_from_the_last_judged_run(judged):
    assert (
        "skipped because the data have not changed since "
        f"{judged.run_id}, whose candidate was refused" in look().stdout
    )
    write_jsonl(Path("r.jsonl"), rows(315))
    assert "skipped because 15 new rows (due from 20)" in look().stdout
    write_jsonl(Path("r.jsonl"), rows(320))
    done = look("--json", check=False)
    said = json.loads(done.stdout)
    assert (done.returncode, said["decision"], said["new_rows"]) == (3, "suggested", 20)
    on_record = turns(path_of(Path(".rekindle"), "reviews"))
    assert [one.decision for one in on_record] == ["skipped", "skipped", "suggested"]
    assert on_record[-1].turn == said["turn"]
    page = Path(".rekindle/index.html").read_text()
    assert f"because the data have not changed since {judged.run_id}" in page
    assert "<b>a run is suggested</b> because 20 new rows (due from 20)" in page
    cooled = look("--set", "triggers.cooldown=1 week", "--now", "2026-11-22").stdout
    assert cooled.startswith(
        "2026-11-22 00:00 reviews: skipped because 20 new rows (due from 20), but"
    )
    assert "(x 2: 1 in a row refused or failed) ends at 2026-12-05 10:15 UTC" in cooled


def test_what_cannot_be_read_is_an_error_and_on_record(judged):
    Path("r.jsonl").unlink()
    done = look(check=False)
    assert done.returncode in (1, 2)
    (one,) = turns(path_of(Path(".rekindle"), "reviews"))
    assert (one.decision, one.because[:23]) == ("skipped", "it could not be decided")
    for words, what in ((["--now", "soon"], "--now"), (["--interval", "often"], "--interval")):
        done = look(*words, check=False)
        assert (done.returncode, what in done.stderr) == (2, True)


def test_two_who_look_at_once_exclude_each_other(judged):
    folder = Path(".rekindle/watch")
    folder.mkdir()
    with locked(folder / "reviews.lock"):
        assert "skipped because another watch of this name decides now" in look().stdout
    assert "the data have not changed" in look().stdout


def test_lines_that_are_cut_short_or_strange_cost_nothing(judged):
    look()
    path = Path(".rekindle/watch/reviews.jsonl")
    path.write_bytes(path.read_bytes() + b'{"turn": "x\xff"}\n\n{"schema_version": 1, "tu')
    look()
    assert [one.decision for one in turns(path_of(Path(".rekindle"), "reviews"))] == ["skipped"] * 2


def test_a_turn_that_ended_within_its_run_is_completed_by_the_next(judged):
    """A preempted or unreachable run leaves its turn open, a failed one is tried again once it may be."""
    home, spec, asked = Path(".rekindle"), load_target("c.yaml"), []
    spec = spec.model_copy(update={"triggers": TriggersSpec(cooldown="1 week")})
    write_jsonl(Path("r.jsonl"), rows(301))

    def ending(error):
        def act(begun):
            asked.append((begun.turn, begun.because))
            if error is not None:
                raise error
            return "a run", "promoted: it is better", None

        return act

    for error in (PreemptedError("taken"), PlatformError("no answer"), StepError("it broke")):
        with pytest.raises(type(error)):
            turn(spec, home, ending(error), NOW.replace(year=2027))
    assert len(set(asked)) == 1
    assert asked[0][1].startswith("the data have changed since")
    (one,) = turns(path_of(home, "reviews"))
    assert one.outcome == "failed: it broke"
    done = turn(spec, home, ending(None), NOW.replace(year=2027, day=16))
    assert (done.decision, done.run_id) == ("ran", "a run")
    assert asked[-1][0] == done.turn != one.turn


def _ends(error):
    def act(begun):
        raise error

    return act


def _left(home, number, make=runs.refused_reviews, **fields):
    """What a run of now leaves."""
    spec, root = load_target("c.yaml"), homes.Home(home)
    run = make(root, f"20261122-10150{number}-reviews-0000")
    known = fingerprint(spec.task, spec.data, spec.model, spec.train, champion=None)
    root.artifact(run.run_id, "fingerprint", "fingerprint", known)
    count = Path("r.jsonl").read_text().count("\n")
    held = homes.manifest(
        "text_classification", "r.jsonl", ("bad",), {"train": count - 50, "test": 50}
    )
    root.artifact(run.run_id, "shard", "shards", held)
    run = run.model_copy(update={"name": "reviews", "number": number, **fields})
    run.write(home / "runs" / run.run_id / "run.json")
    return run


def _judged_by_hand(home, number):
    return _left(home, number).run_id


def _open_turn(home, error):
    spec = load_target("c.yaml").model_copy(update={"triggers": TriggersSpec()})
    write_jsonl(Path("r.jsonl"), rows(301))
    with pytest.raises(type(error)):
        turn(spec, home, _ends(error))
    return spec


def _nothing_runs(begun):
    raise AssertionError(begun)


def test_a_turn_that_others_have_overtaken_is_given_up(judged):
    home = Path(".rekindle")
    spec = _open_turn(home, PreemptedError("taken"))
    by_hand = _judged_by_hand(home, 9)
    done = turn(spec, home, _nothing_runs)
    assert done.because == f"the data have not changed since {by_hand}, whose candidate was refused"
    first, _ = turns(path_of(home, "reviews"))
    assert first.outcome.startswith("given up: its data were judged meanwhile")


def test_an_open_turn_does_not_run_what_may_only_be_suggested(judged):
    home = Path(".rekindle")
    _open_turn(home, PreemptedError("taken"))
    assert turn(load_target("c.yaml"), home, _nothing_runs).decision == "skipped"
    first, last = turns(path_of(home, "reviews"))
    assert first.outcome.startswith("given up")
    assert last.because == "1 new rows (due from 20)"


def test_a_failure_is_over_once_a_run_by_hand_was_judged(judged):
    home = Path(".rekindle")
    spec = _open_turn(home, StepError("it broke"))
    by_hand = _judged_by_hand(home, 9)
    assert by_hand in turn(spec, home, _nothing_runs).because


def test_turns_that_failed_before_a_run_by_hand_that_did_not_hold_nothing_back(judged):
    home, days = Path(".rekindle"), [NOW.replace(year=2027, day=day) for day in (2, 4, 8, 9, 11)]
    triggers = {"triggers": TriggersSpec(new_rows=20, cooldown="1 day")}
    spec = load_target("c.yaml").model_copy(update=triggers)
    _left(home, 8, runs.promoted_digits)
    write_jsonl(Path("r.jsonl"), rows(330))
    for day in days[:3]:
        with pytest.raises(StepError):
            turn(spec, home, _ends(StepError("no deployment")), day)
    _left(home, 9, runs.promoted_digits, started_at=days[3].isoformat())
    write_jsonl(Path("r.jsonl"), rows(390))
    assert (
        turn(spec, home, lambda _: ("r", "promoted: it is better", None), days[4]).decision == "ran"
    )


def test_who_follows_suggestions_hears_of_the_next(judged, monkeypatch):
    with listening() as (heard, address):
        monkeypatch.setenv("HOOK", address)
        spec = load_target("c.yaml").model_copy(update={"notify": NotifySpec(webhook="env:HOOK")})
        for number, count in enumerate((320, 340, 360)):
            write_jsonl(Path("r.jsonl"), rows(count))
            assert turn(spec, Path(".rekindle"), _nothing_runs).decision == "suggested"
            assert turn(spec, Path(".rekindle"), _nothing_runs).decision == "suggested"
            assert len(heard.told) == number + 1
            _judged_by_hand(Path(".rekindle"), number + 2)
            assert turn(spec, Path(".rekindle"), _nothing_runs).decision == "skipped"


def test_an_outcome_that_names_values_with_other_ends_of_lines_stays_one_line(judged):
    """U+2028, U+2029 and U+0085, at which Python's splitlines cuts and JSON does not."""
    home, ran = Path(".rekindle"), []
    spec = load_target("c.yaml").model_copy(update={"triggers": TriggersSpec(new_rows=20)})
    write_jsonl(Path("r.jsonl"), rows(330))

    def act(begun):
        ran.append(_left(home, 9, because=begun.because).run_id)
        return ran[-1], "refused: slice region=a\u2028b\u2029c\u0085d loses 0.1 of accuracy", None

    for day in (1, 2, 3):
        turn(spec, home, act, NOW.replace(year=2027, day=day))
    assert len(ran) == 1
    assert turns(path_of(home, "reviews"))[0].outcome.endswith(
        "a\u2028b\u2029c\u0085d loses 0.1 of accuracy"
    )


class Elsewhere:
    """A platform whose run leaves what `run` has; `state` is what it says of it, `answers` whether
    its store does."""

    def __init__(self, run):
        self.run, self.state, self.answers = run, "running", True

    def describe(self, id):
        bare = {"status": self.state, "artifacts": {}}
        return RunSnapshot(
            self.state, tuple(step.model_copy(update=bare) for step in self.run.steps)
        )

    def artifacts(self, id, step):
        if not self.answers:
            raise PlatformError("the store does not answer")
        return next(one for one in self.run.steps if one.name == step.name).artifacts

    def read(self, uri):
        return Path(uri).read_bytes()


@pytest.mark.parametrize("answers", [True, False], ids=["at once", "later"])
def test_a_run_elsewhere_that_ended_since_the_last_look_is_the_last_judged_one(
    judged, monkeypatch, answers
):
    home, sent = Path(".rekindle"), []
    spec = load_target("c.yaml").model_copy(update={"triggers": TriggersSpec(new_rows=20)})
    write_jsonl(Path("r.jsonl"), rows(330))

    def act(begun):
        run = _left(home, 9, because=begun.because)
        sent.append(Elsewhere(run))
        submission = Submission(definition="d", token=begun.turn, id=run.run_id)
        going = {"platform": "kubeflow", "status": "running", "submission": submission, "steps": ()}
        run.model_copy(update=going).write(home / "runs" / run.run_id / "run.json")
        return run.run_id, "submitted to kubeflow", None

    monkeypatch.setattr(follow, "place_of", lambda record: (sent[0], record.submission))
    look_at = lambda: turn(spec, home, act, NOW.replace(year=2027))  # noqa: E731
    assert look_at().decision == "ran"
    assert look_at().because.endswith(" goes on")
    sent[0].state, sent[0].answers = "succeeded", answers
    if not answers:
        with pytest.raises(RequestError, match="without a fingerprint"):
            look_at()
        sent[0].answers = True
    assert look_at().because.startswith("the data have not changed since ")
    assert len(sent) == 1


def test_a_pipeline_that_judges_nothing_is_refused_once_that_is_known(job):
    """Else it would run at each look, whatever the triggers say."""
    Path("p.py").write_text(
        "from kfp import dsl\n@dsl.component(base_image='python:3.11', install_kfp_package=False)\n"
        "def say() -> str:\n    return 'hi'\n@dsl.pipeline(name='p')\ndef p():\n    say()\n"
    )
    words = ["--set", "pipeline=p.py:p", "--set", "triggers={every: 1 week}"]
    assert "ran because no run was judged before" in look(*words).stdout
    done = look(*words, check=False)
    assert done.returncode == 2
    assert "without a fingerprint of its data and a gate: nothing tells what is new" in done.stderr


def test_the_loop_outlives_what_fails_after_its_first_look(judged, monkeypatch, capsys, caplog):
    """Between looks the data go, come back, and the disk is full for a while."""
    pauses, data = [], Path("r.jsonl")

    sleep = time.sleep  # which threads of others call, too

    def pause(seconds):
        if seconds < 60:
            sleep(seconds)
            return
        pauses.append(seconds)
        if len(pauses) == 1:
            data.rename("away.jsonl")
        elif len(pauses) == 2:
            Path("away.jsonl").rename(data)
            Path(".rekindle/watch").rename("kept")
            Path(".rekindle/watch").write_text("no folder")
        elif len(pauses) == 3:
            Path(".rekindle/watch").unlink()
            Path("kept").rename(".rekindle/watch")
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr("rekindle.cli.watch.time.sleep", pause)
    assert invoke(["watch", "c.yaml", "--interval", "2 hours"]) == 130
    assert pauses == [7200.0] * 4
    assert capsys.readouterr().out.count("skipped because the data have not changed") == 2
    said = [line.getMessage() for line in caplog.records if line.name == "rekindle.cli.watch"]
    assert len(said) == 2
    assert all(text.endswith("the next look is in 2 hours") for text in said)


def test_data_without_rows_are_an_error_and_each_cause_is_told_once(judged, monkeypatch):
    monkeypatch.setenv("HOOK", "")
    said = ""
    causes = {
        "": "the data hold no rows that can be read",
        "not json\n" * 9: "9 rows that cannot be parsed",
    }
    for text, cause in causes.items():
        Path("r.jsonl").write_text(text)
        for _ in range(2):
            done = look("--set", "notify={webhook: env:HOOK}", check=False)
            assert done.returncode == 1
            assert cause in done.stderr
            said += done.stderr
    assert said.count("notify.webhook: the variable HOOK") == len(causes)


def test_a_client_of_a_store_that_fails_is_an_error_like_others(judged):
    found = ["--set", "data.source=ftp://127.0.0.1:1/r.jsonl"]
    done = look(*found, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert turns(path_of(Path(".rekindle"), "reviews"))[-1].because.startswith("it could not be")


@pytest.mark.slow
def test_a_platform_gets_one_run_however_often_who_watches_is_killed(world: World, capsys) -> None:
    """Killed at each call, before and after it takes effect."""
    write_jsonl(Path("r.jsonl"), rows(30))
    config = yaml.safe_load(Path("c.yaml").read_text())
    config |= {"task": "text_classification", "data": {"source": str(Path("r.jsonl").absolute())}}
    Path("c.yaml").write_text(yaml.safe_dump(config))
    words = ["watch", "c.yaml", "--once", "--platform", "kubeflow", "--yes", "--json"]
    kills = 0
    for after in (False, True):
        for call in range(60):
            before = {*world.kfp.runs}
            world.kfp.kill_at = (call, after)
            pid = os.fork()
            if pid == 0:
                os._exit(invoke(words))
            world.kfp.whom = pid
            _, status = os.waitpid(pid, 0)
            world.kfp.kill_at = None
            killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
            kills += killed
            if killed:
                assert invoke(words) == 0
                capsys.readouterr()
            (new,) = {*world.kfp.runs} - before
            world.kfp.runs[new]["state"] = "FAILED"  # so that another is due
            if not killed:
                break
        else:
            raise AssertionError("it never got through")
    assert kills > 5
    last = turns(path_of(Path(".rekindle"), "c"))[-1]
    assert (last.decision, last.outcome) == ("ran", "submitted to kubeflow")


def _rolled_back_by_hand(home, number=1):
    """The run of this number made version 3, which a person rolled back after it."""
    run = _left(home, number, because="300 new rows")
    root = homes.Home(home)
    tags = {
        "rolled_back_for": "a week of wrong labels",
        "rolled_back_by_hand": "2026-11-23T09:00:00+00:00",
    }
    held = homes.registration("reviews", "3", "rolled_back", (), **tags)
    root.artifact(run.run_id, "register", "registration", held)
    return run


def test_after_a_roll_back_by_hand_a_person_starts_the_next_run(judged):
    home = Path(".rekindle")
    _rolled_back_by_hand(home)
    assert "skipped because the data have not changed" in look().stdout
    write_jsonl(Path("r.jsonl"), rows(330))
    done = look("--set", "triggers.act=run", check=False)
    assert done.returncode == 3
    said = "a run is suggested because 30 new rows (due from 20), but version 3 was rolled back: a week of wrong labels. The data that it learnt from are still among the data"
    assert said in done.stdout
    assert "`rekindle run c.yaml`" in done.stdout
    # a run of a person's, judged since, lets the loop go on
    _left(home, 2, started_at="2026-11-24T08:00:00+00:00", because="")
    write_jsonl(Path("r.jsonl"), rows(360))
    assert "rolled back" not in look(check=False).stdout


def test_a_run_that_a_loop_started_does_not_count_as_a_persons(judged):
    home = Path(".rekindle")
    _rolled_back_by_hand(home)
    _left(home, 2, started_at="2026-11-24T08:00:00+00:00", because="300 new rows")
    write_jsonl(Path("r.jsonl"), rows(360))
    assert "but version 3 was rolled back" in look(check=False).stdout


@pytest.mark.parametrize(
    ("read", "now", "gone"),
    [
        ("", "", False),
        (
            "2026-01-01T00:00:00/2026-04-01T00:00:00",
            "2026-04-01T00:00:00/2026-07-01T00:00:00",
            True,
        ),
        (
            "2026-01-01T00:00:00/2026-04-01T00:00:00",
            "2026-03-31T00:00:00/2026-07-01T00:00:00",
            False,
        ),
        ("2026-01-01T00:00:00/2026-04-01T00:00:00", "", False),
    ],
)
def test_data_of_a_window_are_gone_once_it_lies_before_that_of_now(read, now, gone):
    assert _have_gone(read, now) is gone
