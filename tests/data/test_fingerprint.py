"""Fingerprints change with what decides the weights, and with nothing else."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import fsspec
import pytest

from rekindle.data.fingerprint import ChampionState, fingerprint
from rekindle.errors import DataError, RequestError
from rekindle.spec.model import DataSpec, ModelSpec, TrainSpec
from tests.data.corpora import TASKS, rows, text_spec, write_jsonl

TASK = f"{TASKS}:Words"


def taken(data, model=None, train=None, champion=None, task=TASK):
    model, train = model or ModelSpec(), train or TrainSpec()
    return fingerprint(task, data, model, train, champion=champion)


@pytest.fixture
def source(tmp_path):
    return write_jsonl(tmp_path / "reviews.jsonl", rows())


def test_the_same_bytes_elsewhere_are_the_same_work(tmp_path, source):
    here = taken(text_spec(source))
    assert (here.files, here.bytes, here.window) == (1, source.stat().st_size, "")
    copy = tmp_path / "other/name.jsonl"
    copy.parent.mkdir()
    copy.write_bytes(source.read_bytes())
    fsspec.filesystem("memory").pipe("/elsewhere/x.jsonl", source.read_bytes())
    for place in (copy, copy.parent, "memory://elsewhere/x.jsonl"):
        assert taken(text_spec(place)) == here


def test_one_changed_byte_is_other_work(source):
    before = taken(text_spec(source))
    source.write_bytes(source.read_bytes().replace(b"review 7 ", b"review 8 ", 1))
    after = taken(text_spec(source))
    assert after.bytes == before.bytes
    assert (
        len(
            {
                before.data,
                after.data,
                before.run_key,
                after.run_key,
                before.work_key,
                after.work_key,
            }
        )
        == 6
    )


def test_a_folder_that_is_called_like_a_name_is_not_what_the_name_means(
    tmp_path, source, monkeypatch
):
    model, task = ModelSpec(source="gpt2"), f"{Path(TASKS).absolute()}:Words"
    before = taken(text_spec(source), model, task=task)
    for name in ("base", "gpt2"):
        (tmp_path / "here" / name).mkdir(parents=True)
        (tmp_path / "here" / name / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "here")
    assert taken(text_spec(source), model, task=task) == before


SAME = {
    "the disk for shards": {"data": {"disk_gb": 10}},
    "slices": {"data": {"slices": ["category"]}},
    "checkpoints": {"train": {"checkpoint": {"every": 1, "keep": 5}}},
    "restarts": {"train": {"max_restarts": 0}},
}
OTHER = {
    "the learning rate": {"train": {"lr": 0.5}},
    "the seed": {"train": {"seed": 1}},
    "where shards end": {"data": {"shard_rows": 10}},
    "within what rows are shuffled": {"data": {"shuffle_gb": 1}},
    "the split": {"data": {"split": {"train": 0.7, "validation": 0.1, "test": 0.2}}},
    "the longest text": {"data": {"max_length": 64}},
    "the model": {"model": {"source": {"model_type": "bert"}}},
    "the tokenizer": {"model": {"tokenizer": {"vocab_size": 100}}},
    "the task": {"task": f"{TASKS}:Lengths"},
}


@pytest.mark.parametrize(
    ("same", "change"),
    [*((True, c) for c in SAME.values()), *((False, c) for c in OTHER.values())],
    ids=[*SAME, *OTHER],
)
def test_settings_count_if_they_shape_the_weights(source, same, change):
    changed = taken(
        text_spec(source, **change.get("data", {})),
        ModelSpec.model_validate(change.get("model", {})),
        TrainSpec.model_validate(change.get("train", {})),
        task=change.get("task", TASK),
    )
    assert (changed.run_key == taken(text_spec(source)).run_key) is same


def test_code_and_models_behind_a_path_count_by_their_bytes(tmp_path, source):
    entry, folder = tmp_path / "train.py", tmp_path / "model"
    entry.write_text("print(1)")
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    train, model = (
        TrainSpec(entrypoint=str(entry)),
        ModelSpec(source=str(folder), init_from=str(folder)),
    )
    keys = [taken(text_spec(source), model, train)]
    entry.write_text("print(2)")
    keys.append(taken(text_spec(source), model, train))
    (folder / "config.json").write_text('{"a": 1}')
    keys.append(taken(text_spec(source), model, train))
    assert len({key.run_key for key in keys}) == len({key.work_key for key in keys}) == 3
    entry.unlink()
    with pytest.raises(RequestError, match="cannot read"):
        taken(text_spec(source), model, train)


def test_a_module_that_ones_own_task_imports_is_part_of_the_work(tmp_path, source):
    (tmp_path / "words_of_mine.py").write_text("LEAST = 1\n")
    task = tmp_path / "task.py"
    task.write_text(Path(TASKS).read_text() + "\nfrom words_of_mine import LEAST\n")
    keys = [taken(text_spec(source), task=f"{task}:Words").run_key]
    (tmp_path / "beside.py").write_text("")
    keys.append(taken(text_spec(source), task=f"{task}:Words").run_key)
    (tmp_path / "words_of_mine.py").write_text("LEAST = 2\n")
    keys.append(taken(text_spec(source), task=f"{task}:Words").run_key)
    assert keys[0] == keys[1] != keys[2]


WINDOWED = {"columns": {"time": "month"}, "window": {"size": "3 months", "end": "2026-06"}}


def test_records_outside_of_the_window_are_no_part_of_it(source):
    before = taken(text_spec(source, **WINDOWED))
    assert before.window == "2026-04-01T00:00:00/2026-07-01T00:00:00"
    extra = [{"text": f"new {i}", "label": "bad", "month": "2026-11"} for i in range(9)]
    write_jsonl(source, [*extra[:4], *rows(), *extra[4:]])
    after = taken(text_spec(source, **WINDOWED))
    assert (after.data, after.run_key) == (before.data, before.run_key)
    write_jsonl(source, [*rows(), {"text": "late", "label": "bad", "month": "2026-05-31"}])
    assert taken(text_spec(source, **WINDOWED)).data != before.data


def test_the_latest_window_moves_with_the_newest_record(source):
    data = text_spec(source, columns={"time": "month"}, window={"size": "2 months"})
    assert taken(data).window == "2026-09-01T00:00:00/2026-11-01T00:00:00"
    write_jsonl(source, [*rows(), {"text": "new", "label": "bad", "month": "2026-12-24"}])
    assert taken(data).window == "2026-11-01T00:00:00/2027-01-01T00:00:00"


def test_partitions_are_windows_too(tmp_path):
    for month in range(1, 7):
        write_jsonl(tmp_path / f"d/2026-0{month}/x.jsonl", rows(30, month=month))
    data = text_spec(tmp_path / "d/{window}/*.jsonl", window={"size": "2 months"})
    latest = taken(data)
    assert (latest.window, latest.files) == ("2026-05-01T00:00:00/2026-07-01T00:00:00", 2)
    earlier = data.model_copy(update={"window": data.window.model_copy(update={"offset": 1})})
    before = taken(earlier)
    assert (before.window, before.files) == ("2026-03-01T00:00:00/2026-05-01T00:00:00", 2)
    write_jsonl(tmp_path / "d/2026-06/y.jsonl", rows(5))
    assert taken(earlier) == before
    assert taken(data).data != latest.data
    far = data.model_copy(update={"window": data.window.model_copy(update={"offset": 9})})
    with pytest.raises(
        DataError, match=r"none of the partitions, which start 2026-01-01.* to 2026-06-01"
    ):
        taken(far)


def test_a_window_without_records_says_what_there_is(source):
    data = text_spec(
        source, columns={"time": "month"}, window={"size": "1 month", "end": "2020-01"}
    )
    with pytest.raises(
        DataError, match=r"none of 300 records\n.*2026-01-01T00:00:00 to 2026-10-01T00:00:00"
    ):
        taken(data)
    write_jsonl(source, [{"text": "a", "label": "b", "month": "soon"}])
    with pytest.raises(DataError, match="ISO 8601"):
        taken(data)


def test_the_first_run_starts_from_the_base_and_beats_nobody(source):
    for init in ("base", "champion"):
        found = taken(text_spec(source), ModelSpec(init_from=init))
        assert (found.init_from, found.champion) == ("base", "")


def promoted(found, version):
    """The champion that this work became."""
    return ChampionState(
        version,
        found.run_key,
        found.work_key,
        found.init_from,
        found.champion,
        f"weights of {version}",
        found.champion_digest,
    )


@pytest.mark.parametrize("init", ["base", "champion"])
def test_repeated_work_is_a_cache_hit_after_its_promotion_and_new_work_meets_the_champion(
    source, init
):
    model = ModelSpec(init_from=init)
    first = taken(text_spec(source), model)
    champion = promoted(first, "1")
    assert taken(text_spec(source), model, champion=champion) == first

    write_jsonl(source, rows(310))
    second = taken(text_spec(source), model, champion=champion)
    assert (second.champion, second.champion_digest) == ("1", "weights of 1")
    assert second.init_from == ("base" if init == "base" else "1")
    assert second.run_key != first.run_key
    assert taken(text_spec(source), model, champion=promoted(second, "2")) == second

    third = taken(text_spec(source), model, TrainSpec(lr=0.1), promoted(second, "2"))
    assert (third.champion, third.init_from) == ("2", "base" if init == "base" else "2")


def test_a_champion_that_a_budget_ended_meets_the_training_that_goes_on(source):
    paid = TrainSpec(budget_hours=1)
    first = taken(text_spec(source), train=paid)
    champion = dataclasses.replace(promoted(first, "1"), budget_hours="1.0")
    assert taken(text_spec(source), train=paid, champion=champion) == first
    for more in (TrainSpec(budget_hours=2), TrainSpec()):
        found = taken(text_spec(source), train=more, champion=champion)
        assert (found.run_key, found.champion) == (first.run_key, "1")
    whole = promoted(first, "1")  # which no budget ended
    assert taken(text_spec(source), train=paid, champion=whole) == first


def test_a_version_number_that_a_new_registry_gives_to_other_weights_is_another_training(source):
    model = ModelSpec(source="gpt2", init_from="champion")
    keys = set()
    for weights in ("a", "b"):
        champion = ChampionState("7", "other", "other", "base", "6", weights, "c")
        found = taken(text_spec(source), model, champion=champion)
        assert (found.init_from, found.champion) == ("7", "7")
        keys.add(found.run_key)
    assert len(keys) == 2


def test_a_refused_challenger_keeps_its_key_while_the_champion_stays(source):
    champion = ChampionState("7", "other", "other", "base", "6", "a7", "a6")
    once, again = (taken(text_spec(source), champion=champion) for _ in range(2))
    assert once == again
    assert once.champion == "7"


def test_bundled_sets_have_a_fingerprint_without_being_loaded():
    found = taken(DataSpec(source="sklearn:digits"), task=f"{TASKS}:Pixels")
    assert (found.files, len(found.data)) == (1, 32)
    assert found.bytes > 10_000
