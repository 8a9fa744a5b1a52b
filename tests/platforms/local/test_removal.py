"""`rekindle gc` removes what no run needs, beside runs, links and kills, and nothing else."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rekindle.app.runs import all_runs
from rekindle.cli.main import invoke
from rekindle.launch.process import owned
from rekindle.platforms.local.removal import remove
from rekindle.platforms.local.store import HomeStore, locked
from rekindle.records import Registration, RunRecord, ShardManifest, write_atomically
from rekindle.report.ledger import ledger
from rekindle.report.retention import Retention
from tests.platforms.local.runs import run, stored
from tests.report.homes import Home, digest
from tests.report.runs import promoted_digits

ALL_OLD = ["--keep-runs", "1", "--older-than", "0d"]
TEXTS = {"one": "a", "two": "b", "three": "c"}  # the last step of all has the same input


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with three runs of `chain`."""
    root = tmp_path_factory.mktemp("made")
    (root / "folder").mkdir()
    for run_id, text in TEXTS.items():
        run("chain", root / "home", {"folder": str(root / "folder"), "text": text}, run_id=run_id)
    return root / "home"


@pytest.fixture
def home(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "home"))


@pytest.fixture
def again(made: Path, home: Path) -> Callable[[str], RunRecord]:
    """Run one of the three once more in the copy."""
    folder = str(made.parent / "folder")
    return lambda name: run("chain", home, {"folder": folder, "text": TEXTS[name]})


def gc(home: Path, *words: str) -> int:
    return invoke(["gc", *ALL_OLD, f"--home={home}", *words])


def removed(home: Path, capsys: pytest.CaptureFixture[str]) -> list[tuple[str, str]]:
    """What gc says that it removed."""
    capsys.readouterr()
    assert gc(home, "--yes", "--json") == 0
    items = json.loads(capsys.readouterr().out)["items"]
    return sorted((item["kind"], item["path"]) for item in items if not item["stays"])


def folders(home: Path) -> set[Path]:
    """The folders of artifacts."""
    return set(home.glob("artifacts/*/*"))


def of(home: Path, *run_ids: str) -> set[Path]:
    """The folders of artifacts that belong to runs."""
    text = "".join((home / "runs" / run_id / "run.json").read_text() for run_id in run_ids)
    return {path for path in folders(home) if path.name in text}


def keys(home: Path, *run_ids: str) -> set[str]:
    return {step.cache_key for run_id in run_ids for step in stored(home, run_id).steps}


def everything(home: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in home.rglob("*") if path.is_file()}


def is_right(home: Path) -> None:
    """Every run that is there is there whole, and every cache entry has its files."""
    for record in all_runs(home):
        for step in record.steps:
            assert Path(step.log).is_file() or step.cached
            for artifact in step.artifacts.values():
                assert (Path(artifact.uri) / "a.txt").exists()
    for path in home.glob("cache/*.json"):
        for artifact in json.loads(path.read_text())["outputs"]["artifacts"].values():
            assert (home / "artifacts" / artifact["uri"].partition("/artifacts/")[2]).exists()


def test_old_runs_go_with_all_that_only_they_refer_to(
    home: Path, again: Callable[[str], RunRecord], capsys: pytest.CaptureFixture[str]
) -> None:
    stays, shared = of(home, "three"), keys(home, "three") & keys(home, "one")
    assert len(shared) == 1, "what `count` made in the first run is used by the last"
    before = folders(home)
    kept_keys = keys(home, "three")
    assert gc(home, "--yes") == 0
    table = capsys.readouterr().err
    rows = [line.split()[:3] for line in table.splitlines()]
    assert ["goes", "run", "2"] in rows
    assert ["stays", "run", "1"] in rows
    assert ["stays", "cache", "entry"] in rows
    assert table.splitlines()[-1].startswith("removed ")
    assert [record.run_id for record in all_runs(home)] == ["three"]
    assert {path.stem for path in home.glob("cache/*.json")} == kept_keys
    assert stays < before
    assert stays <= folders(home) < before
    assert not list(home.glob("*/.removed"))
    assert {step.cached for step in again("three").steps} == {True}
    (make, _, count) = again("one").steps
    assert not make.cached
    assert count.cached
    is_right(home)


