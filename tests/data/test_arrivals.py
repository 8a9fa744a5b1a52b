"""How many rows are new since a run: of files that grow, of windows that move over times or partitions."""

import json

import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
import pytest
from PIL import Image

from rekindle.data.arrivals import arrivals
from rekindle.data.fingerprint import fingerprint
from rekindle.errors import DataError
from rekindle.records import ShardManifest
from rekindle.spec.model import DataSpec, ModelSpec, TrainSpec
from tests.data.corpora import TASKS, rows, sharded, text_spec, write_jsonl

TASK = f"{TASKS}:Words"


def taken(data, task=TASK):
    return fingerprint(task, data, ModelSpec(), TrainSpec(), champion=None)


def had(count):
    return ShardManifest(task="t", source="s", rows={"train": count})


def test_a_file_that_grows_has_so_many_new_rows_and_none_when_it_shrinks(tmp_path):
    path = write_jsonl(tmp_path / "r.jsonl", rows(300))
    data = text_spec(path)
    first = arrivals(TASK, data, None, None)
    assert (first.rows, first.new) == (300, 300)
    before, shards = taken(data), sharded(data, tmp_path / "out")
    same = arrivals(TASK, data, before, shards)
    assert (same.data, same.rows, same.had, same.new) == (before.data, 300, 300, 0)
    write_jsonl(path, [*rows(300), *rows(40)])
    grown = arrivals(TASK, data, before, shards)
    assert grown.data != before.data
    assert (grown.rows, grown.had, grown.new) == (340, 300, 40)
    write_jsonl(path, rows(100))
    assert arrivals(TASK, data, before, shards).new == 0


def test_rows_that_were_dropped_were_had_too(tmp_path):
    bad = [{"text": "no label"}] * 2
    path = write_jsonl(tmp_path / "r.jsonl", [*rows(298), *rows(2), *bad])
    broken = "{\n" * 3
    path.write_text(path.read_text() + broken)
    data = text_spec(path, on_bad_rows="drop", max_bad_rows=9, duplicates="exact")
    before, shards = taken(data), sharded(data, tmp_path / "out")
    assert sum(shards.rows.values()) < 302
    write_jsonl(path, [*rows(298), *rows(2), *bad, *rows(7)])
    path.write_text(path.read_text() + broken)
    assert arrivals(TASK, data, before, shards).new == 7


def test_rows_without_a_time_that_can_be_read_hide_no_new_ones(tmp_path):
    lost = [{**row, "month": "n/a"} for row in rows(20)]
    path = write_jsonl(tmp_path / "r.jsonl", [*rows(300), *lost])
    window, columns = {"size": "3 months", "end": "2026-05"}, {"time": "month"}
    data = text_spec(path, window=window, columns=columns, on_bad_rows="drop", max_bad_rows=99)
    before = taken(data)
    shards = sharded(data, tmp_path / "out", window=before.window)
    assert shards.bad_rows == {"time": 20}
    write_jsonl(path, [*rows(300), *lost, *[row for row in rows(300) if row["month"] == "2026-05"]])
    found = arrivals(TASK, data, before, shards)
    assert (found.had, found.new) == (90, 30)


def test_a_month_that_fills_and_one_that_begins_count(tmp_path):
    months = rows(300)  # 30 a month, ten months
    window = {"size": "3 months", "every": "1 month"}
    half = [row for row in months if row["month"] < "2026-06"] + months[150:160]
    path = write_jsonl(tmp_path / "r.jsonl", half)
    data = text_spec(path, window=window, columns={"time": "month"})
    before = taken(data)
    assert before.window.endswith("2026-07-01T00:00:00")
    write_jsonl(path, [*half, *months[160:172]])
    filled = arrivals(TASK, data, before, had(70))
    assert (filled.window, filled.rows, filled.new) == (before.window, 82, 12)
    write_jsonl(path, months[:210])  # June is full, July is there, April left
    moved = arrivals(TASK, data, before, had(70))
    assert (moved.rows, moved.new) == (90, 30)
    write_jsonl(path, months)  # nothing of what the run had is left
    assert arrivals(TASK, data, before, had(70)).new == 90


def test_partitions_count_as_times_do(tmp_path):
    for month in range(1, 6):
        write_jsonl(tmp_path / f"m/2026-{month:02}.jsonl", rows(10 * month))
    data = text_spec(tmp_path / "m/{window}.jsonl", window={"size": "2 months", "every": "1 month"})
    before = taken(data)
    assert arrivals(TASK, data, before, had(90)).new == 0
    write_jsonl(tmp_path / "m/2026-06.jsonl", rows(60))
    found = arrivals(TASK, data, before, had(90))
    assert (found.rows, found.new) == (110, 60)
    write_jsonl(tmp_path / "m/2026-09.jsonl", rows(5))  # the window holds a month that is missing
    found = arrivals(TASK, data, before, had(90))
    assert (found.rows, found.new) == (5, 5)


