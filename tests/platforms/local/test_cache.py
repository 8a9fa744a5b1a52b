"""When a step comes from the cache, when not, and what it says about it."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rekindle.errors import RequestError, StepError
from rekindle.ir.graph import Graph, Step
from rekindle.platforms.local import content
from rekindle.platforms.local.cache import Identity, explain_miss, lend, look_up
from rekindle.platforms.local.content import describe, digest
from rekindle.platforms.local.store import HomeStore
from rekindle.records import RunRecord
from tests.platforms.local.runs import graph, run, stored


def reasons(record: RunRecord) -> dict[str, str]:
    return {step.name: ("hit: " if step.cached else "ran: ") + step.reason for step in record.steps}


def times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir())}


def test_the_same_work_is_done_once(home: Path, folder: Path) -> None:
    arguments = {"folder": str(folder)}
    first = run("chain", home, arguments, run_id="one")
    assert set(reasons(first).values()) == {"ran: first run of this step"}
    second = run("chain", home, arguments)
    assert set(reasons(second).values()) == {"hit: same inputs and code as in run one"}
    assert times(folder) == {"count": 1, "make": 1, "use": 1}
    for before, after in zip(first.steps, second.steps, strict=True):
        assert (before.parameters, before.artifacts, before.cache_key) == (
            after.parameters,
            after.artifacts,
            after.cache_key,
        )


def test_a_changed_input_reruns_only_what_its_content_reaches(home: Path, folder: Path) -> None:
    run("chain", home, {"folder": str(folder), "text": "abc"}, run_id="one")
    record = run("chain", home, {"folder": str(folder), "text": "xyz"})
    assert reasons(record) == {
        "make": "ran: input `text` changed",
        "use": "ran: input `data` changed",
        "count": "hit: same inputs and code as in run one",  # the size is what it was
    }


def test_what_changed_is_told_of_the_runs_of_one_config(home: Path, folder: Path) -> None:
    """All shipped configs have one pipeline: another's inputs are no change of this one's."""
    arguments = {"folder": str(folder)}
    run("chain", home, {**arguments, "text": "abc"}, name="one")
    other = run("chain", home, {**arguments, "text": "xyz"}, name="other")
    assert reasons(other)["make"] == "ran: first run of this step"
    again = run("chain", home, {**arguments, "text": "defg"}, name="one")
    assert reasons(again)["make"] == "ran: input `text` changed"


def test_our_own_code_is_part_of_the_key(home: Path, folder: Path) -> None:
    run("chain", home, {"folder": str(folder)}, source_hash="a")
    record = run("chain", home, {"folder": str(folder)}, source_hash="b")
    assert set(reasons(record).values()) == {"ran: rekindle's code changed"}


def test_code_of_ones_own_is_part_of_the_key_of_the_steps_that_use_it(
    home: Path, folder: Path
) -> None:
    arguments = {"folder": str(folder), "text": "task.py:Mine"}
    mine = {"task.py:Mine": "1", "count": "1"}  # a value of a parameter, and a component
    run("chain", home, arguments, own_code=lambda names: mine, run_id="one")
    record = run("chain", home, arguments, own_code=lambda names: {**mine, "task.py:Mine": "2"})
    assert reasons(record)["make"] == "ran: code of yours that it uses changed"
    assert reasons(record)["count"] == "hit: same inputs and code as in run one"
    record = run("chain", home, arguments, own_code=lambda names: {**mine, "count": "2"})
    assert reasons(record)["make"] == "hit: same inputs and code as in run one"
    assert reasons(record)["count"] == "ran: code of yours that it uses changed"


def edited(pipeline: Graph, name: str, **changes: object) -> Graph:
    """The pipeline with another container in one step."""
    step = pipeline.dag.nodes[name]
    assert isinstance(step, Step)
    changed = dataclasses.replace(step, container=dataclasses.replace(step.container, **changes))
    dag = dataclasses.replace(pipeline.dag, nodes={**pipeline.dag.nodes, name: changed})
    return dataclasses.replace(pipeline, dag=dag)


def test_an_edited_component_reruns(home: Path, folder: Path) -> None:
    pipeline = graph("chain")
    run(pipeline, home, {"folder": str(folder)}, run_id="one")
    step = pipeline.dag.nodes["use"]
    assert isinstance(step, Step)
    record = run(
        edited(pipeline, "use", source=step.container.source + "# x\n"),
        home,
        {"folder": str(folder)},
    )
    assert reasons(record)["make"].startswith("hit")
    assert reasons(record)["use"] == "ran: its source changed"
    assert reasons(record)["count"].startswith("hit")


def test_several_changes_are_all_named(home: Path, folder: Path) -> None:
    run("chain", home, {"folder": str(folder)}, source_hash="a")
    record = run("chain", home, {"folder": str(folder), "text": "other"}, source_hash="b")
    assert reasons(record)["make"] == "ran: rekindle's code changed and input `text` changed"


def test_a_step_with_caching_off_always_runs(home: Path, folder: Path) -> None:
    for _ in range(2):
        record = run("uncached", home, {"folder": str(folder)})
    assert reasons(record)["count"] == "ran: caching is off for this step"
    assert reasons(record)["count-2"].startswith("hit")
    assert times(folder) == {"first": 2, "second": 1}


def test_fresh_runs_everything_and_its_results_are_the_new_ones(home: Path, folder: Path) -> None:
    run("chain", home, {"folder": str(folder)}, run_id="one")
    record = run("chain", home, {"folder": str(folder)}, run_id="two", fresh=True)
    assert set(reasons(record).values()) == {"ran: --fresh"}
    record = run("chain", home, {"folder": str(folder)})
    assert set(reasons(record).values()) == {"hit: same inputs and code as in run two"}


def test_from_a_step_means_that_one_and_all_that_depend_on_it(home: Path, folder: Path) -> None:
    run("branching", home, {"folder": str(folder)}, run_id="one")
    record = run("branching", home, {"folder": str(folder)}, from_step="condition-2")
    hit, forced = (
        "hit: same inputs and code as in run one",
        "ran: --from condition-branches-1/condition-2",
    )
    assert reasons(record) == {
        "count": hit,
        "condition-branches-1/condition-2/count-2": forced,
        "condition-branches-1/condition-3/count-3": "ran: its condition is false: not (go == true)",
        "count-4": forced,
    }


def test_from_the_first_step_reaches_into_nested_dags(home: Path, folder: Path) -> None:
    run("branching", home, {"folder": str(folder)})
    record = run("branching", home, {"folder": str(folder)}, from_step="count")
    assert [step.reason for step in record.steps if step.status == "succeeded"] == [
        "--from count"
    ] * 3


def test_from_an_unknown_step_names_the_nearest(home: Path, folder: Path) -> None:
    with pytest.raises(RequestError, match="did you mean `make`"):
        run("chain", home, {"folder": str(folder)}, from_step="mak")
    assert not home.exists()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: shutil.rmtree(path), "artifact `data` is gone"),
        (lambda path: (path / "deep/b.txt").unlink(), "artifact `data` changed on disk"),
        (lambda path: (path / "a.txt").write_text("abd"), "artifact `data` changed on disk"),
        (lambda path: (path / "new.txt").write_text(""), "artifact `data` changed on disk"),
    ],
    ids=["all gone", "a file gone", "a byte changed", "a file more"],
)
def test_a_damaged_artifact_is_made_again(damage, reason, home: Path, folder: Path) -> None:  # type: ignore[no-untyped-def]
    first = run("chain", home, {"folder": str(folder)}, run_id="one")
    damage(Path(first.steps[0].artifacts["data"].uri))
    record = run("chain", home, {"folder": str(folder)})
    assert reasons(record)["make"] == f"ran: {reason}"
    assert reasons(record)["use"].startswith("hit"), "the content is the same again"
    assert set(reasons(run("chain", home, {"folder": str(folder)})).values()) >= {
        f"hit: same inputs and code as in run {record.run_id}"
    }


@pytest.mark.parametrize("read_again", [1 << 30, 0], ids=["small", "larger than is read again"])
def test_flipped_bits_are_noticed_although_size_and_mtime_are_kept(
    read_again: int, home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "_READ_AGAIN_BYTES", read_again)
    first = run("chain", home, {"folder": str(folder)}, run_id="one")
    file = Path(first.steps[0].artifacts["data"].uri) / "deep/b.txt"
    before = file.stat()
    with file.open("r+b") as opened:
        opened.write(b"abd")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    record = run("chain", home, {"folder": str(folder)})
    assert reasons(record)["make"] == "ran: artifact `data` changed on disk"
    assert reasons(record)["use"].startswith("hit"), "the content is the same again"


def test_what_is_read_again_are_the_smallest_files_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "_READ_AGAIN_BYTES", 10)
    for name, size in {"a": 9, "b": 6, "c": 3}.items():
        (tmp_path / name).write_text("x" * size)
    recorded = {
        name: dataclasses.replace(fact, sha256="recorded")
        for name, fact in describe(tmp_path).items()
    }
    kept = {name for name, fact in describe(tmp_path, recorded).items() if fact == recorded[name]}
    assert kept == {"a"}
    (tmp_path / "a").touch()
    assert describe(tmp_path, recorded)["a"].sha256 != "recorded"


def test_touching_a_file_changes_nothing(home: Path, folder: Path) -> None:
    first = run("chain", home, {"folder": str(folder)})
    (Path(first.steps[0].artifacts["data"].uri) / "a.txt").touch()
    assert all(step.cached for step in run("chain", home, {"folder": str(folder)}).steps)


BROKEN = [
    "",
    "{",
    "[]",
    "3",
    '{"run_id": "x"}',
    '{"run_id": "x", "outputs": []}',
    "[" * 100_000,
    '{"run_id": "x", "outputs": {"parameters": [], "artifacts": []}}',
    '{"run_id": "x", "outputs": {"parameters": 1, "artifacts": {}}}',
    '{"run_id": "x", "outputs": {"parameters": {}, "artifacts": {"data": {}}}}',
    '{"run_id": "x", "outputs": {"parameters": {}, "artifacts": {"data": {"files": [1]}}}}',
]


def test_a_broken_entry_is_no_result(home: Path, folder: Path) -> None:
    first = run("chain", home, {"folder": str(folder)})
    key = first.steps[0].cache_key
    for text in BROKEN:
        (home / "cache" / f"{key}.json").write_text(text)
        found, reason = look_up(HomeStore(home), _Known(key))
        assert (found, reason) == (None, "its cache entry cannot be read"), text
    record = run("chain", home, {"folder": str(folder)})
    assert reasons(record)["make"] == "ran: its cache entry cannot be read"


def test_an_entry_with_a_changed_value_is_no_result(home: Path, folder: Path) -> None:
    first = run("chain", home, {"folder": str(folder)})
    file = home / "cache" / f"{first.step('use').cache_key}.json"
    content = file.read_bytes()
    assert first.step("use").parameters == {"Output": 3}
    for damaged in (
        content.replace(b'"Output": 3', b'"Output": 7'),
        content.replace(b'{"Output": 3}', b"[]"),
        content.replace(b'"parameters"', b'"paramet\\u0065r"'),
        *(_flipped(content, seed) for seed in range(60)),
    ):
        assert damaged != content
        file.write_bytes(damaged)
        found, reason = look_up(HomeStore(home), _Known(first.step("use").cache_key))
        assert found is None, damaged
        assert reason in ("its cache entry was damaged", "its cache entry cannot be read")
    record = run("chain", home, {"folder": str(folder)})
    assert record.step("use").parameters == {"Output": 3}


def _flipped(content: bytes, seed: int) -> bytes:
    chance, changed = random.Random(seed), bytearray(content)
    changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def test_what_the_newest_result_was_made_of_may_be_broken_too(home: Path) -> None:
    store = HomeStore(home)
    store.last("a").parent.mkdir(parents=True)
    for text in (*BROKEN, '{"facts": []}', '{"facts": 3}', '{"facts": {"a": []}}'):
        store.last("a").write_text(text)
        assert explain_miss(store, "a", Identity({"outputs": "x"}))


class _Known(Identity):
    """An identity by its key."""

    def __init__(self, key: str) -> None:
        super().__init__({"key": key})

    @property
    def key(self) -> str:
        return self.facts["key"]


def test_a_removed_entry_is_said_to_be_removed(home: Path, folder: Path) -> None:
    first = run("chain", home, {"folder": str(folder)})
    (home / "cache" / f"{first.steps[0].cache_key}.json").unlink()
    record = run("chain", home, {"folder": str(folder)})
    assert reasons(record)["make"] == "ran: its cached result was removed"


def test_a_failed_step_is_never_cached_and_leaves_no_artifact(home: Path, folder: Path) -> None:
    for run_id in ("one", "two"):
        with pytest.raises(StepError):
            run("failing", home, {"folder": str(folder)}, run_id=run_id)
    assert not stored(home, "two").step("fail").cached
    assert not list((home / "artifacts" / "failing.fail").iterdir())


def test_a_key_of_the_users_own_stands_in_for_the_computed_one(home: Path, folder: Path) -> None:
    pipeline = graph("slow")
    step = pipeline.dag.nodes["slow-make"]
    assert isinstance(step, Step)
    keyed = dataclasses.replace(step, cache_key="mine")
    own = dataclasses.replace(
        pipeline, dag=dataclasses.replace(pipeline.dag, nodes={"slow-make": keyed})
    )
    run(own, home, {"folder": str(folder)}, source_hash="a")
    assert run(own, home, {"folder": str(folder)}, source_hash="b").steps[0].cached


@pytest.mark.slow
def test_two_processes_on_one_step_do_it_once(home: Path, folder: Path) -> None:
    def start(run_id: str) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-m",
            "tests.platforms.local.run_child",
            str(home),
            run_id,
            "slow",
        ]
        return subprocess.Popen([*command, str(folder)], stdout=subprocess.PIPE, text=True)

    both = [start("one"), start("two")]
    assert [process.wait(60) for process in both] == [0, 0], [
        p.stdout.read() for p in both if p.stdout
    ]
    assert times(folder) == {"slow": 1}
    steps = [stored(home, run_id).steps[0] for run_id in ("one", "two")]
    assert sorted(step.cached for step in steps) == [False, True]
    assert Path(steps[0].artifacts["data"].uri).read_text() == "half whole"


@pytest.mark.slow
def test_a_step_that_waits_for_another_run_says_so(home: Path, folder: Path) -> None:
    said: list[str] = []
    (folder / "wait").touch()

    def told(record: RunRecord) -> None:
        said.append(record.steps[0].reason)
        if "waiting" in said[-1]:
            (folder / "wait").unlink(missing_ok=True)

    command = [
        sys.executable,
        "-m",
        "tests.platforms.local.run_child",
        str(home),
        "one",
        "slow",
        str(folder),
    ]
    with subprocess.Popen(command) as other:
        while not (folder / "slow").exists():
            assert other.poll() is None
        run("slow", home, {"folder": str(folder)}, on_change=told)
    assert "another run is doing the same step; waiting for its result" in said
    assert said[-1] == "same inputs and code as in run one"


def test_the_digest_of_a_folder_is_its_content(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "empty").mkdir()
        for i in sorted(range(20), reverse=name == "two"):
            (tmp_path / name / "deep" / f"{i}").write_text(str(i))
    one, two = (digest(describe(tmp_path / name)) for name in ("one", "two"))
    assert one == two
    (tmp_path / "two" / "empty").rmdir()
    assert digest(describe(tmp_path / "two")) != one
    (tmp_path / "one" / "deep" / "3").rename(tmp_path / "one" / "deep" / "33")
    assert digest(describe(tmp_path / "one")) != one
    assert digest(describe(tmp_path / "not there")) == ""


def test_links_cannot_trap_the_digest(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "loop").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "broken").symlink_to(tmp_path / "nowhere")
    (tmp_path / "a" / "itself").symlink_to("itself")
    assert set(describe(tmp_path / "a")) == {"loop", "broken", "itself"}


def test_entries_list_every_file_with_size_and_hash(home: Path, folder: Path) -> None:
    record = run("chain", home, {"folder": str(folder)})
    entry = json.loads((home / "cache" / f"{record.steps[0].cache_key}.json").read_text())
    files = entry["outputs"]["artifacts"]["data"]["files"]
    assert {name: fact[0] for name, fact in files.items()} == {"a.txt": 3, "deep/b.txt": 3}
    assert all(len(fact[2]) == 64 for fact in files.values())


def test_a_scratch_home_that_is_lent_results_uses_their_files_where_they_are(
    tmp_path: Path, home: Path, folder: Path
) -> None:
    first = run("chain", home, {"folder": str(folder)}, run_id="one")
    lend(HomeStore(home), HomeStore(tmp_path / "scratch"))
    second = run("chain", tmp_path / "scratch", {"folder": str(folder)})
    assert set(reasons(second).values()) == {"hit: same inputs and code as in run one"}
    made = [step.artifacts for step in first.steps]
    assert [step.artifacts for step in second.steps] == made
    assert all(Path(a.uri).is_relative_to(home) for step in made for a in step.values())