def test_lists_agree_and_a_removed_run_is_named_in_an_error(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["report", f"--home={home}"]) == 0
    assert gc(home, "--yes") == 0
    assert [entry.run_id for entry in ledger(home).entries] == ["three"]
    assert len((home / "runs/.index.jsonl").read_text().splitlines()) == 2
    assert "runs/one/" not in (home / "index.html").read_text()
    for verb in ("runs", "status", "report"):
        assert invoke([verb, "--json", f"--home={home}"]) == 0
    capsys.readouterr()
    assert invoke(["status", "one", f"--home={home}"]) == 2
    assert "there is no run `one`" in (text := capsys.readouterr().err)
    assert "rekindle gc" in text


def test_without_yes_nothing_changes(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger(home)
    before = everything(home)
    assert gc(home) == 2
    assert "goes" in capsys.readouterr().err
    assert everything(home) == before


def test_young_runs_and_the_newest_stay(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    young = stored(home, "one").model_copy(update={"started_at": "9999-01-01T00:00:00+00:00"})
    young.write(home / "runs/one/run.json")
    assert invoke(["gc", "--keep-runs=1", "--older-than=30d", "--yes", f"--home={home}"]) == 0
    assert [record.run_id for record in all_runs(home)] == ["one", "three"]
    assert invoke(["gc", "--older-than", "a week", f"--home={home}"]) == 2
    is_right(home)


def test_the_config_of_the_newest_run_says_how_many_stay(home: Path) -> None:
    record = stored(home, "three")
    spec = {**record.spec, "retention": {"keep_runs": 2, "older_than_days": 0}}
    record.model_copy(update={"spec": spec}).write(home / "runs/three/run.json")
    assert invoke(["gc", "--yes", f"--home={home}"]) == 0
    assert [record.run_id for record in all_runs(home)] == ["two", "three"]


def _killed(home: str, at: int) -> None:
    """gc that is killed right before the `at`-th change of the file system."""
    left = [at]

    def hook(event: str, _: tuple[object, ...]) -> None:
        if event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        os._exit(gc(Path(home), "--yes"))


@pytest.mark.slow
def test_a_removal_that_is_killed_anywhere_is_finished_by_the_next(
    home: Path, tmp_path: Path
) -> None:
    whole = Path(shutil.copytree(home, tmp_path / "whole"))
    assert gc(whole, "--yes") == 0
    expected = {path.relative_to(whole) for path in whole.rglob("*")}
    fork, chance, killed = multiprocessing.get_context("fork"), random.Random(0), 0
    for at in [*range(1, 12), *sorted(chance.sample(range(12, 80), 12))]:
        torn = Path(shutil.copytree(home, tmp_path / str(at)))
        process = fork.Process(target=_killed, args=(str(torn), at))
        process.start()
        process.join()
        killed += process.exitcode == -signal.SIGKILL
        is_right(torn)
        for draft in torn.rglob(".*.????????"):
            os.utime(draft, (0, 0))
        assert gc(torn, "--yes") == 0
        assert {path.relative_to(torn) for path in torn.rglob("*")} == expected
    assert killed > 12


def test_what_a_run_begins_to_use_after_it_was_shown_stays(
    home: Path, again: Callable[[str], RunRecord]
) -> None:
    retention = Retention(home, lambda record: {}, 1, 0)
    shown = [item for item in retention.look() if not item.stays]
    wanted = keys(home, "one")
    assert {f"cache/{key}.json" for key in wanted} & {item.path for item in shown}
    HomeStore(home).run("new").mkdir()
    with HomeStore(home).hold_run("new"):
        HomeStore(home).note_use("new", *wanted)
        kept = [item for item in remove(home, retention.look, shown) if item.stays]
    assert {f"cache/{key}.json" for key in wanted - keys(home, "three")} <= {i.path for i in kept}
    assert {step.cached for step in again("one").steps} == {True}


def test_runs_beside_removals_never_read_half_of_a_result(
    home: Path, again: Callable[[str], RunRecord]
) -> None:
    words = [*ALL_OLD, "--yes", f"--home={home}"]
    code = f"from rekindle.cli.main import invoke\nwhile True: invoke(['gc', *{words!r}])"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    try:
        for name in ("one", "two", "one", "three", "one"):
            assert again(name).status == "succeeded"
    finally:
        process.kill()
        process.wait()
    assert gc(home, "--yes") == 0
    is_right(home)
    assert len(all_runs(home)) == 1


def test_a_run_notes_what_it_uses_while_no_removal_looks(home: Path) -> None:
    store = HomeStore(home)
    notes = threading.Thread(target=store.note_use, args=("three", "xxx"))
    with store.removal():
        notes.start()
        notes.join(0.2)
        assert "xxx" not in (home / "runs/three/uses").read_text()
    notes.join(30)
    assert "xxx" in (home / "runs/three/uses").read_text()


def test_a_run_notes_every_key_and_every_folder(home: Path) -> None:
    noted = set((home / "runs/one/uses").read_text().split())
    assert keys(home, "one") | {path.name for path in of(home, "one")} <= noted


def test_a_lock_that_was_removed_before_it_was_taken_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lock = tmp_path / "lock", fcntl.flock

    def others_remove_it_meanwhile(handle: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        path.unlink()
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", others_remove_it_meanwhile)
    with locked(path) as free, locked(path) as free_again:
        assert free
        assert not free_again


def test_what_a_live_run_has_begun_stays(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = HomeStore(home)
    with store.hold_run("one"), store.attempt("make", "0" * 32) as attempt:
        (attempt / "half").touch()
        store.note_use("one", attempt.name)
        gone = removed(home, capsys)
        assert ("run", "runs/two") in gone
        assert ("run", "runs/one") not in gone
        assert (attempt / "half").exists()
        assert of(home, "one") <= folders(home)
    is_right(home)


def test_links_are_not_followed(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outside = tmp_path / "outside"
    (outside / "checkpoints" / ("a" * 32)).mkdir(parents=True)
    (outside / "file").write_text("kept")
    (home / "checkpoints").symlink_to(outside / "checkpoints")
    step = next(home.glob("artifacts/*"))
    (step / "0123456789ab-01234567").symlink_to(outside)
    (home / "scores").mkdir()
    (home / "scores" / ("b" * 32)).symlink_to(outside)
    (home / "runs/two").rename(outside / "two")
    (home / "runs/two").symlink_to(outside / "two")
    (home / "runs/one/link").symlink_to(outside)
    shutil.move(str(home / "cache" / "locks"), str(outside / "locks"))
    (home / "cache" / "locks").symlink_to(outside / "locks")
    before = everything(outside)
    assert len(before) > 6
    gone = removed(home, capsys)
    assert ("run", "runs/one") in gone
    assert everything(outside) == before
    assert (outside / "checkpoints" / ("a" * 32)).is_dir()
    assert not [path for kind, path in gone if kind in ("checkpoints", "scores", "lock")]


def test_a_record_with_a_path_for_an_id_removes_nothing_outside(home: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    record = stored(home, "one").model_copy(update={"run_id": "../../outside"})
    record.write(home / "runs/one/run.json")
    gc(home, "--yes")
    assert (tmp_path / "outside").is_dir()


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """Two runs of another name whose training is finished."""
    home = tmp_path / "digits"
    promoted_digits(Home(home))
    promoted_digits(Home(home), "20261121-090900-digits-a1b3", version="2")
    return home


TRAINED = digest("sklearn:digitsrun")


def test_checkpoints_go_when_their_training_is_finished_and_no_process_is_at_it(
    digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unfinished, lost = "1" * 32, "2" * 32
    for key in (TRAINED, unfinished, lost):
        (digits / "checkpoints" / key).mkdir(parents=True)
        (digits / "checkpoints" / key / "weights").write_text(key)
    write_atomically(digits / "runs" / "20261121-090900-digits-a1b3" / "uses", unfinished)
    with owned(digits / "checkpoints" / TRAINED, lambda: None):
        gone = removed(digits, capsys)
    assert [path for kind, path in gone if kind == "checkpoints"] == [f"checkpoints/{lost}"]
    gone = removed(digits, capsys)
    assert [path for kind, path in gone if kind == "checkpoints"] == [f"checkpoints/{TRAINED}"]
    assert [path.name for path in (digits / "checkpoints").iterdir()] == [unfinished]


def test_checkpoints_stay_while_a_live_run_has_not_recorded_what_it_trains(
    digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (digits / "checkpoints" / ("2" * 32)).mkdir(parents=True)
    with HomeStore(digits).hold_run("new"):
        assert not [path for kind, path in removed(digits, capsys) if kind == "checkpoints"]
    assert [path for kind, path in removed(digits, capsys) if kind == "checkpoints"]


def test_a_waiting_process_owns_the_folder_that_is_there_after_a_removal(tmp_path: Path) -> None:
    folder, holds = tmp_path / "key", tmp_path / "holds"
    code = (
        "import sys, time; from pathlib import Path; from rekindle.launch.process import owned\n"
        "with owned(Path(sys.argv[1]), lambda: Path(sys.argv[2], 'waits').touch()):\n"
        "    Path(sys.argv[2], 'holds').touch(); sys.stdin.read()"
    )
    holds.mkdir()
    with owned(folder, lambda: None):
        words = [sys.executable, "-c", code, str(folder), str(holds)]
        child = subprocess.Popen(words, stdin=subprocess.PIPE)
        _await(holds / "waits")
        folder.rename(tmp_path / "removed")
    _await(holds / "holds")
    with locked(folder / ".lock") as free:
        assert not free
    child.communicate()


def _await(path: Path) -> None:
    end = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.02)


def test_scores_environments_locks_and_what_killed_processes_left(
    digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    used, unused = "3" * 32, "4" * 32
    for key in (used, unused):
        (digits / "scores" / key).mkdir(parents=True)
        write_atomically(digits / "cache" / "locks" / key, "")
    write_atomically(digits / "runs" / "20261121-090900-digits-a1b3" / "uses", used)
    for name, days in (("5" * 16, 40), ("6" * 16, 20)):
        folder = digits / "environments" / name
        folder.mkdir(parents=True)
        os.utime(folder, (time.time() - days * 86_400,) * 2)
    for name, days in (("7" * 32, 2), ("8" * 32, 0), ("9" * 32, 2)):
        piece = digits / "pieces" / name / "train.arrow"
        write_atomically(piece, "rows")
        os.utime(piece.parent, (time.time() - days * 86_400,) * 2)
    os.link(piece, digits / "train-00000.arrow")  # as examples do
    draft, young = digits / "runs" / ".x.01234567", digits / "runs" / ".y.01234567"
    for file in (draft, young):
        file.touch()
    os.utime(draft, (0, 0))
    killed = digits / "artifacts" / "step" / "0123456789ab-01234567"
    killed.mkdir(parents=True)
    killed.with_name(f"{killed.name}.partial").touch()
    capsys.readouterr()
    assert invoke(["gc", "--yes", "--json", f"--home={digits}"]) == 0
    items = json.loads(capsys.readouterr().out)["items"]
    assert sorted((item["kind"], item["path"]) for item in items if not item["stays"]) == [
        ("draft", "runs/.x.01234567"),
        ("environment", f"environments/{'5' * 16}"),
        ("killed attempt", "artifacts/step/0123456789ab-01234567.partial"),
        ("lock", f"cache/locks/{unused}"),
        ("piece", f"pieces/{'7' * 32}"),
        ("scores", f"scores/{unused}"),
    ]
    assert not list((digits / "artifacts" / "step").iterdir())
    assert young.exists()


def test_pieces_that_shards_name_and_do_not_hold_stay(
    digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"held": "b" * 32, "unheld": "c" * 32}
    for key in keys.values():
        write_atomically(digits / "pieces" / key / "shard.arrow", "rows")
        os.utime(digits / "pieces" / key, (0, 0))
    for path in digits.rglob("manifest.json"):
        manifest = ShardManifest.read(path)
        named = manifest.shards[0].model_copy(update={"key": keys["held"]})
        manifest.model_copy(update={"shards": (named,), "disk_bytes": 1}).write(path)
    capsys.readouterr()
    assert invoke(["gc", "--yes", "--json", f"--home={digits}"]) == 0
    items = json.loads(capsys.readouterr().out)["items"]
    pieces = {item["path"]: item["stays"] for item in items if item["kind"] == "piece"}
    assert pieces == {f"pieces/{keys['held']}": True, f"pieces/{keys['unheld']}": False}


def test_pieces_stay_while_a_run_is_alive_that_may_read_them_for_days(
    digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Examples hold them only once all are read."""
    piece = digits / "pieces" / ("d" * 32) / "train.arrow"
    write_atomically(piece, "rows")
    os.utime(piece.parent, (0, 0))
    with locked(digits / "runs" / "20261121-090900-digits-a1b3" / "lock"):
        assert ("piece", f"pieces/{'d' * 32}") not in removed(digits, capsys)
    assert removed(digits, capsys)[-1] == ("piece", f"pieces/{'d' * 32}")


NEWEST = "it is one of the 1 newest of its name"


def runs_that_stay(home: Path, aliases: dict[str, str]) -> dict[str, str]:
    retention = Retention(home, lambda record: aliases, 1, 0)
    items = [item for item in retention.look() if item.kind == "run" and item.stays]
    return {item.path[-4:]: item.why for item in items}


def test_the_run_that_made_a_version_with_an_alias_stays(digits: Path) -> None:
    assert runs_that_stay(digits, {}) == {"a1b3": NEWEST}
    made = "it made the champion of digits"
    assert runs_that_stay(digits, {"champion": "1"}) == {"a1b2": made, "a1b3": NEWEST}
    promoted_digits(Home(digits), "20261121-091000-digits-a1b4", version="1")  # an exact rerun
    promoted_digits(Home(digits), "20261121-091100-digits-a1b5", version="3")
    assert runs_that_stay(digits, {"champion": "1"}) == {"a1b2": made, "a1b5": NEWEST}


def test_the_run_whose_candidate_waits_for_approval_stays(digits: Path) -> None:
    (path,) = digits.glob("runs/*-a1b2/artifacts/*/registration.json")
    registered = Registration.read(path)
    registered.model_copy(update={"decision": "approval_needed"}).write(path)
    waits = "its candidate waits for approval"
    assert runs_that_stay(digits, {}) == {"a1b2": waits, "a1b3": NEWEST}
    assert runs_that_stay(digits, {"champion": "7"}) == {"a1b3": NEWEST}, "it was not compared"


def test_where_the_registry_gives_no_answer_what_registered_stays(
    digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    why = "its registry gives no answer: there is no registry"
    assert not removed(digits, capsys)
    assert not (digits / "mlflow.db").exists(), "none is made for the question"
    assert invoke(["gc", *ALL_OLD, f"--home={digits}"]) == 0
    assert why in capsys.readouterr().err
    for path in digits.glob("runs/*/artifacts/*/registration.json"):
        path.write_text("{")
    assert "cannot be read" in runs_that_stay(digits, {})["a1b2"]


def test_checkpoints_elsewhere_go_once_they_are_a_day_old(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    volume = tmp_path / "volume"
    weights = [
        volume / "checkpoints" / key / "step-000000001.01234567" / "weights"
        for key in (TRAINED, "1" * 32)
    ]
    for file in weights:
        write_atomically(file, "weights")
    for path in digits.glob("runs/*/run.json"):
        record = RunRecord.read(path)
        place = {"platforms": {"kubeflow": {"artifact_root": f"file://{volume}"}}}
        update = {"platform": "kubeflow", "spec": {**record.spec, **place}}
        record.model_copy(update=update).write(path)
    assert not removed(digits, capsys)
    os.utime(weights[0], (0, 0))
    assert removed(digits, capsys) == [("checkpoints", f"{volume}/checkpoints/{TRAINED}")]
    assert [file.exists() for file in weights] == [False, True]


def test_a_store_that_cannot_be_listed_is_named_and_left(
    digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = digits / "runs/20261121-090900-digits-a1b3/run.json"
    record = RunRecord.read(path)
    place = {"platforms": {"vertex": {"artifact_root": "nothing://bucket/rekindle"}}}
    record.model_copy(update={"platform": "vertex", "spec": {**record.spec, **place}}).write(path)
    assert invoke(["gc", *ALL_OLD, f"--home={digits}"]) == 0
    assert "it cannot be listed from here: ValueError" in capsys.readouterr().err