def test_sources_of_a_mixture_add_up(tmp_path):
    first, second = write_jsonl(tmp_path / "a.jsonl", rows(30)), tmp_path / "b.jsonl"
    write_jsonl(second, rows(20))
    data = DataSpec.model_validate({"sources": [{"source": str(first)}, {"source": str(second)}]})
    before = taken(data)
    write_jsonl(second, rows(26))
    assert arrivals(TASK, data, before, had(50)).new == 6


@pytest.mark.parametrize("new", [0, 3])
def test_images_in_folders_are_counted_without_being_read(tmp_path, new):
    def drawn(name):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4), len(name)).save(path)

    for number in range(8):
        drawn(f"{'ab'[number % 2]}/{number}.png")
    data = DataSpec.model_validate({"source": str(tmp_path / "images")})
    before = taken(data, f"{TASKS}:Pixels")
    for number in range(new):
        drawn(f"a/new {number}.png")
    assert arrivals(f"{TASKS}:Pixels", data, before, had(8)).new == new


def written(path, rows):
    """Rows in the format that the file's name says."""
    if path.suffix == ".jsonl":
        return write_jsonl(path, rows)
    table = pa.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        pc.write_csv(table, path)
    return path


def all_columns(count):
    return [
        {**row, "id": f"r{i}", "lang": "de", "who": f"w{i}"} for i, row in enumerate(rows(count))
    ]


@pytest.mark.parametrize("format", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("column", ["text", "label", "id", "who", "lang", "month"])
def test_a_new_file_without_a_column_is_the_error_of_a_run_and_not_no_new_rows(
    tmp_path, column, format
):
    written(tmp_path / f"1.{format}", all_columns(30))
    columns = {"key": "id", "group": "who", "time": "month"}
    split = {"by": "time", "train": 0.6, "validation": 0.2, "test": 0.2}
    data = text_spec(tmp_path / f"*.{format}", columns=columns, slices=["lang"], split=split)
    assert arrivals(TASK, data, None, None).new == 30
    before = taken(data)
    renamed = [{n if n != column else "other": v for n, v in row.items()} for row in all_columns(7)]
    written(tmp_path / f"2.{format}", renamed)
    with pytest.raises(DataError, match=f"there is no column `{column}`") as caught:
        arrivals(TASK, data, before, had(30))
    assert caught.value.problems[0].where.endswith(f"2.{format}")


def test_an_old_file_without_a_column_that_the_config_names_now_is_an_error(tmp_path):
    written(tmp_path / "1.jsonl", all_columns(30))
    before = taken(text_spec(tmp_path / "*.jsonl"))
    written(tmp_path / "2.jsonl", [{**row, "region": "eu"} for row in all_columns(9)])
    data = text_spec(tmp_path / "*.jsonl", slices=["region"])
    with pytest.raises(DataError, match="there is no column `region`"):
        arrivals(TASK, data, before, had(30))


@pytest.mark.parametrize("dropped", [False, True])
def test_new_rows_whose_time_cannot_be_read_are_an_error_unless_so_many_may_be_left_out(
    tmp_path, dropped
):
    how = {"on_bad_rows": "drop", "max_bad_rows": 5} if dropped else {}
    window = {"size": "3 months", "end": "2026-05"}
    path = write_jsonl(tmp_path / "r.jsonl", rows(300))
    data = text_spec(path, window=window, columns={"time": "month"}, **how)
    before = taken(data)
    new = [{**row, "month": "03/04/2026"} for row in rows(5)]
    good = [row for row in rows(300) if row["month"] == "2026-04"][:4]
    write_jsonl(path, [*rows(300), *new, *good])
    if dropped:
        assert arrivals(TASK, data, before, had(90)).new == 4
        write_jsonl(path, [*rows(300), *new, *new, *good])
    with pytest.raises(DataError, match="rows with no ISO 8601 time"):
        arrivals(TASK, data, before, had(90))


def test_a_file_that_cannot_be_read_is_an_error(tmp_path):
    written(tmp_path / "1.jsonl", rows(30))
    before = taken(text_spec(tmp_path / "*.jsonl"))
    (tmp_path / "2.jsonl").write_text("\ufeff" + json.dumps(rows(1)[0]), encoding="utf-16")
    with pytest.raises(DataError, match="the file is not UTF-8 but UTF-16"):
        arrivals(TASK, text_spec(tmp_path / "*.jsonl"), before, had(30))
